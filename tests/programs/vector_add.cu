// c = a + b. Usage: vector_add [ELEMENTS [SEED]]
#include "check.h"
#include <vector>

__global__ void add(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

int main(int argc, char **argv) {
    int n = argc > 1 ? atoi(argv[1]) : 50000;
    Random random(argc > 2 ? strtoull(argv[2], nullptr, 0) : 1);
    std::vector<float> a(n), b(n), c(n);
    for (int i = 0; i < n; i++) a[i] = random.real(), b[i] = random.real();

    double start = now();
    size_t size = n * sizeof(float);
    float *da, *db, *dc;
    CHECK(cudaMalloc(&da, size));
    CHECK(cudaMalloc(&db, size));
    CHECK(cudaMalloc(&dc, size));
    CHECK(cudaMemcpy(da, a.data(), size, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), size, cudaMemcpyHostToDevice));
    add<<<(n + 255) / 256, 256>>>(da, db, dc, n);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(c.data(), dc, size, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(da));
    CHECK(cudaFree(db));
    CHECK(cudaFree(dc));
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);

    int wrong = 0;
    for (int i = 0; i < n; i++) wrong += c[i] != a[i] + b[i];
    printf("%d elements, checksum %016llx, %d wrong\n", n, (unsigned long long)checksum(c.data(), size), wrong);
    return verdict(wrong == 0);
}

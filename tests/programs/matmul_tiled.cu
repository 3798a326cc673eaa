// C = A B with tiles in shared memory; sizes that are no multiple of the tile, so that edges count.
#include "check.h"
#include <cmath>
#include <vector>

constexpr int TILE = 16;

__global__ void multiply(const float *a, const float *b, float *c, int rows, int inner, int columns) {
    __shared__ float as[TILE][TILE], bs[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int tile = 0; tile < inner; tile += TILE) {
        int k = tile + threadIdx.x, l = tile + threadIdx.y;
        as[threadIdx.y][threadIdx.x] = row < rows && k < inner ? a[row * inner + k] : 0;
        bs[threadIdx.y][threadIdx.x] = l < inner && column < columns ? b[l * columns + column] : 0;
        __syncthreads();
        for (int i = 0; i < TILE; i++) sum = __fmaf_rn(as[threadIdx.y][i], bs[i][threadIdx.x], sum);
        __syncthreads();
    }
    if (row < rows && column < columns) c[row * columns + column] = sum;
}

int main() {
    const int rows = 90, inner = 75, columns = 110;
    Random random(2);
    std::vector<float> a(rows * inner), b(inner * columns), c(rows * columns);
    for (float &value : a) value = random.real();
    for (float &value : b) value = random.real();

    double start = now();
    float *da, *db, *dc;
    CHECK(cudaMalloc(&da, a.size() * sizeof(float)));
    CHECK(cudaMalloc(&db, b.size() * sizeof(float)));
    CHECK(cudaMalloc(&dc, c.size() * sizeof(float)));
    CHECK(cudaMemcpy(da, a.data(), a.size() * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(db, b.data(), b.size() * sizeof(float), cudaMemcpyHostToDevice));
    dim3 grid((columns + TILE - 1) / TILE, (rows + TILE - 1) / TILE), block(TILE, TILE);
    multiply<<<grid, block>>>(da, db, dc, rows, inner, columns);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(c.data(), dc, c.size() * sizeof(float), cudaMemcpyDeviceToHost));
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);

    // The same operations in the same order: not a bit may differ.
    int wrong = 0;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            float sum = 0;
            for (int k = 0; k < inner; k++) sum = fmaf(a[row * inner + k], b[k * columns + column], sum);
            wrong += sum != c[row * columns + column];
        }
    printf("%d x %d x %d, checksum %016llx, %d wrong\n", rows, inner, columns,
           (unsigned long long)checksum(c.data(), c.size() * sizeof(float)), wrong);
    return verdict(wrong == 0);
}

// Fourier transforms by cuFFT: of complex and of real numbers, in one and two dimensions, in batches, and back again.
#include "../programs/check.h"
#include <cmath>
#include <cufft.h>
#include <vector>

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-40s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

#define FFT(call)                                                              \
    do {                                                                       \
        cufftResult fft_result = (call);                                       \
        if (fft_result != CUFFT_SUCCESS) {                                     \
            printf("%s: %d\nFAIL\n", #call, (int)fft_result);                  \
            exit(1);                                                           \
        }                                                                      \
    } while (0)

static bool is(cufftComplex value, double real, double imaginary) {
    return fabs(value.x - real) < 1e-3 && fabs(value.y - imaginary) < 1e-3;
}

// A wave with `cycles` in `n` samples has its energy in two frequencies.
static void waves(int n, int batch) {
    std::vector<cufftComplex> values(n * batch);
    for (int b = 0; b < batch; b++)
        for (int i = 0; i < n; i++) values[b * n + i] = {(float)cos(2 * M_PI * (b + 3) * i / n), 0};
    size_t bytes = values.size() * sizeof values[0];
    cufftComplex *device;
    CHECK(cudaMalloc((void **)&device, bytes));
    CHECK(cudaMemcpy(device, values.data(), bytes, cudaMemcpyHostToDevice));
    cufftHandle plan;
    FFT(cufftPlan1d(&plan, n, CUFFT_C2C, batch));
    FFT(cufftExecC2C(plan, device, device, CUFFT_FORWARD));
    std::vector<cufftComplex> there(values.size()), back(values.size());
    CHECK(cudaMemcpy(there.data(), device, bytes, cudaMemcpyDeviceToHost));
    bool good = true;
    for (int b = 0; b < batch; b++)
        for (int i = 0; i < n; i++) good = good && is(there[b * n + i], i == b + 3 || i == n - b - 3 ? n / 2.0 : 0, 0);
    expect("waves become their frequencies", good);
    FFT(cufftExecC2C(plan, device, device, CUFFT_INVERSE));
    CHECK(cudaMemcpy(back.data(), device, bytes, cudaMemcpyDeviceToHost));
    good = true;
    for (size_t i = 0; i < values.size(); i++) good = good && is(back[i], values[i].x * n, 0);
    expect("and waves again", good);
    FFT(cufftDestroy(plan));
    CHECK(cudaFree(device));
}

static void plane() {
    const int rows = 16, columns = 32, half = columns / 2 + 1;
    std::vector<float> values(rows * columns, 1);
    std::vector<cufftComplex> there(rows * half);
    float *from;
    cufftComplex *to;
    CHECK(cudaMalloc((void **)&from, values.size() * sizeof *from));
    CHECK(cudaMalloc((void **)&to, there.size() * sizeof *to));
    CHECK(cudaMemcpy(from, values.data(), values.size() * sizeof *from, cudaMemcpyHostToDevice));
    cufftHandle plan;
    FFT(cufftPlan2d(&plan, rows, columns, CUFFT_R2C));
    FFT(cufftExecR2C(plan, from, to));
    CHECK(cudaMemcpy(there.data(), to, there.size() * sizeof *to, cudaMemcpyDeviceToHost));
    bool good = is(there[0], rows * columns, 0);
    for (size_t i = 1; i < there.size(); i++) good = good && is(there[i], 0, 0);
    expect("a plane has its mean only", good);
    FFT(cufftDestroy(plan));
    CHECK(cudaFree(from));
    CHECK(cudaFree(to));
}

int main() {
    waves(64, 1);
    waves(128, 4);
    plane();
    return verdict(wrong == 0);
}

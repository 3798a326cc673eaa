// Prints the Mandelbrot set. Branches that diverge within a warp, and loops of unequal length.
#include "check.h"
#include <vector>

constexpr int WIDTH = 78, HEIGHT = 32, LIMIT = 90;

// Without fused operations, so that host and device agree to the last bit.
__device__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ float plus(float a, float b) { return __fadd_rn(a, b); }

__global__ void mandelbrot(unsigned char *picture) {
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= WIDTH || y >= HEIGHT) return;
    float cr = plus(-2.25f, multiply(x, 0.0390625f)), ci = plus(-1.21875f, multiply(y, 0.078125f));
    float zr = 0, zi = 0;
    int steps = 0;
    while (steps < LIMIT && plus(multiply(zr, zr), multiply(zi, zi)) <= 4) {
        float next = plus(plus(multiply(zr, zr), -multiply(zi, zi)), cr);
        zi = plus(multiply(multiply(2, zr), zi), ci);
        zr = next;
        steps++;
    }
    picture[y * WIDTH + x] = steps;
}

static int on_host(int x, int y) {
    // volatile keeps the host's compiler from fusing.
    volatile float cr = x * 0.0390625f, ci = y * 0.078125f, zr = 0, zi = 0;
    cr = -2.25f + cr;
    ci = -1.21875f + ci;
    for (int steps = 0; steps < LIMIT; steps++) {
        volatile float rr = zr * zr, ii = zi * zi, ri = 2 * zr, norm = rr + ii;
        if (!(norm <= 4)) return steps;
        volatile float difference = rr - ii;
        ri = ri * zi;
        zr = difference + cr;
        zi = ri + ci;
    }
    return LIMIT;
}

int main() {
    std::vector<unsigned char> picture(WIDTH * HEIGHT);
    double start = now();
    unsigned char *device;
    CHECK(cudaMalloc(&device, picture.size()));
    dim3 block(16, 4), grid((WIDTH + 15) / 16, (HEIGHT + 3) / 4);
    mandelbrot<<<grid, block>>>(device);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(picture.data(), device, picture.size(), cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device));
    fprintf(stderr, "%.1f ms\n", (now() - start) * 1e3);

    const char *shades = " .,:;-=+*o%#@";
    int wrong = 0;
    for (int y = 0; y < HEIGHT; y++) {
        char line[WIDTH + 1] = {};
        for (int x = 0; x < WIDTH; x++) {
            int steps = picture[y * WIDTH + x];
            line[x] = steps == LIMIT ? '@' : shades[steps < 11 ? steps : 11];
            wrong += steps != on_host(x, y);
        }
        puts(line);
    }
    printf("checksum %016llx, %d wrong\n", (unsigned long long)checksum(picture.data(), picture.size()), wrong);
    return verdict(wrong == 0);
}

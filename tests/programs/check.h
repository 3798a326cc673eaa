// Shared by the test programs. Standard output must be the same on every run and every path to the GPU: no times, no
// addresses, no sizes of memory that depend on the machine. Times go to standard error.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <cuda_runtime.h>

// A call that must succeed.
#define CHECK(call)                                                                              \
    do {                                                                                         \
        cudaError_t check_error = (call);                                                        \
        if (check_error != cudaSuccess) {                                                        \
            std::printf("%s: %d %s\nFAIL\n", #call, (int)check_error, cudaGetErrorName(check_error)); \
            std::exit(1);                                                                        \
        }                                                                                        \
    } while (0)

// True if the program is also to check results that NVIDIA's driver leaves undefined or does not promise: tests of the software GPU
// and of Sluice ask for it.
inline bool undefined_too() { return std::getenv("SLUICE_TEST_UNDEFINED") != nullptr; }

// Pseudo-random data, the same everywhere (splitmix64).
struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed) {}
    uint64_t next() {
        uint64_t z = (state += 0x9e3779b97f4a7c15ull);
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    // In [-1, 1), every value exact in a float.
    float real() { return (float)(int32_t)(next() >> 40) / 8388608.0f - 1.0f; }
    uint32_t below(uint32_t bound) { return (uint32_t)(next() >> 32) % bound; }
};

// FNV-1a: two results with the same bits have the same checksum.
inline uint64_t checksum(const void *data, size_t size) {
    const unsigned char *bytes = (const unsigned char *)data;
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    return hash;
}

inline double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

// The last line of a program, and its exit status.
inline int verdict(bool passed) {
    std::printf("%s\n", passed ? "PASS" : "FAIL");
    return passed ? 0 : 1;
}

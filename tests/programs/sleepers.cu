// Threads that all wait for the same held stream until SIGUSR1 releases it. Usage: sleepers THREADS
#include "check.h"
#include <csignal>
#include <thread>
#include <vector>

__global__ void nothing() {}

static volatile int *released;

static void release(int) { *released = 1; }

// Sleeps on the host between polls, so that fifty held streams do not need fifty processors.
__global__ void hold(volatile int *released) {
    while (!*released) __nanosleep(1000000);
}

int main(int argc, char **argv) {
    if (argc < 2) return verdict(true);
    CHECK(cudaMallocHost((void **)&released, sizeof(int)));
    *released = 0;
    signal(SIGUSR1, release);
    hold<<<1, 1>>>(released);
    CHECK(cudaGetLastError());
    std::vector<std::thread> threads;
    for (int i = 0; i < atoi(argv[1]); i++) threads.emplace_back([] { CHECK(cudaDeviceSynchronize()); });
    printf("sleeping\n");
    fflush(stdout);
    for (auto &thread : threads) thread.join();
    return verdict(true);
}

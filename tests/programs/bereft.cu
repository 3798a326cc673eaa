// Waits for work that never ends, to see the effect of a kill of the host's side of the process: the wait must end with an
// error, and every later call, too. The same if the program closes descriptors that it did not open, as daemons do, and with
// them the library's way to the host: also for work that was posted before the loss could be noticed.
// Usage: bereft [killed | closed]     without an argument, no process ends the wait
#include "check.h"
#include <cstring>
#include <thread>
#include <unistd.h>

__global__ void hold(volatile int *released) {
    while (!*released);
}

int main(int argc, char **argv) {
    if (argc > 1 && !strcmp(argv[1], "closed")) {
        int *never;
        cudaStream_t stream;
        CHECK(cudaMalloc((void **)&never, sizeof(int)));
        CHECK(cudaMemset(never, 0, sizeof(int)));
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        hold<<<1, 1, 0, stream>>>(never);
        CHECK(cudaGetLastError());
        cudaError_t waited = cudaSuccess;
        std::thread waiter([&] { waited = cudaStreamSynchronize(stream); });
        usleep(100000); // until it sleeps
        close_range(3, ~0U, 0);
        hold<<<1, 1>>>(never);
        cudaError_t launched = cudaGetLastError(), later = cudaDeviceSynchronize();
        waiter.join();
        printf("a launch, a wait for it and a wait of before end with errors: %s, %s, %s\n",
               launched != cudaSuccess ? "yes" : "no", later != cudaSuccess ? "yes" : "no",
               waited != cudaSuccess ? "yes" : "no");
        return verdict(later != cudaSuccess && waited != cudaSuccess);
    }
    if (argc > 1 && !strcmp(argv[1], "killed")) {
        int *released;
        CHECK(cudaMalloc((void **)&released, sizeof(int)));
        CHECK(cudaMemset(released, 0, sizeof(int)));
        hold<<<1, 1>>>(released);
        CHECK(cudaGetLastError());
        printf("waiting\n");
        fflush(stdout);
        cudaError_t waited = cudaDeviceSynchronize();
        printf("the wait ended with an error: %s\n", waited != cudaSuccess ? "yes" : "no");
        void *memory;
        cudaError_t later = cudaMalloc(&memory, 256);
        printf("so does a later call: %s\n", later != cudaSuccess ? "yes" : "no");
        return verdict(waited != cudaSuccess && later != cudaSuccess);
    }
    return verdict(true);
}

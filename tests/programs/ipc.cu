// Device memory of one process that another one opens: the program runs itself a second time, and both see the same bytes.
#include "check.h"
#include <csignal>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-52s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

__global__ void bump(int *values, int by, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) values[i] += by;
}

static const int COUNT[2] = {1000, 1500000};

// The other process: adds to the memory that it opens. Its exit status is the number of its last step.
static int other(int input) {
    for (int which = 0; which < 2; which++) {
        cudaIpcMemHandle_t handle;
        if (read(input, &handle, sizeof handle) != sizeof handle) return 2;
        int *values, *again;
        if (cudaIpcOpenMemHandle((void **)&values, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) return 3;
        if (cudaIpcOpenMemHandle((void **)&again, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) return 4;
        if (again != values) return 5;
        bump<<<(COUNT[which] + 255) / 256, 256>>>(values, 100, COUNT[which]);
        if (cudaDeviceSynchronize() != cudaSuccess) return 6;
        if (cudaFree(values) == cudaSuccess) return 7;
        cudaGetLastError();
        if (cudaIpcCloseMemHandle(again) != cudaSuccess || cudaIpcCloseMemHandle(values) != cudaSuccess) return 8;
        if (cudaIpcCloseMemHandle(values) == cudaSuccess) return 9;
        cudaGetLastError();
        if (!undefined_too()) continue;
        handle.reserved[0] ^= 1;
        if (cudaIpcOpenMemHandle((void **)&values, handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess) return 10;
        cudaGetLastError();
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "other") == 0) return other(atoi(argv[2]));
    signal(SIGPIPE, SIG_IGN);
    int ends[2];
    if (pipe(ends) != 0) return 1;
    pid_t child = fork();
    if (child == 0) {
        close(ends[1]);
        char number[16];
        snprintf(number, sizeof number, "%d", ends[0]);
        execl("/proc/self/exe", argv[0], "other", number, (char *)nullptr);
        _exit(127);
    }
    close(ends[0]);
    int *values[2];
    for (int which = 0; which < 2; which++) {
        CHECK(cudaMalloc(&values[which], COUNT[which] * sizeof(int)));
        CHECK(cudaMemset(values[which], 0, COUNT[which] * sizeof(int)));
        bump<<<(COUNT[which] + 255) / 256, 256>>>(values[which], 7, COUNT[which]);
        CHECK(cudaDeviceSynchronize());
        cudaIpcMemHandle_t handle;
        CHECK(cudaIpcGetMemHandle(&handle, values[which] + 10));
        if (write(ends[1], &handle, sizeof handle) != sizeof handle) break;
        void *own;
        expect("a process does not open its own",
               cudaIpcOpenMemHandle(&own, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess);
        cudaGetLastError();
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) printf("the other process ended with %x\n", status);
    expect("the other process opened and closed both", WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (int which = 0; which < 2; which++) {
        int first = 0, last = 0;
        CHECK(cudaMemcpy(&first, values[which], sizeof first, cudaMemcpyDeviceToHost));
        CHECK(cudaMemcpy(&last, values[which] + COUNT[which] - 1, sizeof last, cudaMemcpyDeviceToHost));
        expect("its writes are visible here", first == 107 && last == 107);
    }
    cudaIpcMemHandle_t handle;
    int host_side = 0;
    expect("memory of the host has no handle", cudaIpcGetMemHandle(&handle, &host_side) != cudaSuccess);
    cudaGetLastError();
    return verdict(wrong == 0);
}

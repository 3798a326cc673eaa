// The ways out of a process: with live streams and sleeping threads, from a thread, without destructors, in a forked child.
// The child of a process that uses the GPU has no driver of its own and may not disturb its parent.
// A process that only asked for the driver's version uses nothing yet, and its child starts on its own.
// Usage: exits [return | exit | thread | _exit | fork | early]     without argument: each of them in a child of its own
#include "check.h"
#include <atomic>
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

__global__ void hold(volatile int *released) {
    while (!*released);
}
__global__ void add(int *to) { atomicAdd(to, 1); }

static int way_out(const char *how) {
    if (!strcmp(how, "early")) {
        int version = 0;
        void *driver = dlopen("libcuda.so.1", RTLD_NOW);
        auto get_version = (CUresult(*)(int *))dlsym(driver, "cuDriverGetVersion");
        auto initialise = (CUresult(*)(unsigned))dlsym(driver, "cuInit");
        if (get_version(&version) != CUDA_SUCCESS) return 1;
        pid_t child = fork();
        if (child == 0) _exit(initialise(0) == CUDA_SUCCESS ? 0 : 1);
        int status = 0;
        waitpid(child, &status, 0);
        return WIFEXITED(status) && WEXITSTATUS(status) == 0 && initialise(0) == CUDA_SUCCESS ? 0 : 1;
    }
    int *released, *counter;
    cudaStream_t held;
    CHECK(cudaMallocHost((void **)&released, sizeof(int)));
    *released = 0;
    CHECK(cudaMalloc(&counter, sizeof(int)));
    CHECK(cudaMemset(counter, 0, sizeof(int)));
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    if (!strcmp(how, "fork")) {
        add<<<1, 1>>>(counter);
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            void *memory;
            cudaError_t refused = cudaMalloc(&memory, 256);
            exit(refused == cudaSuccess ? 1 : 0); // with every destructor there is
        }
        int status = 0;
        waitpid(child, &status, 0);
        add<<<1, 1>>>(counter);
        int count = 0;
        CHECK(cudaMemcpy(&count, counter, sizeof count, cudaMemcpyDeviceToHost));
        return WIFEXITED(status) && WEXITSTATUS(status) == 0 && count == 2 ? 0 : 1;
    }
    hold<<<1, 1, 0, held>>>(released);
    CHECK(cudaGetLastError());
    static std::atomic<int> ready{0};
    for (int i = 0; i < 4; i++) {
        std::thread([held] {
            // The runtime's first calls in a thread are over by then.
            cudaStreamQuery(held);
            ready++;
            cudaStreamSynchronize(held);
        }).detach();
    }
    while (ready < 4) usleep(1000);
    usleep(100000);
    if (!strcmp(how, "exit")) exit(0);
    if (!strcmp(how, "_exit")) _exit(0);
    if (!strcmp(how, "thread")) {
        std::thread([] { exit(0); }).detach();
        pause();
    }
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1) return way_out(argv[1]);
    int bad = 0;
    for (const char *how : {"return", "exit", "thread", "_exit", "fork", "early"}) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", argv[0], how, (char *)nullptr);
            _exit(127);
        }
        int status = 0;
        waitpid(child, &status, 0);
        bool good = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        printf("%-8s %s\n", how, good ? "ends well" : WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "fails");
        bad += !good;
    }
    return verdict(bad == 0);
}

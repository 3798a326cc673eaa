// Processes that begin and end while kernels, functions of the program and captures run: by fork, by spawn, by exec and by exit.
//   offspring MODE   the program's second form: computes, or ends in the middle of work
#include "driver.h"
#include <atomic>
#include <cstring>
#include <spawn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

extern char **environ;

__global__ void hold(volatile int *released, int *value) {
    while (!*released);
    *value += 1;
}

__global__ void add(int *value) { atomicAdd(value, 1); }

static bool passed = true;

static void expect(const char *what, bool good) {
    printf("%-64s %s\n", what, good ? "ok" : "WRONG");
    fflush(stdout);
    passed &= good;
}

// The exit status of a child, or more than 1,000 if a signal ended it.
static int ended(pid_t child) {
    int status = -1;
    if (waitpid(child, &status, 0) != child) return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static char own[4096];

static int spawned(const char *mode) {
    char *const arguments[] = {own, const_cast<char *>(mode), nullptr};
    pid_t child;
    if (posix_spawn(&child, own, nullptr, nullptr, arguments, environ) != 0) return -1;
    return ended(child);
}

// A child of a process that uses the GPU has no driver.
static int forked() {
    fflush(stdout);
    pid_t child = fork();
    if (child != 0) return ended(child);
    CUstream stream;
    _exit(CALL(cuStreamCreate, &stream, 0) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
}

static int compute() {
    int *value, seen = 0;
    CHECK(cudaMalloc(&value, 4));
    CHECK(cudaMemset(value, 0, 4));
    for (int i = 0; i < 10; i++) add<<<1, 1>>>(value);
    CHECK(cudaMemcpy(&seen, value, 4, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(value));
    return seen == 10 ? 0 : 1;
}

static void CUDART_CB spawns(void *code) { *(std::atomic<int> *)code = spawned("compute"); }
static void CUDART_CB forks(void *code) { *(std::atomic<int> *)code = forked(); }

// A trace has the result of the launch only if it returns before the process ends.
static void wait_for(void *flag) {
    while (flag && !*(std::atomic<bool> *)flag) usleep(100);
}

static void CUDART_CB exits(void *launched) {
    wait_for(launched);
    _exit(44);
}

static void CUDART_CB replaces(void *launched) {
    wait_for(launched);
    execl(own, own, "compute", (char *)nullptr);
    _exit(1);
}

static int end(const char *mode) {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int *value, *released;
    CHECK(cudaMalloc(&value, 4));
    CHECK(cudaHostAlloc(&released, 4, cudaHostAllocMapped));
    *released = 0;
    if (!strcmp(mode, "return in a kernel")) {
        hold<<<1, 1, 0, stream>>>(released, value);
        std::thread([=] { usleep(50000), *released = 1; }).detach();
        return 41;
    }
    if (!strcmp(mode, "return in a capture")) {
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        add<<<1, 1, 0, stream>>>(value);
        return 42;
    }
    if (!strcmp(mode, "end of a thread in its capture")) {
        std::thread([=] {
            CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
            add<<<1, 1, 0, stream>>>(value);
        }).join();
        cudaGraph_t graph = nullptr;
        return cudaStreamEndCapture(stream, &graph) == cudaErrorStreamCaptureWrongThread ? 43 : 1;
    }
    if (!strcmp(mode, "exec in a kernel")) {
        hold<<<1, 1, 0, stream>>>(released, value);
        replaces(nullptr);
    }
    std::atomic<bool> launched(false);
    CHECK(cudaLaunchHostFunc(stream, !strcmp(mode, "_exit in a function") ? exits : replaces, &launched));
    launched = true;
    for (;;) pause();
}

int main(int argc, char **argv) {
    if (readlink("/proc/self/exe", own, sizeof own - 1) <= 0) return 1;
    if (argc > 1) return !strcmp(argv[1], "compute") ? compute() : end(argv[1]);
    cudaStream_t stream, other;
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    int *value, *released, seen = -1;
    CHECK(cudaMalloc(&value, 4));
    CHECK(cudaMemset(value, 0, 4));
    CHECK(cudaHostAlloc(&released, 4, cudaHostAllocMapped));
    *released = 0;
    CHECK(cudaDeviceSynchronize());

    hold<<<1, 1, 0, stream>>>(released, value);
    expect("a fork during a kernel", forked() == 0);
    expect("a spawned program computes during a kernel", spawned("compute") == 0);
    *released = 1;
    CHECK(cudaStreamSynchronize(stream));

    std::atomic<int> codes[2] = {{-1}, {-1}};
    CHECK(cudaLaunchHostFunc(stream, spawns, &codes[0]));
    add<<<1, 1, 0, other>>>(value);
    CHECK(cudaLaunchHostFunc(stream, forks, &codes[1]));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaStreamSynchronize(other));
    expect("a function of the program spawns one that computes", codes[0] == 0);
    expect("a function of the program forks", codes[1] == 0);

    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    add<<<1, 1, 0, stream>>>(value);
    expect("a fork during a capture", forked() == 0);
    expect("a spawned program computes during a capture", spawned("compute") == 0);
    add<<<1, 1, 0, stream>>>(value);
    cudaGraph_t graph;
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));

    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) {
        threads.emplace_back([&] {
            for (int round = 0; round < 5; round++) failed += forked() != 0;
        });
        threads.emplace_back([=] {
            cudaStream_t own;
            CHECK(cudaStreamCreate(&own));
            for (int round = 0; round < 50; round++) add<<<1, 1, 0, own>>>(value);
            CHECK(cudaStreamSynchronize(own));
            CHECK(cudaStreamDestroy(own));
        });
    }
    for (auto &thread : threads) thread.join();
    expect("threads fork while others launch", failed == 0);
    CHECK(cudaMemcpy(&seen, value, 4, cudaMemcpyDeviceToHost));
    expect("every kernel ran once", seen == 1 + 1 + 2 + 4 * 50);

    struct { const char *mode; int status; } const ends[] = {
        {"return in a kernel", 41}, {"return in a capture", 42}, {"end of a thread in its capture", 43},
        {"_exit in a function", 44}, {"exec in a function", 0}, {"exec in a kernel", 0},
    };
    for (auto &end : ends) expect(end.mode, spawned(end.mode) == end.status);
    CHECK(cudaMemcpy(&seen, value, 4, cudaMemcpyDeviceToHost));
    return verdict(passed);
}

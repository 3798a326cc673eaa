// Functions of the program in the order of streams. Usage: host_functions [fault | exit | never]     without argument: everything, each
// of these in a child of its own
#include "check.h"
#include <atomic>
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

__global__ void add(int *to, int value) { *to += value; }
__global__ void wild(unsigned long long address) { *(volatile int *)address = 1; }

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-64s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

static void until(const std::atomic<int> &flag, int value) {
    while (flag.load() != value) usleep(100);
}

// A result that the function copies, with the place for it.
struct Step {
    const int *from;
    int to;
};

static void copy(void *data) {
    Step *step = (Step *)data;
    step->to = *step->from;
}

// A kernel, a copy and a function in turn: each function sees the result of the kernel before it, and of none behind it.
static void in_order(cudaStream_t stream, const char *what) {
    constexpr int STEPS = 200;
    int *device, *host;
    std::vector<Step> steps(STEPS);
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMallocHost(&host, sizeof(int)));
    CHECK(cudaMemsetAsync(device, 0, sizeof(int), stream));
    for (Step &step : steps) {
        step = {host, -1};
        add<<<1, 1, 0, stream>>>(device, 1);
        CHECK(cudaMemcpyAsync(host, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaLaunchHostFunc(stream, copy, &step));
    }
    CHECK(cudaStreamSynchronize(stream));
    bool good = true;
    for (int i = 0; i < STEPS; i++) good &= steps[i].to == i + 1;
    expect(what, good);
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(host));
}

static void store(void *data) { *(int *)data = 41; }

static void store_late(void *data) {
    usleep(20000);
    store(data);
}

// Work behind a function finds what the function wrote.
static void feeds_the_device() {
    int *device, *host, result = 0;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMallocHost(&host, sizeof(int)));
    *host = 0;
    CHECK(cudaLaunchHostFunc(stream, store, host));
    CHECK(cudaMemcpyAsync(device, host, sizeof(int), cudaMemcpyHostToDevice, stream));
    add<<<1, 1, 0, stream>>>(device, 1);
    CHECK(cudaMemcpyAsync(&result, device, sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    expect("a copy behind a function takes what the function wrote", result == 42);
    // Longer than a copy that may read its source before its turn.
    std::vector<int> pageable(32 << 10);
    int *longer;
    CHECK(cudaMalloc(&longer, pageable.size() * sizeof(int)));
    CHECK(cudaLaunchHostFunc(stream, store_late, pageable.data()));
    CHECK(cudaMemcpy(longer, pageable.data(), pageable.size() * sizeof(int), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(&result, longer, sizeof(int), cudaMemcpyDeviceToHost));
    expect("so does a long synchronous copy of pageable memory", result == 41);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(longer));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(host));
}

static void wait_for(void *data) { until(*(std::atomic<int> *)data, 1); }

// A stream is held while its function runs, and no other stream and no other thread is.
static void holds_its_stream() {
    int *device, value = 5, result = 0;
    cudaStream_t held, other;
    cudaEvent_t behind;
    std::atomic<int> released(0), done(0);
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&behind));
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMemset(device, 0, sizeof(int)));
    // The streams do not wait for the default one.
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaLaunchHostFunc(held, wait_for, &released));
    add<<<1, 1, 0, held>>>(device, 1);
    CHECK(cudaEventRecord(behind, held));
    CHECK(cudaMemcpyAsync(device, &value, sizeof(int), cudaMemcpyHostToDevice, other));
    CHECK(cudaMemcpyAsync(&result, device, sizeof(int), cudaMemcpyDeviceToHost, other));
    CHECK(cudaStreamSynchronize(other));
    expect("another stream computes meanwhile", result == 5);
    expect("the held stream is not ready", cudaStreamQuery(held) == cudaErrorNotReady);
    expect("an event behind the function is not ready", cudaEventQuery(behind) == cudaErrorNotReady);
    std::thread waits([&] {
        CHECK(cudaStreamSynchronize(held));
        done = 1;
    });
    usleep(20000);
    expect("a thread that synchronises with it waits", done == 0);
    // The function waits for a thread that uses the device.
    std::thread([&] {
        CHECK(cudaMemcpyAsync(&result, device, sizeof(int), cudaMemcpyDeviceToHost, other));
        CHECK(cudaStreamSynchronize(other));
        released = 1;
    }).join();
    waits.join();
    CHECK(cudaEventSynchronize(behind));
    CHECK(cudaMemcpy(&result, device, sizeof(int), cudaMemcpyDeviceToHost));
    expect("work behind the function comes after it", result == 6);
    CHECK(cudaEventDestroy(behind));
    CHECK(cudaStreamDestroy(held));
    CHECK(cudaStreamDestroy(other));
    CHECK(cudaFree(device));
}

// A function of one stream behind an event of another.
static void joins_streams() {
    int *device, *host;
    cudaStream_t first, second;
    cudaEvent_t event;
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    CHECK(cudaEventCreate(&event));
    CHECK(cudaMalloc(&device, sizeof(int)));
    CHECK(cudaMallocHost(&host, sizeof(int)));
    bool good = true;
    for (int round = 1; round <= 100; round++) {
        Step step = {host, -1};
        *host = 0;
        CHECK(cudaMemsetAsync(device, 0, sizeof(int), first));
        add<<<1, 1, 0, first>>>(device, round);
        CHECK(cudaMemcpyAsync(host, device, sizeof(int), cudaMemcpyDeviceToHost, first));
        CHECK(cudaEventRecord(event, first));
        CHECK(cudaStreamWaitEvent(second, event, 0));
        CHECK(cudaLaunchHostFunc(second, copy, &step));
        CHECK(cudaStreamSynchronize(second));
        good &= step.to == round;
    }
    expect("a function sees results that its stream waited for", good);
    CHECK(cudaEventDestroy(event));
    CHECK(cudaStreamDestroy(first));
    CHECK(cudaStreamDestroy(second));
    CHECK(cudaFree(device));
    CHECK(cudaFreeHost(host));
}

struct Call {
    cudaStream_t stream;
    cudaError_t status;
    int count;
};

static void callback(cudaStream_t stream, cudaError_t status, void *data) {
    Call *call = (Call *)data;
    *call = {stream, status, call->count + 1};
}

static void callbacks() {
    cudaStream_t stream;
    Call call = {nullptr, cudaErrorUnknown, 0};
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamAddCallback(stream, callback, &call, 0));
    CHECK(cudaStreamSynchronize(stream));
    expect("a callback runs once, with its stream and success",
        call.stream == stream && call.status == cudaSuccess && call.count == 1);
    CHECK(cudaStreamDestroy(stream));
}

// The results of calls of the driver that a function makes.
struct Calls {
    decltype(&cuMemAlloc) allocate;
    decltype(&cuCtxSynchronize) synchronise;
    CUresult results[2];
};

static void make_calls(void *data) {
    Calls *calls = (Calls *)data;
    CUdeviceptr memory;
    calls->results[0] = calls->allocate(&memory, 256);
    calls->results[1] = calls->synchronise();
}

static void refuses_calls() {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    Calls calls = {(decltype(&cuMemAlloc))dlsym(driver, "cuMemAlloc_v2"),
        (decltype(&cuCtxSynchronize))dlsym(driver, "cuCtxSynchronize"), {}};
    CHECK(cudaLaunchHostFunc(stream, make_calls, &calls));
    CHECK(cudaStreamSynchronize(stream));
    for (CUresult result : calls.results) printf("a call in a function gets %d\n", (int)result);
    void *memory;
    CHECK(cudaMalloc(&memory, 256));
    CHECK(cudaFree(memory));
    CHECK(cudaStreamDestroy(stream));
}

static void count(void *data) { ++*(std::atomic<int> *)data; }

// More functions than a stream has places.
static void many() {
    constexpr int STREAMS = 4, EACH = 2000;
    cudaStream_t streams[STREAMS];
    std::atomic<int> counter(0);
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    double start = now();
    for (int i = 0; i < EACH; i++)
        for (cudaStream_t stream : streams) CHECK(cudaLaunchHostFunc(stream, count, &counter));
    CHECK(cudaDeviceSynchronize());
    fprintf(stderr, "%.0f functions a second\n", STREAMS * EACH / (now() - start));
    expect("8000 functions in four streams run", counter == STREAMS * EACH);
    start = now();
    for (int i = 0; i < EACH; i++) {
        CHECK(cudaLaunchHostFunc(streams[0], count, &counter));
        CHECK(cudaStreamSynchronize(streams[0]));
    }
    fprintf(stderr, "%.1f microseconds for a function and a wait\n", (now() - start) / EACH * 1e6);
    expect("2000 functions run, each with a wait", counter == STREAMS * EACH + EACH);
    // A stream that is destroyed runs its functions.
    std::atomic<int> released(0);
    CHECK(cudaLaunchHostFunc(streams[0], wait_for, &released));
    CHECK(cudaLaunchHostFunc(streams[0], count, &counter));
    CHECK(cudaStreamDestroy(streams[0]));
    released = 1;
    CHECK(cudaDeviceSynchronize());
    expect("functions of a destroyed stream run", counter == STREAMS * EACH + EACH + 1);
    for (int i = 1; i < STREAMS; i++) CHECK(cudaStreamDestroy(streams[i]));
}

static void fork_and_wait(void *data) {
    pid_t child = fork();
    if (child == 0) _exit(7);
    waitpid(child, (int *)data, 0);
}

static void forks() {
    int status = 0;
    CHECK(cudaLaunchHostFunc(nullptr, fork_and_wait, &status));
    CHECK(cudaDeviceSynchronize());
    expect("a function may fork", WIFEXITED(status) && WEXITSTATUS(status) == 7);
    void *memory;
    CHECK(cudaMalloc(&memory, 256));
    CHECK(cudaFree(memory));
}

struct Failure {
    std::atomic<int> status, ran;
};

static void note_status(cudaStream_t, cudaError_t status, void *data) { ((Failure *)data)->status = status; }
static void note_run(void *data) { ((Failure *)data)->ran = 1; }

// After a fault callbacks run with its code, and functions do not run.
static int fault() {
    std::atomic<int> released(0);
    Failure failure = {{-1}, {0}};
    cudaStream_t stream;
    int *valid;
    CHECK(cudaStreamCreate(&stream));
    // A driver may load a kernel at its first launch, which waits for all streams: it is launched once before one is held.
    CHECK(cudaMalloc(&valid, sizeof(int)));
    wild<<<1, 1, 0, stream>>>((unsigned long long)valid);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaLaunchHostFunc(stream, wait_for, &released));
    wild<<<1, 1, 0, stream>>>(0x40);
    CHECK(cudaGetLastError());
    CHECK(cudaLaunchHostFunc(stream, note_run, &failure));
    CHECK(cudaStreamAddCallback(stream, note_status, &failure, 0));
    released = 1;
    printf("synchronise %d\n", (int)cudaStreamSynchronize(stream));
    while (failure.status == -1) usleep(1000);
    printf("callback %d, function %s\n", failure.status.load(), failure.ran ? "ran" : "did not run");
    printf("another function %d\n", (int)cudaLaunchHostFunc(stream, note_run, &failure));
    fflush(stdout);
    return failure.status == cudaErrorIllegalAddress && !failure.ran ? 0 : 1;
}

// A driver may wait for the function when the process ends in order.
[[noreturn]] static void leave_with(int status) {
    if (undefined_too()) exit(status);
    fflush(stdout);
    _exit(status);
}

static void leave(void *launched) {
    wait_for(launched);
    leave_with(5);
}

static void never_return(void *data) {
    *(std::atomic<int> *)data = 1;
    for (;;) pause();
}

static int child(const char *how) {
    if (!strcmp(how, "fault")) return fault();
    if (!strcmp(how, "exit")) {
        // A trace has the result of the launch only if it returns before the process ends.
        std::atomic<int> launched(0);
        CHECK(cudaLaunchHostFunc(nullptr, leave, &launched));
        launched = 1;
        for (;;) pause();
    }
    static std::atomic<int> runs(0), waits(0);
    CHECK(cudaLaunchHostFunc(nullptr, never_return, &runs));
    until(runs, 1);
    std::thread([] {
        waits = 1;
        cudaDeviceSynchronize();
    }).detach();
    until(waits, 1);
    usleep(100000);
    leave_with(6);
}

int main(int argc, char **argv) {
    if (argc > 1) return child(argv[1]);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    in_order(stream, "functions of a stream come in its order");
    in_order(nullptr, "those of the default stream, too");
    in_order(cudaStreamPerThread, "and those of the thread's stream");
    CHECK(cudaStreamDestroy(stream));
    feeds_the_device();
    holds_its_stream();
    joins_streams();
    callbacks();
    refuses_calls();
    many();
    forks();
    struct { const char *how; int status; } children[] = {{"fault", 0}, {"exit", 5}, {"never", 6}};
    for (auto [how, expected] : children) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            execl("/proc/self/exe", argv[0], how, (char *)nullptr);
            _exit(127);
        }
        int status = 0;
        waitpid(child, &status, 0);
        printf("%-64s ", how);
        if (WIFEXITED(status)) printf("status %d\n", WEXITSTATUS(status));
        else printf("%s\n", strsignal(WTERMSIG(status)));
        wrong += !(WIFEXITED(status) && WEXITSTATUS(status) == expected);
    }
    return verdict(wrong == 0);
}

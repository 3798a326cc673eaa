// A neighbour that measures its calls by kind: each line of standard input is `all` or `compute` and a number of milliseconds, for
// which it makes calls of every kind in turn, or of that kind alone, and checks every result.
// Prints `computing` at the start, and for each line `pulse LINE KIND MEDIAN P99 MOST CALLS WRONG FAILED` per kind, times in
// nanoseconds. A failed call prints its kind and code to standard error.
//   compute  a kernel and a copy
//   small    a piece of 2 MiB or of 512 bytes, allocated and used, beside others that are freed together
//   large    32 MiB, allocated, used and freed
//   module   an image with 4 MiB of variables, loaded, used and unloaded: more than a margin of growth
//   context  created, used and destroyed
//   session  a process that computes and ends
// Usage: pulse [session]     session: computes once and ends
#include "driver.h"
#include <algorithm>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <vector>

extern char **environ;

static const size_t MIB = 1 << 20;
static const int N = 1 << 10;

__global__ void step(unsigned *values, int n, unsigned round) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) values[i] = values[i] * 1664525u + 1013904223u + round;
}

struct Kind {
    const char *name;
    std::vector<double> took;
    long wrong = 0, failed = 0;

    // A call of this kind.
    void call(CUresult code) {
        if (code == CUDA_SUCCESS) return;
        failed++;
        fprintf(stderr, "%s: %d, %zu calls before it\n", name, (int)code, took.size());
    }
};

// Values that a kernel changes step by step, here and on the device.
struct Values {
    std::vector<unsigned> expected, got;
    unsigned *device = nullptr;
    unsigned round = 0;

    Values() : expected(N), got(N) {
        for (int i = 0; i < N; i++) expected[i] = i;
        CHECK(cudaMalloc(&device, N * sizeof(unsigned)));
        CHECK(cudaMemcpy(device, expected.data(), N * sizeof(unsigned), cudaMemcpyHostToDevice));
    }

    void compute(Kind &kind) {
        step<<<N / 256, 256>>>(device, N, round);
        kind.call((CUresult)cudaGetLastError());
        kind.call((CUresult)cudaMemcpy(got.data(), device, N * sizeof(unsigned), cudaMemcpyDeviceToHost));
        for (int i = 0; i < N; i++) {
            expected[i] = expected[i] * 1664525u + 1013904223u + round;
            kind.wrong += got[i] != expected[i];
        }
        round++;
    }
};

// Writes the end of a piece of memory and reads it back.
static void use(Kind &kind, CUdeviceptr memory, size_t bytes) {
    static unsigned value = 0;
    const size_t count = std::min<size_t>(bytes / 4, 256);
    const CUdeviceptr end = memory + bytes - count * 4;
    std::vector<unsigned> got(count);
    value++;
    kind.call(CU(cuMemsetD32, end, value, count));
    kind.call(CU(cuMemcpyDtoH, (void *)got.data(), end, count * 4));
    for (unsigned one : got) kind.wrong += one != value;
}

static void allocate(Kind &kind, size_t bytes) {
    CUdeviceptr memory = 0;
    CUresult code = CU(cuMemAlloc, &memory, bytes);
    kind.call(code);
    if (code != CUDA_SUCCESS) return;
    use(kind, memory, bytes);
    kind.call(CU(cuMemFree, memory));
}

// Pieces that are held together.
struct Pieces {
    std::vector<CUdeviceptr> all;

    void allocate(Kind &kind, size_t bytes) {
        CUdeviceptr memory = 0;
        CUresult code = CU(cuMemAlloc, &memory, bytes);
        kind.call(code);
        if (code != CUDA_SUCCESS) return;
        all.push_back(memory);
        use(kind, memory, bytes);
    }

    void free(Kind &kind) {
        for (CUdeviceptr memory : all) kind.call(CU(cuMemFree, memory));
    }
};

static void load(Kind &kind) {
    static const std::string image = ".version 7.0\n.target sm_80\n.address_size 64\n"
                                     ".visible .global .align 16 .b8 variable[4194304];\n"
                                     ".visible .entry nothing()\n{\nret;\n}\n";
    CUmodule module;
    CUdeviceptr variable;
    size_t bytes;
    CUresult code = CU(cuModuleLoadData, &module, (const void *)image.c_str());
    kind.call(code);
    if (code != CUDA_SUCCESS) return;
    code = CU(cuModuleGetGlobal, &variable, &bytes, module, "variable");
    kind.call(code);
    if (code == CUDA_SUCCESS) use(kind, variable, bytes);
    kind.call(CU(cuModuleUnload, module));
}

static void create(Kind &kind, CUdevice device, CUcontext primary) {
    CUcontext context;
    CUresult code = CU(cuCtxCreate, &context, (CUctxCreateParams *)nullptr, 0u, device);
    kind.call(code);
    if (code == CUDA_SUCCESS) {
        allocate(kind, 512);
        kind.call(CU(cuCtxDestroy, context));
    }
    kind.call(CU(cuCtxSetCurrent, primary));
}

static void start(Kind &kind) {
    char own[] = "/proc/self/exe", session[] = "session";
    char *arguments[] = {own, session, nullptr};
    pid_t process;
    int status = 0;
    if (posix_spawn(&process, own, nullptr, nullptr, arguments, environ) != 0 || waitpid(process, &status, 0) != process || status != 0) {
        kind.failed++;
        fprintf(stderr, "session: status %d\n", status);
    }
}

int main(int argc, char **) {
    CUdevice device = use_device();
    if (argc > 1) {
        Kind kind{"session's compute", {}};
        Values().compute(kind);
        return kind.wrong == 0 && kind.failed == 0 ? 0 : 1;
    }
    CUcontext primary;
    MUST(cuCtxGetCurrent, &primary);
    Values values;
    printf("computing\n");
    fflush(stdout);
    bool good = true;
    int milliseconds;
    char which[8];
    for (int line = 0; scanf("%7s %d", which, &milliseconds) == 2; line++) {
        const bool all = std::string(which) == "all";
        Kind kinds[] = {{"compute", {}}, {"small", {}}, {"large", {}}, {"module", {}}, {"context", {}}, {"session", {}}};
        // Measures a call of the kind at an index.
        auto time = [&](int at, auto call) {
            double begun = now();
            call(kinds[at]);
            kinds[at].took.push_back(now() - begun);
        };
        const double end = now() + milliseconds * 1e-3;
        // Twice at least: before and after the end of a session, whose memory the arbiter sweeps before drivers may grow again. Once,
        // because a VM whose sessions end often waits with the next ones.
        for (int turn = 0; turn < 2 || now() < end; turn++) {
            for (int i = 0; i < 16; i++) time(0, [&](Kind &kind) { values.compute(kind); });
            if (!all) continue;
            Pieces pieces;
            for (int i = 0; i < 24; i++) time(1, [&](Kind &kind) { pieces.allocate(kind, i % 8 == 7 ? 512 : 2 * MIB); });
            time(1, [&](Kind &kind) { pieces.free(kind); });
            time(2, [&](Kind &kind) { allocate(kind, 32 * MIB); });
            time(3, load);
            time(4, [&](Kind &kind) { create(kind, device, primary); });
            if (turn == 0) time(5, start);
        }
        for (Kind &kind : kinds) {
            if (kind.took.empty()) continue;
            std::sort(kind.took.begin(), kind.took.end());
            auto at = [&](double share) { return kind.took[(size_t)((kind.took.size() - 1) * share)] * 1e9; };
            printf("pulse %d %s %.0f %.0f %.0f %zu %ld %ld\n", line, kind.name, at(0.5), at(0.99), at(1), kind.took.size(), kind.wrong,
                   kind.failed);
            good &= kind.wrong == 0 && kind.failed == 0;
        }
        fflush(stdout);
    }
    return verdict(good);
}

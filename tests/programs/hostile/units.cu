// Allocates memory of several GPUs, and checks all of it, and the figures of driver and management library, for each line of input.
// Usage: units QUOTA BYTES...     QUOTA: of each GPU; BYTES: to take of the first, the second, …; 0 to leave it alone
// Prints `holding` when it has all; then for each line `as it should be`, or FAIL and the reason; PASS at the end of input.
#include "driver.h"
#include <cstring>
#include <unistd.h>
#include <vector>

static const size_t PIECE = 2 << 20;

typedef struct Opaque *Monitored;
struct Memory {
    unsigned long long total, free, used;
};
struct Process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

static void expect(const char *what, int gpu, bool holds) {
    if (holds) return;
    std::printf("GPU %d: %s: not so\nFAIL\n", gpu, what);
    std::exit(1);
}

template <typename... Arguments> static int nvml(const char *name, Arguments... arguments) {
    static void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    auto entry = library ? (int (*)(Arguments...))dlsym(library, name) : nullptr;
    return entry ? entry(arguments...) : -1;
}

struct Gpu {
    int number = 0;
    CUdevice device = 0;
    CUcontext context = nullptr;
    Monitored monitored = nullptr;
    size_t quota = 0;
    std::vector<CUdeviceptr> pieces;

    unsigned pattern(size_t piece) const { return 0x5eed0000u + number * 4096 + (unsigned)piece; }
    size_t taken() const { return pieces.size() * PIECE; }

    void open() {
        MUST(cuDeviceGet, &device, number);
        CUuuid uuid;
        MUST(cuDeviceGetUuid, &uuid, device);
        char text[96] = "GPU-";
        for (int i = 0; i < 16; i++)
            std::sprintf(text + std::strlen(text), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                         (unsigned char)uuid.bytes[i]);
        expect("it is monitored", number, nvml("nvmlDeviceGetHandleByUUID", (const char *)text, &monitored) == 0);
        size_t total = 0;
        MUST(cuDeviceTotalMem, &total, device);
        expect("its size is the quota", number, total == quota);
    }

    void take(size_t bytes) {
        MUST(cuDevicePrimaryCtxRetain, &context, device);
        MUST(cuCtxSetCurrent, context);
        while (taken() < bytes) {
            CUdeviceptr piece;
            MUST(cuMemAlloc, &piece, PIECE);
            MUST(cuMemsetD32, piece, pattern(pieces.size()), PIECE / 4);
            pieces.push_back(piece);
        }
        CUdeviceptr more;
        if (taken() == quota) expect("nothing is left", number, CU(cuMemAlloc, &more, (size_t)1) == CUDA_ERROR_OUT_OF_MEMORY);
    }

    void look() const {
        Memory memory = {};
        expect("the library reports its memory", number, nvml("nvmlDeviceGetMemoryInfo", monitored, &memory) == 0);
        expect("the library's total is the quota", number, memory.total == quota);
        Process list[64];
        unsigned count = 64;
        expect("the library lists", number, nvml("nvmlDeviceGetComputeRunningProcesses_v3", monitored, &count, list) == 0);
        unsigned long long own = 0, all = 0;
        for (unsigned i = 0; i < count; i++) {
            all += list[i].bytes;
            if (list[i].pid == (unsigned)getpid()) own += list[i].bytes;
        }
        // The driver's share of the quota counts, too.
        expect("this process has the memory that it took", number, own >= taken() && own <= quota);
        expect("the processes together have the used memory", number, all == memory.used);
        if (!context) return;
        MUST(cuCtxSetCurrent, context);
        size_t free = 0, total = 0;
        MUST(cuMemGetInfo, &free, &total);
        expect("driver and library agree", number, total == memory.total && free == memory.free);
        std::vector<unsigned> words(PIECE / 4);
        for (size_t piece = 0; piece < pieces.size(); piece++) {
            MUST(cuMemcpyDtoH, words.data(), pieces[piece], PIECE);
            for (unsigned word : words) expect("the written data is there", number, word == pattern(piece));
        }
    }

    void give() {
        if (!context) return;
        MUST(cuCtxSetCurrent, context);
        for (CUdeviceptr piece : pieces) MUST(cuMemFree, piece);
        MUST(cuDevicePrimaryCtxRelease, device);
    }
};

int main(int argc, char **argv) {
    int count = 0;
    MUST(cuInit, 0);
    MUST(cuDeviceGetCount, &count);
    expect("as many as were named", count, argc > 2 && count == argc - 2);
    expect("the management library starts", count, nvml("nvmlInit_v2") == 0);
    std::vector<Gpu> gpus(count);
    for (int number = 0; number < count; number++) {
        Gpu &gpu = gpus[number];
        gpu.number = number;
        gpu.quota = strtoull(argv[1], nullptr, 10);
        gpu.open();
        if (size_t bytes = strtoull(argv[2 + number], nullptr, 10)) gpu.take(bytes);
    }
    std::printf("holding\n");
    std::fflush(stdout);
    while (std::getchar() != EOF) {
        for (const Gpu &gpu : gpus) gpu.look();
        std::printf("as it should be\n");
        std::fflush(stdout);
    }
    for (Gpu &gpu : gpus) gpu.give();
    return verdict(true);
}

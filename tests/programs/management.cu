// The management library beside the driver: both report the same about a device, its memory, and this process.
#include "check.h"
#include <cstring>
#include <dlfcn.h>
#include <unistd.h>
#include <vector>

typedef struct Opaque *Device;
struct Memory {
    unsigned long long total, free, used;
};
struct Process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

static void *library;
static bool good = true;

template <typename... Arguments> static int nvml(const char *name, Arguments... arguments) {
    auto entry = (int (*)(Arguments...))dlsym(library, name);
    return entry ? entry(arguments...) : -1;
}

static void expect(const char *what, bool holds) {
    std::printf("%-48s %s\n", what, holds ? "ok" : "WRONG");
    good &= holds;
}

// The bytes of this process in the list; 0 if it is not in it.
static unsigned long long own_bytes(Device device) {
    for (unsigned room = 16;; room *= 2) {
        std::vector<Process> list(room);
        unsigned count = room;
        int status = nvml("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, list.data());
        if (status == 7) continue; // does not fit
        if (status != 0) return 0;
        for (unsigned i = 0; i < count; i++)
            if (list[i].pid == (unsigned)getpid()) return list[i].bytes;
        return 0;
    }
}

// Holds so many MiB, and for each line of input prints its view: total, used, then each process and its bytes.
static int hold(size_t mebibytes) {
    void *memory = nullptr;
    CHECK(cudaMalloc(&memory, mebibytes << 20));
    Device device = nullptr;
    if (nvml("nvmlInit_v2") != 0 || nvml("nvmlDeviceGetHandleByIndex_v2", 0u, &device) != 0) return verdict(false);
    std::printf("ready\n");
    std::fflush(stdout);
    while (std::getchar() != EOF) {
        Memory info = {};
        Process list[64];
        unsigned count = 64;
        if (nvml("nvmlDeviceGetMemoryInfo", device, &info) != 0) return verdict(false);
        if (nvml("nvmlDeviceGetComputeRunningProcesses_v3", device, &count, list) != 0) return verdict(false);
        std::printf("%llu %llu", info.total, info.used);
        for (unsigned i = 0; i < count; i++) std::printf(" %u %llu", list[i].pid, list[i].bytes);
        std::printf("\n");
        std::fflush(stdout);
    }
    return verdict(true);
}

int main(int count_of_arguments, char **arguments) {
    const size_t HELD = 8 << 20;
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        std::printf("%s\nFAIL\n", dlerror());
        return 1;
    }
    if (count_of_arguments > 1) return hold(std::strtoul(arguments[1], nullptr, 10));
    unsigned count = 0;
    expect("nothing before the start", nvml("nvmlDeviceGetCount_v2", &count) == 1);
    expect("starts", nvml("nvmlInit_v2") == 0 && nvml("nvmlInitWithFlags", 0u) == 0);
    expect("a text for every code", !std::strcmp(((const char *(*)(int))dlsym(library, "nvmlErrorString"))(3), "Not Supported"));
    int devices = 0;
    CHECK(cudaGetDeviceCount(&devices));
    expect("devices", nvml("nvmlDeviceGetCount_v2", &count) == 0 && (int)count >= devices);

    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    char uuid[96] = "GPU-", name[96], bus[32];
    for (int i = 0; i < 16; i++)
        std::sprintf(uuid + std::strlen(uuid), i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
                     (unsigned char)properties.uuid.bytes[i]);
    Device device = nullptr, same = nullptr;
    expect("a device by UUID", nvml("nvmlDeviceGetHandleByUUID", (const char *)uuid, &device) == 0);
    expect("its name", nvml("nvmlDeviceGetName", device, name, 96u) == 0 && !std::strcmp(name, properties.name));
    CHECK(cudaDeviceGetPCIBusId(bus, sizeof bus, 0));
    expect("the same by bus id", nvml("nvmlDeviceGetHandleByPciBusId_v2", (const char *)bus, &same) == 0 && same == device);
    int major = 0, minor = 0;
    expect("its capability", nvml("nvmlDeviceGetCudaComputeCapability", device, &major, &minor) == 0 &&
                                 major == properties.major && minor == properties.minor);

    void *memory = nullptr;
    CHECK(cudaMalloc(&memory, HELD));
    // The vendor's own library also counts memory that no program can get; and others may use the device between two calls.
    const bool vendor = dlsym(library, "nvmlInternalGetExportTable") != nullptr;
    bool agrees = vendor;
    for (int tries = 0; tries < 1000 && !agrees; tries++) {
        size_t free = 0, total = 0, later = 0;
        Memory info = {};
        CHECK(cudaMemGetInfo(&free, &total));
        if (nvml("nvmlDeviceGetMemoryInfo", device, &info) != 0) break;
        CHECK(cudaMemGetInfo(&later, &total));
        agrees = free == later && info.total == total && info.free == free && info.used == total - free;
    }
    expect("its memory, to the byte", agrees);
    expect("this process is listed", own_bytes(device) >= HELD);
    CHECK(cudaFree(memory));
    unsigned unknown = 0;
    expect("a missing feature is refused", vendor || nvml("nvmlDeviceGetTemperature", device, 0, &unknown) == 3);
    expect("ends as often as it started", nvml("nvmlShutdown") == 0 && nvml("nvmlShutdown") == 0 && nvml("nvmlShutdown") == 1);
    return verdict(good);
}

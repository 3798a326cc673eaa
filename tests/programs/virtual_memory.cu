// The virtual-memory API: physical memory, reserved addresses, mappings that grow, access, handles that outlive their
// release, memory passed on as a file descriptor, and reservations of more addresses than any device has memory. With an argument it
// waits for a signal SIGUSR1 before the first reservation, and while it has the last ones.
#include "check.h"
#include <cuda.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#include <vector>

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-52s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

__global__ void store(unsigned *to, unsigned count) {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) to[i] = i * 7;
}

static void *library;
static void *entry(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        printf("%s is missing\nFAIL\n", name);
        exit(1);
    }
    return found;
}
#define ENTRY(name) auto p_##name = (decltype(&name))entry(#name)
#define DRIVER(call)                                                          \
    do {                                                                      \
        CUresult driver_result = (call);                                      \
        if (driver_result != CUDA_SUCCESS) {                                  \
            printf("%s: %d\nFAIL\n", #call, (int)driver_result);              \
            exit(1);                                                          \
        }                                                                     \
    } while (0)

// The resident memory of this process.
static long resident_kibibytes() {
    long kibibytes = 0;
    char line[256];
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(line, sizeof line, file)) sscanf(line, "VmRSS: %ld", &kibibytes);
    if (file) fclose(file);
    return kibibytes;
}

int main(int argc, char **) {
    const bool waits = argc > 1;
    sigset_t wake;
    sigemptyset(&wake);
    sigaddset(&wake, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &wake, nullptr);
    auto wait_after = [&](const char *line) {
        int number;
        printf("%s\n", line);
        fflush(stdout);
        sigwait(&wake, &number);
    };
    CHECK(cudaFree(0));
    library = dlopen("libcuda.so.1", RTLD_NOW);
    ENTRY(cuMemGetAllocationGranularity);
    ENTRY(cuMemCreate);
    ENTRY(cuMemRelease);
    ENTRY(cuMemAddressReserve);
    ENTRY(cuMemAddressFree);
    ENTRY(cuMemMap);
    ENTRY(cuMemUnmap);
    ENTRY(cuMemSetAccess);
    ENTRY(cuMemGetAccess);
    ENTRY(cuMemRetainAllocationHandle);
    ENTRY(cuMemGetAllocationPropertiesFromHandle);
    ENTRY(cuMemExportToShareableHandle);
    ENTRY(cuMemImportFromShareableHandle);

    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    size_t unit = 0;
    DRIVER(p_cuMemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    expect("the granularity is a power of two", unit > 0 && (unit & (unit - 1)) == 0);

    // Code takes memory at its first use: before the measurements.
    store<<<1, 1>>>(nullptr, 0);
    CHECK(cudaDeviceSynchronize());
    size_t free_before, free_now, total;
    CHECK(cudaMemGetInfo(&free_before, &total));
    const size_t part = 4 * unit, whole = 16 * unit;
    if (waits) wait_after("begun");
    CUdeviceptr base;
    DRIVER(p_cuMemAddressReserve(&base, 64 * whole, 0, 0, 0));
    CHECK(cudaMemGetInfo(&free_now, &total));
    expect("addresses cost nothing", free_now == free_before);

    CUmemAccessDesc access = {};
    access.location = prop.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    std::vector<CUmemGenericAllocationHandle> handles;
    for (size_t at = 0; at < whole; at += part) {
        CUmemGenericAllocationHandle handle;
        DRIVER(p_cuMemCreate(&handle, part, &prop, 0));
        DRIVER(p_cuMemMap(base + at, part, 0, handle, 0));
        handles.push_back(handle);
    }
    CHECK(cudaMemGetInfo(&free_now, &total));
    // A driver keeps some memory for itself, such as page tables; the software GPU does not.
    expect("memory costs its size", undefined_too() ? free_before - free_now == whole : free_before >= free_now + whole);
    unsigned long long flags = 9;
    DRIVER(p_cuMemGetAccess(&flags, &prop.location, base));
    expect("no device has access at first", flags == CU_MEM_ACCESS_FLAGS_PROT_NONE);
    DRIVER(p_cuMemSetAccess(base, whole, &access, 1));
    DRIVER(p_cuMemGetAccess(&flags, &prop.location, base + part));
    expect("then there is access", flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);

    const unsigned count = whole / sizeof(unsigned);
    store<<<64, 256>>>((unsigned *)base, count);
    std::vector<unsigned> back(count);
    CHECK(cudaMemcpy(back.data(), (void *)base, whole, cudaMemcpyDeviceToHost));
    bool good = true;
    for (unsigned i = 0; i < count; i++) good = good && back[i] == i * 7;
    expect("kernels and copies cross from part to part", good);

    CUmemGenericAllocationHandle again;
    DRIVER(p_cuMemRetainAllocationHandle(&again, (void *)(base + part + 5)));
    expect("an address leads to its handle", again == handles[1]);
    CUmemAllocationProp told = {};
    DRIVER(p_cuMemGetAllocationPropertiesFromHandle(&told, again));
    expect("the handle has its properties", told.type == prop.type && told.location.id == 0 &&
                                        told.requestedHandleTypes == prop.requestedHandleTypes);
    DRIVER(p_cuMemRelease(again));

    int descriptor = -1;
    DRIVER(p_cuMemExportToShareableHandle(&descriptor, handles[2], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    CUmemGenericAllocationHandle imported;
    DRIVER(p_cuMemImportFromShareableHandle(&imported, (void *)(uintptr_t)descriptor,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    DRIVER(p_cuMemMap(base + whole, part, 0, imported, 0));
    DRIVER(p_cuMemSetAccess(base + whole, part, &access, 1));
    CHECK(cudaMemset((void *)(base + whole), 0x5a, 100));
    unsigned char seen = 0;
    CHECK(cudaMemcpy(&seen, (void *)(base + 2 * part + 99), 1, cudaMemcpyDeviceToHost));
    expect("an import is the same memory", seen == 0x5a);
    DRIVER(p_cuMemUnmap(base + whole, part));
    DRIVER(p_cuMemRelease(imported));

    expect("an offset", p_cuMemMap(base + whole, part - unit, unit, handles[0], 0) != CUDA_SUCCESS);
    if (undefined_too()) expect("more than there is", p_cuMemMap(base + whole, part + unit, 0, handles[0], 0) == CUDA_ERROR_INVALID_VALUE);
    expect("over something else", p_cuMemMap(base, part, 0, handles[0], 0) != CUDA_SUCCESS);
    expect("half a mapping", p_cuMemUnmap(base, part / 2) == CUDA_ERROR_INVALID_VALUE);
    expect("addresses in use", p_cuMemAddressFree(base, 64 * whole) != CUDA_SUCCESS);
    expect("half a page", p_cuMemCreate(&again, unit / 2, &prop, 0) == CUDA_ERROR_INVALID_VALUE);

    for (CUmemGenericAllocationHandle handle : handles) DRIVER(p_cuMemRelease(handle));
    CHECK(cudaMemGetInfo(&free_now, &total));
    expect("mapped memory is not free", undefined_too() ? free_before - free_now == whole : free_before >= free_now + whole);
    CHECK(cudaMemcpy(back.data(), (void *)base, 64, cudaMemcpyDeviceToHost));
    expect("and keeps its contents", back[3] == 21);
    if (undefined_too()) expect("a handle that is released", p_cuMemMap(base + whole, part, 0, handles[0], 0) == CUDA_ERROR_INVALID_VALUE);
    DRIVER(p_cuMemUnmap(base, whole));
    CHECK(cudaMemGetInfo(&free_now, &total));
    expect("in the end all is free", undefined_too() ? free_before == free_now : free_before < free_now + whole);
    DRIVER(p_cuMemAddressFree(base, 64 * whole));

    // As PyTorch's expandable segments: for each stream nine eighths of the memory of the largest device, and small parts of it in use.
    const size_t wide = (size_t)192 << 30, segment = wide + wide / 8, small = unit, large = 10 * unit;
    const int segments = 8;
    CUdeviceptr segment_at[segments];
    long resident = resident_kibibytes();
    for (CUdeviceptr &start : segment_at) DRIVER(p_cuMemAddressReserve(&start, segment, 0, 0, 0));
    good = true;
    for (int i = 0; i < segments; i++)
        for (int j = 0; j < i; j++)
            good = good && (segment_at[i] + segment <= segment_at[j] || segment_at[j] + segment <= segment_at[i]);
    expect("wide reservations lie apart", good);
    good = true;
    for (CUdeviceptr start : segment_at) {
        size_t at[3] = {0, segment / 2 / unit * unit, segment - large}, bytes[3] = {small, large, large};
        for (int i = 0; i < 3; i++) {
            CUmemGenericAllocationHandle handle;
            DRIVER(p_cuMemCreate(&handle, bytes[i], &prop, 0));
            DRIVER(p_cuMemMap(start + at[i], bytes[i], 0, handle, 0));
            DRIVER(p_cuMemSetAccess(start + at[i], bytes[i], &access, 1));
            unsigned words = bytes[i] / sizeof(unsigned), last = 0;
            store<<<64, 256>>>((unsigned *)(start + at[i]), words);
            CHECK(cudaMemcpy(&last, (void *)(start + at[i] + bytes[i] - sizeof last), sizeof last, cudaMemcpyDeviceToHost));
            good = good && last == (words - 1) * 7;
            DRIVER(p_cuMemUnmap(start + at[i], bytes[i]));
            DRIVER(p_cuMemRelease(handle));
        }
    }
    expect("parts of them come and go", good);
    if (waits) wait_after("reserved");
    expect("they take addresses only", resident_kibibytes() - resident < 64 << 10);
    CUdeviceptr none;
    expect("more than all addresses", p_cuMemAddressReserve(&none, (size_t)1 << 56, 0, 0, 0) != CUDA_SUCCESS);
    for (CUdeviceptr start : segment_at) DRIVER(p_cuMemAddressFree(start, segment));
    CHECK(cudaMemGetInfo(&free_now, &total));
    expect("and in the end all is free", undefined_too() ? free_before == free_now : free_before < free_now + whole);
    return verdict(wrong == 0);
}

// The driver interface, looked up by name, so that a program can try every call, also those that the driver lacks.
#pragma once

#include "../check.h"
#include <cuda.h>
#include <dlfcn.h>

#define TEXT_OF(name) #name
#define NAME(name) TEXT_OF(name)

// The result of a call that the driver does not export.
static const CUresult ABSENT = CUDA_ERROR_NOT_FOUND;

inline void *driver_library(int flags = 0) {
    static void *library = dlopen("libcuda.so.1", RTLD_NOW | flags);
    if (!library) {
        std::printf("dlopen: %s\nFAIL\n", dlerror());
        std::exit(1);
    }
    return library;
}

template <typename Function, typename... Arguments> CUresult call_by_name(const char *name, Arguments... arguments) {
    auto function = (Function)dlsym(driver_library(), name);
    return function ? function(arguments...) : ABSENT;
}

// Calls by exported name; cuda.h's macros turn the plain names into the versioned ones.
#define CU(name, ...) call_by_name<decltype(&name)>(NAME(name), ##__VA_ARGS__)

// A call that must succeed.
#define MUST(name, ...)                                                        \
    do {                                                                       \
        CUresult must_result = CU(name, ##__VA_ARGS__);                        \
        if (must_result != CUDA_SUCCESS) {                                     \
            std::printf("%s: %d\nFAIL\n", NAME(name), (int)must_result);       \
            std::exit(1);                                                      \
        }                                                                      \
    } while (0)

// Makes the primary context of the first device current in this thread.
inline CUdevice use_device() {
    CUdevice device;
    CUcontext context;
    MUST(cuInit, 0);
    MUST(cuDeviceGet, &device, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, device);
    MUST(cuCtxSetCurrent, context);
    return device;
}

// Device memory of the virtual-memory API, mapped for reading and writing.
struct Mapped {
    CUdeviceptr address = 0;
    size_t bytes = 0;
    CUmemGenericAllocationHandle handle = 0;
};

inline CUmemAllocationProp on_device(CUdevice device) {
    CUmemAllocationProp properties = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = device;
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return properties;
}

inline CUresult map(CUdevice device, Mapped &mapped) {
    CUresult result = CU(cuMemAddressReserve, &mapped.address, mapped.bytes, (size_t)0, (CUdeviceptr)0, 0ull);
    if (result != CUDA_SUCCESS) return result;
    result = CU(cuMemMap, mapped.address, mapped.bytes, (size_t)0, mapped.handle, 0ull);
    if (result == CUDA_SUCCESS) {
        CUmemAccessDesc access = {};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = device;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        result = CU(cuMemSetAccess, mapped.address, mapped.bytes, &access, (size_t)1);
        if (result == CUDA_SUCCESS) return result;
        CU(cuMemUnmap, mapped.address, mapped.bytes);
    }
    CU(cuMemAddressFree, mapped.address, mapped.bytes);
    mapped.address = 0;
    return result;
}

inline CUresult create_mapped(CUdevice device, size_t bytes, Mapped &mapped) {
    CUmemAllocationProp properties = on_device(device);
    mapped.bytes = bytes;
    CUresult result = CU(cuMemCreate, &mapped.handle, bytes, &properties, 0ull);
    if (result != CUDA_SUCCESS) return result;
    result = map(device, mapped);
    if (result != CUDA_SUCCESS) CU(cuMemRelease, mapped.handle);
    return result;
}

inline void destroy_mapped(Mapped &mapped) {
    MUST(cuMemUnmap, mapped.address, mapped.bytes);
    MUST(cuMemRelease, mapped.handle);
    MUST(cuMemAddressFree, mapped.address, mapped.bytes);
}

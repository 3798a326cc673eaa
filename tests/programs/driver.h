// The functions of the driver, looked up by the names that the driver exports: cuda.h's macros turn the plain names into the versioned
// ones.
#pragma once

#include "check.h"
#include <cuda.h>
#include <dlfcn.h>

#define TEXT_OF(name) #name
#define NAME(name) TEXT_OF(name)

// A function of the driver, or null.
inline void *find(const char *name) {
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) {
        std::printf("dlopen: %s\nFAIL\n", dlerror());
        std::exit(1);
    }
    return dlsym(driver, name);
}

inline void *entry(const char *name) {
    void *found = find(name);
    if (!found) {
        std::printf("%s is no symbol of the driver\nFAIL\n", name);
        std::exit(1);
    }
    return found;
}

#define CALL(name, ...) (((decltype(&name))entry(NAME(name)))(__VA_ARGS__))

// The version of CUDA that the driver is made for, as 13010 for 13.1: functions of later ones are missing.
inline int driver_version() {
    int version = 0;
    CALL(cuDriverGetVersion, &version);
    return version;
}

inline void must(const char *what, CUresult code) {
    if (code == CUDA_SUCCESS) return;
    std::printf("%s: %d\nFAIL\n", what, (int)code);
    std::exit(1);
}

// A call that must succeed.
#define MUST(name, ...) must(#name, CALL(name, __VA_ARGS__))

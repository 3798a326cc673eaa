// Stands between a runtime and the driver and shows the runtime one property differently from the driver's report. The driver
// itself is unaffected, so its answer at start does not fit the runtime's view, and the runtime must refuse to work: this proves
// that an accepted answer is the right one. Properties known only to the caller (the runtime's version, its clock) cannot be
// changed from here; a unit test of the answer covers them.
//
// Usage: LD_PRELOAD=./skew.so SKEW=nothing|driver|process|thread|interface|table|entry|uuid|domain|bus|device|order program
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef int Status;

static const unsigned char INTERFACE[16] = {0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a,
                                            0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9};
static const unsigned char HANDSHAKE[16] = {0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b,
                                            0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2};

static Status (*get_procedure)(const char *, void **, int, uint64_t, int *);
static Status (*get_version)(int *);
static Status (*get_table)(const void **, const void *);
static Status (*get_uuid)(unsigned char *, int);
static Status (*get_attribute)(int *, int, int);
static Status (*answer)(uint32_t, uint64_t, uint64_t *);

static int skewed(const char *what) {
    const char *wanted = getenv("SKEW");
    return wanted && !strcmp(wanted, what);
}

static void *next(const char *name) { return dlvsym(RTLD_NEXT, name, "GLIBC_2.2.5"); }

// True if a call comes from the program, which contains a static runtime, and not from a library.
static int from_program(void *caller) {
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && !strstr(info.dli_fname, ".so");
}

pid_t getpid(void) {
    static pid_t (*real)(void);
    if (!real) real = next("getpid");
    return real() + (skewed("process") && from_program(__builtin_return_address(0)));
}

pthread_t pthread_self(void) {
    static pthread_t (*real)(void);
    if (!real) real = next("pthread_self");
    return real() + (skewed("thread") && from_program(__builtin_return_address(0)));
}

static Status skewed_version(int *version) {
    Status status = get_version(version);
    if (!status) *version += 10;
    return status;
}

static int other(int device) { return skewed("order") ? device ^ 1 : device; }

static Status skewed_uuid(unsigned char *uuid, int device) {
    Status status = get_uuid(uuid, other(device));
    if (!status && skewed("uuid")) uuid[5] ^= 1;
    return status;
}

static Status skewed_attribute(int *value, int attribute, int device) {
    int is_address = attribute == 50 || attribute == 33 || attribute == 34;
    Status status = get_attribute(value, attribute, is_address ? other(device) : device);
    int changed = (attribute == 50 && skewed("domain")) || (attribute == 33 && skewed("bus")) ||
                  (attribute == 34 && skewed("device"));
    if (!status && changed) *value += 1;
    return status;
}

static Status forwarded_answer(uint32_t version, uint64_t seconds, uint64_t *words) {
    return answer(version, seconds, words);
}

static const void *copied(const void *table) {
    uint64_t size = *(const uint64_t *)table;
    void *copy = malloc(size);
    return copy ? memcpy(copy, table, size) : table;
}

static Status skewed_table(const void **table, const void *uuid) {
    Status status = get_table(table, uuid);
    if (status) return status;
    if (!memcmp(uuid, INTERFACE, 16) && skewed("interface")) *table = copied(*table);
    if (!memcmp(uuid, HANDSHAKE, 16) && skewed("table")) *table = copied(*table);
    if (!memcmp(uuid, HANDSHAKE, 16) && skewed("entry") && !answer) {
        void **slot = (void **)*table + 1;
        uintptr_t page = (uintptr_t)slot & ~(uintptr_t)4095;
        memcpy(&answer, slot, sizeof answer);
        if (mprotect((void *)page, 4096, PROT_READ | PROT_WRITE)) return 999;
        *slot = (void *)forwarded_answer;
    }
    return status;
}

static Status skewed_procedure(const char *, void **, int, uint64_t, int *);

static void *replaced(const char *name, void *real) {
#define REPLACE(wanted, kept, ours)       \
    if (!strcmp(name, wanted)) {          \
        memcpy(&kept, &real, sizeof real); \
        return (void *)ours;              \
    }
    if (!real) return real;
    REPLACE("cuGetProcAddress_v2", get_procedure, skewed_procedure)
    REPLACE("cuGetExportTable", get_table, skewed_table)
    REPLACE("cuDeviceGetUuid", get_uuid, skewed_uuid)
    REPLACE("cuDeviceGetAttribute", get_attribute, skewed_attribute)
    if (skewed("driver")) REPLACE("cuDriverGetVersion", get_version, skewed_version)
    return real;
}

static Status skewed_procedure(const char *name, void **procedure, int version, uint64_t flags, int *found) {
    Status status = get_procedure(name, procedure, version, flags, found);
    if (status || !procedure) return status;
    // Runtimes look up the look-up function itself, too; its older form has another signature and is left unchanged.
    if (!strcmp(name, "cuGetProcAddress")) {
        if (version >= 12000 && *procedure) *procedure = (void *)skewed_procedure;
    } else {
        *procedure = replaced(name, *procedure);
    }
    return status;
}

void *dlsym(void *library, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = next("dlsym");
    void *symbol = real(library, name);
    return strncmp(name, "cu", 2) ? symbol : replaced(name, symbol);
}

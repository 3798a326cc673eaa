// Memory of a pool that another process imports: the program runs itself a second time with the pool's descriptor.
#include "driver.h"
#include <csignal>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

static bool passed = true;

static void expect(const char *what, bool good) {
    printf("%-52s %s\n", what, good ? "ok" : "WRONG");
    passed &= good;
}

static const size_t BYTES[2] = {4096, 6 << 20};
static const CUmemAllocationHandleType FILE_TYPE = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

static CUmemoryPool pool_of(CUmemAllocationHandleType type) {
    CUmemPoolProps properties = {};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.handleTypes = type;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    CUmemoryPool pool = nullptr;
    MUST(cuMemPoolCreate, &pool, &properties);
    return pool;
}

static CUstream begin() {
    CUcontext context;
    CUstream stream;
    MUST(cuInit, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, 0);
    MUST(cuCtxSetCurrent, context);
    MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    return stream;
}

// The other process. Its exit status is the number of its last step.
static int other(int descriptor, int input) {
    CUmemPoolPtrExportData data[2];
    if (read(input, data, sizeof data) != sizeof data) return 2;
    CUstream stream = begin();
    CUmemoryPool pool, wrong = pool_of(FILE_TYPE);
    MUST(cuMemPoolImportFromShareableHandle, &pool, (void *)(uintptr_t)descriptor, FILE_TYPE, 0);
    CUdeviceptr memory[2], none;
    if (undefined_too()) {
        if (CALL(cuMemAllocFromPoolAsync, &none, 64, pool, stream) != CUDA_ERROR_INVALID_VALUE) return 3;
        if (CALL(cuDeviceSetMemPool, 0, pool) != CUDA_ERROR_INVALID_VALUE) return 4;
        if (CALL(cuMemPoolImportPointer, &none, wrong, &data[0]) != CUDA_ERROR_INVALID_VALUE) return 5;
        CUmemPoolPtrExportData forged = data[0];
        forged.reserved[0] ^= 1;
        if (CALL(cuMemPoolImportPointer, &none, pool, &forged) != CUDA_ERROR_INVALID_VALUE) return 6;
        memset(&forged, 0, sizeof forged);
        if (CALL(cuMemPoolImportPointer, &none, pool, &forged) != CUDA_ERROR_INVALID_VALUE) return 7;
    }
    for (int which = 0; which < 2; which++) {
        MUST(cuMemPoolImportPointer, &memory[which], pool, &data[which]);
        unsigned char last = 0;
        MUST(cuMemcpyDtoHAsync, &last, memory[which] + BYTES[which] - 1, 1, stream);
        MUST(cuStreamSynchronize, stream);
        if (last != 7 + which) return 8;
        MUST(cuMemsetD8Async, memory[which], 100 + which, BYTES[which], stream);
        if (!undefined_too()) continue;
        if (CALL(cuMemsetD8, memory[which] + BYTES[which] - 1, 0, 1 << 30) != CUDA_ERROR_INVALID_VALUE) return 9;
        if (CALL(cuIpcCloseMemHandle, memory[which]) != CUDA_ERROR_INVALID_VALUE) return 10;
    }
    MUST(cuStreamSynchronize, stream);
    CUmemPoolPtrExportData again;
    if (undefined_too() && CALL(cuMemPoolExportPointer, &again, memory[0]) != CUDA_ERROR_INVALID_VALUE) return 11;
    MUST(cuMemFree, memory[0]);
    MUST(cuMemFreeAsync, memory[1], stream);
    MUST(cuStreamSynchronize, stream);
    if (!undefined_too()) return 0;
    if (CALL(cuMemFree, memory[0]) == CUDA_SUCCESS || CALL(cuMemFree, memory[1]) == CUDA_SUCCESS) return 12;
    MUST(cuMemPoolTrimTo, pool, 0);
    MUST(cuMemPoolDestroy, pool);
    MUST(cuMemPoolDestroy, wrong);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "other") == 0) return other(atoi(argv[2]), atoi(argv[3]));
    signal(SIGPIPE, SIG_IGN);
    CUstream stream = begin();
    int supported;
    MUST(cuDeviceGetAttribute, &supported, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 0);
    if (!(supported & FILE_TYPE)) {
        printf("pools are not shared\n");
        return verdict(true);
    }
    CUmemoryPool pool = pool_of(FILE_TYPE), plain = pool_of(CU_MEM_HANDLE_TYPE_NONE);
    int descriptor = -1, types = 0;
    MUST(cuMemPoolExportToShareableHandle, &descriptor, pool, FILE_TYPE, 0);
    expect("a plain pool has no descriptor",
           CALL(cuMemPoolExportToShareableHandle, &types, plain, FILE_TYPE, 0) == CUDA_ERROR_INVALID_VALUE);
    CUdeviceptr memory[2], other_memory, single;
    CUmemPoolPtrExportData data[2], none;
    for (int which = 0; which < 2; which++) {
        MUST(cuMemAllocFromPoolAsync, &memory[which], BYTES[which], pool, stream);
        MUST(cuMemsetD8Async, memory[which], 7 + which, BYTES[which], stream);
        MUST(cuMemPoolExportPointer, &data[which], memory[which]);
    }
    MUST(cuMemAllocFromPoolAsync, &other_memory, 64, plain, stream);
    MUST(cuMemAlloc, &single, 64);
    MUST(cuStreamSynchronize, stream);
    expect("memory of a plain pool has no data", CALL(cuMemPoolExportPointer, &none, other_memory) == CUDA_ERROR_INVALID_VALUE);
    expect("single memory has no data", CALL(cuMemPoolExportPointer, &none, single) == CUDA_ERROR_INVALID_VALUE);
    expect("only a whole allocation has data", CALL(cuMemPoolExportPointer, &none, memory[0] + 512) == CUDA_ERROR_INVALID_VALUE);
    if (undefined_too()) {
        CUmemoryPool own;
        MUST(cuMemPoolImportFromShareableHandle, &own, (void *)(uintptr_t)descriptor, FILE_TYPE, 0);
        CUdeviceptr again;
        expect("a process does not open its own",
               CALL(cuMemPoolImportPointer, &again, own, &data[0]) == CUDA_ERROR_INVALID_CONTEXT);
        MUST(cuMemPoolDestroy, own);
    }
    int ends[2];
    if (pipe(ends) != 0) return 1;
    pid_t child = fork();
    if (child == 0) {
        close(ends[1]);
        char numbers[2][16];
        snprintf(numbers[0], 16, "%d", dup(descriptor)), snprintf(numbers[1], 16, "%d", ends[0]);
        execl("/proc/self/exe", argv[0], "other", numbers[0], numbers[1], (char *)nullptr);
        _exit(127);
    }
    close(ends[0]);
    if (write(ends[1], data, sizeof data) != sizeof data) return 1;
    int status = -1;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) printf("the other process ended with %x\n", status);
    expect("the other process opened and freed both", WIFEXITED(status) && WEXITSTATUS(status) == 0);
    for (int which = 0; which < 2; which++) {
        unsigned char first = 0, last = 0;
        MUST(cuMemcpyDtoHAsync, &first, memory[which], 1, stream);
        MUST(cuMemcpyDtoHAsync, &last, memory[which] + BYTES[which] - 1, 1, stream);
        MUST(cuStreamSynchronize, stream);
        expect("its writes are visible here", first == 100 + which && last == 100 + which);
        MUST(cuMemFreeAsync, memory[which], stream);
    }
    MUST(cuMemFreeAsync, other_memory, stream);
    MUST(cuMemFree, single);
    MUST(cuStreamSynchronize, stream);
    MUST(cuMemPoolDestroy, pool);
    MUST(cuMemPoolDestroy, plain);
    return verdict(passed);
}

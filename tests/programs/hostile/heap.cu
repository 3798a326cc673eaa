// Runs kernels that call malloc. Prints `held ERROR` for each load that should find no room for the heap, `free BYTES BYTES`
// around one that should, and PASS. After each step it prints `look`, and waits for a line or the end of standard input, so that a
// test can observe it from outside.
// Usage: heap WAY
//   WAY  module: loads modules while most memory is taken, and again after it is freed; library: the same with a kernel of
//        this program, which the runtime has in a library; refused: such a kernel while most memory is taken; limit: sets the
//        heap's size and loads a module at once
#include "driver.h"
#include <string>
#include <unistd.h>
#include <vector>

static const size_t MIB = 1 << 20;
static CUdevice device;
static std::vector<CUdeviceptr> pieces;

// A thread that gets memory from the heap, writes it and gives it back.
__global__ void use_heap(int bytes, int *got) {
    char *memory = (char *)malloc(bytes);
    if (memory)
        for (int i = 0; i < bytes; i += 4096) memory[i] = (char)i;
    *got = memory != nullptr;
    free(memory);
}

static std::string image() {
    return ".version 7.0\n.target sm_80\n.address_size 64\n"
           ".extern .func (.param .b64 memory) malloc (.param .b64 bytes);\n"
           ".visible .entry allocate(.param .u64 to, .param .u64 bytes)\n{\n"
           ".reg .b64 %rd<3>;\n.param .b64 in;\n.param .b64 out;\n"
           "ld.param.u64 %rd0, [to];\nld.param.u64 %rd1, [bytes];\n"
           "st.param.b64 [in], %rd1;\ncall.uni (out), malloc, (in);\nld.param.b64 %rd2, [out];\n"
           "st.global.u64 [%rd0], %rd2;\nret;\n}\n";
}

static CUresult load(CUmodule *module) { return CU(cuModuleLoadData, module, (const void *)image().c_str()); }

static void be_seen() {
    printf("look\n");
    fflush(stdout);
    getchar();
}

static size_t free_bytes() {
    size_t free = 0, total = 0;
    MUST(cuMemGetInfo, &free, &total);
    return free;
}

// Allocates all memory except for so many bytes.
static void fill(size_t but) {
    CUdeviceptr address;
    while (CU(cuMemAlloc, &address, 2 * MIB) == CUDA_SUCCESS) pieces.push_back(address);
    for (size_t given = 0; given < but && !pieces.empty(); given += 2 * MIB) {
        MUST(cuMemFree, pieces.back());
        pieces.pop_back();
    }
}

static void give_all() {
    for (CUdeviceptr piece : pieces) MUST(cuMemFree, piece);
    pieces.clear();
}

static bool allocates(CUmodule module, size_t bytes) {
    CUfunction function;
    MUST(cuModuleGetFunction, &function, module, (const char *)"allocate");
    CUdeviceptr to;
    MUST(cuMemAlloc, &to, (size_t)8);
    void *parameters[] = {&to, &bytes};
    MUST(cuLaunchKernel, function, 1u, 1u, 1u, 1u, 1u, 1u, 0u, (CUstream)0, parameters, (void **)nullptr);
    uint64_t got = 0;
    MUST(cuMemcpyDtoH, (void *)&got, to, sizeof got);
    MUST(cuMemFree, to);
    return got != 0;
}

static const size_t OWN_HEAP = 28 * MIB;

// The free memory that a load of any kind takes.
template <typename Load> bool taken_by(Load load) {
    size_t before = free_bytes();
    CUresult loaded = load();
    if (loaded != CUDA_SUCCESS) printf("load: %d\n", (int)loaded);
    printf("free %zu %zu\n", before, free_bytes());
    be_seen();
    return loaded == CUDA_SUCCESS;
}

static bool modules() {
    CUmodule first, second;
    // There is room for a small image, and not for the heap.
    fill(4 * MIB);
    printf("held %d\n", (int)load(&first));
    be_seen();
    give_all();
    if (!taken_by([&] { return load(&first); })) return false;
    // With all memory taken but for a small image, a kernel has the heap, and a second module needs no other.
    fill(4 * MIB);
    bool good = allocates(first, 4 * MIB);
    be_seen();
    MUST(cuModuleUnload, first);
    return good && load(&second) == CUDA_SUCCESS && allocates(second, 4 * MIB - 1000);
}

static bool use_library(int *got) {
    *got = 0;
    use_heap<<<1, 1>>>(4 * MIB, got);
    return cudaGetLastError() == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess && *got == 1;
}

static bool library(int *got) {
    bool good = taken_by([=] { return use_library(got) ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN; });
    fill(4 * MIB);
    return good && use_library(got);
}

static bool refused(int *got) {
    fill(4 * MIB);
    use_heap<<<1, 1>>>(4096, got);
    printf("held %d\n", (int)cudaGetLastError());
    return true;
}

static bool limit() {
    CUmodule module;
    bool good = taken_by([&] {
        CUresult set = CU(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, OWN_HEAP);
        return set == CUDA_SUCCESS ? load(&module) : set;
    });
    fill(4 * MIB);
    return good && allocates(module, OWN_HEAP - MIB);
}

int main(int argc, char **argv) {
    std::string way = argc > 1 ? argv[1] : "";
    device = use_device();
    int *got;
    CHECK(cudaMallocManaged(&got, sizeof *got));
    bool good = way == "module"    ? modules()
                : way == "library" ? library(got)
                : way == "refused" ? refused(got)
                : way == "limit"   ? limit()
                                   : false;
    // Long enough for the measurement to correct the grant.
    usleep(3000000);
    be_seen();
    return verdict(good);
}

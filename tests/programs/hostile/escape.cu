// Tries to get more device memory than the VM's quota, in every known way. Each way prints its steps, a line each:
//   step NAME ERROR BYTES     the result of the last call of the step, and the bytes that the step got until then
// and frees everything; `balance` tells if free memory is then the same as before. The test judges the output.
// After a step it waits for a line or the end of standard input, so that a test can observe it from outside.
// Usage: escape WAY QUOTA [COUNT]     COUNT: of single bytes
#include "driver.h"
#include <atomic>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

static const size_t MIB = 1 << 20;
static CUdevice device;
static size_t quota;
// Free memory before the first allocation of this program: the quota without the driver's share.
static size_t initial;
static int wrong = 0;

static void step(const char *name, CUresult result, size_t bytes) {
    printf("step %s %d %zu\n", name, (int)result, bytes);
    fflush(stdout);
    char byte;
    while (read(STDIN_FILENO, &byte, 1) < 0 && errno == EINTR) {}
}

static void expect(const char *what, bool good) {
    if (good) return;
    printf("wrong: %s\n", what);
    wrong++;
}

static size_t free_bytes() {
    size_t free = 0, total = 0;
    MUST(cuMemGetInfo, &free, &total);
    expect("the total is the quota", total == quota);
    expect("free is not more than the total", free <= total);
    return free;
}

// Allocates linear memory until the driver refuses.
struct Linear {
    std::vector<CUdeviceptr> all;
    size_t bytes = 0;
    CUresult take(size_t piece, size_t most = ~(size_t)0) {
        for (;;) {
            if (bytes + piece > most) return CUDA_SUCCESS;
            CUdeviceptr address;
            CUresult result = CU(cuMemAlloc, &address, piece);
            if (result != CUDA_SUCCESS) return result;
            all.push_back(address);
            bytes += piece;
        }
    }
    void give() {
        for (CUdeviceptr address : all) MUST(cuMemFree, address);
        all.clear();
        bytes = 0;
    }
};

// All of the remainder can be allocated, and nothing beyond it.
static void the_rest_is_exactly(const char *name) {
    Linear rest;
    size_t left = free_bytes();
    for (size_t piece : {32 * MIB, 2 * MIB}) rest.take(piece);
    step(name, rest.take(2 * MIB), rest.bytes);
    expect("all free memory could be allocated", rest.bytes >= left / (2 * MIB) * (2 * MIB));
    expect("a full quota has nothing free", free_bytes() < 2 * MIB);
    rest.give();
}

static void linear() {
    CUdeviceptr none;
    size_t pitch;
    step("all-address-space", CU(cuMemAlloc, &none, ~(size_t)0), 0);
    step("overflow-when-rounded", CU(cuMemAlloc, &none, ~(size_t)0 - 100), 0);
    step("half-of-the-address-space", CU(cuMemAlloc, &none, (size_t)1 << 63), 0);
    step("quota-and-one", CU(cuMemAlloc, &none, quota + 1), 0);
    step("pitch-overflow", CU(cuMemAllocPitch, &none, &pitch, (size_t)1 << 40, (size_t)1 << 40, 16u), 0);
    for (size_t piece : {512 * MIB, 32 * MIB, 2 * MIB}) {
        Linear all;
        CUresult result = all.take(piece);
        step(("pieces-of-" + std::to_string(piece / MIB)).c_str(), result, all.bytes);
        all.give();
    }
    the_rest_is_exactly("all");
}

static void pools() {
    std::vector<CUdeviceptr> all;
    size_t bytes = 0;
    CUdeviceptr address;
    CUresult result;
    while ((result = CU(cuMemAllocAsync, &address, 2 * MIB, (CUstream)0)) == CUDA_SUCCESS) all.push_back(address), bytes += 2 * MIB;
    step("default-pool", result, bytes);
    CUmemoryPool pool;
    CUmemPoolProps properties = {};
    properties.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    properties.location = on_device(device).location;
    // An account of its own would start empty, beside the first one.
    auto behind = [&](const char *name) {
        MUST(cuMemPoolCreate, &pool, (const CUmemPoolProps *)&properties);
        size_t own = 0;
        std::vector<CUdeviceptr> more;
        while ((result = CU(cuMemAllocFromPoolAsync, &address, 2 * MIB, pool, (CUstream)0)) == CUDA_SUCCESS) more.push_back(address), own += 2 * MIB;
        step(name, result, bytes + own);
        for (CUdeviceptr each : more) MUST(cuMemFreeAsync, each, (CUstream)0);
        MUST(cuMemPoolDestroy, pool);
    };
    behind("pool-for-other-processes-behind-default-pool");
    properties.handleTypes = CU_MEM_HANDLE_TYPE_NONE;
    behind("own-pool-behind-default-pool");
    for (CUdeviceptr each : all) MUST(cuMemFreeAsync, each, (CUstream)0);
    MUST(cuStreamSynchronize, (CUstream)0);
    // Memory that a pool keeps for later is still in use, until another allocation needs it.
    the_rest_is_exactly("linear-behind-pool");
}

static void graphs() {
    CUgraph graph;
    CUgraphExec executable;
    CUresult result = CUDA_SUCCESS;
    size_t bytes = 0;
    struct Made {
        CUgraph graph;
        CUgraphExec executable;
        CUdeviceptr address;
    };
    std::vector<Made> all;
    for (int i = 0; i < 1000; i++) {
        CUgraphNode node;
        CUDA_MEM_ALLOC_NODE_PARAMS parameters = {};
        parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        parameters.poolProps.location = on_device(device).location;
        parameters.bytesize = 2 * MIB;
        MUST(cuGraphCreate, &graph, 0u);
        result = CU(cuGraphAddMemAllocNode, &node, graph, (const CUgraphNode *)nullptr, (size_t)0, &parameters);
        if (result == CUDA_SUCCESS) result = CU(cuGraphInstantiate, &executable, graph, 0ull);
        if (result == CUDA_SUCCESS) result = CU(cuGraphLaunch, executable, (CUstream)0);
        if (result != CUDA_SUCCESS) break;
        bytes += 2 * MIB;
        all.push_back({graph, executable, parameters.dptr});
    }
    step("memory-node", result, bytes);
    step("instantiate", CU(cuGraphInstantiate, &executable, graph, 0ull), 0);
    MUST(cuGraphExecDestroy, executable);
    MUST(cuGraphDestroy, graph);
    for (Made &each : all) {
        // Memory of a graph that is gone stays until it is freed.
        MUST(cuGraphExecDestroy, each.executable);
        MUST(cuGraphDestroy, each.graph);
        MUST(cuMemFree, each.address);
    }
}

static void vmm() {
    CUmemAllocationProp properties = on_device(device);
    CUmemGenericAllocationHandle handle;
    step("overflow", CU(cuMemCreate, &handle, (size_t)1 << 63, &properties, 0ull), 0);
    step("quota-and-more", CU(cuMemCreate, &handle, quota + 2 * MIB, &properties, 0ull), 0);
    // Never mapped.
    std::vector<CUmemGenericAllocationHandle> handles;
    CUresult result;
    while ((result = CU(cuMemCreate, &handle, 2 * MIB, &properties, 0ull)) == CUDA_SUCCESS) handles.push_back(handle);
    step("unmapped-handles", result, handles.size() * 2 * MIB);
    for (CUmemGenericAllocationHandle each : handles) MUST(cuMemRelease, each);
    // Released while mapped: the memory stays, and so must the charge.
    std::vector<Mapped> all;
    for (;;) {
        Mapped mapped;
        result = create_mapped(device, 2 * MIB, mapped);
        if (result != CUDA_SUCCESS) break;
        MUST(cuMemRelease, mapped.handle);
        all.push_back(mapped);
    }
    step("released-but-mapped", result, all.size() * 2 * MIB);
    for (Mapped &mapped : all) MUST(cuMemsetD8, mapped.address, (unsigned char)7, mapped.bytes);
    MUST(cuCtxSynchronize);
    for (Mapped &mapped : all) {
        MUST(cuMemUnmap, mapped.address, mapped.bytes);
        MUST(cuMemAddressFree, mapped.address, mapped.bytes);
    }
    // Memory that is mapped twice counts once.
    Mapped once, twice;
    result = create_mapped(device, 2 * MIB, once);
    if (result == CUDA_SUCCESS) {
        size_t before = free_bytes();
        twice = once;
        result = map(device, twice);
        step("mapped-twice", result, before - free_bytes());
        if (result == CUDA_SUCCESS) {
            MUST(cuMemUnmap, twice.address, twice.bytes);
            MUST(cuMemAddressFree, twice.address, twice.bytes);
        }
        // Imports of its own exports.
        int file = -1;
        result = CU(cuMemExportToShareableHandle, (void *)&file, once.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
        step("export", result, 0);
        if (result == CUDA_SUCCESS) {
            size_t free_before = free_bytes();
            std::vector<CUmemGenericAllocationHandle> imports;
            for (int i = 0; i < 100 && result == CUDA_SUCCESS; i++) {
                result = CU(cuMemImportFromShareableHandle, &handle, (void *)(intptr_t)file, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
                if (result == CUDA_SUCCESS) imports.push_back(handle);
            }
            step("own-imports", result, free_before - free_bytes());
            for (CUmemGenericAllocationHandle each : imports) MUST(cuMemRelease, each);
            close(file);
        }
        destroy_mapped(once);
    }
    // Host memory, requested through the device's interface.
    properties.location.type = CU_MEM_LOCATION_TYPE_HOST;
    properties.location.id = 0;
    result = CU(cuMemCreate, &handle, 2 * MIB, &properties, 0ull);
    step("on-the-host", result, 0);
    if (result == CUDA_SUCCESS) MUST(cuMemRelease, handle);
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = 7;
    step("on-another-device", CU(cuMemCreate, &handle, 2 * MIB, &properties, 0ull), 0);
    the_rest_is_exactly("all");
}

static void arrays() {
    CUDA_ARRAY_DESCRIPTOR shape = {1024, 512, CU_AD_FORMAT_UNSIGNED_INT32, 1};
    CUDA_ARRAY3D_DESCRIPTOR deep = {128, 64, 64, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0};
    CUDA_ARRAY3D_DESCRIPTOR huge = {16384, 16384, 16384, CU_AD_FORMAT_UNSIGNED_INT32, 4, 0};
    CUDA_ARRAY3D_DESCRIPTOR beyond = {~(size_t)0, ~(size_t)0, ~(size_t)0, CU_AD_FORMAT_UNSIGNED_INT32, 4, 0};
    CUarray array;
    CUmipmappedArray mipmap;
    size_t bytes = 0;
    CUresult result;
    std::vector<CUarray> all;
    auto give = [&] {
        for (CUarray each : all) MUST(cuArrayDestroy, each);
        all.clear();
        bytes = 0;
    };
    step("larger-than-any-device", CU(cuArray3DCreate, &array, (const CUDA_ARRAY3D_DESCRIPTOR *)&huge), 0);
    step("extents-that-overflow", CU(cuArray3DCreate, &array, (const CUDA_ARRAY3D_DESCRIPTOR *)&beyond), 0);
    while (bytes < 8 * quota && (result = CU(cuArrayCreate, &array, (const CUDA_ARRAY_DESCRIPTOR *)&shape)) == CUDA_SUCCESS) all.push_back(array), bytes += 2 * MIB;
    step("arrays", result, bytes);
    give();
    while (bytes < 8 * quota && (result = CU(cuArray3DCreate, &array, (const CUDA_ARRAY3D_DESCRIPTOR *)&deep)) == CUDA_SUCCESS) all.push_back(array), bytes += 2 * MIB;
    step("arrays-of-three-dimensions", result, bytes);
    give();
    std::vector<CUmipmappedArray> mipmaps;
    while (bytes < 8 * quota && (result = CU(cuMipmappedArrayCreate, &mipmap, (const CUDA_ARRAY3D_DESCRIPTOR *)&deep, 3u)) == CUDA_SUCCESS)
        mipmaps.push_back(mipmap), bytes += 2 * MIB;
    step("mipmaps", result, bytes);
    for (CUmipmappedArray each : mipmaps) MUST(cuMipmappedArrayDestroy, each);
}

// Allocates managed memory until none is left: in large pieces, then in the smallest that are charged.
static CUresult all_managed(std::vector<CUdeviceptr> &all, size_t &bytes) {
    CUresult result = CUDA_SUCCESS;
    CUdeviceptr address;
    for (size_t piece : {8 * MIB, 2 * MIB})
        while (bytes < 2 * quota && (result = CU(cuMemAllocManaged, &address, piece, (unsigned)CU_MEM_ATTACH_GLOBAL)) == CUDA_SUCCESS) {
            MUST(cuMemsetD8, address, (unsigned char)1, piece);
            all.push_back(address);
            bytes += piece;
        }
    return result;
}

static void managed() {
    std::vector<CUdeviceptr> all;
    CUresult result;
    size_t bytes = 0;
    CUdeviceptr address, other;
    step("all-address-space", CU(cuMemAllocManaged, &address, ~(size_t)0, (unsigned)CU_MEM_ATTACH_GLOBAL), 0);
    step("quota-and-one", CU(cuMemAllocManaged, &address, quota + 1, (unsigned)CU_MEM_ATTACH_HOST), 0);
    result = all_managed(all, bytes);
    step("managed", result, bytes);
    step("device-memory-beside-it", CU(cuMemAlloc, &other, 2 * MIB), 0);
    // Freed memory is charged no longer, and only once.
    for (CUdeviceptr each : all) MUST(cuMemFree, each);
    step("freed-twice", CU(cuMemFree, all[0]), 0);
    all.clear();
    MUST(cuMemAlloc, &other, quota / 2);
    bytes = quota / 2;
    result = all_managed(all, bytes);
    step("behind-device-memory", result, bytes);
    for (CUdeviceptr each : all) MUST(cuMemFree, each);
    MUST(cuMemFree, other);
    the_rest_is_exactly("all");
}

static std::string own_path() {
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
    return std::string(path, length > 0 ? length : 0);
}

// Runs this program again; its output goes to ours.
static pid_t start(const std::vector<std::string> &arguments) {
    fflush(stdout);
    std::string path = own_path();
    std::vector<char *> words = {path.data()};
    for (const std::string &argument : arguments) words.push_back((char *)argument.c_str());
    words.push_back(nullptr);
    pid_t child = fork();
    if (child == 0) {
        execv(path.c_str(), words.data());
        _exit(127);
    }
    return child;
}

static bool ended_well(pid_t child) {
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// Memory that another process of the VM opens is charged once, as long as one of them has it.
static void ipc() {
    CUdeviceptr address;
    CUipcMemHandle handle;
    const size_t bytes = 8 * MIB;
    MUST(cuMemAlloc, &address, bytes);
    MUST(cuMemsetD8, address, (unsigned char)0x5a, bytes);
    CUresult result = CU(cuIpcGetMemHandle, &handle, address);
    step("handle", result, 0);
    if (result == CUDA_SUCCESS) {
        step("own-handle", CU(cuIpcOpenMemHandle, &address, handle, (unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), 0);
        std::string text;
        for (char byte : handle.reserved) {
            char two[3];
            snprintf(two, sizeof two, "%02x", (unsigned char)byte);
            text += two;
        }
        int to_child[2], to_parent[2];
        if (pipe(to_child) || pipe(to_parent)) exit(1);
        pid_t child = start({"ipc-child", std::to_string(quota), text, std::to_string(to_child[0]), std::to_string(to_parent[1])});
        char byte = 0;
        if (read(to_parent[0], &byte, 1) != 1) exit(1);
        size_t before = free_bytes();
        if (byte == 'o') {
            // Freed here: only the child has it now.
            MUST(cuMemFree, address);
            step("freed-but-open-elsewhere", CUDA_SUCCESS, free_bytes() - before);
        }
        the_rest_is_exactly("all-but-what-is-open");
        if (write(to_child[1], "x", 1) != 1) exit(1);
        expect("the other process ends well", ended_well(child));
        if (byte == 'o') address = 0;
        // The other process's worker gives its memory back a moment after the process.
        for (int i = 0; i < 6000 && free_bytes() != initial - (address ? bytes : 0); i++) usleep(10000);
    }
    handle.reserved[20] ^= 1;
    CUdeviceptr forged;
    step("forged-handle", CU(cuIpcOpenMemHandle, &forged, handle, (unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), 0);
    if (address) MUST(cuMemFree, address);
}

static void ipc_child(char **arguments) {
    CUipcMemHandle handle;
    for (size_t i = 0; i < sizeof handle.reserved; i++) {
        char two[3] = {arguments[0][2 * i], arguments[0][2 * i + 1], 0};
        handle.reserved[i] = (char)strtoul(two, nullptr, 16);
    }
    int from = atoi(arguments[1]), to = atoi(arguments[2]);
    size_t before = free_bytes();
    CUdeviceptr address;
    CUresult result = CU(cuIpcOpenMemHandle, &address, handle, (unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    step("open-in-another-process", result, before - free_bytes());
    char byte = result == CUDA_SUCCESS ? 'o' : 'n';
    if (write(to, &byte, 1) != 1 || read(from, &byte, 1) != 1) exit(1);
    if (result == CUDA_SUCCESS) {
        std::vector<unsigned char> got(8 * MIB);
        MUST(cuMemcpyDtoH, (void *)got.data(), address, got.size());
        size_t same = 0;
        for (unsigned char each : got) same += each == 0x5a;
        expect("shared memory stays as it was written while its last user has it", same == got.size());
        MUST(cuIpcCloseMemHandle, address);
    }
}

// The driver's own memory is part of the quota.
static void limits() {
    struct {
        const char *name;
        CUlimit limit;
    } all[] = {{"stack", CU_LIMIT_STACK_SIZE}, {"heap", CU_LIMIT_MALLOC_HEAP_SIZE}, {"printf", CU_LIMIT_PRINTF_FIFO_SIZE}};
    for (auto &each : all) {
        size_t before = 0;
        MUST(cuCtxGetLimit, &before, each.limit);
        step(each.name, CU(cuCtxSetLimit, each.limit, (size_t)1 << 46), 0);
        CUresult result = CUDA_SUCCESS;
        size_t size = 1 << 10;
        for (; size < (size_t)1 << 40 && result == CUDA_SUCCESS; size *= 2) result = CU(cuCtxSetLimit, each.limit, size);
        step((std::string(each.name) + "-growing").c_str(), result, 0);
        CU(cuCtxSetLimit, each.limit, before);
    }
    std::vector<CUcontext> contexts;
    CUcontext context, current;
    MUST(cuCtxGetCurrent, &current);
    CUresult result;
    while (contexts.size() < 100 && (result = CU(cuCtxCreate, &context, (CUctxCreateParams *)nullptr, 0u, device)) == CUDA_SUCCESS) contexts.push_back(context);
    step("contexts", result, 0);
    for (CUcontext each : contexts) MUST(cuCtxDestroy, each);
    MUST(cuCtxSetCurrent, current);
    the_rest_is_exactly("all");
}

__global__ void use_local_memory(int *to) {
    int all[8192];
    asm volatile("" ::"l"(all) : "memory");
    if (to) *to = all[threadIdx.x];
}

// The stacks of all threads that can run at once, for one kernel. A refusal leaves the stream in order.
static void local() {
    use_local_memory<<<1, 32>>>(nullptr);
    step("huge-local-memory", (CUresult)cudaGetLastError(), 0);
    CUdeviceptr address;
    MUST(cuMemAlloc, &address, 2 * MIB);
    MUST(cuMemsetD8, address, (unsigned char)3, 2 * MIB);
    step("goes-on", CU(cuCtxSynchronize), 0);
    MUST(cuMemFree, address);
    the_rest_is_exactly("all");
}

// Code and variables likewise.
static void modules() {
    auto image = [](size_t bytes) {
        return ".version 7.0\n.target sm_80\n.address_size 64\n.visible .global .align 16 .b8 huge[" + std::to_string(bytes) + "];\n"
               ".visible .entry touch(.param .u64 x)\n{\nret;\n}\n";
    };
    CUmodule module;
    step("one-larger-than-the-device", CU(cuModuleLoadData, &module, (const void *)image((size_t)3 << 40).c_str()), 0);
    step("one-of-eight-quotas", CU(cuModuleLoadData, &module, (const void *)image(8 * quota).c_str()), 0);
    std::vector<CUmodule> all;
    CUresult result;
    std::string many = image(4 * MIB);
    while (all.size() < 500 && (result = CU(cuModuleLoadData, &module, (const void *)many.c_str())) == CUDA_SUCCESS) all.push_back(module);
    step("many", result, all.size() * 4 * MIB);
    the_rest_is_exactly("memory-beside-them");
    for (CUmodule each : all) MUST(cuModuleUnload, each);
}

static void tiny(size_t count) {
    size_t made = 0, at_once = 0;
    CUresult result = CUDA_SUCCESS;
    std::vector<CUdeviceptr> all;
    while (made < count) {
        CUdeviceptr address;
        result = CU(cuMemAlloc, &address, (size_t)1);
        if (result == CUDA_SUCCESS) {
            all.push_back(address);
            made++;
        }
        if (result != CUDA_SUCCESS || made == count) {
            at_once = std::max(at_once, all.size());
            if (result != CUDA_SUCCESS) expect("no byte is free when one byte is refused", free_bytes() < 2 * MIB);
            // Every second one, so that no whole chunk is freed.
            std::vector<CUdeviceptr> kept;
            for (size_t i = 0; i < all.size(); i++) {
                if (i % 2 && made < count)
                    kept.push_back(all[i]);
                else
                    MUST(cuMemFree, all[i]);
            }
            all = kept;
            if (result != CUDA_SUCCESS && result != CUDA_ERROR_OUT_OF_MEMORY) break;
        }
    }
    step("single-bytes", result, made);
    // 256 bytes are the smallest alignment.
    expect("single bytes are charged as the memory they take", at_once <= quota / 256);
    for (CUdeviceptr each : all) MUST(cuMemFree, each);
}

static void frees() {
    size_t before = free_bytes();
    CUdeviceptr address, other;
    MUST(cuMemAlloc, &address, 4 * MIB);
    MUST(cuMemAlloc, &other, (size_t)100);
    MUST(cuMemFree, address);
    step("twice", CU(cuMemFree, address), 0);
    step("in-the-middle", CU(cuMemFree, other + 16), 0);
    step("nothing", CU(cuMemFree, (CUdeviceptr)0), 0);
    step("host-memory", CU(cuMemFree, (CUdeviceptr)(uintptr_t)&address), 0);
    step("anywhere", CU(cuMemFree, (CUdeviceptr)0x123456000), 0);
    step("the-end-of-the-address-space", CU(cuMemFree, ~(CUdeviceptr)0), 0);
    void *pinned;
    MUST(cuMemHostAlloc, &pinned, MIB, 0u);
    step("pinned-as-device", CU(cuMemFree, (CUdeviceptr)(uintptr_t)pinned), 0);
    step("device-as-pinned", CU(cuMemFreeHost, (void *)other), 0);
    MUST(cuMemFreeHost, pinned);
    Mapped mapped;
    CUresult result = create_mapped(device, 2 * MIB, mapped);
    if (result == CUDA_SUCCESS) {
        step("mapped-as-linear", CU(cuMemFree, mapped.address), 0);
        destroy_mapped(mapped);
        step("handle-twice", CU(cuMemRelease, mapped.handle), 0);
        step("unmap-twice", CU(cuMemUnmap, mapped.address, mapped.bytes), 0);
        step("address-twice", CU(cuMemAddressFree, mapped.address, mapped.bytes), 0);
    }
    step("a-handle-that-never-was", CU(cuMemRelease, (CUmemGenericAllocationHandle)0x1234567890), 0);
    MUST(cuMemFree, other);
    expect("the balance is as before", free_bytes() == before);
    the_rest_is_exactly("all");
}

// The memory of all threads and processes together, as reported so far. Each reports after an allocation and before a free, so
// the sum is never more than they really have.
struct Sum {
    std::atomic<size_t> bytes{0}, most{0}, refused{0}, odd{0}, processes{0};
    void add(size_t piece) {
        size_t now = bytes.fetch_add(piece) + piece, before = most;
        while (now > before && !most.compare_exchange_weak(before, now)) {}
    }
};

static void race(Sum &sum, uint64_t seed, double seconds) {
    Random random(seed);
    std::vector<std::pair<CUdeviceptr, size_t>> held;
    std::vector<Mapped> mapped;
    double end = now() + seconds;
    while (now() < end) {
        uint32_t what = random.below(8);
        if (what < 4) {
            size_t bytes = what < 3 ? (1 + random.below(4)) * 2 * MIB : 1 + random.below(1 << 20);
            CUdeviceptr address;
            CUresult result = CU(cuMemAlloc, &address, bytes);
            if (result == CUDA_SUCCESS) {
                sum.add(bytes);
                held.push_back({address, bytes});
            } else if (result == CUDA_ERROR_OUT_OF_MEMORY)
                sum.refused++;
            else
                sum.odd++;
        } else if (what == 4) {
            Mapped piece;
            CUresult result = create_mapped(device, 2 * MIB, piece);
            if (result == CUDA_SUCCESS) {
                sum.add(piece.bytes);
                mapped.push_back(piece);
            } else if (result == CUDA_ERROR_OUT_OF_MEMORY)
                sum.refused++;
            else
                sum.odd++;
        } else if (what < 7 && !held.empty()) {
            size_t at = random.below(held.size());
            sum.bytes -= held[at].second;
            MUST(cuMemFree, held[at].first);
            held[at] = held.back();
            held.pop_back();
        } else if (!mapped.empty()) {
            sum.bytes -= mapped.back().bytes;
            destroy_mapped(mapped.back());
            mapped.pop_back();
        }
    }
    for (auto &[address, bytes] : held) {
        sum.bytes -= bytes;
        MUST(cuMemFree, address);
    }
    for (Mapped &piece : mapped) {
        sum.bytes -= piece.bytes;
        destroy_mapped(piece);
    }
}

static void report(Sum &sum) {
    printf("most %zu\n", (size_t)sum.most);
    expect("all together never had more than the quota", sum.most <= quota);
    expect("a call was refused", sum.refused > 0);
    expect("no call failed with an error other than out of memory", sum.odd == 0);
    // Each process has a context, which is part of the quota.
    expect("most of the quota that contexts leave was reached", sum.most >= quota / 8);
}

static void threads() {
    Sum sum;
    CUcontext context;
    MUST(cuCtxGetCurrent, &context);
    std::vector<std::thread> all;
    for (int i = 0; i < 16; i++)
        all.emplace_back([&, i] {
            MUST(cuCtxSetCurrent, context);
            race(sum, i, 2);
        });
    for (std::thread &each : all) each.join();
    report(sum);
    the_rest_is_exactly("all");
}

static const size_t PROCESSES = 8;

static void processes() {
    int file = memfd_create("sum", 0);
    if (file < 0 || ftruncate(file, sizeof(Sum))) exit(1);
    auto sum = new (mmap(nullptr, sizeof(Sum), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)) Sum;
    std::vector<pid_t> all;
    for (size_t i = 0; i < PROCESSES; i++) all.push_back(start({"processes-child", std::to_string(quota), std::to_string(file), std::to_string(i)}));
    for (pid_t child : all) expect("a process ends well", ended_well(child));
    report(*sum);
    // Their workers give memory back a moment after them.
    for (int i = 0; i < 6000 && free_bytes() != initial; i++) usleep(10000);
    the_rest_is_exactly("all");
}

static void processes_child(char **arguments) {
    auto sum = (Sum *)mmap(nullptr, sizeof(Sum), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(arguments[0]), 0);
    // Each has its context before any fills the quota, however late it started.
    sum->processes++;
    for (double end = now() + 60; sum->processes < PROCESSES;) {
        if (now() > end) exit(1);
        usleep(1000);
    }
    race(*sum, 100 + atoi(arguments[1]), 3);
}

// A load for tests that kill: runs until it is killed, or for a while.
static void churn() {
    printf("churning\n");
    fflush(stdout);
    Sum sum;
    race(sum, getpid(), 600);
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    std::string way = argv[1];
    quota = strtoull(argv[2], nullptr, 10);
    // A library of its own, past any other that intercepts its calls.
    if (way == "deepbind") driver_library(RTLD_DEEPBIND);
    device = use_device();
    bool alone = way != "ipc-child" && way != "processes-child" && way != "churn";
    size_t before = alone ? free_bytes() : 0;
    initial = before;
    if (way == "linear" || way == "deepbind") linear();
    else if (way == "pools") pools();
    else if (way == "graphs") graphs();
    else if (way == "vmm") vmm();
    else if (way == "arrays") arrays();
    else if (way == "managed") managed();
    else if (way == "ipc") ipc();
    else if (way == "ipc-child") ipc_child(argv + 3);
    else if (way == "limits") limits();
    else if (way == "modules") modules();
    else if (way == "local") local();
    else if (way == "tiny") tiny(argc > 3 ? strtoull(argv[3], nullptr, 10) : 1000000);
    else if (way == "frees") frees();
    else if (way == "threads") threads();
    else if (way == "processes") processes();
    else if (way == "processes-child") processes_child(argv + 3);
    else if (way == "churn") churn();
    else return 2;
    // Memory that the driver has freed counts as free when the host has noticed that, some seconds later.
    for (int i = 0; before && way != "limits" && i < 6000 && free_bytes() < before; i++) usleep(10000);
    // Raised limits stay raised.
    if (before && way != "limits") expect("all that was free is free again", free_bytes() >= before);
    if (way.find("-child") != std::string::npos) return wrong;
    return verdict(wrong == 0);
}

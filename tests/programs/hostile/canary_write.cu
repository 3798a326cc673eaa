// Leaves a pattern in one kind of memory and ends in a certain way. Prints `written KIND BYTES`, or `refused KIND ERROR` if
// the driver does not offer the kind.
// Usage: canary_write KIND END CELL
//   KIND  large small pool vmm managed graph array mipmap local shared registers pinned staging ring
//   END   free: frees everything and goes on; exit; fault: a kernel of its own faults, and goes on; hold: until killed
#include "canary.h"
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <unistd.h>
#include <vector>

static const int THREADS = 256, BLOCKS = 64;

__global__ void fill(Tag *to, size_t tags, uint64_t cell) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < tags; i += (size_t)gridDim.x * blockDim.x) to[i] = tag_of(cell);
}

static const int LOCAL_TAGS = 20;

// An array that lives only in local memory: code that the compiler cannot inspect takes its address.
__global__ void fill_local(uint64_t cell, uint64_t *sum) {
    Tag tags[LOCAL_TAGS];
    for (int i = 0; i < LOCAL_TAGS; i++) tags[i] = tag_of(cell);
    asm volatile("" ::"l"(tags) : "memory");
    if (sum) *sum = tags[threadIdx.x % LOCAL_TAGS].low;
}

__global__ void fill_shared(uint64_t cell, uint64_t *sum) {
    extern __shared__ Tag shared_tags[];
    volatile uint64_t *words = (volatile uint64_t *)shared_tags;
    for (int i = threadIdx.x; i < (48 << 10) / 16; i += blockDim.x) {
        words[2 * i] = tag_of(cell).high;
        words[2 * i + 1] = tag_of(cell).low;
    }
    __syncthreads();
    if (sum) *sum = words[2 * threadIdx.x + 1];
}

__global__ void fill_registers(uint64_t cell, uint64_t *sum) {
    uint64_t words[64];
#pragma unroll
    for (int i = 0; i < 64; i += 2) words[i] = tag_of(cell).high, words[i + 1] = tag_of(cell).low;
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("" : "+l"(words[i]));
    uint64_t total = 0;
#pragma unroll
    for (int i = 0; i < 64; i++) total += words[i];
    if (sum) *sum = total;
}

__global__ void fault() { *(volatile int *)16 = 1; }

static const size_t MIB = 1 << 20;
static uint64_t cell;
static CUdevice device;

// Ends the program if the driver does not offer the kind.
static void offered(const char *kind, CUresult result) {
    if (result == CUDA_SUCCESS) return;
    printf("refused %s %d\n", kind, (int)result);
    exit(0);
}

static void fill_device(CUdeviceptr address, size_t bytes) {
    fill<<<BLOCKS, THREADS>>>((Tag *)address, bytes / sizeof(Tag), cell);
    CHECK(cudaGetLastError());
    CHECK(cudaDeviceSynchronize());
    // The pattern must be there; otherwise an empty search later would prove nothing.
    Tag last;
    CHECK(cudaMemcpy(&last, (char *)address + bytes - sizeof last, sizeof last, cudaMemcpyDeviceToHost));
    if (found(last.high, last.low) != (long)cell) {
        printf("the pattern was not written\nFAIL\n");
        exit(1);
    }
}

static void fill_host(void *address, size_t bytes) {
    for (size_t i = 0; i < bytes / sizeof(Tag); i++) ((Tag *)address)[i] = tag_of(cell);
}

// Copies between an array of `side` rows of as many words and host memory.
static CUDA_MEMCPY2D rectangle(size_t side) {
    CUDA_MEMCPY2D copy = {};
    copy.WidthInBytes = side * 4;
    copy.Height = side;
    return copy;
}

static void fill_array(CUarray array, size_t side) {
    std::vector<Tag> tags(side * side * 4 / sizeof(Tag), tag_of(cell)), back(tags.size());
    CUDA_MEMCPY2D copy = rectangle(side);
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = tags.data();
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = array;
    MUST(cuMemcpy2D, (const CUDA_MEMCPY2D *)&copy);
    copy = rectangle(side);
    copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.srcArray = array;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = back.data();
    MUST(cuMemcpy2D, (const CUDA_MEMCPY2D *)&copy);
    if (memcmp(tags.data(), back.data(), tags.size() * sizeof(Tag)) != 0) {
        printf("the pattern was not written\nFAIL\n");
        exit(1);
    }
}

using Free = std::function<void()>;

// Writes the pattern; returns the function that frees the memory.
static Free write(const std::string &kind, size_t &bytes) {
    if (kind == "large") {
        bytes = 24 * MIB;
        CUdeviceptr address;
        MUST(cuMemAlloc, &address, bytes);
        fill_device(address, bytes);
        return [=] { MUST(cuMemFree, address); };
    }
    if (kind == "small") {
        auto all = std::make_shared<std::vector<CUdeviceptr>>(4000);
        bytes = all->size() * 3072;
        for (CUdeviceptr &address : *all) {
            MUST(cuMemAlloc, &address, (size_t)3072);
            fill<<<1, THREADS>>>((Tag *)address, 3072 / sizeof(Tag), cell);
        }
        fill_device(all->back(), 3072);
        return [=] {
            for (CUdeviceptr address : *all) MUST(cuMemFree, address);
        };
    }
    if (kind == "pool") {
        bytes = 8 * MIB;
        CUdeviceptr address;
        offered("pool", CU(cuMemAllocAsync, &address, bytes, (CUstream)0));
        fill_device(address, bytes);
        return [=] {
            MUST(cuMemFreeAsync, address, (CUstream)0);
            CHECK(cudaDeviceSynchronize());
        };
    }
    if (kind == "vmm") {
        bytes = 8 * MIB;
        auto mapped = std::make_shared<Mapped>();
        offered("vmm", create_mapped(device, bytes, *mapped));
        fill_device(mapped->address, bytes);
        return [=] { destroy_mapped(*mapped); };
    }
    if (kind == "managed") {
        bytes = 8 * MIB;
        CUdeviceptr address;
        offered("managed", CU(cuMemAllocManaged, &address, bytes, (unsigned)CU_MEM_ATTACH_GLOBAL));
        fill_device(address, bytes);
        return [=] { MUST(cuMemFree, address); };
    }
    if (kind == "graph") {
        bytes = 8 * MIB;
        CUgraph graph;
        CUgraphExec executable;
        CUgraphNode node;
        CUDA_MEM_ALLOC_NODE_PARAMS parameters = {};
        parameters.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        parameters.poolProps.location = on_device(device).location;
        parameters.bytesize = bytes;
        offered("graph", CU(cuGraphCreate, &graph, 0u));
        offered("graph", CU(cuGraphAddMemAllocNode, &node, graph, (const CUgraphNode *)nullptr, (size_t)0, &parameters));
        offered("graph", CU(cuGraphInstantiate, &executable, graph, 0ull));
        offered("graph", CU(cuGraphLaunch, executable, (CUstream)0));
        CHECK(cudaDeviceSynchronize());
        fill_device(parameters.dptr, bytes);
        CUdeviceptr address = parameters.dptr;
        return [=] {
            MUST(cuMemFree, address);
            MUST(cuGraphExecDestroy, executable);
            MUST(cuGraphDestroy, graph);
        };
    }
    if (kind == "array") {
        bytes = 4 * MIB;
        CUarray array;
        CUDA_ARRAY_DESCRIPTOR shape = {1024, 1024, CU_AD_FORMAT_UNSIGNED_INT32, 1};
        offered("array", CU(cuArrayCreate, &array, (const CUDA_ARRAY_DESCRIPTOR *)&shape));
        fill_array(array, 1024);
        return [=] { MUST(cuArrayDestroy, array); };
    }
    if (kind == "mipmap") {
        CUmipmappedArray mipmap;
        CUDA_ARRAY3D_DESCRIPTOR shape = {1024, 1024, 0, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0};
        offered("mipmap", CU(cuMipmappedArrayCreate, &mipmap, (const CUDA_ARRAY3D_DESCRIPTOR *)&shape, 3u));
        for (unsigned level = 0; level < 3; level++) {
            CUarray array;
            MUST(cuMipmappedArrayGetLevel, &array, mipmap, level);
            size_t side = 1024 >> level;
            fill_array(array, side);
            bytes += side * side * 4;
        }
        return [=] { MUST(cuMipmappedArrayDestroy, mipmap); };
    }
    if (kind == "local") {
        bytes = (size_t)LOCAL_TAGS * sizeof(Tag) * BLOCKS * THREADS;
        fill_local<<<BLOCKS, THREADS>>>(cell, nullptr);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        return [] {};
    }
    if (kind == "shared") {
        bytes = 48 << 10;
        fill_shared<<<BLOCKS, THREADS, 48 << 10>>>(cell, nullptr);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        return [] {};
    }
    if (kind == "registers") {
        bytes = 64 * 8;
        fill_registers<<<BLOCKS, THREADS>>>(cell, nullptr);
        CHECK(cudaGetLastError());
        CHECK(cudaDeviceSynchronize());
        return [] {};
    }
    if (kind == "pinned") {
        bytes = 8 * MIB;
        void *address;
        CHECK(cudaMallocHost(&address, bytes));
        fill_host(address, bytes);
        return [=] { CHECK(cudaFreeHost(address)); };
    }
    if (kind == "staging" || kind == "ring") {
        // Large copies from ordinary memory travel through staging, small ones inside the ring.
        size_t piece = kind == "ring" ? 1024 : 4 * MIB;
        bytes = 8 * MIB;
        std::vector<Tag> tags(piece / sizeof(Tag), tag_of(cell));
        CUdeviceptr address;
        MUST(cuMemAlloc, &address, bytes);
        for (size_t at = 0; at < bytes; at += piece) MUST(cuMemcpyHtoD, address + at, (const void *)tags.data(), piece);
        return [=] { MUST(cuMemFree, address); };
    }
    printf("no such kind: %s\nFAIL\n", kind.c_str());
    exit(1);
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    std::string kind = argv[1], end = argv[2];
    cell = strtoull(argv[3], nullptr, 10);
    device = use_device();
    CHECK(cudaFree(nullptr));
    size_t bytes = 0;
    Free give_back = write(kind, bytes);
    if (end == "free") give_back();
    if (end == "fault") {
        fault<<<1, 1>>>();
        cudaError_t error = cudaDeviceSynchronize();
        if (error != cudaErrorIllegalAddress) {
            printf("no fault: %d\nFAIL\n", (int)error);
            return 1;
        }
    }
    printf("written %s %zu\n", kind.c_str(), bytes);
    fflush(stdout);
    if (end == "exit") return 0;
    for (;;) pause();
}

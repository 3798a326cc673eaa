// Allocates all device memory it can get in every way, and searches it for patterns of others. Never writes to
// that memory. The contents of arrays are copied to a buffer of its own, which is cleared before it is freed.
// Prints `read WAY BYTES` and `took WAY MILLISECONDS` for each way, `hit WAY CELL COUNT` for each pattern, and `hits COUNT` last.
// Usage: canary_read [kernel] [WAY]...     without a way: every way but `array`
// The way `array` must be named: a worker clears a new array, so this search removes what the others look for.
//   kernel: a kernel searches the device's memory, which is faster on large devices; else it is copied and searched here
#include "canary.h"
#include <cstring>
#include <algorithm>
#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

static const size_t MIB = 1 << 20;
static std::map<std::string, std::map<long, long>> hits;
static CUdevice device;
static std::vector<uint64_t> window(8 * MIB / 8);

// At every 8 bytes: a pattern written at a pitch of 16 need not be found at one.
static void search_host(const std::string &way, const void *address, size_t bytes) {
    const uint64_t *words = (const uint64_t *)address;
    for (size_t i = 0; i + 1 < bytes / 8; i++) {
        if (~words[i] != NOT_HIGH) continue;
        long cell = found(words[i], words[i + 1]);
        if (cell >= 0) hits[way][cell]++;
    }
}

// Counts of patterns by their cells; higher cells count for the last one.
static const int MOST_CELLS = 256;
static bool by_kernel = false;
static unsigned long long *cell_counts = nullptr;

__global__ void search_words(const uint64_t *words, size_t count, unsigned long long *counts) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i + 1 < count; i += (size_t)gridDim.x * blockDim.x) {
        long cell = found(words[i], words[i + 1]);
        if (cell >= 0) atomicAdd(&counts[cell < MOST_CELLS ? cell : MOST_CELLS - 1], 1ull);
    }
}

// Takes the counts of a way from the device, and clears them.
static void collect(const std::string &way) {
    if (!by_kernel) return;
    unsigned long long counts[MOST_CELLS];
    CHECK(cudaMemcpy(counts, cell_counts, sizeof counts, cudaMemcpyDeviceToHost));
    CHECK(cudaMemset(cell_counts, 0, sizeof counts));
    for (int cell = 0; cell < MOST_CELLS; cell++)
        if (counts[cell]) hits[way][cell] += counts[cell];
}

static void search_device(const std::string &way, CUdeviceptr address, size_t bytes) {
    if (by_kernel) {
        // 16 words or more for each thread, and enough threads for the largest GPU.
        const size_t words = bytes / 8, blocks = std::min<size_t>(2048, (words + 4095) / 4096);
        search_words<<<blocks, 256>>>((const uint64_t *)address, words, cell_counts);
        CHECK(cudaGetLastError());
        return;
    }
    for (size_t at = 0; at < bytes; at += window.size() * 8) {
        size_t piece = std::min(bytes - at, window.size() * 8);
        MUST(cuMemcpyDtoH, (void *)window.data(), address + at, piece);
        search_host(way, window.data(), piece);
    }
    memset(window.data(), 0, window.size() * 8);
}

// Prints the result of a way that began at a time, with the result of its last allocation.
static void report(const std::string &way, size_t total, CUresult last, std::chrono::steady_clock::time_point begun) {
    if (total == 0)
        printf("refused %s %d\n", way.c_str(), (int)last);
    else
        printf("read %s %zu\n", way.c_str(), total);
    const auto took = std::chrono::steady_clock::now() - begun;
    printf("took %s %lld\n", way.c_str(), (long long)std::chrono::duration_cast<std::chrono::milliseconds>(took).count());
    fflush(stdout);
}

// Allocates ever smaller pieces until nothing is left, searches each, and frees all. The first ones are large: each chunk of memory that
// is lent costs about a millisecond.
static void drain(const std::string &way, size_t least, std::function<CUresult(size_t, Mapped &)> take,
                  std::function<void(Mapped &)> give) {
    const auto begun = std::chrono::steady_clock::now();
    std::vector<Mapped> all;
    size_t total = 0;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t bytes = 2048 * MIB; bytes >= least; bytes /= 4) {
        Mapped piece;
        while ((result = take(bytes, piece)) == CUDA_SUCCESS) {
            piece.bytes = bytes;
            search_device(way, piece.address, bytes);
            all.push_back(piece);
            total += bytes;
        }
        if (result != CUDA_ERROR_OUT_OF_MEMORY) break;
    }
    collect(way);
    for (Mapped &piece : all) give(piece);
    report(way, total, result, begun);
}

// Searches an array of so many rows of as many words, through a buffer of the device or of the host.
static const size_t STRIP = 4 * MIB;
static void search_array(CUarray array, size_t side, CUdeviceptr buffer) {
    CUDA_MEMCPY2D copy = {};
    copy.WidthInBytes = side * 4;
    copy.Height = std::min(side, STRIP / copy.WidthInBytes);
    copy.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.srcArray = array;
    copy.dstMemoryType = by_kernel ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    copy.dstDevice = buffer;
    copy.dstHost = window.data();
    copy.dstPitch = copy.WidthInBytes;
    for (; copy.srcY < side; copy.srcY += copy.Height) {
        MUST(cuMemcpy2D, (const CUDA_MEMCPY2D *)&copy);
        if (by_kernel)
            search_device("array", buffer, copy.WidthInBytes * copy.Height);
        else
            search_host("array", window.data(), copy.WidthInBytes * copy.Height);
    }
    memset(window.data(), 0, window.size() * 8);
}

// Arrays of the driver's own memory, until nothing is left.
static void drain_arrays() {
    const auto begun = std::chrono::steady_clock::now();
    CUdeviceptr buffer = 0;
    if (by_kernel) MUST(cuMemAlloc, &buffer, STRIP);
    std::vector<CUarray> all;
    size_t total = 0;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t side = 16384; side >= 1024 && result == CUDA_ERROR_OUT_OF_MEMORY; side /= 2) {
        CUDA_ARRAY_DESCRIPTOR shape = {side, side, CU_AD_FORMAT_UNSIGNED_INT32, 1};
        CUarray array;
        while ((result = CU(cuArrayCreate, &array, (const CUDA_ARRAY_DESCRIPTOR *)&shape)) == CUDA_SUCCESS) {
            search_array(array, side, buffer);
            all.push_back(array);
            total += side * side * 4;
        }
    }
    collect("array");
    for (CUarray each : all) MUST(cuArrayDestroy, each);
    if (by_kernel) {
        CHECK(cudaMemset((void *)buffer, 0, STRIP));
        MUST(cuMemFree, buffer);
    }
    report("array", total, result, begun);
}

static const int COUNTS = 64;
struct Findings {
    unsigned long long count;
    long cells[COUNTS];
};

__device__ void note(Findings *findings, uint64_t high, uint64_t low) {
    long cell = found(high, low);
    if (cell < 0) return;
    unsigned long long at = atomicAdd(&findings->count, 1ull);
    if (at < COUNTS) findings->cells[at] = cell;
}

static const int LOCAL_WORDS = 40;

// Code that the compiler cannot inspect takes the address, so the compiler must read the actual contents.
__global__ void search_local(Findings *findings) {
    uint64_t words[LOCAL_WORDS];
    asm volatile("" ::"l"(words) : "memory");
    for (int i = 0; i + 1 < LOCAL_WORDS; i++) note(findings, words[i], words[i + 1]);
}

__global__ void search_shared(Findings *findings) {
    extern __shared__ uint64_t shared_words[];
    volatile uint64_t *words = shared_words;
    for (int i = threadIdx.x; i + 1 < (48 << 10) / 8; i += blockDim.x) note(findings, words[i], words[i + 1]);
}

__global__ void search_registers(Findings *findings) {
    uint64_t words[64];
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("{ .reg .b64 unset; mov.b64 %0, unset; }" : "=l"(words[i]));
#pragma unroll
    for (int i = 0; i < 63; i++) note(findings, words[i], words[i + 1]);
}

__device__ uint64_t blank[MIB / 8];

static void search_kernel(const std::string &way, void (*kernel)(Findings *), int shared) {
    Findings *findings, host;
    CHECK(cudaMalloc(&findings, sizeof *findings));
    CHECK(cudaMemset(findings, 0, sizeof *findings));
    kernel<<<64, 256, shared>>>(findings);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(&host, findings, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(findings));
    for (unsigned long long i = 0; i < host.count; i++) hits[way][host.cells[i < COUNTS ? i : COUNTS - 1]]++;
    printf("read %s 0\n", way.c_str());
}

int main(int argc, char **argv) {
    by_kernel = argc > 1 && !strcmp(argv[1], "kernel");
    const int first = by_kernel ? 2 : 1;
    auto named = [&](const char *way) {
        for (int i = first; i < argc; i++)
            if (!strcmp(argv[i], way)) return true;
        return false;
    };
    auto wanted = [&](const char *way) { return argc == first || named(way); };
    device = use_device();
    CHECK(cudaFree(nullptr));
    // First of all: later launches would find remnants of this program itself there.
    if (wanted("local")) search_kernel("local", search_local, 0);
    if (wanted("shared")) search_kernel("shared", search_shared, 48 << 10);
    if (wanted("registers")) search_kernel("registers", search_registers, 0);
    if (by_kernel) {
        CHECK(cudaMalloc(&cell_counts, MOST_CELLS * sizeof *cell_counts));
        CHECK(cudaMemset(cell_counts, 0, MOST_CELLS * sizeof *cell_counts));
    }
    if (wanted("variable")) {
        void *address;
        CHECK(cudaGetSymbolAddress(&address, blank));
        search_device("variable", (CUdeviceptr)address, sizeof blank);
        collect("variable");
        printf("read variable %zu\n", sizeof blank);
    }
    if (wanted("linear"))
        drain(
            "linear", 2048, [](size_t bytes, Mapped &piece) { return CU(cuMemAlloc, &piece.address, bytes); },
            [](Mapped &piece) { MUST(cuMemFree, piece.address); });
    if (wanted("pool"))
        drain(
            "pool", 65536, [](size_t bytes, Mapped &piece) { return CU(cuMemAllocAsync, &piece.address, bytes, (CUstream)0); },
            [](Mapped &piece) {
                MUST(cuMemFreeAsync, piece.address, (CUstream)0);
                MUST(cuStreamSynchronize, (CUstream)0);
            });
    if (wanted("vmm"))
        drain(
            "vmm", 2 * MIB, [](size_t bytes, Mapped &piece) { return create_mapped(device, bytes, piece); },
            [](Mapped &piece) { destroy_mapped(piece); });
    if (named("array")) drain_arrays();
    if (wanted("managed")) {
        CUdeviceptr address;
        CUresult result = CU(cuMemAllocManaged, &address, 16 * MIB, (unsigned)CU_MEM_ATTACH_GLOBAL);
        if (result == CUDA_SUCCESS) {
            search_device("managed", address, 16 * MIB);
            collect("managed");
            search_host("managed", (void *)address, 16 * MIB);
            MUST(cuMemFree, address);
            printf("read managed %zu\n", 16 * MIB);
        } else
            printf("refused managed %d\n", (int)result);
    }
    if (wanted("pinned")) {
        void *address;
        CHECK(cudaMallocHost(&address, 16 * MIB));
        search_host("pinned", address, 16 * MIB);
        CHECK(cudaFreeHost(address));
        printf("read pinned %zu\n", 16 * MIB);
    }
    long total = 0;
    for (auto &[way, cells] : hits)
        for (auto &[cell, count] : cells) {
            printf("hit %s %ld %ld\n", way.c_str(), cell, count);
            total += count;
        }
    printf("hits %ld\n", total);
    return 0;
}

// Memory that two devices of a VM share as peers, and another VM that seeks it.
// Usage: peer_memory hold           writes a pattern on both devices, each of which may access the other's memory; prints its addresses,
//                               `as it should be` for each line of input if each device finds the pattern on the other, and PASS
//        peer_memory seek ADDRESS...  as a peer of its own, tries to access these addresses; prints `hits COUNT` last
//        peer_memory search DEVICE ADDRESS   the kernel of one such try: exit status 0 for nothing, 1 for a pattern, 2 for a fault
#include "canary.h"
#include <cstring>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

static const size_t BYTES = 2 << 20, TAGS = BYTES / sizeof(Tag);
static CUcontext contexts[2];

__global__ void fill(Tag *to) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < TAGS; i += (size_t)gridDim.x * blockDim.x) to[i] = tag_of(1);
}

__global__ void search(const uint64_t *words, unsigned long long *count) {
    for (size_t i = blockIdx.x * blockDim.x + threadIdx.x; i + 1 < BYTES / 8; i += (size_t)gridDim.x * blockDim.x)
        if (found(words[i], words[i + 1]) >= 0) atomicAdd(count, 1ull);
}

static void become_peers() {
    MUST(cuInit, 0);
    for (int device = 0; device < 2; device++) {
        MUST(cuDevicePrimaryCtxRetain, &contexts[device], device);
        CHECK(cudaSetDevice(device));
        CHECK(cudaFree(nullptr));
    }
    for (int device = 0; device < 2; device++) {
        CHECK(cudaSetDevice(device));
        MUST(cuCtxEnablePeerAccess, contexts[1 - device], 0);
    }
}

// Counts patterns from an address on; negative after a fault.
static long count(int device, CUdeviceptr address) {
    unsigned long long *counter, counted = 0;
    CHECK(cudaSetDevice(device));
    CHECK(cudaMalloc(&counter, sizeof counted));
    CHECK(cudaMemset(counter, 0, sizeof counted));
    search<<<16, 256>>>((const uint64_t *)address, counter);
    cudaError_t ended = cudaDeviceSynchronize();
    if (ended == cudaErrorIllegalAddress) return -1;
    CHECK(ended);
    CHECK(cudaMemcpy(&counted, counter, sizeof counted, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(counter));
    return (long)counted;
}

static int hold() {
    CUdeviceptr memory[2];
    become_peers();
    for (int device = 0; device < 2; device++) {
        CHECK(cudaSetDevice(device));
        CHECK(cudaMalloc((void **)&memory[device], BYTES));
        // By the other device.
        CHECK(cudaSetDevice(1 - device));
        fill<<<16, 256>>>((Tag *)memory[device]);
        CHECK(cudaDeviceSynchronize());
    }
    std::printf("%llu %llu\n", memory[0], memory[1]);
    std::fflush(stdout);
    while (std::getchar() != EOF) {
        bool good = true;
        for (int device = 0; device < 2; device++)
            for (CUdeviceptr address : memory) good &= count(device, address) == (long)TAGS;
        std::printf("%s\n", good ? "as it should be" : "the pattern is not there");
        std::fflush(stdout);
    }
    return verdict(true);
}

static int ended(const char *program, int device, const char *address) {
    std::fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", program, "search", device ? "1" : "0", address, (char *)nullptr);
        _exit(127);
    }
    int status = -1;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int seek(const char *program, int count, char **addresses) {
    int hits = 0;
    for (int i = 0; i < count; i++)
        for (int device = 0; device < 2; device++) {
            int status = ended(program, device, addresses[i]);
            std::printf("device %d: %d\n", device, status);
            if (status != 0 && status != 2) hits++;
        }
    become_peers();
    CUdeviceptr own;
    CHECK(cudaMalloc((void **)&own, BYTES));
    for (int i = 0; i < count; i++)
        for (int device = 0; device < 2; device++) {
            CUdeviceptr address = strtoull(addresses[i], nullptr, 10);
            if (address <= own && own < address + BYTES) continue;
            CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
            CUmemGenericAllocationHandle handle;
            CHECK(cudaSetDevice(device));
            CUresult results[] = {
                CU(cuMemSetAccess, address, BYTES, &access, (size_t)1),
                CU(cuMemRetainAllocationHandle, &handle, (void *)address),
                CU(cuMemcpyPeer, own, contexts[0], address, contexts[device], BYTES),
                CU(cuMemcpyDtoD, own, address, BYTES),
                CU(cuMemsetD8, address, 0, BYTES),
            };
            for (CUresult result : results) {
                std::printf("refused: %d\n", (int)result);
                if (result == CUDA_SUCCESS) hits++;
            }
        }
    std::printf("hits %d\n", hits);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && !std::strcmp(argv[1], "hold")) return hold();
    if (argc > 2 && !std::strcmp(argv[1], "seek")) return seek(argv[0], argc - 2, argv + 2);
    if (argc != 4 || std::strcmp(argv[1], "search")) return 64;
    become_peers();
    long patterns = count(std::atoi(argv[2]), strtoull(argv[3], nullptr, 10));
    return patterns < 0 ? 2 : patterns > 0;
}

// Prints its view of its device, then allocates all of its memory and checks it for each line of input.
// Usage: instance PATTERN
// Prints `COUNT TOTAL MULTIPROCESSORS`, then `holding BYTES`; for each line `as it should be`, or FAIL and the reason.
#include "driver.h"
#include <vector>

static const size_t PIECE = 2 << 20;

int main(int argc, char **argv) {
    const unsigned pattern = argc > 1 ? (unsigned)strtoul(argv[1], nullptr, 10) : 0;
    CUdevice device = use_device();
    int count = 0, multiprocessors = 0;
    size_t total = 0;
    MUST(cuDeviceGetCount, &count);
    MUST(cuDeviceTotalMem, &total, device);
    MUST(cuDeviceGetAttribute, &multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    std::printf("%d %zu %d\n", count, total, multiprocessors);
    std::vector<CUdeviceptr> pieces;
    CUdeviceptr piece;
    CUresult result;
    while ((result = CU(cuMemAlloc, &piece, PIECE)) == CUDA_SUCCESS) {
        MUST(cuMemsetD32, piece, pattern, PIECE / 4);
        pieces.push_back(piece);
    }
    std::printf("holding %zu\n", result == CUDA_ERROR_OUT_OF_MEMORY ? pieces.size() * PIECE : 0);
    std::fflush(stdout);
    std::vector<unsigned> words(PIECE / 4);
    while (std::getchar() != EOF) {
        bool kept = true;
        for (CUdeviceptr held : pieces) {
            MUST(cuMemcpyDtoH, words.data(), held, PIECE);
            for (unsigned word : words) kept = kept && word == pattern;
        }
        std::printf(kept ? "as it should be\n" : "FAIL: another pattern is there\n");
        std::fflush(stdout);
    }
    return verdict(true);
}

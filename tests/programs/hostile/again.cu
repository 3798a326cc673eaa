// Frees memory and allocates as much again, and counts its own bytes that it finds there. Each small size shares its chunk with an
// allocation that stays, so that the chunk does not go back to the arbiter.
// Prints `found BYTES of BYTES` for each size.
#include "driver.h"
#include <vector>

static const unsigned char PATTERN = 0xa7;

int main() {
    use_device();
    for (size_t bytes : {(size_t)512, (size_t)100000, (size_t)700000, (size_t)8 << 20}) {
        CUdeviceptr neighbour, memory, again;
        MUST(cuMemAlloc, &neighbour, bytes);
        MUST(cuMemAlloc, &memory, bytes);
        MUST(cuMemsetD8, memory, PATTERN, bytes);
        MUST(cuMemFree, memory);
        MUST(cuMemAlloc, &again, bytes);
        std::vector<unsigned char> host(bytes);
        MUST(cuMemcpyDtoH, host.data(), again, bytes);
        size_t found = 0;
        for (unsigned char byte : host) found += byte == PATTERN;
        std::printf("found %zu of %zu\n", found, bytes);
        MUST(cuMemFree, again);
        MUST(cuMemFree, neighbour);
    }
    return verdict(true);
}

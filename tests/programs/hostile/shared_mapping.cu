// Registers mappings that processes share, as NCCL does for its transport in shared memory: one of a file in /dev/shm, one of a file
// elsewhere. Prints the codes, and whether the mapping is shared as before and can be copied.
// Usage: shared_mapping FOLDER...
#include "driver.h"
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

static const size_t BYTES = 3 << 20;

static void *mapped(int file) {
    void *at = mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (at == MAP_FAILED) std::perror("mmap"), std::exit(1);
    return at;
}

int main(int argc, char **argv) {
    use_device();
    CUdeviceptr device, address;
    MUST(cuMemAlloc, &device, BYTES);
    for (int i = 1; i < argc; i++) {
        std::string path = std::string(argv[i]) + "/sluice-test-XXXXXX";
        int file = mkstemp(path.data());
        if (file < 0 || unlink(path.c_str()) != 0 || ftruncate(file, BYTES) != 0) return std::perror(path.c_str()), 1;
        char *first = (char *)mapped(file), *second = (char *)mapped(file);
        std::memset(first, 7, BYTES);
        CUresult code = CU(cuMemHostRegister, (void *)first, BYTES, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
        std::printf("register: %d\n", (int)code);
        if (code == CUDA_SUCCESS) {
            MUST(cuMemHostUnregister, (void *)first);
        } else {
            std::printf("address: %d\n", (int)CU(cuMemHostGetDevicePointer, &address, (void *)first, 0u));
            std::printf("unregister: %d\n", (int)CU(cuMemHostUnregister, (void *)first));
        }
        first[BYTES - 1] = 9;
        second[0] = 8;
        MUST(cuMemcpyHtoD, device, (const void *)first, BYTES);
        char ends[2] = {};
        MUST(cuMemcpyDtoH, (void *)&ends[0], device, (size_t)1);
        MUST(cuMemcpyDtoH, (void *)&ends[1], device + BYTES - 1, (size_t)1);
        MUST(cuMemcpyDtoH, (void *)(first + 4096), device, (size_t)1);
        bool shared = second[BYTES - 1] == 9 && first[0] == 8 && second[4096] == 8;
        std::printf("shared: %s, copied: %s\n", shared ? "yes" : "no", ends[0] == 8 && ends[1] == 9 ? "yes" : "no");
        munmap(first, BYTES);
        munmap(second, BYTES);
        close(file);
    }
    return 0;
}

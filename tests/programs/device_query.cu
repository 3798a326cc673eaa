// Properties of the device before its first use. Memory sizes are left out: a quota changes them. With an argument it prints the UUIDs of
// all devices instead, which differ between machines.
#include "check.h"

int main(int argc, char **) {
    int count = 0, driver = 0, runtime = 0, attribute = 0;
    CHECK(cudaGetDeviceCount(&count));
    if (argc > 1) {
        for (int device = 0; device < count; device++) {
            cudaDeviceProp properties;
            CHECK(cudaGetDeviceProperties(&properties, device));
            for (int i = 0; i < 16; i++)
                printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", (unsigned char)properties.uuid.bytes[i]);
            printf("\n");
        }
        return verdict(true);
    }
    CHECK(cudaDriverGetVersion(&driver));
    CHECK(cudaRuntimeGetVersion(&runtime));
    printf("%d device(s), driver %d, runtime %d\n", count, driver, runtime);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    printf("%s, compute capability %d.%d\n", properties.name, properties.major, properties.minor);
    printf("warp %d, threads per block %d, block %d x %d x %d, grid %d x %d x %d\n", properties.warpSize,
           properties.maxThreadsPerBlock, properties.maxThreadsDim[0], properties.maxThreadsDim[1],
           properties.maxThreadsDim[2], properties.maxGridSize[0], properties.maxGridSize[1], properties.maxGridSize[2]);
    printf("multiprocessors %d, shared memory per block %zu, registers per block %d, unified addressing %d\n",
           properties.multiProcessorCount, properties.sharedMemPerBlock, properties.regsPerBlock,
           properties.unifiedAddressing);
    CHECK(cudaDeviceGetAttribute(&attribute, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    printf("shared memory per block with opt-in %d\n", attribute);
    bool sane = count >= 1 && driver >= 12000 && properties.warpSize == 32 && properties.maxThreadsPerBlock >= 1024 &&
                properties.major >= 8 && properties.totalGlobalMem > 0 && properties.name[0] != 0;
    return verdict(sane);
}

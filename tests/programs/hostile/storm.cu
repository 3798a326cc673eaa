// Makes the driver grow and shrink without end: modules with variables, contexts, stacks, heaps. A refused call is tried again.
#include "driver.h"
#include <string>
#include <vector>

static const size_t MIB = 1 << 20;

int main() {
    CUdevice device = use_device();
    std::string image = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .global .align 16 .b8 variable[4194304];\n"
                        ".visible .entry touch(.param .u64 x)\n{\nret;\n}\n";
    CUcontext primary;
    MUST(cuCtxGetCurrent, &primary);
    printf("storming\n");
    fflush(stdout);
    for (unsigned round = 0;; round++) {
        std::vector<CUmodule> all;
        CUmodule module;
        while (all.size() < 16 && CU(cuModuleLoadData, &module, (const void *)image.c_str()) == CUDA_SUCCESS) all.push_back(module);
        CUcontext context;
        if (CU(cuCtxCreate, &context, (CUctxCreateParams *)nullptr, 0u, device) == CUDA_SUCCESS) CU(cuCtxDestroy, context);
        CU(cuCtxSetCurrent, primary);
        CU(cuCtxSetLimit, CU_LIMIT_MALLOC_HEAP_SIZE, (8 + round % 2 * 8) * MIB);
        for (CUmodule each : all) CU(cuModuleUnload, each);
    }
}

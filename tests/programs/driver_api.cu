// The driver interface without the runtime: found by dlopen, entry points by name and by cuGetProcAddress, PTX from text,
// contexts, modules, libraries, and the three ways to launch.
#include "check.h"
#include <cuda.h>
#include <cstring>
#include <dlfcn.h>
#include <vector>

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 launches;
.visible .entry axpy(.param .u64 x, .param .u64 y, .param .f32 a, .param .u32 n)
{
    .reg .pred %p<2>;
    .reg .b32 %r<7>;
    .reg .f32 %f<5>;
    .reg .b64 %rd<8>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.f32 %f1, [a];
    ld.param.u32 %r1, [n];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    setp.ne.u32 %p1, %r5, 0;
    @%p1 bra skip;
    mov.u64 %rd7, launches;
    atom.global.add.u32 %r6, [%rd7], 1;
skip:
    setp.ge.u32 %p1, %r5, %r1;
    @%p1 bra done;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.u32 %rd5, %r5, 4;
    add.s64 %rd6, %rd3, %rd5;
    add.s64 %rd4, %rd4, %rd5;
    ld.global.f32 %f2, [%rd6];
    ld.global.f32 %f3, [%rd4];
    fma.rn.f32 %f4, %f1, %f2, %f3;
    st.global.f32 [%rd4], %f4;
done:
    ret;
}
)";

#define TEXT_OF(name) #name
#define NAME(name) TEXT_OF(name)

static void *library;
static decltype(&cuGetProcAddress) get_proc_address;
static int wrong = 0;

// By exported name; cuda.h's macros turn the plain names into the versioned ones.
#define EXPORTED(name) decltype(&name) p_##name = (decltype(&name))dlsym(library, NAME(name))

template <typename Function> static Function by_version(const char *name, int version, Function) {
    void *found = nullptr;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    CUresult result = get_proc_address(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    if (result != CUDA_SUCCESS || found == nullptr || status != CU_GET_PROC_ADDRESS_SUCCESS) {
        printf("cuGetProcAddress(%s, %d): result %d, status %d\nFAIL\n", name, version, (int)result, (int)status);
        exit(1);
    }
    return (Function)found;
}

static void must(const char *what, CUresult result, CUresult expected = CUDA_SUCCESS) {
    if (result == expected) return;
    printf("%s: %d, expected %d\nFAIL\n", what, (int)result, (int)expected);
    exit(1);
}
#define MUST(call) must(#call, call)

static void expect(const char *what, bool good) {
    printf("%-48s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

int main() {
    library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        printf("dlopen: %s\nFAIL\n", dlerror());
        return 1;
    }
    get_proc_address = (decltype(get_proc_address))dlsym(library, NAME(cuGetProcAddress));
    EXPORTED(cuInit);
    EXPORTED(cuDriverGetVersion);
    EXPORTED(cuDeviceGetCount);
    EXPORTED(cuDeviceGet);
    EXPORTED(cuDeviceGetAttribute);
    EXPORTED(cuGetErrorName);
    EXPORTED(cuCtxSetCurrent);
    EXPORTED(cuCtxGetCurrent);
    EXPORTED(cuCtxDestroy);
    EXPORTED(cuDevicePrimaryCtxRetain);
    EXPORTED(cuDevicePrimaryCtxRelease);
    EXPORTED(cuDevicePrimaryCtxReset);
    EXPORTED(cuMemAlloc);
    EXPORTED(cuMemFree);
    EXPORTED(cuMemcpyHtoD);
    EXPORTED(cuMemcpyDtoH);
    EXPORTED(cuMemsetD32);
    EXPORTED(cuStreamWriteValue32);
    EXPORTED(cuStreamWriteValue64);
    EXPORTED(cuMemHostAlloc);
    EXPORTED(cuMemFreeHost);
    EXPORTED(cuModuleGetGlobal);
    EXPORTED(cuModuleUnload);
    EXPORTED(cuGetExportTable);
    EXPORTED(cuStreamGetId);
    bool all_exported = get_proc_address && p_cuInit && p_cuDriverGetVersion && p_cuDeviceGetCount && p_cuDeviceGet &&
                        p_cuDeviceGetAttribute && p_cuGetErrorName && p_cuCtxSetCurrent && p_cuCtxGetCurrent &&
                        p_cuCtxDestroy && p_cuDevicePrimaryCtxRetain && p_cuDevicePrimaryCtxRelease && p_cuMemAlloc &&
                        p_cuMemFree && p_cuMemcpyHtoD && p_cuMemcpyDtoH && p_cuMemsetD32 && p_cuModuleGetGlobal &&
                        p_cuModuleUnload && p_cuGetExportTable && p_cuStreamGetId && p_cuDevicePrimaryCtxReset;
    expect("exported names", all_exported);
    if (!all_exported) return verdict(false);

    int count = 0, version = 0, major = 0;
    CUdevice device;
    CUcontext unused, primary, current, own = nullptr;
    expect("a call before cuInit", p_cuCtxGetCurrent(&unused) == CUDA_ERROR_NOT_INITIALIZED);
    MUST(p_cuInit(0));
    MUST(p_cuDriverGetVersion(&version));
    MUST(p_cuDeviceGetCount(&count));
    MUST(p_cuDeviceGet(&device, 0));
    MUST(p_cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device));
    printf("driver %d, %d device(s), capability %d\n", version, count, major);
    expect("a device that is not there", p_cuDeviceGet(&device, 77) == CUDA_ERROR_INVALID_DEVICE);
    MUST(p_cuDeviceGet(&device, 0));
    const char *text = nullptr;
    MUST(p_cuGetErrorName(CUDA_ERROR_ILLEGAL_ADDRESS, &text));
    expect("the name of an error", strcmp(text, "CUDA_ERROR_ILLEGAL_ADDRESS") == 0);

    auto p_cuCtxCreate = by_version("cuCtxCreate", 3020, (CUresult(*)(CUcontext *, unsigned, CUdevice))nullptr);
    auto p_cuModuleLoadData = by_version("cuModuleLoadData", 2000, (decltype(&cuModuleLoadData))nullptr);
    auto p_cuModuleGetFunction = by_version("cuModuleGetFunction", 2000, (decltype(&cuModuleGetFunction))nullptr);
    auto p_cuLaunchKernel = by_version("cuLaunchKernel", 4000, (decltype(&cuLaunchKernel))nullptr);
    auto p_cuLaunchKernelEx = by_version("cuLaunchKernelEx", 11060, (decltype(&cuLaunchKernelEx))nullptr);
    auto p_cuStreamCreate = by_version("cuStreamCreate", 2000, (decltype(&cuStreamCreate))nullptr);
    auto p_cuStreamSynchronize = by_version("cuStreamSynchronize", 2000, (decltype(&cuStreamSynchronize))nullptr);
    auto p_cuStreamDestroy = by_version("cuStreamDestroy", 4000, (decltype(&cuStreamDestroy))nullptr);
    auto p_cuFuncGetAttribute = by_version("cuFuncGetAttribute", 2020, (decltype(&cuFuncGetAttribute))nullptr);
    auto p_cuLibraryLoadData = by_version("cuLibraryLoadData", 12000, (decltype(&cuLibraryLoadData))nullptr);
    auto p_cuLibraryGetKernel = by_version("cuLibraryGetKernel", 12000, (decltype(&cuLibraryGetKernel))nullptr);
    auto p_cuLibraryUnload = by_version("cuLibraryUnload", 12000, (decltype(&cuLibraryUnload))nullptr);
    void *found = &found;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
    get_proc_address("cuNoSuchCall", &found, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    expect("a call that does not exist", found == nullptr && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    found = &found;
    get_proc_address("cuLaunchKernelEx", &found, 11000, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    expect("a call that is too new", found == nullptr && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

    MUST(p_cuCtxGetCurrent(&current));
    expect("no context at first", current == nullptr);
    CUdeviceptr none;
    expect("an allocation without context", p_cuMemAlloc(&none, 16) == CUDA_ERROR_INVALID_CONTEXT);
    MUST(p_cuDevicePrimaryCtxRetain(&primary, device));
    MUST(p_cuCtxSetCurrent(primary));

    CUmodule module, broken;
    CUfunction axpy, nobody;
    MUST(p_cuModuleLoadData(&module, PTX));
    MUST(p_cuModuleGetFunction(&axpy, module, "axpy"));
    expect("a function that is not there", p_cuModuleGetFunction(&nobody, module, "nobody") == CUDA_ERROR_NOT_FOUND);
    expect("a module that is no PTX",
           p_cuModuleLoadData(&broken, ".version 7.0\n.target sm_80\nnonsense;\n") == CUDA_ERROR_INVALID_PTX);
    int most = 0;
    MUST(p_cuFuncGetAttribute(&most, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, axpy));
    expect("threads per block", most >= 256 && most <= 1024);

    const unsigned n = 3000;
    Random random(9);
    std::vector<float> x(n), y(n), expected(n);
    for (unsigned i = 0; i < n; i++) x[i] = random.real(), y[i] = expected[i] = random.real();
    CUdeviceptr dx, dy, counter;
    size_t counter_size;
    float a = 1.5f;
    unsigned length = n, launches = 0;
    MUST(p_cuMemAlloc(&dx, n * sizeof(float)));
    MUST(p_cuMemAlloc(&dy, n * sizeof(float)));
    MUST(p_cuMemcpyHtoD(dx, x.data(), n * sizeof(float)));
    MUST(p_cuMemcpyHtoD(dy, y.data(), n * sizeof(float)));
    MUST(p_cuModuleGetGlobal(&counter, &counter_size, module, "launches"));
    expect("size of a variable", counter_size == 4);
    MUST(p_cuMemsetD32(counter, 0, 1));

    // 1: an array of pointers to parameters. 2: one packed buffer. 3: the extensible form. 4: a kernel of a library.
    CUstream stream;
    MUST(p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    void *parameters[] = {&dx, &dy, &a, &length};
    MUST(p_cuStreamSynchronize(nullptr));
    MUST(p_cuLaunchKernel(axpy, (n + 127) / 128, 1, 1, 128, 1, 1, 0, stream, parameters, nullptr));
    struct {
        CUdeviceptr x, y;
        float a;
        unsigned n;
    } packed = {dx, dy, a, length};
    size_t packed_size = sizeof packed;
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &packed_size,
                     CU_LAUNCH_PARAM_END};
    MUST(p_cuLaunchKernel(axpy, (n + 63) / 64, 1, 1, 64, 1, 1, 0, stream, nullptr, extra));
    CUlaunchConfig config = {};
    config.gridDimX = (n + 255) / 256;
    config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1;
    config.blockDimX = 256;
    config.hStream = stream;
    MUST(p_cuLaunchKernelEx(&config, axpy, parameters, nullptr));
    CUlibrary lib;
    CUkernel kernel;
    MUST(p_cuLibraryLoadData(&lib, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    MUST(p_cuLibraryGetKernel(&kernel, lib, "axpy"));
    MUST(p_cuLaunchKernel((CUfunction)kernel, (n + 127) / 128, 1, 1, 128, 1, 1, 0, stream, parameters, nullptr));
    MUST(p_cuStreamSynchronize(stream));
    for (unsigned i = 0; i < n; i++)
        for (int k = 0; k < 4; k++) expected[i] = __builtin_fmaf(a, x[i], expected[i]);
    MUST(p_cuMemcpyDtoH(y.data(), dy, n * sizeof(float)));
    MUST(p_cuMemcpyDtoH(&launches, counter, sizeof launches));
    expect("four launches", memcmp(y.data(), expected.data(), n * sizeof(float)) == 0);
    expect("a variable of the module counts its own launches", launches == 3);
    expect("a block of 2048",
           p_cuLaunchKernel(axpy, 1, 1, 1, 2048, 1, 1, 0, stream, parameters, nullptr) == CUDA_ERROR_INVALID_VALUE);
    expect("a grid of 0",
           p_cuLaunchKernel(axpy, 0, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr) == CUDA_ERROR_INVALID_VALUE);

    // Values written in the order of a stream, to device memory and to pinned memory.
    unsigned words[4] = {};
    unsigned long long *flag;
    CUdeviceptr values;
    MUST(p_cuMemAlloc(&values, sizeof words));
    MUST(p_cuMemsetD32(values, 7, 4));
    // The other stream does not wait for stream 0.
    MUST(p_cuStreamSynchronize(nullptr));
    MUST(p_cuStreamWriteValue32(stream, values, 0xdead0001u, CU_STREAM_WRITE_VALUE_DEFAULT));
    MUST(p_cuStreamWriteValue64(stream, values + 8, 0x1122334455667788ull, CU_STREAM_WRITE_VALUE_DEFAULT));
    MUST(p_cuMemHostAlloc((void **)&flag, sizeof *flag, 0));
    *flag = 0;
    // Some transports map no host memory.
    int mapped;
    MUST(p_cuDeviceGetAttribute(&mapped, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, device));
    if (mapped)
        MUST(p_cuStreamWriteValue64(stream, (CUdeviceptr)flag, 0x99aabbccddeeff00ull, CU_STREAM_WRITE_VALUE_DEFAULT));
    MUST(p_cuStreamSynchronize(stream));
    MUST(p_cuMemcpyDtoH(words, values, sizeof words));
    expect("values of 4 and 8 bytes",
           words[0] == 0xdead0001u && words[1] == 7 && words[2] == 0x55667788u && words[3] == 0x11223344u);
    expect("a value in pinned memory", !mapped || *flag == 0x99aabbccddeeff00ull);
    MUST(p_cuMemFreeHost(flag));
    MUST(p_cuMemFree(values));

    // cuBLAS keeps a workspace for each stream, which it names by two functions of an export table.
    const unsigned char uuid[] = {0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48,
                                  0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2};
    const void *tools;
    MUST(p_cuGetExportTable(&tools, (const CUuuid *)uuid));
    const auto slots = (void *const *)tools;
    const auto object_of = (CUresult(*)(CUcontext, CUstream, void **, unsigned))slots[51];
    const auto id_of = (CUresult(*)(CUcontext, void *, unsigned long long *))slots[39];
    int different = 0;
    for (CUstream each : {CUstream(nullptr), CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, stream}) {
        void *object;
        unsigned long long id = 0, documented = 0;
        MUST(object_of(primary, each, &object, each == CU_STREAM_PER_THREAD));
        MUST(id_of(primary, object, &id));
        MUST(p_cuStreamGetId(each, &documented));
        different += id != documented;
    }
    expect("a library finds the id of each stream", different == 0);

    // A context of our own beside the primary one.
    MUST(p_cuCtxCreate(&own, 0, device));
    MUST(p_cuCtxGetCurrent(&current));
    expect("a new context is current", own != nullptr && own != primary && current == own);
    CUdeviceptr there;
    unsigned value = 0;
    MUST(p_cuMemAlloc(&there, 64));
    MUST(p_cuMemsetD32(there, 0xabcd1234u, 16));
    MUST(p_cuMemcpyDtoH(&value, there + 60, 4));
    expect("memory of a new context", value == 0xabcd1234u);
    MUST(p_cuMemFree(there));
    MUST(p_cuCtxDestroy(own));

    MUST(p_cuCtxSetCurrent(primary));
    MUST(p_cuLibraryUnload(lib));
    MUST(p_cuStreamDestroy(stream));
    MUST(p_cuMemFree(dx));
    MUST(p_cuMemFree(dy));
    MUST(p_cuModuleUnload(module));
    MUST(p_cuDevicePrimaryCtxRelease(device));
    // A reset takes all retains back.
    MUST(p_cuDevicePrimaryCtxRetain(&primary, device));
    MUST(p_cuDevicePrimaryCtxReset(device));
    printf("a release after a reset: %d\n", (int)p_cuDevicePrimaryCtxRelease(device));
    printf("checksum %016llx\n", (unsigned long long)checksum(y.data(), n * sizeof(float)));
    return verdict(wrong == 0);
}

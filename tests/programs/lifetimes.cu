// Lifetimes: work of a stream that was destroyed, contexts that are destroyed while current elsewhere, variables of
// a library in one context and another, pinned memory of every size, and calls that must not wait for each other.
#include "check.h"
#include <atomic>
#include <cuda.h>
#include <cstring>
#include <dlfcn.h>
#include <thread>

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 variable = 7;
.visible .entry await(.param .u64 flag, .param .u64 done)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [flag];
    ld.param.u64 %rd2, [done];
again:
    ld.volatile.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 0;
    @%p1 bra again;
    st.volatile.global.u32 [%rd2], %r1;
    ret;
}
)";

#define TEXT_OF(name) #name
#define NAME(name) TEXT_OF(name)
static void *library_handle;
#define EXPORTED(name) static decltype(&name) p_##name
EXPORTED(cuInit);
// By its version: CUDA 13 changed the meaning of the plain name.
static CUresult (*p_cuCtxCreate_v2)(CUcontext *, unsigned, CUdevice);
EXPORTED(cuCtxDestroy);
EXPORTED(cuCtxSetCurrent);
EXPORTED(cuCtxSynchronize);
EXPORTED(cuModuleLoadData);
EXPORTED(cuModuleGetFunction);
EXPORTED(cuLibraryLoadData);
EXPORTED(cuLibraryGetGlobal);
EXPORTED(cuLaunchKernel);
EXPORTED(cuStreamCreate);
EXPORTED(cuStreamDestroy);
EXPORTED(cuStreamSynchronize);
EXPORTED(cuStreamQuery);
EXPORTED(cuStreamWaitEvent);
EXPORTED(cuEventCreate);
EXPORTED(cuEventDestroy);
EXPORTED(cuEventRecordWithFlags);
EXPORTED(cuMemAlloc);
EXPORTED(cuMemFree);
EXPORTED(cuMemHostAlloc);
EXPORTED(cuMemFreeHost);
EXPORTED(cuMemcpy);
EXPORTED(cuMemcpyHtoD);
EXPORTED(cuMemcpyDtoH);
EXPORTED(cuMemcpyDtoD);
EXPORTED(cuPointerGetAttribute);
EXPORTED(cuFuncSetAttribute);
EXPORTED(cuOccupancyMaxActiveBlocksPerMultiprocessor);
#define FIND(name) p_##name = (decltype(&name))dlsym(library_handle, NAME(name))

static int wrong = 0;
static void expect(const char *what, bool good) {
    printf("%-64s %s\n", what, good ? "ok" : "WRONG");
    fflush(stdout);
    wrong += !good;
}
static void must(const char *what, CUresult result) {
    if (result == CUDA_SUCCESS) return;
    printf("%s: %d\nFAIL\n", what, (int)result);
    exit(1);
}
#define MUST(call) must(#call, call)

static CUfunction await_flag;
static volatile unsigned *flag, *done;

static void launch_await(CUstream stream) {
    void *a = (void *)flag, *b = (void *)done;
    void *parameters[] = {&a, &b};
    *flag = *done = 0;
    MUST(p_cuLaunchKernel(await_flag, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
}

// Releases the kernel after a while.
static std::thread release() {
    return std::thread([] {
        timespec pause = {0, 50000000};
        nanosleep(&pause, nullptr);
        *flag = 1;
    });
}

int main() {
    library_handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library_handle) return verdict(false);
    FIND(cuInit);
    p_cuCtxCreate_v2 = (decltype(p_cuCtxCreate_v2))dlsym(library_handle, "cuCtxCreate_v2");
    FIND(cuCtxDestroy);
    FIND(cuCtxSetCurrent);
    FIND(cuCtxSynchronize);
    FIND(cuModuleLoadData);
    FIND(cuModuleGetFunction);
    FIND(cuLibraryLoadData);
    FIND(cuLibraryGetGlobal);
    FIND(cuLaunchKernel);
    FIND(cuStreamCreate);
    FIND(cuStreamDestroy);
    FIND(cuStreamSynchronize);
    FIND(cuStreamQuery);
    FIND(cuStreamWaitEvent);
    FIND(cuEventCreate);
    FIND(cuEventDestroy);
    FIND(cuEventRecordWithFlags);
    FIND(cuMemAlloc);
    FIND(cuMemFree);
    FIND(cuMemHostAlloc);
    FIND(cuMemFreeHost);
    FIND(cuMemcpy);
    FIND(cuMemcpyHtoD);
    FIND(cuMemcpyDtoH);
    FIND(cuMemcpyDtoD);
    FIND(cuPointerGetAttribute);
    FIND(cuFuncSetAttribute);
    FIND(cuOccupancyMaxActiveBlocksPerMultiprocessor);

    MUST(p_cuInit(0));
    CUcontext first, second;
    MUST(p_cuCtxCreate_v2(&first, 0, 0));
    MUST(p_cuMemHostAlloc((void **)&flag, 4096, CU_MEMHOSTALLOC_PORTABLE));
    done = flag + 64;
    CUmodule module;
    MUST(p_cuModuleLoadData(&module, PTX));
    MUST(p_cuModuleGetFunction(&await_flag, module, "await"));

    // A stream that is destroyed with work on it: the work still belongs to the context.
    CUstream stream;
    MUST(p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    launch_await(stream);
    std::thread releasing = release();
    MUST(p_cuStreamDestroy(stream));
    expect("a destroyed stream is no handle", p_cuStreamQuery(stream) != CUDA_SUCCESS);
    MUST(p_cuCtxSynchronize());
    expect("the context waits for work of a destroyed stream", *done == 1);
    releasing.join();

    MUST(p_cuStreamCreate(&stream, CU_STREAM_DEFAULT));
    launch_await(stream);
    releasing = release();
    MUST(p_cuStreamDestroy(stream));
    MUST(p_cuStreamSynchronize(nullptr));
    expect("so does the legacy stream", *done == 1);
    releasing.join();

    // Copies between host buffers are ordered, too.
    unsigned *copy;
    MUST(p_cuMemHostAlloc((void **)&copy, 4096, 0));
    MUST(p_cuStreamCreate(&stream, CU_STREAM_DEFAULT));
    launch_await(stream);
    releasing = release();
    MUST(p_cuMemcpy((CUdeviceptr)copy, (CUdeviceptr)done, 4));
    expect("a copy in the legacy stream waits for blocking streams", *copy == 1);
    releasing.join();
    MUST(p_cuStreamDestroy(stream));

    // Pinned memory is memory that a device reaches, in every copy function.
    CUdeviceptr device;
    MUST(p_cuMemAlloc(&device, 4096));
    unsigned value = 41;
    expect("into pinned memory by its device address", p_cuMemcpyHtoD((CUdeviceptr)copy, &value, 4) == CUDA_SUCCESS &&
                                                           *copy == 41);
    expect("from pinned to device memory as device addresses",
           p_cuMemcpyDtoD(device, (CUdeviceptr)copy, 4) == CUDA_SUCCESS);
    value = 0;
    MUST(p_cuMemcpyDtoH(&value, device, 4));
    expect("and it arrives", value == 41);

    // A later buffer at the same address is a different one.
    unsigned long long identity = 0, later = 0;
    MUST(p_cuPointerGetAttribute(&identity, CU_POINTER_ATTRIBUTE_BUFFER_ID, device));
    MUST(p_cuMemFree(device));
    MUST(p_cuMemAlloc(&device, 4096));
    MUST(p_cuPointerGetAttribute(&later, CU_POINTER_ATTRIBUTE_BUFFER_ID, device));
    expect("a buffer's id is never given again", identity != later);

    // Events outside graphs.
    CUevent event;
    MUST(p_cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    MUST(p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    launch_await(stream);
    expect("an event of a graph", p_cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_EXTERNAL) == CUDA_ERROR_ILLEGAL_STATE);
    MUST(p_cuEventRecordWithFlags(event, stream, 0));
    expect("a wait of a graph", p_cuStreamWaitEvent(nullptr, event, CU_EVENT_WAIT_EXTERNAL) == CUDA_ERROR_ILLEGAL_STATE);
    *flag = 1;
    MUST(p_cuCtxSynchronize());
    MUST(p_cuEventDestroy(event));
    expect("an event that is gone", p_cuEventDestroy(event) == CUDA_ERROR_INVALID_HANDLE ||
                                        p_cuEventDestroy(event) == CUDA_ERROR_CONTEXT_IS_DESTROYED);

    // Other calls about a kernel go on while its launches wait for room on their stream.
    launch_await(stream);
    std::atomic<int> launched{0};
    std::thread launching([&] {
        MUST(p_cuCtxSetCurrent(first));
        void *a = (void *)flag, *b = (void *)done;
        void *parameters[] = {&a, &b};
        for (int i = 0; i < 600; i++) {
            MUST(p_cuLaunchKernel(await_flag, 1, 1, 1, 1, 1, 1, 0, stream, parameters, nullptr));
            launched++;
        }
    });
    timespec pause = {0, 300000000};
    nanosleep(&pause, nullptr);
    std::thread setting([&] {
        MUST(p_cuCtxSetCurrent(first));
        MUST(p_cuFuncSetAttribute(await_flag, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1024));
    });
    nanosleep(&pause, nullptr);
    int blocks = 0;
    MUST(p_cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, await_flag, 32, 0));
    *flag = 1;
    launching.join();
    setting.join();
    MUST(p_cuCtxSynchronize());
    expect("attributes are set and read while a stream is full", launched == 600 && blocks > 0);
    MUST(p_cuStreamDestroy(stream));

    // Pinned memory of sizes that are not powers of two.
    bool all = true;
    for (size_t megabytes : {33, 77, 300, 544, 600, 700}) {
        char *pinned = nullptr;
        all = all && p_cuMemHostAlloc((void **)&pinned, megabytes << 20, 0) == CUDA_SUCCESS;
        if (!pinned) break;
        pinned[0] = pinned[(megabytes << 20) - 1] = 1;
        all = all && p_cuMemFreeHost(pinned) == CUDA_SUCCESS;
    }
    expect("pinned memory of many sizes", all);
    void *impossible;
    expect("more pinned memory than there is",
           p_cuMemHostAlloc(&impossible, (size_t)1 << 44, 0) == CUDA_ERROR_OUT_OF_MEMORY);
    MUST(p_cuMemHostAlloc(&impossible, (size_t)40 << 20, 0));
    MUST(p_cuMemFreeHost(impossible));
    expect("is refused, and less is given", true);

    // A library's variable is a separate one in each context.
    CUlibrary library;
    MUST(p_cuLibraryLoadData(&library, PTX, nullptr, nullptr, 0, nullptr, nullptr, 0));
    CUdeviceptr here = 0, there = 0;
    size_t size = 0;
    MUST(p_cuLibraryGetGlobal(&here, &size, library, "variable"));
    value = 8;
    MUST(p_cuMemcpyHtoD(here, &value, 4));
    MUST(p_cuCtxCreate_v2(&second, 0, 0));
    MUST(p_cuLibraryGetGlobal(&there, &size, library, "variable"));
    MUST(p_cuMemcpyDtoH(&value, there, 4));
    expect("a library's variable in another context", here != there && value == 7);

    // A function belongs to its module's context.
    void *parameters[] = {&here, &there};
    CUresult refused = p_cuLaunchKernel(await_flag, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr);
    expect("a function in the wrong context", refused == CUDA_ERROR_INVALID_HANDLE || refused == CUDA_ERROR_INVALID_CONTEXT);
    expect("and nothing is broken by it", p_cuCtxSynchronize() == CUDA_SUCCESS);

    // A context that is destroyed with work on a destroyed stream, and while it is current on another thread.
    MUST(p_cuModuleLoadData(&module, PTX));
    MUST(p_cuModuleGetFunction(&await_flag, module, "await"));
    MUST(p_cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    launch_await(stream);
    MUST(p_cuStreamDestroy(stream));
    std::atomic<int> step{0};
    CUresult elsewhere = CUDA_SUCCESS;
    std::thread other([&] {
        MUST(p_cuCtxSetCurrent(second));
        step = 1;
        while (step != 2) sched_yield();
        elsewhere = p_cuCtxSynchronize();
    });
    while (step != 1) sched_yield();
    *flag = 1;
    expect("a context goes, streams with work that were destroyed and all", p_cuCtxDestroy(second) == CUDA_SUCCESS);
    step = 2;
    other.join();
    expect("it is gone for the other thread", elsewhere == CUDA_ERROR_CONTEXT_IS_DESTROYED);

    MUST(p_cuCtxSetCurrent(first));
    MUST(p_cuLibraryGetGlobal(&here, &size, library, "variable"));
    MUST(p_cuMemcpyDtoH(&value, here, 4));
    expect("the first context is as it was", value == 8);
    MUST(p_cuCtxDestroy(first));
    return verdict(wrong == 0);
}

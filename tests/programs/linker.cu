// Links of PTX texts, from memory and from a file, with the compiler's logs, its time and its options; images that are linked or loaded
// with options.
#include "driver.h"
#include <cstring>
#include <string>
#include <unistd.h>

// Calls a function of another text, and adds a variable of another text.
static const char CALLER[] = R"(
.version 7.0
.target sm_80
.address_size 64
.extern .func (.param .b32 result) twice(.param .b32 value);
.extern .global .align 4 .u32 bias;
.func (.param .b32 result) own(.param .b32 value)
{
    .reg .b32 %r<3>;
    ld.param.u32 %r1, [value];
    add.u32 %r2, %r1, 1;
    st.param.b32 [result], %r2;
    ret;
}
.visible .entry run(.param .u64 to, .param .u32 value)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [to];
    ld.param.u32 %r1, [value];
    {
        .param .b32 argument;
        .param .b32 answer;
        st.param.b32 [argument], %r1;
        call.uni (answer), twice, (argument);
        ld.param.b32 %r2, [answer];
    }
    {
        .param .b32 argument;
        .param .b32 answer;
        st.param.b32 [argument], %r2;
        call.uni (answer), own, (argument);
        ld.param.b32 %r3, [answer];
    }
    ld.global.u32 %r4, [bias];
    add.u32 %r5, %r3, %r4;
    cvta.to.global.u64 %rd2, %rd1;
    st.global.u32 [%rd2], %r5;
    ret;
}
)";

// It has a function of the same name for itself.
static const char HELPER[] = R"(
.version 7.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 bias = 1000;
.func (.param .b32 result) own(.param .b32 value)
{
    .reg .b32 %r<3>;
    ld.param.u32 %r1, [value];
    shl.b32 %r2, %r1, 1;
    st.param.b32 [result], %r2;
    ret;
}
.visible .func (.param .b32 result) twice(.param .b32 value)
{
    .reg .b32 %r<3>;
    ld.param.u32 %r1, [value];
    {
        .param .b32 argument;
        .param .b32 answer;
        st.param.b32 [argument], %r1;
        call.uni (answer), own, (argument);
        ld.param.b32 %r2, [answer];
    }
    st.param.b32 [result], %r2;
    ret;
}
)";

static bool right = true;

static void row(const char *what, long long value, long long expected) {
    std::printf("%-52s %lld %s\n", what, value, value == expected ? "right" : "WRONG");
    right &= value == expected;
}

// The compiler's options of a load or a link: the time and both logs, and others that follow.
struct Report {
    char info[4096], error[4096];
    CUjit_option options[12];
    void *values[12];
    unsigned count = 0;

    Report() {
        memset(info, 'i', sizeof info);
        memset(error, 'e', sizeof error);
        add(CU_JIT_WALL_TIME, nullptr);
        add(CU_JIT_INFO_LOG_BUFFER, info);
        add(CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, (void *)sizeof info);
        add(CU_JIT_ERROR_LOG_BUFFER, error);
        add(CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, (void *)sizeof error);
    }
    void add(CUjit_option option, void *value) {
        options[count] = option;
        values[count++] = value;
    }
    float time() const {
        float time;
        memcpy(&time, &values[0], sizeof time);
        return time;
    }
    unsigned used(int which) const { return (unsigned)(size_t)values[which]; }
    // True if a log has content, is terminated and not longer than reported.
    bool logged() const { return used(4) > 0 && used(4) <= sizeof error && memchr(error, 0, sizeof error) && strlen(error) > 0 && strlen(error) <= used(4); }
    bool silent() const { return used(4) == 0 && memchr(error, 0, sizeof error) == error; }
};

// The element that the kernel computes.
static unsigned computed(CUmodule module, CUdeviceptr memory, unsigned value) {
    CUfunction run;
    unsigned result = 0;
    MUST(cuModuleGetFunction, &run, module, "run");
    void *parameters[] = {&memory, &value};
    MUST(cuLaunchKernel, run, 1, 1, 1, 1, 1, 1, 0, nullptr, parameters, nullptr);
    MUST(cuMemcpyDtoH, &result, memory, sizeof result);
    return result;
}

int main() {
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUlibrary library;
    CUlinkState link;
    CUdeviceptr memory;
    void *image = nullptr;
    size_t bytes = 0;
    MUST(cuInit, 0);
    MUST(cuDeviceGet, &device, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, device);
    MUST(cuCtxSetCurrent, context);
    MUST(cuMemAlloc, &memory, 64);

    // Two texts, one of them from a file.
    char path[] = "/tmp/linker-XXXXXX";
    int file = mkstemp(path);
    if (file < 0 || write(file, HELPER, strlen(HELPER)) != (ssize_t)strlen(HELPER)) {
        std::printf("cannot write a file\nFAIL\n");
        return 1;
    }
    Report report;
    report.add(CU_JIT_LOG_VERBOSE, (void *)1);
    MUST(cuLinkCreate, report.count, report.options, report.values, &link);
    MUST(cuLinkAddData, link, CU_JIT_INPUT_PTX, (void *)CALLER, sizeof CALLER, "caller", 0, nullptr, nullptr);
    MUST(cuLinkAddFile, link, CU_JIT_INPUT_PTX, path, 0, nullptr, nullptr);
    MUST(cuLinkComplete, link, &image, &bytes);
    close(file);
    unlink(path);
    row("time of the link is positive", report.time() > 0, 1);
    row("log of errors is empty", report.silent(), 1);
    row("log of information has content", report.used(2) > 0 && strlen(report.info) > 0, 1);
    row("image has bytes", image && bytes > 0, 1);
    // The image is as long as it states, and stays until the link ends.
    std::string copy((const char *)image, bytes);
    MUST(cuModuleLoadData, &module, copy.data());
    row("sum with a function and a variable of the other", computed(module, memory, 20), 1041);
    MUST(cuModuleUnload, module);
    MUST(cuModuleLoadData, &module, image);
    MUST(cuLinkDestroy, link);
    row("sum with a module that outlives its link", computed(module, memory, 21), 1043);
    MUST(cuModuleUnload, module);
    MUST(cuLibraryLoadData, &library, copy.data(), nullptr, nullptr, 0, nullptr, nullptr, 0);
    MUST(cuLibraryUnload, library);

    // A linked image may be an input of another link.
    if (undefined_too()) {
        MUST(cuLinkCreate, 0, nullptr, nullptr, &link);
        MUST(cuLinkAddData, link, CU_JIT_INPUT_CUBIN, (void *)copy.data(), copy.size(), "linked", 0, nullptr, nullptr);
        MUST(cuLinkComplete, link, &image, &bytes);
        MUST(cuModuleLoadData, &module, image);
        row("sum with an image that is linked again", computed(module, memory, 1), 1003);
        MUST(cuModuleUnload, module);
        MUST(cuLinkDestroy, link);
    }

    // Errors of inputs and of symbols, with a log that names them.
    Report refused;
    MUST(cuLinkCreate, refused.count, refused.options, refused.values, &link);
    row("text that is no PTX", CALL(cuLinkAddData, link, CU_JIT_INPUT_PTX, (void *)"nothing", 8, "broken", 0, nullptr, nullptr), CUDA_ERROR_INVALID_IMAGE);
    row("log has content", refused.logged(), 1);
    row("file that does not exist", CALL(cuLinkAddFile, link, CU_JIT_INPUT_PTX, "/nowhere/at/all", 0, nullptr, nullptr), CUDA_ERROR_FILE_NOT_FOUND);
    MUST(cuLinkDestroy, link);
    Report missing;
    MUST(cuLinkCreate, missing.count, missing.options, missing.values, &link);
    MUST(cuLinkAddData, link, CU_JIT_INPUT_PTX, (void *)CALLER, sizeof CALLER, "caller", 0, nullptr, nullptr);
    row("link without a definition fails", CALL(cuLinkComplete, link, &image, &bytes) != CUDA_SUCCESS, 1);
    row("log names the symbol", missing.logged() && (strstr(missing.error, "twice") || strstr(missing.error, "bias")), 1);
    MUST(cuLinkDestroy, link);
    Report repeated;
    MUST(cuLinkCreate, repeated.count, repeated.options, repeated.values, &link);
    MUST(cuLinkAddData, link, CU_JIT_INPUT_PTX, (void *)HELPER, sizeof HELPER, "one", 0, nullptr, nullptr);
    // A driver may find it at either call.
    CUresult second = CALL(cuLinkAddData, link, CU_JIT_INPUT_PTX, (void *)HELPER, sizeof HELPER, "two", 0, nullptr, nullptr);
    if (second == CUDA_SUCCESS) second = CALL(cuLinkComplete, link, &image, &bytes);
    row("link with two definitions fails", second != CUDA_SUCCESS, 1);
    row("log has content", repeated.logged(), 1);
    MUST(cuLinkDestroy, link);
    if (undefined_too()) row("link that was destroyed", CALL(cuLinkDestroy, nullptr), CUDA_ERROR_INVALID_HANDLE);

    // The same options for modules and libraries.
    Report loaded;
    loaded.add(CU_JIT_OPTIMIZATION_LEVEL, (void *)2);
    loaded.add(CU_JIT_GENERATE_LINE_INFO, (void *)1);
    loaded.add(CU_JIT_THREADS_PER_BLOCK, (void *)128);
    MUST(cuModuleLoadDataEx, &module, HELPER, loaded.count, loaded.options, loaded.values);
    row("time of a module is positive", loaded.time() > 0, 1);
    row("log of a module is empty", loaded.silent(), 1);
    MUST(cuModuleUnload, module);
    Report of_module, of_library;
    row("module that is no PTX", CALL(cuModuleLoadDataEx, &module, "nothing", of_module.count, of_module.options, of_module.values), CUDA_ERROR_INVALID_IMAGE);
    row("log has content", of_module.logged(), 1);
    const char *BROKEN = ".version 7.0\n.target sm_80\n.address_size 64\n.nonsense\n";
    row("library of broken PTX", CALL(cuLibraryLoadData, &library, BROKEN, of_library.options, of_library.values, of_library.count, nullptr, nullptr, 0), CUDA_ERROR_INVALID_PTX);
    row("log has content", of_library.logged(), 1);
    // A short buffer has a part of the log, and its NUL.
    char brief[8];
    memset(brief, 'x', sizeof brief);
    CUjit_option short_options[] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *short_values[] = {brief, (void *)5};
    row("module that is no PTX", CALL(cuModuleLoadDataEx, &module, "nothing", 2, short_options, short_values), CUDA_ERROR_INVALID_IMAGE);
    row("length of the short log", strnlen(brief, sizeof brief), 4);
    row("bytes behind the short log", brief[5] == 'x' && brief[6] == 'x' && brief[7] == 'x', 1);
    CUjit_option unknown = (CUjit_option)999;
    void *value = nullptr;
    row("option 999", CALL(cuModuleLoadDataEx, &module, HELPER, 1, &unknown, &value), CUDA_ERROR_INVALID_VALUE);

    MUST(cuMemFree, memory);
    MUST(cuDevicePrimaryCtxRelease, device);
    return verdict(right);
}

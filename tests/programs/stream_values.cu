// Streams that wait for values in memory and write them: every comparison, both widths, batches, and waits that another stream, a
// kernel or the program ends.
#include "driver.h"

static bool passed = true;

static void expect(const char *what, bool holds) {
    printf("%-44s %s\n", what, holds ? "yes" : "no");
    passed &= holds;
}

__global__ void store(volatile unsigned *to, unsigned value) { *to = value; }

static bool busy(cudaStream_t stream) { return cudaStreamQuery(stream) == cudaErrorNotReady; }

static CUstreamBatchMemOpParams wait_for(CUdeviceptr at, unsigned value, unsigned flags) {
    CUstreamBatchMemOpParams operation = {};
    operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    operation.waitValue.address = at;
    operation.waitValue.value = value;
    operation.waitValue.flags = flags;
    return operation;
}

static CUstreamBatchMemOpParams write_wide(CUdeviceptr to, unsigned long long value) {
    CUstreamBatchMemOpParams operation = {};
    operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
    operation.writeValue.address = to;
    operation.writeValue.value64 = value;
    return operation;
}

int main() {
    cudaStream_t held, open;
    CUdeviceptr words;
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamCreateWithFlags(&held, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&open, cudaStreamNonBlocking));
    MUST(cuMemAlloc, &words, 4096);
    auto clear = [&] {
        MUST(cuMemsetD8, words, 0, 4096);
        CHECK(cudaDeviceSynchronize());
    };
    auto word = [&](int index) {
        unsigned value = 0;
        MUST(cuMemcpyDtoHAsync, &value, words + 4 * index, 4, open);
        CHECK(cudaStreamSynchronize(open));
        return value;
    };
    auto attribute = [](CUdevice_attribute which) {
        int value = 0;
        MUST(cuDeviceGetAttribute, &value, which, 0);
        return value;
    };
    const int wide = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS);
    const int has_nor = attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR);

    // The comparisons: a value that keeps the stream, and one that frees it.
    struct Case {
        const char *name;
        unsigned flags, first, value, freeing;
    } cases[] = {
        {"at least", CU_STREAM_WAIT_VALUE_GEQ, 4, 5, 6},
        {"at least, around the end", CU_STREAM_WAIT_VALUE_GEQ, 0xfffffff0u, 2, 3},
        {"equal", CU_STREAM_WAIT_VALUE_EQ, 6, 5, 5},
        {"and", CU_STREAM_WAIT_VALUE_AND, 5, 2, 7},
        {"nor", CU_STREAM_WAIT_VALUE_NOR, 0xfffffff0u, 0x0f, 0x7fffffffu},
    };
    for (const Case &each : cases) {
        if (each.flags == CU_STREAM_WAIT_VALUE_NOR && !has_nor) {
            expect(each.name, CALL(cuStreamWaitValue32, held, words, 0, each.flags) == CUDA_ERROR_NOT_SUPPORTED);
            continue;
        }
        clear();
        MUST(cuStreamWriteValue32, open, words, each.first, 0);
        CHECK(cudaStreamSynchronize(open));
        MUST(cuStreamWaitValue32, held, words, each.value, each.flags);
        MUST(cuStreamWriteValue32, held, words + 4, 77, 0);
        bool before = busy(held) && word(1) == 0;
        MUST(cuStreamWriteValue32, open, words, each.freeing, 0);
        CHECK(cudaStreamSynchronize(held));
        expect(each.name, before && word(1) == 77);
    }

    // A value that is there already holds nothing.
    clear();
    MUST(cuStreamWaitValue32, held, words, 0, CU_STREAM_WAIT_VALUE_EQ);
    CHECK(cudaStreamSynchronize(held));

    // Values of 8 bytes: all of them count.
    if (wide) {
        MUST(cuStreamWaitValue64, held, words, 1ull << 32, CU_STREAM_WAIT_VALUE_GEQ);
        MUST(cuStreamWriteValue32, open, words, 0xffffffffu, 0);
        CHECK(cudaStreamSynchronize(open));
        bool before = busy(held);
        MUST(cuStreamWriteValue64, open, words, 1ull << 32, 0);
        CHECK(cudaStreamSynchronize(held));
        expect("8 bytes", before);
    } else {
        expect("8 bytes", CALL(cuStreamWaitValue64, held, words, 0, 0) == CUDA_ERROR_NOT_SUPPORTED);
    }

    // A kernel of another stream ends the wait, and work of all kinds stands behind it. A driver may load a kernel at its first launch,
    // which waits for all streams: it is launched once before.
    store<<<1, 1, 0, open>>>((unsigned *)words, 0);
    clear();
    cudaEvent_t behind;
    CHECK(cudaEventCreateWithFlags(&behind, cudaEventDisableTiming));
    MUST(cuStreamWaitValue32, held, words, 9, CU_STREAM_WAIT_VALUE_EQ);
    for (int i = 0; i < 300; i++) store<<<1, 1, 0, held>>>((unsigned *)words + 2, i);
    CHECK(cudaEventRecord(behind, held));
    bool before = cudaEventQuery(behind) == cudaErrorNotReady && word(2) == 0;
    store<<<1, 1, 0, open>>>((unsigned *)words, 9);
    CHECK(cudaEventSynchronize(behind));
    expect("a kernel ends a wait", before && word(2) == 299);

    // A batch is done in its order; a copy of its list is what counts.
    clear();
    CUstreamBatchMemOpParams list[4] = {wait_for(words, 1, 0), write_wide(words + 8, 0x1122334455667788ull),
                                        wait_for(words + 4, 1, 0), write_wide(words + 16, 5)};
    if (wide) {
        MUST(cuStreamBatchMemOp, held, 4, list, 0);
        for (auto &operation : list) operation = {};
        before = busy(held) && word(2) == 0;
        MUST(cuStreamWriteValue32, open, words, 1, 0);
        MUST(cuStreamWaitValue32, open, words + 8, 0x55667788u, CU_STREAM_WAIT_VALUE_EQ);
        before &= word(2) == 0x55667788u && busy(held) && word(4) == 0;
        MUST(cuStreamWriteValue32, open, words + 4, 1, 0);
        CHECK(cudaStreamSynchronize(held));
        expect("a batch", before && word(3) == 0x11223344u && word(4) == 5);
    } else {
        expect("a batch", CALL(cuStreamBatchMemOp, held, 4, list, 0) == CUDA_ERROR_NOT_SUPPORTED);
    }
    CUstreamBatchMemOpParams barrier = {};
    barrier.memoryBarrier.operation = CU_STREAM_MEM_OP_BARRIER;
    barrier.memoryBarrier.flags = CU_STREAM_MEMORY_BARRIER_TYPE_GPU;
    MUST(cuStreamBatchMemOp, held, 1, &barrier, 0);
    CHECK(cudaStreamSynchronize(held));

    // A batch with one bad operation, whose address is misaligned, does nothing.
    if (undefined_too()) {
        clear();
        CUstreamBatchMemOpParams bad[2] = {write_wide(words, 1), write_wide(words + 4, 2)};
        bool refused = CALL(cuStreamBatchMemOp, held, 2, bad, 0) != CUDA_SUCCESS;
        CHECK(cudaStreamSynchronize(held));
        expect("a refused batch does nothing", refused && word(0) == 0);
    }

    // Pinned memory: the program ends the wait, and a write behind it does not hold up the program.
    if (attribute(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY)) {
        volatile unsigned *flags;
        CHECK(cudaHostAlloc((void **)&flags, 64, cudaHostAllocMapped));
        flags[0] = flags[1] = 0;
        CUdeviceptr at;
        MUST(cuMemHostGetDevicePointer, &at, (void *)flags, 0);
        MUST(cuStreamWaitValue32, held, at, 3, CU_STREAM_WAIT_VALUE_EQ);
        MUST(cuStreamWriteValue32, held, at + 4, 4, 0);
        before = busy(held) && flags[1] == 0;
        flags[0] = 3;
        CHECK(cudaStreamSynchronize(held));
        expect("the program ends a wait", before && flags[1] == 4);
        CHECK(cudaFreeHost((void *)flags));
    } else {
        expect("the program ends a wait", true);
    }

    // Managed memory is not for this.
    unsigned *managed;
    if (undefined_too() && attribute(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY)) {
        CHECK(cudaMallocManaged(&managed, 64));
        expect("managed memory is refused",
               CALL(cuStreamWaitValue32, held, (CUdeviceptr)managed, 0, 0) == CUDA_ERROR_INVALID_VALUE);
        CHECK(cudaFree(managed));
    }
    MUST(cuMemFree, words);
    return verdict(passed);
}

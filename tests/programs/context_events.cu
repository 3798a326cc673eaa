// Events of all work of a context, and contexts that wait for events: streams of every kind, destroyed and later ones included.
#include "driver.h"
#include <thread>
#include <unistd.h>

static bool passed = true;

static void expect(const char *what, bool holds) {
    printf("%-44s %s\n", what, holds ? "yes" : "no");
    passed &= holds;
}

static CUdeviceptr words;

static unsigned word(CUstream stream, int index) {
    unsigned value = 0;
    MUST(cuMemcpyDtoHAsync, &value, words + 4 * index, 4, stream);
    MUST(cuStreamSynchronize, stream);
    return value;
}

int main() {
    CUcontext context, other;
    CUevent event, foreign;
    CUstream streams[3], gone, beside, free;
    MUST(cuInit, 0);
    MUST(cuCtxCreate, &other, nullptr, 0, 0);
    MUST(cuEventCreate, &foreign, CU_EVENT_DISABLE_TIMING);
    for (CUstream *stream : {&beside, &free}) MUST(cuStreamCreate, stream, CU_STREAM_NON_BLOCKING);
    // Memory of the other context, so that a copy of it waits for no stream of this one.
    MUST(cuMemAlloc, &words, 64);
    MUST(cuCtxCreate, &context, nullptr, 0, 0);
    MUST(cuEventCreate, &event, CU_EVENT_DISABLE_TIMING);
    for (CUstream &stream : streams) MUST(cuStreamCreate, &stream, &stream == streams ? 0 : CU_STREAM_NON_BLOCKING);
    MUST(cuStreamCreate, &gone, CU_STREAM_NON_BLOCKING);
    auto clear = [&] {
        for (int i = 0; i < 16; i++) MUST(cuStreamWriteValue32, beside, words + 4 * i, 0, 0);
        MUST(cuStreamSynchronize, beside);
    };

    // An idle context.
    MUST(cuCtxRecordEvent, context, event);
    MUST(cuEventSynchronize, event);

    // Each stream holds the event by itself.
    clear();
    for (int i = 0; i < 3; i++) MUST(cuStreamWaitValue32, streams[i], words + 4 * i, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuCtxRecordEvent, context, event);
    // Work behind the record does not count.
    MUST(cuStreamWaitValue32, streams[2], words + 12, 1, CU_STREAM_WAIT_VALUE_EQ);
    bool held = true;
    for (int i = 0; i < 3; i++) {
        held &= CALL(cuEventQuery, event) == CUDA_ERROR_NOT_READY;
        MUST(cuStreamWriteValue32, beside, words + 4 * i, 1, 0);
        MUST(cuStreamSynchronize, beside);
    }
    MUST(cuEventSynchronize, event);
    expect("an event holds for all streams", held && CALL(cuStreamQuery, streams[2]) == CUDA_ERROR_NOT_READY);
    MUST(cuStreamWriteValue32, beside, words + 12, 1, 0);
    MUST(cuStreamSynchronize, streams[2]);

    // A destroyed stream whose work goes on.
    clear();
    MUST(cuStreamWaitValue32, gone, words, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuStreamDestroy, gone);
    MUST(cuCtxRecordEvent, context, event);
    held = CALL(cuEventQuery, event) == CUDA_ERROR_NOT_READY;
    MUST(cuStreamWriteValue32, beside, words, 1, 0);
    MUST(cuEventSynchronize, event);
    expect("a destroyed stream holds its event", held);

    // All streams wait for an event of another context, those that are made later, too. A driver may have that call wait as well.
    clear();
    MUST(cuStreamWaitValue32, beside, words, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, foreign, beside);
    MUST(cuCtxWaitEvent, context, foreign);
    for (int i = 0; i < 3; i++) MUST(cuStreamWriteValue32, streams[i], words + 4 + 4 * i, 7, 0);
    held = true;
    for (CUstream stream : streams) held &= CALL(cuStreamQuery, stream) == CUDA_ERROR_NOT_READY;
    // What becomes of the event does not matter to the waits.
    MUST(cuEventDestroy, foreign);
    std::thread making([&] {
        CUstream later;
        MUST(cuCtxSetCurrent, context);
        MUST(cuStreamCreate, &later, CU_STREAM_NON_BLOCKING);
        MUST(cuStreamWriteValue32, later, words + 16, 7, 0);
        MUST(cuStreamSynchronize, later);
    });
    usleep(50000);
    MUST(cuCtxSetCurrent, other);
    for (int i = 1; i <= 4; i++) held &= word(free, i) == 0;
    MUST(cuStreamWriteValue32, free, words, 1, 0);
    making.join();
    MUST(cuCtxSetCurrent, context);
    for (CUstream stream : streams) MUST(cuStreamSynchronize, stream);
    MUST(cuCtxSetCurrent, other);
    for (int i = 1; i <= 4; i++) held &= word(free, i) == 7;
    expect("all streams wait", held);

    // Once the wait is over, new streams do not wait; and an event that was never recorded holds no stream.
    MUST(cuCtxSetCurrent, context);
    CUevent fresh;
    MUST(cuEventCreate, &fresh, CU_EVENT_DISABLE_TIMING);
    MUST(cuCtxWaitEvent, context, fresh);
    CUstream last;
    MUST(cuStreamCreate, &last, 0);
    MUST(cuStreamSynchronize, last);
    MUST(cuStreamQuery, last);

    // Streams of the program and of threads begin and end meanwhile.
    CUdeviceptr large;
    MUST(cuMemAlloc, &large, 4 << 20);
    unsigned failures = 0;
    auto create = [&] {
        MUST(cuCtxSetCurrent, context);
        for (int i = 0; i < 500; i++) {
            CUstream brief;
            MUST(cuStreamCreate, &brief, CU_STREAM_NON_BLOCKING);
            MUST(cuStreamDestroy, brief);
        }
    };
    std::thread creators[] = {std::thread(create), std::thread(create)};
    std::thread starter([&] {
        for (int i = 0; i < 100; i++)
            std::thread([&] {
                MUST(cuCtxSetCurrent, context);
                MUST(cuMemsetD8Async, large, 0, 4, CU_STREAM_PER_THREAD);
                MUST(cuStreamSynchronize, CU_STREAM_PER_THREAD);
            }).join();
    });
    for (int i = 0; i < 1000; i++) {
        MUST(cuMemsetD8Async, large, i & 255, 4 << 20, streams[1]);
        MUST(cuEventRecord, event, streams[1]);
        failures += CALL(cuCtxWaitEvent, context, event) != CUDA_SUCCESS;
    }
    starter.join();
    for (std::thread &creator : creators) creator.join();
    MUST(cuCtxSynchronize);
    MUST(cuMemFree, large);
    expect("streams begin and end meanwhile", failures == 0);

    // Not while a stream of the context captures.
    MUST(cuStreamBeginCapture, streams[1], CU_STREAM_CAPTURE_MODE_RELAXED);
    CUgraph graph = nullptr;
    expect("no record in a capture", CALL(cuCtxRecordEvent, context, event) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    expect("the capture is invalid", CALL(cuStreamEndCapture, streams[1], &graph) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    expect("an event of another context", CALL(cuCtxRecordEvent, other, event) == CUDA_ERROR_INVALID_HANDLE);
    MUST(cuMemFree, words);
    return verdict(passed);
}

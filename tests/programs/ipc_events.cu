// Events that two processes share: the program runs itself a second time, and each waits for recordings of the other.
#include "driver.h"
#include <csignal>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

static bool passed = true;

static void expect(const char *what, bool good) {
    printf("%-52s %s\n", what, good ? "ok" : "WRONG");
    passed &= good;
}

// What the two processes exchange.
struct Names {
    CUipcMemHandle memory;
    CUipcEventHandle early, late, both;
};

static int input, output;

static void tell(char step) {
    if (write(output, &step, 1) == 1) return;
    int status;
    if (wait(&status) > 0) printf("the other process ended with %x\n", status);
    fflush(stdout);
    _exit(90);
}
static bool told(char step) {
    char got = 0;
    return read(input, &got, 1) == 1 && got == step;
}

// A word of the shared memory that frees a stream.
static void store(CUstream stream, CUdeviceptr words, int index) {
    MUST(cuStreamWriteValue32, stream, words + 4 * index, 1, 0);
    MUST(cuStreamSynchronize, stream);
}

static CUresult query(CUevent event) { return CALL(cuEventQuery, event); }

// The other process. Its exit status is the number of its last step.
static int other() {
    Names names;
    CUcontext context;
    CUdeviceptr words;
    CUevent early, late, again, own, both, twice;
    CUstream waits, free;
    if (read(input, &names, sizeof names) != sizeof names) return 2;
    MUST(cuInit, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, 0);
    MUST(cuCtxSetCurrent, context);
    MUST(cuStreamCreate, &waits, CU_STREAM_NON_BLOCKING);
    MUST(cuStreamCreate, &free, CU_STREAM_NON_BLOCKING);
    MUST(cuIpcOpenMemHandle, &words, names.memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    MUST(cuIpcOpenEventHandle, &early, names.early);
    MUST(cuIpcOpenEventHandle, &late, names.late);
    MUST(cuIpcOpenEventHandle, &again, names.late);
    for (CUevent *event : {&both, &twice}) MUST(cuIpcOpenEventHandle, event, names.both);
    if (query(early) != CUDA_ERROR_NOT_READY || query(late) != CUDA_ERROR_NOT_READY) return 3;
    if (query(again) != CUDA_ERROR_NOT_READY) return 4;
    float time;
    if (CALL(cuEventElapsedTime, &time, early, late) == CUDA_SUCCESS) return 5;
    if (undefined_too()) {
        CUipcEventHandle foreign, forged = names.late;
        if (CALL(cuIpcGetEventHandle, &foreign, late) != CUDA_ERROR_INVALID_VALUE) return 16;
        forged.reserved[30] ^= 1;
        if (CALL(cuIpcOpenEventHandle, &own, forged) == CUDA_SUCCESS) return 6;
        memcpy(&forged, &names.memory, sizeof forged);
        if (CALL(cuIpcOpenEventHandle, &own, forged) == CUDA_SUCCESS) return 7;
        memset(&forged, 0, sizeof forged);
        if (CALL(cuIpcOpenEventHandle, &own, forged) == CUDA_SUCCESS) return 8;
    }

    // A stream here waits for both.
    MUST(cuStreamWaitEvent, waits, early, 0);
    MUST(cuStreamWaitEvent, waits, late, 0);
    MUST(cuStreamWriteValue32, waits, words + 4 * 8, 5, 0);
    if (CALL(cuStreamQuery, waits) != CUDA_ERROR_NOT_READY) return 9;
    tell('a');
    MUST(cuStreamSynchronize, waits);
    if (query(early) != CUDA_SUCCESS || query(late) != CUDA_SUCCESS) return 10;
    MUST(cuEventSynchronize, late);
    MUST(cuEventDestroy, again);

    // A recording of this process, on which the other waits.
    MUST(cuStreamWaitValue32, waits, words + 4 * 2, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, late, waits);
    MUST(cuCtxRecordEvent, context, early);
    if (query(late) != CUDA_ERROR_NOT_READY) return 11;
    tell('b');
    if (!told('c')) return 12;
    store(free, words, 2);
    MUST(cuEventSynchronize, late);
    MUST(cuEventSynchronize, early);

    // The same event is recorded here while a recording of the other process is not reached, and here twice in reverse order.
    if (!told('e')) return 17;
    MUST(cuEventRecord, both, free);
    MUST(cuStreamSynchronize, free);
    if (query(both) != CUDA_SUCCESS) return 18;
    tell('f');
    if (!told('g')) return 19;
    MUST(cuEventRecord, twice, free);
    MUST(cuStreamWaitValue32, waits, words + 4 * 5, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, both, waits);
    MUST(cuEventRecord, twice, free);
    store(free, words, 5);
    MUST(cuStreamSynchronize, waits);
    if (query(both) != CUDA_SUCCESS || query(twice) != CUDA_SUCCESS) return 20;
    MUST(cuEventDestroy, twice);

    // An event of this process, which ends while its own stream waits for something that never comes.
    MUST(cuEventCreate, &own, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    MUST(cuEventRecord, own, free);
    MUST(cuStreamSynchronize, free);
    CUipcEventHandle handle;
    MUST(cuIpcGetEventHandle, &handle, own);
    if (write(output, &handle, sizeof handle) != sizeof handle) return 13;
    if (!told('d')) return 14;
    MUST(cuStreamWaitEvent, waits, late, 0);
    if (CALL(cuStreamQuery, waits) != CUDA_ERROR_NOT_READY) return 15;
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc == 4 && strcmp(argv[1], "other") == 0) {
        input = atoi(argv[2]), output = atoi(argv[3]);
        return other();
    }
    signal(SIGPIPE, SIG_IGN);
    int there[2], back[2];
    if (pipe(there) != 0 || pipe(back) != 0) return 1;
    pid_t child = fork();
    if (child == 0) {
        close(there[1]), close(back[0]);
        char numbers[2][16];
        snprintf(numbers[0], 16, "%d", there[0]), snprintf(numbers[1], 16, "%d", back[1]);
        execl("/proc/self/exe", argv[0], "other", numbers[0], numbers[1], (char *)nullptr);
        _exit(127);
    }
    close(there[0]), close(back[1]);
    input = back[0], output = there[1];
    CUcontext context;
    CUstream held, waits, free;
    CUdeviceptr words;
    CUevent early, late, plain, timed, own, both;
    Names names;
    MUST(cuInit, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, 0);
    MUST(cuCtxSetCurrent, context);
    int supported;
    MUST(cuDeviceGetAttribute, &supported, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, 0);
    if (!supported) {
        kill(child, SIGKILL);
        printf("events are not shared\n");
        return verdict(true);
    }
    for (CUstream *stream : {&held, &waits, &free}) MUST(cuStreamCreate, stream, CU_STREAM_NON_BLOCKING);
    MUST(cuMemAlloc, &words, 256);
    MUST(cuMemsetD8, words, 0, 256);
    MUST(cuCtxSynchronize);
    expect("an event with times is not for this",
           CALL(cuEventCreate, &timed, CU_EVENT_INTERPROCESS) == CUDA_ERROR_INVALID_VALUE);
    MUST(cuEventCreate, &plain, CU_EVENT_DISABLE_TIMING);
    // Warp takes the handle also of an event that is refused, from memory that it did not initialise, and expects zeros.
    CUipcEventHandle refused;
    memset(&refused, 0xff, sizeof refused);
    expect("a plain event has no handle", CALL(cuIpcGetEventHandle, &refused, plain) == CUDA_ERROR_INVALID_HANDLE);
    const CUipcEventHandle zeros = {};
    if (undefined_too()) expect("its handle is cleared", memcmp(&refused, &zeros, sizeof refused) == 0);
    for (CUevent *event : {&early, &late, &both})
        MUST(cuEventCreate, event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);

    // One is recorded before it has a handle, the other one afterwards.
    MUST(cuStreamWaitValue32, held, words, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, early, held);
    MUST(cuIpcGetMemHandle, &names.memory, words);
    MUST(cuIpcGetEventHandle, &names.early, early);
    MUST(cuIpcGetEventHandle, &names.late, late);
    MUST(cuIpcGetEventHandle, &names.both, both);
    CUipcEventHandle same;
    MUST(cuIpcGetEventHandle, &same, late);
    expect("an event has one handle", memcmp(&same, &names.late, sizeof same) == 0);
    expect("a process does not open its own", CALL(cuIpcOpenEventHandle, &own, names.late) == CUDA_ERROR_INVALID_CONTEXT);
    MUST(cuEventSynchronize, late);
    MUST(cuStreamWaitValue32, held, words + 4, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, late, held);
    if (write(output, &names, sizeof names) != sizeof names) return 1;
    expect("the other process waits", told('a'));
    unsigned value = 0;
    auto seen = [&] {
        MUST(cuMemcpyDtoHAsync, &value, words + 4 * 8, 4, free);
        MUST(cuStreamSynchronize, free);
        return value;
    };
    store(free, words, 0);
    MUST(cuEventSynchronize, early);
    expect("one of two events is reached", query(late) == CUDA_ERROR_NOT_READY && seen() == 0);
    store(free, words, 1);
    expect("the other process has gone on, and has recorded", told('b'));
    expect("its work is done", seen() == 5);

    bool unreached = query(late) == CUDA_ERROR_NOT_READY && query(early) == CUDA_ERROR_NOT_READY;
    MUST(cuStreamWaitEvent, waits, late, 0);
    MUST(cuCtxWaitEvent, context, early);
    // A query waits for no stream.
    unreached &= query(late) == CUDA_ERROR_NOT_READY && query(early) == CUDA_ERROR_NOT_READY;
    unreached &= CALL(cuStreamQuery, waits) == CUDA_ERROR_NOT_READY && CALL(cuStreamQuery, held) == CUDA_ERROR_NOT_READY;
    tell('c');
    MUST(cuStreamSynchronize, waits);
    MUST(cuStreamSynchronize, held);
    expect("its recordings hold streams here", unreached);

    // The later of two recordings is reached first, and stays reached when the earlier one is.
    MUST(cuStreamWaitValue32, held, words + 4 * 4, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, both, held);
    tell('e');
    expect("the other process has recorded the same event", told('f'));
    bool reached = query(both) == CUDA_SUCCESS;
    store(free, words, 4);
    MUST(cuStreamSynchronize, held);
    expect("the latest recording counts, in any order", reached && query(both) == CUDA_SUCCESS);
    tell('g');

    CUipcEventHandle handle;
    if (read(input, &handle, sizeof handle) != sizeof handle) return 1;
    MUST(cuIpcOpenEventHandle, &own, handle);
    MUST(cuEventSynchronize, own);
    MUST(cuStreamWaitValue32, held, words + 4 * 3, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, late, held);
    tell('d');
    int status = -1;
    waitpid(child, &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) printf("the other process ended with %x\n", status);
    expect("the other process has ended", WIFEXITED(status) && WEXITSTATUS(status) == 0);
    // What it left is still of use.
    MUST(cuEventQuery, own);
    MUST(cuEventRecord, own, held);
    bool ready = query(own) == CUDA_ERROR_NOT_READY && query(late) == CUDA_ERROR_NOT_READY;
    store(free, words, 3);
    MUST(cuEventSynchronize, late);
    MUST(cuEventSynchronize, own);
    expect("its event outlives it", ready);
    // Many recordings, more than may be under way.
    for (int i = 0; i < 1300; i++) MUST(cuEventRecord, late, free);
    MUST(cuEventSynchronize, late);
    MUST(cuEventDestroy, both);

    // A stream that waits behind other work for an event, which is reached, destroyed and followed by another one meanwhile.
    CUevent first, second;
    MUST(cuEventCreate, &first, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    MUST(cuIpcGetEventHandle, &handle, first);
    MUST(cuStreamWaitValue32, waits, words + 4 * 6, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuStreamWaitValue32, held, words + 4 * 7, 1, CU_STREAM_WAIT_VALUE_EQ);
    MUST(cuEventRecord, first, held);
    MUST(cuStreamWaitEvent, waits, first, 0);
    store(free, words, 7);
    MUST(cuStreamSynchronize, held);
    MUST(cuEventDestroy, first);
    MUST(cuEventCreate, &second, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
    MUST(cuIpcGetEventHandle, &handle, second);
    bool waiting = CALL(cuStreamQuery, waits) == CUDA_ERROR_NOT_READY;
    store(free, words, 6);
    MUST(cuStreamSynchronize, waits);
    expect("a wait outlives its event", waiting);
    for (CUevent event : {own, late, early, plain, second}) MUST(cuEventDestroy, event);
    MUST(cuMemFree, words);
    return verdict(passed);
}

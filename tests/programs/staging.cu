// Copies of pinned and pageable memory, of more bytes than a small arena has, in several streams. With the size of a fixed arena in
// MiB: also the error beyond it, copies while all pinned memory is taken, and copies while other streams hold the staging memory.
#include "check.h"
#include <cstring>
#include <vector>

static int wrong = 0;

static void expect(const char *what, bool good) {
    printf("%-56s %s\n", what, good ? "ok" : "WRONG");
    wrong += !good;
}

constexpr size_t MIB = 1 << 20;
constexpr int STREAMS = 4;

static std::vector<unsigned char> data(size_t bytes, uint64_t seed) {
    std::vector<unsigned char> made(bytes);
    Random random(seed);
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t next = random.next();
        memcpy(&made[i], &next, 8);
    }
    return made;
}

__global__ void until(volatile int *flag) {
    while (*flag == 0) __nanosleep(1000000);
}

// There and back, a part in each stream.
static bool pageable_round_trip(size_t bytes) {
    std::vector<unsigned char> in = data(bytes, bytes), out(bytes);
    unsigned char *device;
    cudaStream_t streams[STREAMS];
    CHECK(cudaMalloc(&device, bytes));
    size_t part = bytes / STREAMS;
    for (cudaStream_t &stream : streams) CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int s = 0; s < STREAMS; s++)
        CHECK(cudaMemcpyAsync(device + s * part, in.data() + s * part, part, cudaMemcpyHostToDevice, streams[s]));
    for (int s = 0; s < STREAMS; s++)
        CHECK(cudaMemcpyAsync(out.data() + s * part, device + s * part, part, cudaMemcpyDeviceToHost, streams[s]));
    CHECK(cudaDeviceSynchronize());
    for (cudaStream_t stream : streams) CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFree(device));
    return in == out;
}

// A synchronous copy, read by a stream that does not wait for the default one. Copies of 64 KiB and less may return earlier.
static bool seen_by_other_streams(size_t bytes) {
    std::vector<unsigned char> in = data(bytes, bytes + 2);
    unsigned char *device, *out;
    cudaStream_t stream;
    CHECK(cudaMalloc(&device, bytes));
    CHECK(cudaMallocHost(&out, bytes));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMemset(device, 0, bytes));
    CHECK(cudaMemcpy(device, in.data(), bytes, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyAsync(out, device, bytes, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    bool same = memcmp(out, in.data(), bytes) == 0;
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeHost(out));
    CHECK(cudaFree(device));
    return same;
}

// Through a pinned buffer of 2 MiB, which each stream has to itself.
static bool pinned_round_trip(size_t bytes) {
    constexpr size_t part = 2 * MIB;
    std::vector<unsigned char> in = data(bytes, bytes + 1), out(bytes);
    unsigned char *device, *buffers[STREAMS];
    cudaStream_t streams[STREAMS];
    CHECK(cudaMalloc(&device, bytes));
    for (int s = 0; s < STREAMS; s++) {
        CHECK(cudaMallocHost(&buffers[s], part));
        CHECK(cudaStreamCreate(&streams[s]));
    }
    for (int back = 0; back < 2; back++)
        for (size_t at = 0; at < bytes; at += part * STREAMS)
            for (int pass = 0; pass < 2; pass++)
                for (int s = 0; s < STREAMS; s++) {
                    size_t from = at + s * part;
                    if (pass == 0 && !back) memcpy(buffers[s], &in[from], part);
                    if (pass == 0)
                        CHECK(cudaMemcpyAsync(back ? buffers[s] : device + from, back ? device + from : buffers[s], part,
                                              cudaMemcpyDefault, streams[s]));
                    if (pass == 1) CHECK(cudaStreamSynchronize(streams[s]));
                    if (pass == 1 && back) memcpy(&out[from], buffers[s], part);
                }
    for (int s = 0; s < STREAMS; s++) {
        CHECK(cudaFreeHost(buffers[s]));
        CHECK(cudaStreamDestroy(streams[s]));
    }
    CHECK(cudaFree(device));
    return in == out;
}

// Rows that are longer than a portion of staging memory.
static bool long_rows_round_trip(size_t width, size_t height) {
    std::vector<unsigned char> in = data(width * height, width), out(width * height);
    unsigned char *device;
    size_t pitch;
    CHECK(cudaMallocPitch(&device, &pitch, width, height));
    CHECK(cudaMemcpy2D(device, pitch, in.data(), width, width, height, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2D(out.data(), width, device, pitch, width, height, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(device));
    return in == out;
}

static void with_fixed_arena(size_t arena) {
    void *whole = nullptr;
    cudaError_t code = cudaMallocHost(&whole, arena);
    expect("pinned memory of the size of the arena is refused", code == cudaErrorMemoryAllocation && !whole);
    expect("the error is of that call only", cudaGetLastError() == code && cudaGetLastError() == cudaSuccess);
    std::vector<unsigned char *> all;
    unsigned char *one = nullptr;
    while ((code = cudaMallocHost(&one, MIB)) == cudaSuccess) all.push_back(one);
    expect("pinned memory ends with the right error", code == cudaErrorMemoryAllocation);
    (void)cudaGetLastError();
    printf("%zu MiB of %zu could be pinned\n", all.size(), arena / MIB);
    expect("it is part of the arena", !all.empty() && all.size() < arena / MIB);
    bool apart = true;
    for (size_t i = 0; i < all.size(); i++) memset(all[i], (int)i + 1, MIB);
    expect("pageable copies while all of it is taken", pageable_round_trip(2 * arena));
    expect("rows while all of it is taken", long_rows_round_trip(3 * MIB + 12345, 3));
    for (size_t i = 0; i < all.size(); i++) apart = apart && all[i][0] == i + 1 && all[i][MIB - 1] == i + 1;
    expect("pinned memory keeps its bytes", apart);
    for (unsigned char *memory : all) CHECK(cudaFreeHost(memory));
    CHECK(cudaMallocHost(&one, 4 * MIB));
    CHECK(cudaFreeHost(one));

    // Streams that wait hold the staging memory of their copies. A stream that need not wait copies all the same.
    int *flag;
    cudaEvent_t set;
    std::vector<cudaStream_t> waiting(arena / MIB);
    cudaStream_t first, other;
    CHECK(cudaMallocHost(&flag, sizeof(int)));
    *(volatile int *)flag = 0;
    CHECK(cudaEventCreateWithFlags(&set, cudaEventDisableTiming));
    CHECK(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    std::vector<unsigned char> in = data(MIB, 77), out(waiting.size() * MIB), more = data(8 * MIB, 78), back(8 * MIB);
    unsigned char *device, *second;
    CHECK(cudaMalloc(&device, waiting.size() * MIB));
    CHECK(cudaMalloc(&second, more.size()));
    until<<<1, 1, 0, first>>>(flag);
    CHECK(cudaEventRecord(set, first));
    // As many as hold a quarter of the arena, less one: a further one would wait for its turn.
    size_t held = arena / MIB / 4 - 1;
    for (size_t s = 0; s < held; s++) {
        CHECK(cudaStreamCreateWithFlags(&waiting[s], cudaStreamNonBlocking));
        CHECK(cudaStreamWaitEvent(waiting[s], set, 0));
        CHECK(cudaMemcpyAsync(device + s * MIB, in.data(), MIB, cudaMemcpyHostToDevice, waiting[s]));
    }
    CHECK(cudaMemcpyAsync(second, more.data(), more.size(), cudaMemcpyHostToDevice, other));
    CHECK(cudaMemcpyAsync(back.data(), second, more.size(), cudaMemcpyDeviceToHost, other));
    CHECK(cudaStreamSynchronize(other));
    expect("copies beside streams that wait", back == more && cudaStreamQuery(first) == cudaErrorNotReady);
    (void)cudaGetLastError();
    *(volatile int *)flag = 1;
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(out.data(), device, held * MIB, cudaMemcpyDeviceToHost));
    bool arrived = true;
    for (size_t s = 0; s < held; s++) arrived = arrived && memcmp(&out[s * MIB], in.data(), MIB) == 0;
    expect("copies of streams that waited", arrived);
}

int main(int argc, char **argv) {
    expect("pageable copies in several streams", pageable_round_trip(24 * MIB));
    expect("pinned copies in several streams", pinned_round_trip(24 * MIB));
    expect("rows of more than a mebibyte", long_rows_round_trip(3 * MIB + 12345, 3));
    bool seen = true;
    for (size_t bytes : {(size_t)65 << 10, 3 * MIB}) seen = seen && seen_by_other_streams(bytes);
    expect("a long synchronous copy is there for all streams", seen);
    if (argc > 1) with_fixed_arena(strtoull(argv[1], nullptr, 10) * MIB);
    return verdict(wrong == 0);
}

// Copies by the newer calls: batches, copies with attributes, copies between contexts.
#include "driver.h"
#include <cstring>
#include <vector>

static bool right = true;

static void row(const char *what, uint64_t value, uint64_t expected) {
    std::printf("%-52s %016llx %s\n", what, (unsigned long long)value, value == expected ? "right" : "WRONG");
    right &= value == expected;
}

static std::vector<unsigned char> random_bytes(uint64_t seed, size_t bytes) {
    Random random(seed);
    std::vector<unsigned char> data(bytes);
    for (auto &byte : data) byte = (unsigned char)random.next();
    return data;
}

static uint64_t device_sum(CUdeviceptr from, size_t bytes) {
    std::vector<unsigned char> data(bytes);
    MUST(cuMemcpyDtoH, data.data(), from, bytes);
    return checksum(data.data(), bytes);
}

int main() {
    constexpr size_t PART = 96 << 10, PARTS = 5, ALL = PART * PARTS;
    CUdevice device;
    CUcontext context, other;
    CUstream stream;
    MUST(cuInit, 0);
    MUST(cuDeviceGet, &device, 0);
    MUST(cuDevicePrimaryCtxRetain, &context, device);
    MUST(cuCtxSetCurrent, context);
    MUST(cuStreamCreate, &stream, CU_STREAM_NON_BLOCKING);
    CUdeviceptr first, second;
    MUST(cuMemAlloc, &first, ALL);
    MUST(cuMemAlloc, &second, ALL);
    unsigned char *pinned;
    MUST(cuMemHostAlloc, (void **)&pinned, ALL, 0);
    auto data = random_bytes(1, ALL);
    std::memcpy(pinned, data.data(), ALL);

    // A batch from pinned and pageable memory, whose parts have other attributes from the third on.
    CUdeviceptr to[PARTS], from[PARTS];
    size_t sizes[PARTS], starts[2] = {0, 2};
    for (size_t i = 0; i < PARTS; i++) {
        to[i] = first + i * PART;
        from[i] = (CUdeviceptr)((i % 2 ? pinned : data.data()) + i * PART);
        sizes[i] = PART;
    }
    CUmemcpyAttributes attributes[2] = {};
    attributes[0].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    attributes[1].srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    attributes[1].flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE;
    MUST(cuMemcpyBatchAsync, to, from, sizes, PARTS, attributes, starts, 2, stream);
    // Parts from the third on were read during the call.
    std::memset(pinned + 3 * PART, 0, PART);
    MUST(cuStreamSynchronize, stream);
    row("batch to the device", device_sum(first, ALL), checksum(data.data(), ALL));

    for (size_t i = 0; i < PARTS; i++) {
        from[i] = first + i * PART;
        to[i] = second + (PARTS - 1 - i) * PART;
    }
    MUST(cuMemcpyBatchAsync, to, from, sizes, PARTS, attributes, starts, 1, stream);
    MUST(cuStreamSynchronize, stream);
    std::vector<unsigned char> turned(ALL);
    for (size_t i = 0; i < PARTS; i++) std::memcpy(&turned[(PARTS - 1 - i) * PART], &data[i * PART], PART);
    row("batch within the device", device_sum(second, ALL), checksum(turned.data(), ALL));

    // Attributes of one copy, if the driver has such copies; then a box with gaps.
    const bool has_attributes = driver_version() >= 13020;
    if (has_attributes) MUST(cuMemcpyWithAttributesAsync, (CUdeviceptr)pinned, second, ALL, attributes, stream);
    else MUST(cuMemcpyDtoHAsync, pinned, second, ALL, stream);
    MUST(cuStreamSynchronize, stream);
    row("copy with attributes from the device", checksum(pinned, ALL), checksum(turned.data(), ALL));
    CUDA_MEMCPY3D_BATCH_OP box = {};
    box.src.type = box.dst.type = CU_MEMCPY_OPERAND_TYPE_POINTER;
    box.src.op.ptr.ptr = first;
    box.src.op.ptr.rowLength = 512;
    box.src.op.ptr.layerHeight = 16;
    box.dst.op.ptr.ptr = second;
    box.extent = {100, 8, 4};
    box.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_ANY;
    std::vector<unsigned char> packed;
    for (size_t z = 0; z < 4; z++)
        for (size_t y = 0; y < 8; y++) {
            const unsigned char *begin = &data[(z * 16 + y) * 512];
            packed.insert(packed.end(), begin, begin + 100);
        }
    CUDA_MEMCPY3D_BATCH_OP boxes[2] = {box, box};
    boxes[1].dst.op.ptr.ptr = second + packed.size();
    MUST(cuMemcpy3DBatchAsync, 2, boxes, 0, stream);
    MUST(cuStreamSynchronize, stream);
    row("first box of a batch", device_sum(second, packed.size()), checksum(packed.data(), packed.size()));
    row("second box of a batch", device_sum(second + packed.size(), packed.size()), checksum(packed.data(), packed.size()));
    MUST(cuMemsetD8, second, 0, packed.size());
    MUST(cuCtxSynchronize);
    if (has_attributes) MUST(cuMemcpy3DWithAttributesAsync, &box, 0, stream);
    else MUST(cuMemcpy3DBatchAsync, 1, &box, 0, stream);
    MUST(cuStreamSynchronize, stream);
    row("box with attributes", device_sum(second, packed.size()), checksum(packed.data(), packed.size()));

    // Between two contexts of the device.
    CUdeviceptr third;
    CUctxCreateParams params = {};
    MUST(cuCtxCreate, &other, &params, 0, device);
    MUST(cuMemAlloc, &third, ALL);
    MUST(cuMemcpyPeer, third, other, first, context, ALL);
    MUST(cuCtxSynchronize);
    row("copy to another context", device_sum(third, ALL), checksum(data.data(), ALL));
    MUST(cuCtxSetCurrent, context);
    MUST(cuMemcpyPeerAsync, second, context, third, other, ALL, stream);
    MUST(cuStreamSynchronize, stream);
    row("copy from another context in a stream", device_sum(second, ALL), checksum(data.data(), ALL));
    CUDA_MEMCPY3D_PEER peer = {};
    peer.srcMemoryType = peer.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    peer.srcDevice = third;
    peer.srcContext = other;
    peer.srcPitch = 512;
    peer.srcHeight = 16;
    peer.dstDevice = second;
    peer.dstContext = context;
    peer.WidthInBytes = 100;
    peer.Height = 8;
    peer.Depth = 4;
    MUST(cuMemcpy3DPeer, &peer);
    row("box from another context", device_sum(second, packed.size()), checksum(packed.data(), packed.size()));
    MUST(cuMemsetD8, second, 0, packed.size());
    MUST(cuCtxSynchronize);
    MUST(cuMemcpy3DPeerAsync, &peer, stream);
    MUST(cuStreamSynchronize, stream);
    row("box from another context in a stream", device_sum(second, packed.size()), checksum(packed.data(), packed.size()));

    // A bad part stops a batch. A driver does not promise how much of it is done.
    for (size_t i = 0; i < PARTS; i++) to[i] = second + i * PART, from[i] = first + i * PART;
    MUST(cuMemsetD8, second, 0, ALL);
    MUST(cuCtxSynchronize);
    CUdeviceptr last;
    MUST(cuMemAlloc, &last, 2 << 20);
    to[3] = last + (2 << 20) - 8;
    CUresult code = CALL(cuMemcpyBatchAsync, to, from, sizes, PARTS, attributes, starts, 1, stream);
    MUST(cuStreamSynchronize, stream);
    std::vector<unsigned char> begun(ALL);
    std::memcpy(begun.data(), data.data(), 3 * PART);
    std::printf("%-52s %d\n", "batch with a bad part", (int)code);
    if (undefined_too()) row("parts before the bad one", device_sum(second, ALL), checksum(begun.data(), ALL));

    // The pools of the newer calls are those of the older ones.
    CUmemoryPool pool, same;
    CUmemLocation location = {};
    location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    MUST(cuMemGetDefaultMemPool, &pool, &location, CU_MEM_ALLOCATION_TYPE_PINNED);
    MUST(cuDeviceGetDefaultMemPool, &same, device);
    row("default pool of a location", pool == same, true);
    CUmemPoolProps props = {};
    props.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
    props.location = location;
    CUmemoryPool made;
    MUST(cuMemPoolCreate, &made, &props);
    MUST(cuMemSetMemPool, &location, CU_MEM_ALLOCATION_TYPE_PINNED, made);
    MUST(cuMemGetMemPool, &pool, &location, CU_MEM_ALLOCATION_TYPE_PINNED);
    row("current pool of a location", pool == made, true);
    MUST(cuMemPoolDestroy, made);
    MUST(cuCtxDestroy, other);
    return verdict(right);
}

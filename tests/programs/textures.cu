// Arrays, textures and surfaces: every kind of array, every mode of addresses and filters, formats, levels, views, copies in all
// directions, and the texture references of the driver interface. Results are compared with ones that the processor computes.
#include "driver.h"
#include <cmath>
#include <cstring>
#include <vector>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

static bool right = true;

static void row(const char *what, long long value, long long expected) {
    std::printf("%-58s %lld %s\n", what, value, value == expected ? "right" : "WRONG");
    right &= value == expected;
}

// A call of the runtime that must fail with this code, and leave no error behind.
static void refused(const char *what, cudaError_t code, cudaError_t expected) {
    row(what, code, expected);
    cudaGetLastError();
}

static bool near(float value, float expected, float tolerance) { return std::fabs(value - expected) <= tolerance; }

// ---- a sampler on the processor ----

static int outside(int i, int n, cudaTextureAddressMode mode) {
    switch (mode) {
    case cudaAddressModeWrap: return ((i % n) + n) % n;
    case cudaAddressModeMirror: {
        int around = ((i % (2 * n)) + 2 * n) % (2 * n);
        return around < n ? around : 2 * n - 1 - around;
    }
    case cudaAddressModeClamp: return i < 0 ? 0 : i >= n ? n - 1 : i;
    default: return i < 0 || i >= n ? -1 : i;
    }
}

struct Plane {
    const float *values;
    int width, height;
    cudaTextureAddressMode mode;
    float border;

    float texel(int x, int y) const {
        int i = outside(x, width, mode), j = outside(y, height, mode);
        return i < 0 || j < 0 ? border : values[j * width + i];
    }
    float point(float x, float y) const { return texel((int)std::floor(x), (int)std::floor(y)); }
    float linear(float x, float y) const {
        float i = std::floor(x - 0.5f), j = std::floor(y - 0.5f), a = x - 0.5f - i, b = y - 0.5f - j;
        int u = (int)i, v = (int)j;
        return (1 - a) * (1 - b) * texel(u, v) + a * (1 - b) * texel(u + 1, v) + (1 - a) * b * texel(u, v + 1) +
               a * b * texel(u + 1, v + 1);
    }
};

// ---- kernels ----

__global__ void sample_1d(cudaTextureObject_t texture, const float *x, float *to, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = tex1D<float>(texture, x[i]);
}

__global__ void sample_2d(cudaTextureObject_t texture, const float2 *at, float *to, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = tex2D<float>(texture, at[i].x, at[i].y);
}

__global__ void sample_level(cudaTextureObject_t texture, const float *level, float *to, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = tex2DLod<float>(texture, 0.5f, 0.5f, level[i]);
}

__global__ void read_3d(cudaTextureObject_t texture, float *to, int width, int height, int depth) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % width, y = i / width % height, z = i / width / height;
    if (z < depth) to[i] = tex3D<float>(texture, x + 0.5f, y + 0.5f, z + 0.5f);
}

__global__ void read_lines(cudaTextureObject_t texture, float *to, int width, int layers) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % width, layer = i / width;
    if (layer < layers) to[i] = tex1DLayered<float>(texture, x + 0.5f, layer);
}

__global__ void read_planes(cudaTextureObject_t texture, float *to, int width, int height, int layers) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % width, y = i / width % height, layer = i / width / height;
    if (layer < layers) to[i] = tex2DLayered<float>(texture, x + 0.5f, y + 0.5f, layer);
}

// The middle of each face; a cube of a layer if there are several.
__global__ void read_faces(cudaTextureObject_t texture, float *to, int cubes) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, face = i % 6, cube = i / 6;
    if (i >= (cubes ? cubes : 1) * 6) return;
    float way[3] = {0, 0, 0};
    way[face / 2] = face % 2 ? -1.0f : 1.0f;
    to[i] = cubes ? texCubemapLayered<float>(texture, way[0], way[1], way[2], cube)
                  : texCubemap<float>(texture, way[0], way[1], way[2]);
}

template <typename T> __global__ void read_2d(cudaTextureObject_t texture, T *to, int width, int height) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < width * height) to[i] = tex2D<T>(texture, i % width + 0.5f, i / width + 0.5f);
}

__global__ void read_linear(cudaTextureObject_t texture, float *to, int count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) to[i] = tex1Dfetch<float>(texture, i);
}

__global__ void gather(cudaTextureObject_t texture, float4 *to) {
    to[0] = tex2Dgather<float4>(texture, 2.0f, 1.0f, 0);
}

__global__ void add_in_surface(cudaSurfaceObject_t surface, int width, int height, int more) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % width, y = i / width;
    if (y >= height) return;
    int value = surf2Dread<int>(surface, x * 4, y);
    surf2Dwrite(value + more, surface, x * 4, y);
}

__global__ void fill_volume(cudaSurfaceObject_t surface, int width, int height, int depth) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % width, y = i / width % height, z = i / width / height;
    if (z < depth) surf3Dwrite((float)(x + 10 * y + 100 * z), surface, x * 4, y, z);
}

__global__ void fill_layers(cudaSurfaceObject_t surface, int width, int height, int layers) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % width, y = i / width % height, layer = i / width / height;
    if (layer < layers) surf2DLayeredwrite((float)(x + 10 * y + 100 * layer), surface, x * 4, y, layer);
}

__global__ void clamp_surface(cudaSurfaceObject_t surface, int width, int *to) {
    to[0] = surf2Dread<int>(surface, width * 4, 0, cudaBoundaryModeZero);
    to[1] = surf2Dread<int>(surface, width * 4, 0, cudaBoundaryModeClamp);
    surf2Dwrite(77, surface, -4, 0, cudaBoundaryModeZero);
}

// ---- helpers ----

static int blocks(int count) { return (count + 127) / 128; }

template <typename T> struct Device {
    T *at = nullptr;
    size_t count;
    explicit Device(size_t count) : count(count) { CHECK(cudaMalloc(&at, count * sizeof(T))); }
    explicit Device(const std::vector<T> &values) : Device(values.size()) {
        CHECK(cudaMemcpy(at, values.data(), count * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> read() const {
        std::vector<T> values(count);
        CHECK(cudaMemcpy(values.data(), at, count * sizeof(T), cudaMemcpyDeviceToHost));
        return values;
    }
    ~Device() { cudaFree(at); }
};

static cudaResourceDesc over(cudaArray_t array) {
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeArray;
    resource.res.array.array = array;
    return resource;
}

static cudaTextureDesc sampling(cudaTextureAddressMode mode = cudaAddressModeClamp, cudaTextureFilterMode filter = cudaFilterModePoint,
                                bool normalised = false) {
    cudaTextureDesc texture = {};
    for (int i = 0; i < 3; i++) texture.addressMode[i] = mode;
    texture.filterMode = filter;
    texture.normalizedCoords = normalised;
    texture.readMode = cudaReadModeElementType;
    return texture;
}

static cudaTextureObject_t make(const cudaResourceDesc &resource, const cudaTextureDesc &texture) {
    cudaTextureObject_t object = 0;
    CHECK(cudaCreateTextureObject(&object, &resource, &texture, nullptr));
    return object;
}

static cudaArray_t array_3d(cudaExtent extent, unsigned flags) {
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t array;
    CHECK(cudaMalloc3DArray(&array, &format, extent, flags));
    return array;
}

static void fill_3d(cudaArray_t array, const std::vector<float> &values, cudaExtent extent) {
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr((void *)values.data(), extent.width * 4, extent.width, extent.height ? extent.height : 1);
    copy.dstArray = array;
    copy.extent = make_cudaExtent(extent.width, extent.height ? extent.height : 1, extent.depth ? extent.depth : 1);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
}

static std::vector<float> numbers(size_t count) {
    std::vector<float> values(count);
    Random random(count);
    for (float &value : values) value = random.real();
    return values;
}

template <typename T> static long long same(const std::vector<T> &found, const std::vector<T> &expected) {
    long long hits = 0;
    for (size_t i = 0; i < expected.size(); i++) hits += std::memcmp(&found[i], &expected[i], sizeof(T)) == 0;
    return hits;
}

// ---- the parts ----

constexpr int WIDTH = 13, HEIGHT = 7;

static void copies() {
    std::vector<float> values = numbers(WIDTH * HEIGHT);
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t array, other;
    CHECK(cudaMallocArray(&array, &format, WIDTH, HEIGHT));
    CHECK(cudaMallocArray(&other, &format, WIDTH, HEIGHT));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, values.data(), WIDTH * 4, WIDTH * 4, HEIGHT, cudaMemcpyHostToDevice));
    // A box inside, from device memory with gaps.
    std::vector<float> part(16 * 3, -5.0f);
    Device<float> pitched(part);
    CHECK(cudaMemcpy2DToArray(array, 8, 1, pitched.at, 64, 20, 3, cudaMemcpyDeviceToDevice));
    std::vector<float> expected = values;
    for (int y = 1; y < 4; y++)
        for (int x = 2; x < 7; x++) expected[y * WIDTH + x] = -5.0f;
    std::vector<float> found(WIDTH * HEIGHT);
    CHECK(cudaMemcpy2DFromArray(found.data(), WIDTH * 4, array, 0, 0, WIDTH * 4, HEIGHT, cudaMemcpyDeviceToHost));
    row("elements after a copy into the middle of an array", same(found, expected), WIDTH * HEIGHT);
    CHECK(cudaMemcpy2DArrayToArray(other, 0, 0, array, 4, 2, 24, 4, cudaMemcpyDeviceToDevice));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    std::vector<float> corner(24);
    CHECK(cudaMemcpy2DFromArrayAsync(corner.data(), 24, other, 0, 0, 24, 4, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    long long hits = 0;
    for (int y = 0; y < 4; y++)
        for (int x = 0; x < 6; x++) hits += corner[y * 6 + x] == expected[(y + 2) * WIDTH + x + 1];
    row("elements after a copy between arrays", hits, 24);
    cudaChannelFormatDesc told;
    cudaExtent extent;
    unsigned flags = 9;
    CHECK(cudaArrayGetInfo(&told, &extent, &flags, array));
    row("the array's description", extent.width * 1000 + extent.height * 10 + extent.depth + told.x + flags, 13102);
    // A node of a graph copies the array to memory.
    cudaGraph_t graph;
    cudaGraphNode_t node;
    cudaGraphExec_t executable;
    Device<float> target(WIDTH * HEIGHT);
    cudaMemcpy3DParms copy = {};
    copy.srcArray = array;
    copy.dstPtr = make_cudaPitchedPtr(target.at, WIDTH * 4, WIDTH, HEIGHT);
    copy.extent = make_cudaExtent(WIDTH, HEIGHT, 1);
    copy.kind = cudaMemcpyDeviceToDevice;
    CHECK(cudaGraphCreate(&graph, 0));
    CHECK(cudaGraphAddMemcpyNode(&node, graph, nullptr, 0, &copy));
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    row("elements after a graph's copy", same(target.read(), expected), WIDTH * HEIGHT);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    refused("a copy beyond the array", cudaMemcpy2DToArray(array, 4, 0, values.data(), 52, 52, 1, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaFreeArray(array));
    CHECK(cudaFreeArray(other));
}

static void modes() {
    std::vector<float> values = numbers(WIDTH * HEIGHT);
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &format, WIDTH, HEIGHT));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, values.data(), WIDTH * 4, WIDTH * 4, HEIGHT, cudaMemcpyHostToDevice));
    constexpr int COUNT = 400;
    const char *names[] = {"wrap", "clamp", "mirror", "border"};
    for (int mode = 0; mode < 4; mode++)
        for (int filter = 0; filter < 2; filter++)
            for (int normalised = 0; normalised < 2; normalised++) {
                cudaTextureDesc texture = sampling((cudaTextureAddressMode)mode, (cudaTextureFilterMode)filter, normalised);
                texture.borderColor[0] = 0.75f;
                cudaTextureObject_t object = make(over(array), texture);
                Random random(mode * 4 + filter * 2 + normalised);
                std::vector<float2> at(COUNT);
                std::vector<float> expected(COUNT);
                cudaTextureAddressMode applied = (cudaTextureAddressMode)mode;
                if (!normalised && mode != cudaAddressModeBorder) applied = cudaAddressModeClamp;
                Plane plane = {values.data(), WIDTH, HEIGHT, applied, 0.75f};
                for (int i = 0; i < COUNT; i++) {
                    // Off the edges of elements: there a rounding decides.
                    float x = (random.below(3 * WIDTH * 8) + 0.25f) / 8 - WIDTH, y = (random.below(3 * HEIGHT * 8) + 0.25f) / 8 - HEIGHT;
                    at[i] = normalised ? make_float2(x / WIDTH, y / HEIGHT) : make_float2(x, y);
                    expected[i] = filter ? plane.linear(x, y) : plane.point(x, y);
                }
                Device<float2> places(at);
                Device<float> to(COUNT);
                sample_2d<<<blocks(COUNT), 128>>>(object, places.at, to.at, COUNT);
                CHECK(cudaGetLastError());
                std::vector<float> found = to.read();
                long long hits = 0;
                for (int i = 0; i < COUNT; i++) hits += near(found[i], expected[i], filter ? 0.02f : 0.0f);
                char what[80];
                std::snprintf(what, sizeof what, "%s, %s, %s coordinates", names[mode], filter ? "linear" : "point",
                              normalised ? "normalised" : "plain");
                row(what, hits, COUNT);
                CHECK(cudaDestroyTextureObject(object));
            }
    // One dimension.
    cudaArray_t line;
    CHECK(cudaMallocArray(&line, &format, WIDTH));
    CHECK(cudaMemcpy2DToArray(line, 0, 0, values.data(), WIDTH * 4, WIDTH * 4, 1, cudaMemcpyHostToDevice));
    cudaTextureObject_t object = make(over(line), sampling(cudaAddressModeClamp, cudaFilterModeLinear));
    std::vector<float> at(50), expected(50);
    Plane row_only = {values.data(), WIDTH, 1, cudaAddressModeClamp, 0};
    for (int i = 0; i < 50; i++) at[i] = i * 0.3f, expected[i] = row_only.linear(at[i], 0.5f);
    Device<float> places(at), to(50);
    sample_1d<<<1, 128>>>(object, places.at, to.at, 50);
    std::vector<float> found = to.read();
    long long hits = 0;
    for (int i = 0; i < 50; i++) hits += near(found[i], expected[i], 0.02f);
    row("one dimension, linear", hits, 50);
    // The four neighbours of a corner.
    CHECK(cudaDestroyTextureObject(object));
    object = make(over(array), sampling());
    Device<float4> four(1);
    cudaArray_t for_gather = array_3d(make_cudaExtent(WIDTH, HEIGHT, 0), cudaArrayTextureGather);
    fill_3d(for_gather, values, make_cudaExtent(WIDTH, HEIGHT, 0));
    CHECK(cudaDestroyTextureObject(object));
    object = make(over(for_gather), sampling());
    gather<<<1, 1>>>(object, four.at);
    float4 gathered = four.read()[0];
    hits = (gathered.x == values[WIDTH + 1]) + (gathered.y == values[WIDTH + 2]) + (gathered.z == values[2]) + (gathered.w == values[1]);
    row("gathered neighbours", hits, 4);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(for_gather));
    CHECK(cudaFreeArray(line));
    CHECK(cudaFreeArray(array));
}

static void kinds() {
    cudaExtent extent = make_cudaExtent(6, 5, 4);
    std::vector<float> values = numbers(6 * 5 * 4);
    cudaArray_t volume = array_3d(extent, 0);
    fill_3d(volume, values, extent);
    cudaTextureObject_t object = make(over(volume), sampling());
    Device<float> to(120);
    read_3d<<<1, 128>>>(object, to.at, 6, 5, 4);
    row("elements of three dimensions", same(to.read(), values), 120);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(volume));

    cudaArray_t lines = array_3d(make_cudaExtent(30, 0, 4), cudaArrayLayered);
    fill_3d(lines, values, make_cudaExtent(30, 0, 4));
    object = make(over(lines), sampling());
    read_lines<<<1, 128>>>(object, to.at, 30, 4);
    row("elements in layers of one dimension", same(to.read(), values), 120);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(lines));

    cudaArray_t planes = array_3d(extent, cudaArrayLayered | cudaArraySurfaceLoadStore);
    fill_3d(planes, values, extent);
    object = make(over(planes), sampling());
    read_planes<<<1, 128>>>(object, to.at, 6, 5, 4);
    row("elements in layers of two dimensions", same(to.read(), values), 120);
    CHECK(cudaDestroyTextureObject(object));
    // A view of two layers, whose bits are read as integers elsewhere.
    cudaResourceDesc resource = over(planes);
    cudaTextureDesc texture = sampling();
    cudaResourceViewDesc view = {};
    view.format = cudaResViewFormatFloat1;
    view.width = 6, view.height = 5, view.depth = 4;
    view.firstLayer = 1, view.lastLayer = 2;
    CHECK(cudaCreateTextureObject(&object, &resource, &texture, &view));
    read_planes<<<1, 128>>>(object, to.at, 6, 5, 2);
    std::vector<float> middle(values.begin() + 30, values.begin() + 90), found = to.read();
    found.resize(60);
    row("elements of a view of two layers", same(found, middle), 60);
    cudaResourceViewDesc told = {};
    CHECK(cudaGetTextureObjectResourceViewDesc(&told, object));
    row("the view's description", told.firstLayer * 10 + told.lastLayer, 12);
    CHECK(cudaDestroyTextureObject(object));
    view.width = 3;
    refused("a view with another width", cudaCreateTextureObject(&object, &resource, &texture, &view), cudaErrorInvalidValue);
    cudaSurfaceObject_t surface;
    CHECK(cudaCreateSurfaceObject(&surface, &resource));
    fill_layers<<<1, 128>>>(surface, 6, 5, 4);
    object = make(resource, sampling());
    read_planes<<<1, 128>>>(object, to.at, 6, 5, 4);
    for (int i = 0; i < 120; i++) values[i] = i % 6 + 10 * (i / 6 % 5) + 100 * (i / 30);
    row("elements that a surface wrote in layers", same(to.read(), values), 120);
    CHECK(cudaDestroySurfaceObject(surface));
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(planes));

    volume = array_3d(extent, cudaArraySurfaceLoadStore);
    resource = over(volume);
    CHECK(cudaCreateSurfaceObject(&surface, &resource));
    fill_volume<<<1, 128>>>(surface, 6, 5, 4);
    object = make(resource, sampling());
    read_3d<<<1, 128>>>(object, to.at, 6, 5, 4);
    row("elements that a surface wrote in three dimensions", same(to.read(), values), 120);
    CHECK(cudaDestroySurfaceObject(surface));
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(volume));

    for (int cubes = 0; cubes < 3; cubes += 2) {
        int layers = cubes ? 12 : 6;
        cudaExtent faces = make_cudaExtent(4, 4, layers);
        std::vector<float> colours(16 * layers), expected(layers);
        for (int i = 0; i < 16 * layers; i++) colours[i] = i / 16 + 1;
        for (int i = 0; i < layers; i++) expected[i] = i + 1;
        cudaArray_t cube = array_3d(faces, cudaArrayCubemap | (cubes ? cudaArrayLayered : 0));
        fill_3d(cube, colours, faces);
        object = make(over(cube), sampling(cudaAddressModeClamp, cudaFilterModePoint, true));
        Device<float> seen(layers);
        read_faces<<<1, 128>>>(object, seen.at, cubes);
        row(cubes ? "faces of layers of cubes" : "faces of a cube", same(seen.read(), expected), layers);
        CHECK(cudaDestroyTextureObject(object));
        CHECK(cudaFreeArray(cube));
    }
}

static void formats() {
    // Bytes as fractions, and as they are.
    std::vector<uchar4> bytes(8);
    for (int i = 0; i < 8; i++) bytes[i] = make_uchar4(i * 30, 255 - i, i, 255);
    cudaChannelFormatDesc format = cudaCreateChannelDesc<uchar4>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &format, 4, 2));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, bytes.data(), 16, 16, 2, cudaMemcpyHostToDevice));
    cudaTextureDesc texture = sampling();
    cudaTextureObject_t object = make(over(array), texture);
    Device<uchar4> raw(8);
    read_2d<uchar4><<<1, 128>>>(object, raw.at, 4, 2);
    row("bytes as they are", same(raw.read(), bytes), 8);
    CHECK(cudaDestroyTextureObject(object));
    texture.readMode = cudaReadModeNormalizedFloat;
    object = make(over(array), texture);
    Device<float4> fractions(8);
    read_2d<float4><<<1, 128>>>(object, fractions.at, 4, 2);
    std::vector<float4> found = fractions.read();
    long long hits = 0;
    for (int i = 0; i < 8; i++)
        hits += near(found[i].x, bytes[i].x / 255.0f, 1e-6f) && near(found[i].y, bytes[i].y / 255.0f, 1e-6f) && found[i].w == 1.0f;
    row("bytes as fractions", hits, 8);
    cudaTextureDesc told = {};
    CHECK(cudaGetTextureObjectTextureDesc(&told, object));
    row("the texture's description", told.readMode * 10 + told.addressMode[0], 11);
    CHECK(cudaDestroyTextureObject(object));
    texture = sampling(cudaAddressModeClamp, cudaFilterModeLinear);
    cudaResourceDesc resource = over(array);
    refused("a linear filter over integers", cudaCreateTextureObject(&object, &resource, &texture, nullptr), cudaErrorInvalidFilterSetting);
    CHECK(cudaFreeArray(array));

    std::vector<short2> shorts(8);
    for (int i = 0; i < 8; i++) shorts[i] = make_short2(-1000 * i, 32767 - i);
    format = cudaCreateChannelDesc<short2>();
    CHECK(cudaMallocArray(&array, &format, 4, 2));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, shorts.data(), 16, 16, 2, cudaMemcpyHostToDevice));
    object = make(over(array), sampling());
    Device<short2> halves(8);
    read_2d<short2><<<1, 128>>>(object, halves.at, 4, 2);
    row("pairs of short integers", same(halves.read(), shorts), 8);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(array));

    std::vector<float4> wide(8);
    for (int i = 0; i < 8; i++) wide[i] = make_float4(i, -i, 0.5f * i, 1e20f);
    format = cudaCreateChannelDesc<float4>();
    CHECK(cudaMallocArray(&array, &format, 4, 2));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, wide.data(), 64, 64, 2, cudaMemcpyHostToDevice));
    object = make(over(array), sampling());
    read_2d<float4><<<1, 128>>>(object, fractions.at, 4, 2);
    row("four floats", same(fractions.read(), wide), 8);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(array));

    // Floats of 16 bits: 1, 2, -0.5 and 0.
    std::vector<unsigned short> small = {0x3c00, 0x4000, 0xb800, 0};
    std::vector<float> expected = {1.0f, 2.0f, -0.5f, 0.0f};
    format = cudaCreateChannelDescHalf();
    CHECK(cudaMallocArray(&array, &format, 4, 1));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, small.data(), 8, 8, 1, cudaMemcpyHostToDevice));
    object = make(over(array), sampling());
    Device<float> floats(4);
    read_2d<float><<<1, 128>>>(object, floats.at, 4, 1);
    row("floats of 16 bits", same(floats.read(), expected), 4);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFreeArray(array));
}

static void levels() {
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    cudaMipmappedArray_t mipmapped;
    CHECK(cudaMallocMipmappedArray(&mipmapped, &format, make_cudaExtent(16, 8, 0), 4));
    for (int level = 0; level < 4; level++) {
        cudaArray_t array;
        CHECK(cudaGetMipmappedArrayLevel(&array, mipmapped, level));
        cudaExtent extent;
        CHECK(cudaArrayGetInfo(nullptr, &extent, nullptr, array));
        row("width and height of a level", extent.width * 100 + extent.height, (16 >> level) * 100 + (8 >> level));
        std::vector<float> values(extent.width * extent.height, level * 10.0f);
        CHECK(cudaMemcpy2DToArray(array, 0, 0, values.data(), extent.width * 4, extent.width * 4, extent.height, cudaMemcpyHostToDevice));
    }
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeMipmappedArray;
    resource.res.mipmap.mipmap = mipmapped;
    std::vector<float> wanted = {0.0f, 0.4f, 1.0f, 1.25f, 2.0f, 2.75f, 3.0f, 9.0f};
    for (int filter = 0; filter < 2; filter++) {
        cudaTextureDesc texture = sampling(cudaAddressModeClamp, cudaFilterModeLinear, true);
        texture.mipmapFilterMode = (cudaTextureFilterMode)filter;
        texture.maxMipmapLevelClamp = 2.5f;
        cudaTextureObject_t object = make(resource, texture);
        Device<float> at(wanted), to(wanted.size());
        sample_level<<<1, 128>>>(object, at.at, to.at, (int)wanted.size());
        std::vector<float> found = to.read();
        long long hits = 0;
        for (size_t i = 0; i < wanted.size(); i++) {
            float level = std::fmin(wanted[i], 2.5f);
            // Half a level is a tie of the nearest one.
            bool tie = !filter && level == 2.5f;
            float expected = 10 * (filter ? level : std::floor(level + 0.5f));
            hits += near(found[i], expected, 0.06f) || (tie && near(found[i], 20.0f, 0.0f));
        }
        row(filter ? "levels, linear" : "levels, the nearest", hits, wanted.size());
        CHECK(cudaDestroyTextureObject(object));
    }
    cudaTextureDesc plain = sampling();
    cudaTextureObject_t object;
    if (undefined_too()) refused("levels without normalised coordinates", cudaCreateTextureObject(&object, &resource, &plain, nullptr), cudaErrorInvalidValue);
    CHECK(cudaFreeMipmappedArray(mipmapped));
}

static void surfaces() {
    std::vector<int> values(WIDTH * HEIGHT), expected(WIDTH * HEIGHT);
    for (int i = 0; i < WIDTH * HEIGHT; i++) values[i] = i * 3, expected[i] = i * 3 + 42;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<int>();
    cudaArray_t array;
    CHECK(cudaMallocArray(&array, &format, WIDTH, HEIGHT, cudaArraySurfaceLoadStore));
    CHECK(cudaMemcpy2DToArray(array, 0, 0, values.data(), WIDTH * 4, WIDTH * 4, HEIGHT, cudaMemcpyHostToDevice));
    cudaResourceDesc resource = over(array), told = {};
    cudaSurfaceObject_t surface;
    CHECK(cudaCreateSurfaceObject(&surface, &resource));
    CHECK(cudaGetSurfaceObjectResourceDesc(&told, surface));
    row("the surface's array", told.res.array.array == array, 1);
    add_in_surface<<<1, 128>>>(surface, WIDTH, HEIGHT, 42);
    std::vector<int> found(WIDTH * HEIGHT);
    CHECK(cudaMemcpy2DFromArray(found.data(), WIDTH * 4, array, 0, 0, WIDTH * 4, HEIGHT, cudaMemcpyDeviceToHost));
    row("elements that a surface read and wrote", same(found, expected), WIDTH * HEIGHT);
    Device<int> edge(2);
    clamp_surface<<<1, 1>>>(surface, WIDTH, edge.at);
    std::vector<int> edges = edge.read();
    row("zero and the last element beyond the edge", edges[0] * 1000 + edges[1], expected[WIDTH - 1]);
    CHECK(cudaDestroySurfaceObject(surface));
    CHECK(cudaFreeArray(array));
}

static void linear_memory() {
    std::vector<float> values = numbers(1000);
    Device<float> from(values), to(1000);
    cudaResourceDesc resource = {};
    resource.resType = cudaResourceTypeLinear;
    resource.res.linear.devPtr = from.at;
    resource.res.linear.desc = cudaCreateChannelDesc<float>();
    resource.res.linear.sizeInBytes = 4000;
    cudaTextureObject_t object = make(resource, sampling());
    read_linear<<<blocks(1000), 128>>>(object, to.at, 1000);
    row("elements of linear memory", same(to.read(), values), 1000);
    CHECK(cudaDestroyTextureObject(object));
    size_t pitch;
    float *rows;
    CHECK(cudaMallocPitch(&rows, &pitch, WIDTH * 4, HEIGHT));
    CHECK(cudaMemcpy2D(rows, pitch, values.data(), WIDTH * 4, WIDTH * 4, HEIGHT, cudaMemcpyHostToDevice));
    resource = {};
    resource.resType = cudaResourceTypePitch2D;
    resource.res.pitch2D.devPtr = rows;
    resource.res.pitch2D.desc = cudaCreateChannelDesc<float>();
    resource.res.pitch2D.width = WIDTH;
    resource.res.pitch2D.height = HEIGHT;
    resource.res.pitch2D.pitchInBytes = pitch;
    object = make(resource, sampling());
    Device<float> plane(WIDTH * HEIGHT);
    read_2d<float><<<1, 128>>>(object, plane.at, WIDTH, HEIGHT);
    values.resize(WIDTH * HEIGHT);
    row("elements of memory with rows", same(plane.read(), values), WIDTH * HEIGHT);
    CHECK(cudaDestroyTextureObject(object));
    CHECK(cudaFree(rows));
}

// ---- the driver interface ----

static const char PTX[] = R"(
.version 7.0
.target sm_80
.address_size 64
.global .texref image;
.global .texref line;
.global .surfref canvas;
.visible .entry fetch(.param .u64 to)
{
    .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f32 %f<8>;
    ld.param.u64 %rd1, [to];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
    cvt.rn.f32.u32 %f1, %r1; add.f32 %f1, %f1, 0f3F000000;
    cvt.rn.f32.u32 %f2, %r2; add.f32 %f2, %f2, 0f3F000000;
    tex.2d.v4.f32.f32 {%f3, %f4, %f5, %f6}, [image, {%f1, %f2}];
    mov.u32 %r3, %ntid.x;
    mad.lo.u32 %r3, %r2, %r3, %r1;
    mul.wide.u32 %rd2, %r3, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f3;
    ret;
}
.visible .entry fetch_line(.param .u64 to)
{
    .reg .b32 %r<4>; .reg .b64 %rd<4>; .reg .f32 %f<8>;
    ld.param.u64 %rd1, [to];
    mov.u32 %r1, %tid.x;
    tex.1d.v4.f32.s32 {%f3, %f4, %f5, %f6}, [line, {%r1}];
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f3;
    ret;
}
.visible .entry draw()
{
    .reg .b32 %r<4>;
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;
    shl.b32 %r3, %r1, 2;
    sust.b.2d.b32.trap [canvas, {%r3, %r2}], {%r1};
    ret;
}
)";

static CUfunction kernel(CUmodule module, const char *name) {
    CUfunction function;
    MUST(cuModuleGetFunction, &function, module, name);
    return function;
}

static void run(CUfunction function, unsigned grid, unsigned block, CUdeviceptr to) {
    void *parameters[] = {&to};
    MUST(cuLaunchKernel, function, grid, 1, 1, block, 1, 1, 0, nullptr, to ? parameters : nullptr, nullptr);
    MUST(cuCtxSynchronize);
}

static void references() {
    CUmodule module;
    MUST(cuModuleLoadData, &module, PTX);
    CUtexref image, line, again, own;
    CUsurfref canvas;
    MUST(cuModuleGetTexRef, &image, module, "image");
    MUST(cuModuleGetTexRef, &line, module, "line");
    MUST(cuModuleGetTexRef, &again, module, "image");
    MUST(cuModuleGetSurfRef, &canvas, module, "canvas");
    row("the same reference for the same name", again == image && image != line, 1);
    row("an unknown name", CALL(cuModuleGetTexRef, &again, module, "none"), CUDA_ERROR_NOT_FOUND);

    CUDA_ARRAY3D_DESCRIPTOR description = {WIDTH, HEIGHT, 0, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_SURFACE_LDST};
    CUarray array, told_array = nullptr;
    MUST(cuArray3DCreate, &array, &description);
    std::vector<float> values = numbers(WIDTH * HEIGHT);
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = values.data();
    copy.srcPitch = WIDTH * 4;
    copy.dstMemoryType = CU_MEMORYTYPE_ARRAY;
    copy.dstArray = array;
    copy.WidthInBytes = WIDTH * 4;
    copy.Height = HEIGHT;
    MUST(cuMemcpy2D, &copy);
    MUST(cuTexRefSetArray, image, array, CU_TRSA_OVERRIDE_FORMAT);
    MUST(cuTexRefSetAddressMode, image, 0, CU_TR_ADDRESS_MODE_BORDER);
    MUST(cuTexRefSetAddressMode, image, 1, CU_TR_ADDRESS_MODE_BORDER);
    MUST(cuTexRefSetFilterMode, image, CU_TR_FILTER_MODE_POINT);
    float border[4] = {0.5f, 0, 0, 0}, told_border[4] = {};
    MUST(cuTexRefSetBorderColor, image, border);
    MUST(cuParamSetTexRef, kernel(module, "fetch"), CU_PARAM_TR_DEFAULT, image);
    Device<float> to((WIDTH + 2) * HEIGHT);
    run(kernel(module, "fetch"), HEIGHT, WIDTH + 2, (CUdeviceptr)to.at);
    std::vector<float> expected, found = to.read();
    for (int y = 0; y < HEIGHT; y++)
        for (int x = 0; x < WIDTH + 2; x++) expected.push_back(x < WIDTH ? values[y * WIDTH + x] : 0.5f);
    row("elements by a reference, and its border", same(found, expected), (WIDTH + 2) * HEIGHT);

    CUaddress_mode mode;
    CUfilter_mode filter;
    CUarray_format format;
    CUdeviceptr address = 0;
    int channels = 0;
    unsigned flags = 9;
    MUST(cuTexRefGetArray, &told_array, image);
    MUST(cuTexRefGetAddressMode, &mode, image, 1);
    MUST(cuTexRefGetFilterMode, &filter, image);
    MUST(cuTexRefGetFormat, &format, &channels, image);
    MUST(cuTexRefGetBorderColor, told_border, image);
    MUST(cuTexRefGetFlags, &flags, image);
    row("the reference's settings", (told_array == array) + mode * 10 + filter + format + channels * 100 + flags,
        1 + 30 + 0x20 + 100);
    row("the reference's border", told_border[0] == 0.5f, 1);
    row("the address of a reference with an array", CALL(cuTexRefGetAddress, &address, image), CUDA_ERROR_INVALID_VALUE);

    Device<float> from(values), seen(WIDTH);
    size_t offset = 9;
    MUST(cuTexRefSetFormat, line, CU_AD_FORMAT_FLOAT, 1);
    MUST(cuTexRefSetAddress, &offset, line, (CUdeviceptr)from.at, WIDTH * 4);
    MUST(cuTexRefGetAddress, &address, line);
    row("the offset of an aligned address", offset + (address == (CUdeviceptr)from.at), 1);
    run(kernel(module, "fetch_line"), 1, WIDTH, (CUdeviceptr)seen.at);
    row("elements of linear memory by a reference", same(seen.read(), std::vector<float>(values.begin(), values.begin() + WIDTH)), WIDTH);

    MUST(cuSurfRefSetArray, canvas, array, 0);
    MUST(cuSurfRefGetArray, &told_array, canvas);
    row("the array of a surface reference", told_array == array, 1);
    run(kernel(module, "draw"), HEIGHT, WIDTH, 0);
    std::vector<unsigned> drawn(WIDTH * HEIGHT), wanted;
    for (int i = 0; i < WIDTH * HEIGHT; i++) wanted.push_back(i % WIDTH);
    CUDA_MEMCPY3D back = {};
    back.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    back.srcArray = array;
    back.dstMemoryType = CU_MEMORYTYPE_HOST;
    back.dstHost = drawn.data();
    back.dstPitch = WIDTH * 4;
    back.dstHeight = HEIGHT;
    back.WidthInBytes = WIDTH * 4;
    back.Height = HEIGHT;
    back.Depth = 1;
    MUST(cuMemcpy3D, &back);
    row("elements that a surface reference wrote", same(drawn, wanted), WIDTH * HEIGHT);

    // Arrays of one dimension have copies of their own.
    CUDA_ARRAY_DESCRIPTOR flat = {16, 0, CU_AD_FORMAT_FLOAT, 1}, told_flat = {};
    CUarray first, second;
    MUST(cuArrayCreate, &first, &flat);
    MUST(cuArrayCreate, &second, &flat);
    MUST(cuArrayGetDescriptor, &told_flat, first);
    row("the description of an array", told_flat.Width + told_flat.Height + told_flat.NumChannels, 17);
    MUST(cuMemcpyHtoA, first, 4, values.data(), 40);
    MUST(cuMemcpyAtoA, second, 0, first, 8, 32);
    MUST(cuMemcpyAtoD, (CUdeviceptr)seen.at, second, 0, 16);
    MUST(cuMemcpyDtoA, second, 32, (CUdeviceptr)seen.at, 16);
    float line_values[12] = {};
    MUST(cuMemcpyAtoH, line_values, second, 0, 48);
    long long hits = 0;
    for (int i = 0; i < 12; i++) hits += line_values[i] == values[i < 8 ? i + 1 : i - 7];
    row("elements after copies of lines", hits, 12);
    MUST(cuTexRefCreate, &own);
    row("a reference of the program for a kernel", CALL(cuParamSetTexRef, kernel(module, "fetch"), CU_PARAM_TR_DEFAULT, own),
        CUDA_ERROR_INVALID_VALUE);
    MUST(cuTexRefDestroy, own);
    CUDA_ARRAY_SPARSE_PROPERTIES sparse;
    CUDA_ARRAY_MEMORY_REQUIREMENTS requirements;
    CUarray plane;
    row("properties of an array that is not sparse", CALL(cuArrayGetSparseProperties, &sparse, array), CUDA_ERROR_INVALID_VALUE);
    row("requirements of an array that is not deferred", CALL(cuArrayGetMemoryRequirements, &requirements, array, 0),
        CUDA_ERROR_INVALID_VALUE);
    row("a plane of an array that has none", CALL(cuArrayGetPlane, &plane, array, 0), CUDA_ERROR_INVALID_VALUE);
    MUST(cuArrayDestroy, first);
    MUST(cuArrayDestroy, second);
    MUST(cuArrayDestroy, array);
    MUST(cuModuleUnload, module);
}

int main() {
    CHECK(cudaSetDevice(0));
    CHECK(cudaFree(nullptr));
    cudaDeviceProp device;
    CHECK(cudaGetDeviceProperties(&device, 0));
    row("the device has textures and surfaces", device.maxTexture2D[0] > 0 && device.maxSurface2D[0] > 0, 1);
    copies();
    modes();
    kinds();
    formats();
    levels();
    surfaces();
    linear_memory();
    references();
    return verdict(right);
}

"""cuda-python: the driver's interface through its bindings, with a kernel that NVRTC compiles."""

import array
import ctypes

import report

driver, nvrtc = report.modules("cuda.bindings.driver", "cuda.bindings.nvrtc")
SOURCE = b"""extern "C" __global__ void scale(float *to, int count, float factor) {
    int place = blockIdx.x * blockDim.x + threadIdx.x;
    if (place < count) to[place] *= factor;
}"""
COUNT = 1 << 16


def check(answer):
    code, *values = answer
    if int(code) != 0:
        raise RuntimeError(f"{code!r}")
    return values[0] if len(values) == 1 else tuple(values)


try:
    check(driver.cuInit(0))
except RuntimeError as error:
    report.skip(f"the driver does not start: {error}")
device = check(driver.cuDeviceGet(0))
context = check(driver.cuDevicePrimaryCtxRetain(device))
check(driver.cuCtxSetCurrent(context))

with report.part("memory"):
    free, total = check(driver.cuMemGetInfo())
    report.line(memory={"free": int(free), "total": int(total)})
    report.result("name", check(driver.cuDeviceGetName(96, device)).split(b"\0")[0].decode())

with report.part("compile"):
    attribute = driver.CUdevice_attribute
    major = check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device))
    minor = check(driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device))
    program = check(nvrtc.nvrtcCreateProgram(SOURCE, b"scale.cu", 0, [], []))
    # PTX of the oldest architecture that every compiler has: a newer compiler's PTX may be too new for the driver.
    check(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_80"]))
    image = b" " * check(nvrtc.nvrtcGetPTXSize(program))
    check(nvrtc.nvrtcGetPTX(program, image))
    report.note("capability", f"{major}.{minor}")
    module = check(driver.cuModuleLoadData(image))
    function = check(driver.cuModuleGetFunction(module, b"scale"))
    stream = check(driver.cuStreamCreate(0))
    values = array.array("f", (place % 1000 / 8 for place in range(COUNT)))
    results = array.array("f", bytes(4 * COUNT))
    memory = check(driver.cuMemAlloc(4 * COUNT))
    arguments = ((int(memory), COUNT, 2.5), (ctypes.c_void_p, ctypes.c_int, ctypes.c_float))

    def step():
        check(driver.cuMemcpyHtoDAsync(memory, values.buffer_info()[0], 4 * COUNT, stream))
        check(driver.cuLaunchKernel(function, COUNT // 256, 1, 1, 256, 1, 1, 0, stream, arguments, 0))
        check(driver.cuMemcpyDtoHAsync(results.buffer_info()[0], memory, 4 * COUNT, stream))

    step()
    check(driver.cuStreamSynchronize(stream))
    report.result("scaled numbers", all(2.5 * value == result for value, result in zip(values, results)))
    report.timed("copy, kernel, copy", step, lambda: check(driver.cuStreamSynchronize(stream)))

report.done()

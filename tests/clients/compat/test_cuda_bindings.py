"""cuda-python's bindings of the driver and of NVRTC: its wheel has no tests."""

import ctypes

import numpy
import pytest
from cuda.bindings import driver, nvrtc

SOURCE = rb"""
extern "C" __global__ void scale(float *data, float factor, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) data[i] *= factor;
}
"""


def must(result):
    assert int(result[0]) == 0, result[0]
    return result[1] if len(result) == 2 else result[1:]


@pytest.fixture(scope="module")
def context():
    must(driver.cuInit(0))
    device = must(driver.cuDeviceGet(0))
    context = must(driver.cuDevicePrimaryCtxRetain(device))
    must(driver.cuCtxSetCurrent(context))
    yield device
    must(driver.cuDevicePrimaryCtxRelease(device))


@pytest.fixture(scope="module")
def ptx():
    program = must(nvrtc.nvrtcCreateProgram(SOURCE, b"scale.cu", 0, [], []))
    must(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_80"]))
    text = b" " * must(nvrtc.nvrtcGetPTXSize(program))
    must(nvrtc.nvrtcGetPTX(program, text))
    return text


def scaled(function, stream, count=1000):
    values = numpy.arange(count, dtype=numpy.float32)
    expected = values * 3
    data = must(driver.cuMemAlloc(values.nbytes))
    must(driver.cuMemcpyHtoDAsync(data, values.ctypes.data, values.nbytes, stream))
    arguments = ((int(data), 3.0, count), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int))
    must(driver.cuLaunchKernel(function, 8, 1, 1, 128, 1, 1, 0, stream, arguments, 0))
    must(driver.cuMemcpyDtoHAsync(values.ctypes.data, data, values.nbytes, stream))
    must(driver.cuStreamSynchronize(stream))
    must(driver.cuMemFree(data))
    return numpy.array_equal(values, expected)


def test_module(context, ptx):
    module = must(driver.cuModuleLoadData(ptx))
    function = must(driver.cuModuleGetFunction(module, b"scale"))
    assert scaled(function, driver.CUstream(0))
    must(driver.cuModuleUnload(module))


def test_library_and_graph(context, ptx):
    library = must(driver.cuLibraryLoadData(ptx, [], [], 0, [], [], 0))
    kernel = must(driver.cuLibraryGetKernel(library, b"scale"))
    stream = must(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    data = must(driver.cuMemAlloc(4000))
    must(driver.cuMemsetD32(data, 0x3F800000, 1000))
    must(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    arguments = ((int(data), 2.0, 1000), (ctypes.c_void_p, ctypes.c_float, ctypes.c_int))
    function = must(driver.cuKernelGetFunction(kernel))
    must(driver.cuLaunchKernel(function, 8, 1, 1, 128, 1, 1, 0, stream, arguments, 0))
    graph = must(driver.cuStreamEndCapture(stream))
    executable = must(driver.cuGraphInstantiate(graph, 0))
    for _ in range(3):
        must(driver.cuGraphLaunch(executable, stream))
    must(driver.cuStreamSynchronize(stream))
    values = numpy.zeros(1000, dtype=numpy.float32)
    must(driver.cuMemcpyDtoH(values.ctypes.data, data, values.nbytes))
    assert (values == 8).all()


def test_events_and_pools(context):
    stream = must(driver.cuStreamCreate(0))
    start, end = must(driver.cuEventCreate(0)), must(driver.cuEventCreate(0))
    must(driver.cuEventRecord(start, stream))
    data = must(driver.cuMemAllocAsync(1 << 20, stream))
    must(driver.cuMemFreeAsync(data, stream))
    must(driver.cuEventRecord(end, stream))
    must(driver.cuEventSynchronize(end))
    assert must(driver.cuEventElapsedTime(start, end)) >= 0


def test_errors(context):
    assert driver.cuMemFree(12345)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE
    assert driver.cuModuleLoadData(b"nonsense\0")[0] != driver.CUresult.CUDA_SUCCESS
    must(driver.cuCtxSynchronize())


@pytest.mark.parametrize("attribute", list(driver.CUdevice_attribute))
def test_attribute(context, attribute):
    code, value = driver.cuDeviceGetAttribute(attribute, context)
    # The last value of the header's list is its end.
    assert code in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE)

"""CuPy: element-wise kernels and reductions that it compiles at run time, a kernel of ours, a stream, pools, the end of memory."""

import zlib

import report

cupy, numpy = report.modules("cupy", "numpy")
try:
    if cupy.cuda.runtime.getDeviceCount() == 0:
        report.skip("cupy finds no device")
except cupy.cuda.runtime.CUDARuntimeError as error:
    report.skip(f"cupy finds no device: {error}")
wait = cupy.cuda.runtime.deviceSynchronize

with report.part("memory"):
    free, total = cupy.cuda.runtime.memGetInfo()
    report.line(memory={"free": int(free), "total": int(total)})

x = numpy.arange(100_000, dtype=numpy.float32) / 8
numbers = cupy.asarray(x)

with report.part("elements"):
    for name, array in (("sum of arrays", numbers + numbers), ("half", numbers.astype("f2").astype("f4")), ("ints", numbers.astype("i8") * 3 // 7 % 5)):
        report.result(name, f"{zlib.crc32(cupy.asnumpy(array).tobytes()):08x}")
    report.result("sine", [float(value) for value in cupy.asnumpy(cupy.sin(numbers)[::12_500])], 1e-4)
    report.timed("sine", lambda: cupy.sin(numbers), wait)

with report.part("reductions"):
    report.result("sum", float((numbers / 1000).sum()), 1e-4)
    report.result("place of the largest", int(numbers.argmax()))
    report.result("running sum", float(cupy.cumsum(numbers[:1000])[-1]), 1e-4)
    report.timed("sum", lambda: numbers.sum(), wait)

with report.part("own kernel"):
    kernel = cupy.RawKernel(
        r"""extern "C" __global__ void square(const float *from, float *to, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) to[i] = from[i] * from[i];
        }""",
        "square",
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    wait()
    with stream:
        squares = cupy.empty_like(numbers)
        kernel((391,), (256,), (numbers, squares, numpy.int32(numbers.size)))
        event = stream.record()
    event.synchronize()
    report.result("own kernel", bool(numpy.array_equal(squares.get(), x * x)))
    report.timed("own kernel", lambda: kernel((391,), (256,), (numbers, squares, numpy.int32(numbers.size))), wait)

with report.part("product"):
    square = cupy.asarray(numpy.random.default_rng(1).standard_normal((512, 512), dtype=numpy.float32))
    report.result("product", [float(value) for value in cupy.asnumpy((square @ square)[0, ::64])], 1e-3)
    report.timed("product", lambda: square @ square, wait)

with report.part("out of memory"):
    raised = False
    try:
        cupy.empty(1 << 44, dtype=cupy.uint8)
    except cupy.cuda.memory.OutOfMemoryError:
        raised = True
    report.result("the end of memory raises an error", raised)
    cupy.get_default_memory_pool().free_all_blocks()
    report.result("sum after the end of memory", float((numbers / 1000).sum()), 1e-4)

report.done()

"""numba: kernels that it compiles from Python, shared memory, atomics, a stream."""

import report

numpy, numba, cuda = report.modules("numpy", "numba", "numba.cuda")
if not cuda.is_available():
    report.skip("numba finds no CUDA device")

with report.part("memory"):
    info = cuda.current_context().get_memory_info()
    report.line(memory={"free": int(info.free), "total": int(info.total)})


@cuda.jit
def scale(values, factor):
    place = cuda.grid(1)
    if place < values.size:
        values[place] *= factor


@cuda.jit
def total(values, result):
    cache = cuda.shared.array(256, numba.float32)
    place, own = cuda.grid(1), cuda.threadIdx.x
    cache[own] = values[place] if place < values.size else 0.0
    cuda.syncthreads()
    step = 128
    while step > 0:
        if own < step:
            cache[own] += cache[own + step]
        cuda.syncthreads()
        step //= 2
    if own == 0:
        cuda.atomic.add(result, 0, cache[0])


values = numpy.arange(1 << 16, dtype=numpy.float32) % 1000 / 8

with report.part("scale"):
    stream = cuda.stream()
    memory = cuda.to_device(values, stream=stream)
    scale[256, 256, stream](memory, 2.5)
    back = memory.copy_to_host(stream=stream)
    stream.synchronize()
    report.result("scale", bool(numpy.array_equal(back, values * numpy.float32(2.5))))
    report.timed("scale", lambda: scale[256, 256, stream](memory, 1.0), stream.synchronize)

with report.part("sum"):
    memory, result = cuda.to_device(values), cuda.to_device(numpy.zeros(1, dtype=numpy.float32))
    total[256, 256](memory, result)
    report.result("sum", float(result.copy_to_host()[0]), 1e-3)
    report.timed("sum", lambda: total[256, 256](memory, result), cuda.synchronize)

report.done()

"""CuPy: element-wise kernels and reductions that it compiles at run time, a kernel of ours, a stream, an event."""

import sys
import zlib

import cupy
import numpy

print(f"runtime {cupy.cuda.runtime.runtimeGetVersion()}, {cupy.cuda.runtime.getDeviceCount()} device(s)")
x = numpy.arange(1000, dtype=numpy.float32)
a = cupy.asarray(x)
b = cupy.ones(1000, dtype=cupy.float32)
right = [numpy.array_equal((a + b).get(), x + 1) for _ in range(2)]

kernel = cupy.RawKernel(
    r"""extern "C" __global__ void square(const float *from, float *to, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) to[i] = from[i] * from[i];
    }""",
    "square",
)
stream = cupy.cuda.Stream(non_blocking=True)
with stream:
    squares = cupy.zeros_like(a)
    kernel((8,), (128,), (a, squares, numpy.int32(1000)))
    event = stream.record()
event.synchronize()
right.append(numpy.array_equal(squares.get(), x * x))
print("add, add again, own kernel:", right)

numbers = cupy.asarray(x / 8)
reductions = {
    "sum": (numbers.sum(), (x / 8).sum()),
    "largest": (numbers.max(), (x / 8).max()),
    "its place": (numbers.argmax(), 999),
    "mean of rows": (numbers.reshape(10, 100).mean(axis=1), (x / 8).reshape(10, 100).mean(axis=1)),
    "running sum": (cupy.cumsum(numbers), numpy.cumsum(x / 8)),
    "sine": (cupy.sin(numbers), numpy.sin(x / 8)),
    "power": (numbers**1.5, (x / 8) ** 1.5),
    "half precision": (numbers.astype("f2").astype("f4"), (x / 8).astype("f2").astype("f4")),
    "whole numbers": (numbers.astype("i8") * 3 // 7 % 5, (x / 8).astype("i8") * 3 // 7 % 5),
    "complex": ((numbers + 1j * numbers) ** 2, (x / 8 + 1j * x / 8) ** 2),
    "transposed": (cupy.ascontiguousarray(numbers.reshape(10, 100).T), (x / 8).reshape(10, 100).T),
}
for name, (result, expected) in reductions.items():
    result = cupy.asnumpy(result)
    right.append(numpy.allclose(result, expected, rtol=1e-5))
    print(f"{name}: {'right' if right[-1] else 'wrong'}, checksum {zlib.crc32(result.tobytes()):08x}")
print("PASS" if all(right) else "FAIL")
sys.exit(not all(right))

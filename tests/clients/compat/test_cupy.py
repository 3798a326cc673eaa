"""CuPy: its wheel has no tests."""

import cupy
import numpy
import pytest

X = numpy.arange(1, 1001, dtype=numpy.float32) / 8

UNARY = ["sin", "cos", "exp", "log", "sqrt", "tanh", "floor", "abs", "negative", "isfinite"]
BINARY = ["add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "greater", "hypot"]
REDUCTIONS = ["sum", "prod", "max", "min", "mean", "std", "var", "argmax", "argmin", "any", "all"]
TYPES = ["?", "b", "B", "h", "i", "q", "e", "f", "d", "F", "D"]


def close(ours, expected):
    numpy.testing.assert_allclose(cupy.asnumpy(ours), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    close(getattr(cupy, name)(cupy.asarray(X)), getattr(numpy, name)(X))


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    y = X[::-1].copy() / 50
    close(getattr(cupy, name)(cupy.asarray(X), cupy.asarray(y)), getattr(numpy, name)(X, y))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction(name):
    x = X[:64] / 8
    close(getattr(cupy, name)(cupy.asarray(x)), getattr(numpy, name)(x))
    rows = x.reshape(8, 8)
    close(getattr(cupy, name)(cupy.asarray(rows), axis=1), getattr(numpy, name)(rows, axis=1))


@pytest.mark.parametrize("kind", TYPES)
def test_type(kind):
    x = numpy.arange(10).astype(kind)
    close(cupy.asarray(x), x)
    close(cupy.asarray(x) + cupy.asarray(x), x + x)


def test_indexing():
    x, y = numpy.arange(60).reshape(3, 4, 5), cupy.arange(60).reshape(3, 4, 5)
    close(y[1, ::-1, 2:4], x[1, ::-1, 2:4])
    close(y[y % 7 == 0], x[x % 7 == 0])
    close(y[[2, 0], 1], x[[2, 0], 1])
    y[:, 1] = 0
    x[:, 1] = 0
    close(y, x)


def test_sort_and_unique():
    x = numpy.array([5, 3, 9, 1, 3, 3, 8, 0], dtype=numpy.int32)
    close(cupy.sort(cupy.asarray(x)), numpy.sort(x))
    close(cupy.argsort(cupy.asarray(x), kind="stable"), numpy.argsort(x, kind="stable"))
    close(cupy.unique(cupy.asarray(x)), numpy.unique(x))


def test_scan():
    close(cupy.cumsum(cupy.asarray(X)), numpy.cumsum(X))


def test_raw_kernel_streams_and_graph():
    kernel = cupy.RawKernel(
        'extern "C" __global__ void twice(float *x, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x;'
        " if (i < n) x[i] *= 2; }",
        "twice",
    )
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        data = cupy.ones(1000, dtype=cupy.float32)
        kernel((8,), (128,), (data, numpy.int32(1000)))
        stream.begin_capture()
        kernel((8,), (128,), (data, numpy.int32(1000)))
        graph = stream.end_capture()
        graph.launch(stream)
        graph.launch(stream)
    stream.synchronize()
    close(data, numpy.full(1000, 8, dtype=numpy.float32))


def test_memory_pools():
    pool = cupy.cuda.MemoryAsyncPool()
    with cupy.cuda.using_allocator(pool.malloc):
        assert float(cupy.ones(1 << 16, dtype=cupy.float32).sum()) == 1 << 16
    pinned = cupy.cuda.alloc_pinned_memory(4096)
    host = numpy.frombuffer(pinned, numpy.float32, 1000)
    host[:] = X
    data = cupy.empty(1000, dtype=cupy.float32)
    data.set(host)
    close(data, X)


def test_out_of_memory_is_an_exception():
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.empty(1 << 50, dtype=cupy.uint8)
    assert int(cupy.arange(10).sum()) == 45

"""Taichi on its CUDA back end, compared with NumPy."""

import numpy
import pytest
import taichi as ti


@pytest.fixture(scope="module", autouse=True)
def device():
    # Its memory pool is larger than a small share by default.
    ti.init(arch=ti.cuda, device_memory_GB=0.1, offline_cache=False)
    assert ti.lang.impl.current_cfg().arch == ti.cuda
    yield
    ti.reset()


def test_field():
    field = ti.field(ti.f32, shape=1000)

    @ti.kernel
    def fill():
        for i in field:
            field[i] = ti.sqrt(float(i))

    fill()
    numpy.testing.assert_allclose(field.to_numpy(), numpy.sqrt(numpy.arange(1000, dtype=numpy.float32)), rtol=1e-5)


def test_reduction():
    field = ti.field(ti.i32, shape=(40, 50))
    field.from_numpy(numpy.arange(2000, dtype=numpy.int32).reshape(40, 50))

    @ti.kernel
    def total() -> ti.i32:
        sum = 0
        for i, j in field:
            sum += field[i, j]
        return sum

    assert total() == 1999000


def test_array_of_numpy():
    @ti.kernel
    def twice(x: ti.types.ndarray(dtype=ti.f32, ndim=1)):
        for i in x:
            x[i] *= 2

    x = numpy.arange(100, dtype=numpy.float32)
    twice(x)
    assert numpy.array_equal(x, numpy.arange(100, dtype=numpy.float32) * 2)


def test_matrices():
    vectors = ti.Vector.field(3, ti.f32, shape=64)

    @ti.kernel
    def rotate():
        for i in vectors:
            turn = ti.Matrix([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]])
            vectors[i] = turn @ ti.Vector([float(i), 1.0, 2.0])

    rotate()
    assert numpy.array_equal(vectors.to_numpy()[5], [1.0, 2.0, 5.0])


def test_fractal():
    size = 64
    pixels = ti.field(ti.i32, shape=(size, size))

    @ti.kernel
    def paint():
        for i, j in pixels:
            x, y, n = 0.0, 0.0, 0
            while x * x + y * y < 4.0 and n < 50:
                x, y = x * x - y * y + (i - 40) / 24.0, 2 * x * y + (j - 32) / 24.0
                n += 1
            pixels[i, j] = n

    paint()
    painted = pixels.to_numpy()
    assert painted[40, 32] == 50 and painted[0, 0] < 5

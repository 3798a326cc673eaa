"""tinygrad on its CUDA device: its own operations, TinyJit, a small training run."""

import numpy
import pytest
from tinygrad import Context, Tensor, TinyJit, nn

X = numpy.linspace(-2, 2, 48, dtype=numpy.float32).reshape(6, 8)

UNARY = ["relu", "exp", "sigmoid", "tanh", "sqrt", "sin", "neg", "abs"]


def test_device_is_cuda():
    assert Tensor([1]).device.startswith("CUDA")


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    x = abs(X) + 1
    expected = {"relu": lambda x: numpy.maximum(x, 0), "sigmoid": lambda x: 1 / (1 + numpy.exp(-x)), "neg": numpy.negative}
    numpy.testing.assert_allclose(
        getattr(Tensor(x), name)().numpy(), expected.get(name, getattr(numpy, name, None))(x), rtol=1e-3, atol=1e-5
    )


@pytest.mark.parametrize("axis", [None, 0, 1])
@pytest.mark.parametrize("name", ["sum", "max", "mean"])
def test_reduction(name, axis):
    numpy.testing.assert_allclose(
        getattr(Tensor(X), name)(axis=axis).numpy(), getattr(X, name)(axis=axis), rtol=1e-4, atol=1e-5
    )


def test_product_and_convolution():
    numpy.testing.assert_allclose((Tensor(X) @ Tensor(X.T.copy())).numpy(), X @ X.T, rtol=1e-4, atol=1e-4)
    image, kernel = Tensor(X.reshape(1, 1, 6, 8)), Tensor(numpy.ones((1, 1, 3, 3), dtype=numpy.float32))
    expected = sum(X[i : i + 4, j : j + 6] for i in range(3) for j in range(3))
    numpy.testing.assert_allclose(image.conv2d(kernel).numpy()[0, 0], expected, rtol=1e-4, atol=1e-5)


def test_jit():
    @TinyJit
    def step(x):
        return ((x * 2 + 1).relu() @ x.T).realize()

    for round in range(5):
        x = X + round
        expected = numpy.maximum(x * 2 + 1, 0) @ x.T
        numpy.testing.assert_allclose(step(Tensor(x).realize()).numpy(), expected, rtol=1e-3, atol=1e-3)


def test_training():
    Tensor.manual_seed(1)
    layer = nn.Linear(8, 1)
    optimiser = nn.optim.SGD([layer.weight, layer.bias], lr=0.05)
    goal = Tensor(X.sum(axis=1, keepdims=True) / 8)
    losses = []
    with Context(TRAINING=1):
        for _ in range(20):
            optimiser.zero_grad()
            loss = ((layer(Tensor(X)) - goal) ** 2).mean().backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 4, losses

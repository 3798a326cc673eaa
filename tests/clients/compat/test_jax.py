"""JAX compiles for the device: each result is compared with that of its CPU back end."""

import jax
import jax.numpy as jnp
import numpy

# Sums of single precision have another order on each back end.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def data(*shape, seed=1):
    return numpy.random.default_rng(seed).normal(size=shape).astype(numpy.float32)


def both(function, *arguments):
    """The results of a compiled function on the device and on the CPU."""
    results = []
    for platform in ("cuda", "cpu"):
        device = jax.devices(platform)[0]
        placed = jax.device_put(arguments, device)
        result = jax.jit(function)(*placed)
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(result))
        results.append(jax.tree.map(numpy.asarray, result))
    return results


def agree(function, *arguments):
    gpu, cpu = both(function, *arguments)
    jax.tree.map(lambda one, other: numpy.testing.assert_allclose(one, other, **TOLERANCE), gpu, cpu)
    return gpu


def test_device():
    (device,) = jax.devices()
    assert device.platform == "gpu"
    assert device.memory_stats()["bytes_limit"] > 0


def test_operators_without_jit():
    x = jnp.asarray(data(1000))
    numpy.testing.assert_allclose(x * 2 + x, data(1000) * 3, rtol=1e-6)


def test_jit():
    agree(lambda x, y: (x * y + 1).sum(axis=0) - jnp.maximum(x, y).max(axis=1)[:50], data(200, 50), data(200, 50, seed=2))


def test_grad():
    agree(jax.grad(lambda x: ((x**2 - 1) ** 2).mean()), data(4000))


def test_hessian():
    agree(jax.hessian(lambda x: (x**3).sum() * x.mean()), data(16))


def test_vmap():
    agree(jax.vmap(lambda x, y: (x * y).sum(), in_axes=(0, None)), data(64, 30), data(30, seed=2))


def test_scan():
    def decayed(x):
        def step(state, value):
            state = state * 0.9 + value
            return state, state.sum()

        return jax.lax.scan(step, jnp.zeros(x.shape[1:]), x)

    agree(decayed, data(100, 32))


def test_grad_of_scan():
    def loss(x):
        return jax.lax.scan(lambda state, value: (state * 0.9 + value * state, None), jnp.ones(8), x)[0].sum()

    agree(jax.grad(loss), 0.1 * data(20, 8))


def test_loop_whose_end_depends_on_data():
    def halved(x):
        return jax.lax.while_loop(lambda state: state[0].max() > 1, lambda state: (state[0] / 2, state[1] + 1), (x, 0))

    gpu, cpu = both(halved, 1000 + data(256))
    numpy.testing.assert_array_equal(gpu[0], cpu[0])
    assert gpu[1] == cpu[1] == 10


def test_condition():
    def chosen(x):
        return jax.lax.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, x)

    for x in (data(100) + 5, data(100) - 5):
        agree(chosen, x)


def test_commands_that_repeat():
    # By default a chain of this length is a graph of the driver, which later calls update with their addresses.
    def chain(x):
        parts = []
        for index in range(12):
            x = jnp.sort(x) * 0.5 if index % 2 else jnp.cumsum(x) / x.size
            parts.append(x.sum())
        return x, jnp.stack(parts)

    for seed in range(6):
        agree(chain, data(512, seed=seed))


def test_integers_and_sorting():
    x = numpy.random.default_rng(3).integers(-1000, 1000, 3000).astype(numpy.int32)
    gpu, cpu = both(lambda x: (jnp.sort(x), jnp.argsort(x, stable=True), jnp.cumsum(x), jnp.bincount(x % 10, length=10)), x)
    for one, other in zip(gpu, cpu):
        numpy.testing.assert_array_equal(one, other)


def test_random_bits():
    gpu, cpu = both(lambda seed: jax.random.bits(jax.random.key(seed), (1000,)), numpy.int32(7))
    numpy.testing.assert_array_equal(gpu, cpu)


def test_gather_and_scatter():
    index = numpy.random.default_rng(4).integers(0, 100, 500)
    agree(lambda x, y: (x[index], x.at[index].add(y)), data(100), data(500, seed=2))


def test_callback_on_the_host():
    seen = []

    def remembered(x):
        jax.debug.callback(lambda value: seen.append(float(value)), x.sum())
        return jax.pure_callback(lambda x: numpy.asarray(x) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    x = jnp.arange(10, dtype=jnp.float32)
    numpy.testing.assert_allclose(jax.jit(remembered)(x), (numpy.arange(10) + 1) * 2)
    jax.effects_barrier()
    assert seen == [45.0]


def test_donated_buffers():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros(1 << 16)
    for _ in range(50):
        last, x = x, step(x)
        assert last.is_deleted()
    assert (numpy.asarray(x) == 50).all()


def test_training():
    inputs, weights = data(256, 8), data(8, seed=2)
    target = inputs @ weights

    def loss(w):
        return (((inputs * w).sum(axis=1) - target) ** 2).mean()

    def step(w, _):
        value, slope = jax.value_and_grad(loss)(w)
        return w - 0.1 * slope, value

    def trained(w):
        return jax.lax.scan(step, w, None, length=40)

    w, losses = agree(trained, numpy.zeros(8, numpy.float32))
    assert losses[-1] < 1e-3 * losses[0]
    numpy.testing.assert_allclose(w, weights, atol=0.05)

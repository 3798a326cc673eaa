"""JAX: compiled functions, gradients, a loop with random numbers, and a training step."""

import report

jax, numpy = report.modules("jax", "numpy")
import jax.numpy as jnp  # noqa: E402

try:
    device = jax.devices("gpu")[0]
except RuntimeError as error:
    report.skip(f"jax finds no GPU: {error}")


def digest(array):
    flat = numpy.asarray(array, dtype=numpy.float64).ravel()
    return [float(flat.mean()), float(flat.std()), *map(float, flat[:: max(1, flat.size // 8)][:8])]


with report.part("memory"):
    statistics = device.memory_stats() or {}
    report.note("bytes_limit", statistics.get("bytes_limit"))
    report.result("device", device.device_kind)

with report.part("product"):
    a = jax.random.normal(jax.random.PRNGKey(1), (2048, 2048))
    square = jax.jit(lambda x: x @ x)
    report.result("product", digest(square(a)), 1e-2)
    report.timed("product", lambda: square(a).block_until_ready(), lambda: None)

with report.part("gradients"):
    loss = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
    x, w = jax.random.normal(jax.random.PRNGKey(2), (256, 512)), jax.random.normal(jax.random.PRNGKey(3), (512, 64))
    gradient = jax.jit(jax.grad(loss))
    report.result("gradients", digest(gradient(w, x)), 1e-2)
    report.timed("gradients", lambda: gradient(w, x).block_until_ready(), lambda: None)

with report.part("loop"):
    def walk(key):
        def body(_, state):
            key, total = state
            key, part = jax.random.split(key)
            return key, total + jax.random.normal(part, (1024,))

        return jax.lax.fori_loop(0, 100, body, (key, jnp.zeros(1024)))[1]

    walks = jax.jit(walk)
    report.result("loop", digest(walks(jax.random.PRNGKey(4))), 1e-4)
    report.timed("loop of 100 steps", lambda: walks(jax.random.PRNGKey(4)).block_until_ready(), lambda: None)

with report.part("training"):
    shapes = [(64, 128), (128, 128), (128, 1)]
    keys = jax.random.split(jax.random.PRNGKey(5), len(shapes))
    parameters = [jax.random.normal(key, shape) / shape[0] ** 0.5 for key, shape in zip(keys, shapes)]
    inputs = jax.random.normal(jax.random.PRNGKey(6), (512, 64))
    target = jnp.sin(inputs.sum(axis=1, keepdims=True))

    def predict(parameters, x):
        for w in parameters[:-1]:
            x = jnp.tanh(x @ w)
        return x @ parameters[-1]

    error = lambda parameters: jnp.mean((predict(parameters, inputs) - target) ** 2)

    @jax.jit
    def train(parameters):
        value, slopes = jax.value_and_grad(error)(parameters)
        return value, [w - 0.05 * slope for w, slope in zip(parameters, slopes)]

    losses = []
    for _ in range(100):
        value, parameters = train(parameters)
        losses.append(float(value))
    report.result("losses", losses[::10], 5e-2)
    report.timed("training step", lambda: jax.block_until_ready(train(parameters)), lambda: None)

report.done()

"""Ten steps of training on four devices, which belong to one process or to two: python -m tests.devices.two_processes.

Prints a line of JSON: the losses for each packer, and a norm of each gradient of the last step.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax import PyLayer, saved_tensors_hooks
from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu, save_on_disk

STEPS = 10


class Gelu(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jax.nn.sigmoid(1.702 * x), jnp.tanh(x)

    @staticmethod
    def backward(ctx, dy, unused):  # a missing cotangent arrives as zeros
        (x,) = ctx.saved_tensor()
        s = jax.nn.sigmoid(1.702 * x)
        return dy * s * (1 + 1.702 * x * (1 - s)) + unused


def packers(directory: str) -> dict[str, Any]:
    """A function that makes each pair, by its name."""
    return {
        "none": lambda: lambda f: f,
        "save_on_cpu": save_on_cpu,
        "pinned": lambda: save_on_cpu(pin_memory=True),
        "save_on_disk": lambda: save_on_disk(directory),
        "cast_saved": cast_saved,
        "quantize_saved": quantize_saved,
        "host": lambda: saved_tensors_hooks(lambda x: [x], lambda packed: packed[0], host=True),
    }


def train(pair: Any, kind: AxisType, jitted: bool) -> tuple[list[float], list[float]]:
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)

    def array(seed: int, shape: tuple[int, ...], *spec: Any) -> jax.Array:
        values = np.random.default_rng(seed).normal(size=shape).astype(np.float32) / shape[0] ** 0.5
        return jax.make_array_from_callback(shape, NamedSharding(mesh, P(*spec)), lambda index: values[index])

    def on(*spec: Any) -> Any:
        return NamedSharding(mesh, P(*spec)) if kind == AxisType.Explicit else None

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        hidden, _ = Gelu.apply(jnp.matmul(x, weights[0], out_sharding=on("data", "model")))
        y = jnp.matmul(hidden, weights[1], out_sharding=on("data", None))
        return jnp.mean((jnp.tanh(y) - x) ** 2)

    def step(weights: list[jax.Array], x: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(pair(loss))(weights, x)
        weights = [w - 0.5 * g for w, g in zip(weights, gradients, strict=True)]
        return weights, value, [jnp.linalg.norm(g) for g in gradients]

    weights, x = [array(1, (16, 32), None, "model"), array(2, (32, 16), "model", None)], array(3, (8, 16), "data", None)
    specs = [w.sharding for w in weights]
    run = jax.jit(step) if jitted else step
    losses, norms = [], []
    for _ in range(STEPS):
        weights, value, norms = run(weights, x)
        losses.append(float(value))
    if kind == AxisType.Explicit:
        assert [w.sharding for w in weights] == specs
    return losses, [float(norm) for norm in norms]


# Each packer, and the ways to run a step of it: with all packers under jit, with those that differ in the others.
DIFFERENT = ("save_on_disk", "quantize_saved", "host")
WAYS = {"explicit": (AxisType.Explicit, True), "automatic": (AxisType.Auto, True), "eager": (AxisType.Auto, False)}


def runs() -> list[tuple[str, str]]:
    return [(way, name) for way in WAYS for name in packers("") if way == "explicit" or name in DIFFERENT]


def results(directory: str) -> dict[str, Any]:
    """The losses and gradient norms of each packer, jitted with either kind of axes, and in eager mode."""
    pairs = packers(directory)
    return {f"{way} {name}": train(pairs[name](), *WAYS[way]) for way, name in runs()}


def main() -> None:
    process, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Several small programs at once, each of which waits for the other process, can wait for each other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    assert len(jax.devices()) == 4
    assert len(jax.local_devices()) == 2
    found = results(directory)
    print(json.dumps(found), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()

"""A tensor-parallel block of a transformer on four devices, with automatic and with explicit axes."""

from __future__ import annotations

import contextlib
import re
from collections import Counter

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.kit.layers import Tanh

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}
WIDTH, HEADS = 512, 8


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)


def entered(mesh):
    return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()


def random(mesh, shape, *spec, seed=0):
    values = jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))


def collectives(compiled):
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))


def normalized(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-6)


def transformer(mesh):
    """The loss of a tensor-parallel block, its parameters and its input."""

    def on(*spec):
        return NamedSharding(mesh, P(*spec)) if AxisType.Explicit in mesh.axis_types else None

    def split(x):
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        return jnp.reshape(x, shape, out_sharding=on("data", None, "model")).swapaxes(1, 2)

    def block(x, w):
        h = normalized(x)
        q, k, v = (split(h @ w[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k) / 8, axis=-1)
        mixed = jnp.einsum("bhqk,bhkd->bhqd", weights, v).swapaxes(1, 2)
        mixed = jnp.reshape(mixed, x.shape, out_sharding=on("data", None, "model"))
        x = x + jnp.matmul(mixed, w["out"], out_sharding=on("data", None, None))
        hidden = Tanh.apply(normalized(x) @ w["up"])
        return x + jnp.matmul(hidden, w["down"], out_sharding=on("data", None, None))

    def loss(w, x):
        return jnp.mean(block(x, w) ** 2)

    columns = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "up": 2 * WIDTH}
    rows = {"out": WIDTH, "down": 2 * WIDTH}
    weights = {name: random(mesh, (WIDTH, n), None, "model", seed=ord(name[0])) for name, n in columns.items()}
    weights |= {name: random(mesh, (n, WIDTH), "model", seed=ord(name[0])) for name, n in rows.items()}
    return loss, weights, random(mesh, (4, 32, WIDTH), "data")

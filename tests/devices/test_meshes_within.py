"""JAX finds the devices of a mesh within layers and within operations of a block, and compiles for them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pylayer_jax import PyLayer, saved_tensors_hooks
from tests.kit.layers import Tanh, bits


def sine():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)


class Sine(PyLayer):
    forward_mode = True

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return sine()(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(ctx.saved_tensor()[0])


WITHIN = {
    "an operation in a block": lambda: bits()(sine()),
    "a layer": lambda: Sine.apply,
    "a layer in a block": lambda: bits()(Sine.apply),
    "a scan": lambda: lambda x: jax.lax.scan(lambda c, _: (bits()(sine())(c), None), x, length=1)[0],
}


@pytest.mark.parametrize("within", WITHIN)
def test_a_shard_map_of_arrays_that_may_be_anywhere(within):
    x, f = jnp.linspace(0.0, 1.0, 8), WITHIN[within]()
    np.testing.assert_allclose(jax.jit(f)(x), np.sin(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: f(x).sum()))(x), np.cos(x), rtol=1e-2)
    np.testing.assert_allclose(jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1])(x), x * np.cos(x), rtol=1e-5)


def test_a_sharding_constraint_in_a_block_is_obeyed():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    double = bits()(lambda x: jax.lax.with_sharding_constraint(x * jnp.sin(x), sharded))
    assert jax.jit(double)(jnp.ones(8)).sharding.device_set == sharded.device_set


def test_a_checkpointed_block_around_a_shard_map_in_eager_mode():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    tanh = jax.shard_map(Tanh.apply, mesh=mesh, in_specs=spec, out_specs=spec)
    x, f = jnp.linspace(0.0, 1.0, 8), jax.checkpoint(saved_tensors_hooks(lambda x: x, lambda x: x)(tanh))
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(x), 1 - np.tanh(x) ** 2, rtol=1e-5)

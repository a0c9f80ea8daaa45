"""`jax.vmap(jax.shard_map(...), spmd_axis_name=...)`: each device along the axis has examples of its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pylayer_jax import saved_tensors_hooks
from tests.kit.layers import Matmul

X = jnp.sin(jnp.arange(72.0)).reshape(4, 3, 6)
W = jnp.cos(jnp.arange(36.0)).reshape(6, 6)


class ByTransposition(Matmul):
    forward_mode = True


class ByJvp(Matmul):
    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        return dx @ w + x @ dw


PRODUCTS = {
    "transposed": ByTransposition.apply,
    "jvp": ByJvp.apply,
    "operation in a block": saved_tensors_hooks(lambda x: (x,), lambda kept: kept[0], differentiable=True)(jnp.matmul),
}


def cases():
    for name, product in PRODUCTS.items():
        # jax 0.10 cannot transpose its own pvary in the vjp function of an operation there.
        fails = name == "operation in a block" and jax.__version_info__ < (0, 11)
        yield pytest.param(product, id=name, marks=[pytest.mark.xfail(raises=ValueError, strict=True)] if fails else [])


@pytest.mark.parametrize("product", list(cases()))
def test_an_operand_that_all_examples_share(product):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(f, x, w):
        replicated = PartitionSpec()
        mapped = jax.shard_map(lambda x, w: jnp.sin(f(x, w)), mesh=mesh, in_specs=replicated, out_specs=replicated)
        return jnp.sum(jax.vmap(mapped, in_axes=(0, None), spmd_axis_name="data")(x, w) ** 2)

    def of_gradient(f, x, w):
        return jnp.sum(jax.grad(loss, 2)(f, x, w) ** 2)

    for f in (loss, of_gradient):
        got, expected = (jax.jit(jax.grad(functools.partial(f, g), (0, 1)))(X, W) for g in (product, jnp.matmul))
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)

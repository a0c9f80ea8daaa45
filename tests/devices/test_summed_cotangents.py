"""Gradients of a replicated input, whose cotangent JAX has added up over devices already."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from pylayer_jax import PyLayer

W = jnp.arange(12.0).reshape(3, 4)
COLUMNS = PartitionSpec(None, "ranks")
OTHERS = {
    "the cotangent": lambda ctx, dy: dy,
    "pmean": lambda ctx, dy: jax.lax.pmean(dy, "ranks"),
    "own mean": lambda ctx, dy: jax.lax.psum(dy, "ranks") * 0.25,
    "sum of what varies": lambda ctx, dy: (
        jax.lax.psum(dy * jax.lax.axis_index("ranks").astype(dy.dtype), "ranks") / 6.0
    ),
}


def gradient(backward, around):
    class Identity(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 1.0

    Identity.backward = staticmethod(backward)
    mesh = jax.make_mesh((4,), ("ranks",), axis_types=(AxisType.Auto,))
    layer = jax.shard_map(
        lambda x, w: Identity.apply(x) @ w, mesh=mesh, in_specs=(PartitionSpec(), COLUMNS), out_specs=COLUMNS
    )
    return around(lambda x: layer(x, W).sum())(jnp.ones((1, 3)))


AROUND = [lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))]


@pytest.mark.parametrize("around", AROUND, ids=["jit of grad", "grad of jit"])
@pytest.mark.parametrize("name", OTHERS)
def test_what_is_right(name, around):
    with warnings.catch_warnings(action="error"):
        np.testing.assert_allclose(gradient(OTHERS[name], around), jnp.sum(W, 1)[None], rtol=1e-6)

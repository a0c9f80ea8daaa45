"""Layers of parallel training under `jax.shard_map`, written with JAX's own collectives, against one device.

JAX gives each value a type: *varying* over a mesh axis (each device has its own) or *invariant* (all have the same).
The transposes of `psum`, `pcast` and `all_gather` follow these types. So `backward` returns the gradient of its own
device for a varying argument, and the sum over all devices for an invariant one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pylayer_jax import PyLayer
from pylayer_jax.testing import assert_equivalent
from tests.kit.case import grid
from tests.kit.layers import Matmul


class CrossEntropy(PyLayer):
    """The cross entropy of logits [n, vocabulary] that are split along `axis`, and labels [n] that are not."""

    @staticmethod
    def forward(ctx, logits, labels, axis):
        count = logits.shape[-1]
        own_labels = labels - lax.axis_index(axis) * count
        is_own = own_labels[:, None] == jnp.arange(count)
        shifted = logits - lax.pmax(lax.stop_gradient(logits.max(-1)), axis)[:, None]
        exponentials = jnp.exp(shifted)
        total = lax.psum(exponentials.sum(-1), axis)
        ctx.save_for_backward(exponentials / total[:, None], is_own)
        return jnp.log(total) - lax.psum(jnp.where(is_own, shifted, 0).sum(-1), axis)

    @staticmethod
    def backward(ctx, dloss):
        softmax, is_own = ctx.saved_tensor()
        return (softmax - is_own.astype(softmax.dtype)) * dloss[:, None], None


class BatchNorm(PyLayer):
    """Batch norm of x [batch, channels], whose batch is split along `axis`."""

    @staticmethod
    def forward(ctx, x, scale, bias, axis):
        centered = x - lax.pmean(x.mean(0), axis)
        inv = lax.rsqrt(lax.pmean((centered**2).mean(0), axis) + 1e-5)
        ctx.save_for_backward(centered * inv, inv, scale)
        ctx.axis = axis
        return centered * inv * scale + bias

    @staticmethod
    def backward(ctx, dy):
        normalized, inv, scale = ctx.saved_tensor()
        dscale, dbias = lax.psum((jnp.sum(dy * normalized, 0), jnp.sum(dy, 0)), ctx.axis)
        count = dy.shape[0] * lax.axis_size(ctx.axis)
        return (dy - (dbias + normalized * dscale) / count) * inv * scale, dscale, dbias


LABELS = jnp.array([2, 7, 0, 5, 5, 1])


def network(x, a, b):
    return jnp.tanh(x @ a) @ b


def tensor_parallel(x, a, b):
    hidden = jnp.tanh(Matmul.apply(lax.pcast(x, "i", to="varying"), a))
    return lax.psum(Matmul.apply(hidden, b), "i")


def sequence_parallel(x, a, b):
    hidden = jnp.tanh(Matmul.apply(lax.all_gather(x, "i", tiled=True), a))
    return lax.psum_scatter(Matmul.apply(hidden, b), "i", tiled=True)


def plain_cross_entropy(logits):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), LABELS[:, None], 1)[:, 0]


def plain_batch_norm(x, scale, bias):
    return (x - x.mean(0)) * lax.rsqrt(x.var(0) + 1e-5) * scale + bias


ROWS, COLUMNS, ALL = P("i"), P(None, "i"), P()
MLP = grid(4, 6), grid(6, 8, low=-0.8, high=0.9), grid(8, 4, low=-0.7, high=0.8)
NORM = grid(8, 3), grid(3), 2 * grid(3)
CASES = {  # what a device computes, the whole, arguments, how they and the result are split
    "tensor parallel": (tensor_parallel, network, MLP, (ALL, COLUMNS, ROWS), ALL),
    "sequence parallel": (sequence_parallel, network, MLP, (ROWS, COLUMNS, ROWS), ROWS),
    "cross entropy": (lambda z: CrossEntropy.apply(z, LABELS, "i"), plain_cross_entropy, [grid(6, 8)], (COLUMNS,), ALL),
    "batch norm": (lambda *a: BatchNorm.apply(*a, "i"), plain_batch_norm, NORM, (ROWS, ALL, ALL), ROWS),
}


def sharded(of_shard, in_specs, out_specs):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    # Jitted, because jax.checking_leaks, in assert_equivalent, refuses gradients of eager shard_maps in plain JAX too.
    return jax.jit(jax.shard_map(of_shard, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


@pytest.mark.parametrize("name", CASES)
def test_derivatives_are_those_of_one_device(name):
    of_shard, whole, args, in_specs, out_specs = CASES[name]
    assert_equivalent(sharded(of_shard, in_specs, out_specs), whole, args, orders=(0, 1, 2))


@pytest.mark.parametrize("name", CASES)
def test_forward_over_reverse(name):
    of_shard, whole, args, in_specs, out_specs = CASES[name]
    tangents = tuple(jnp.cos(x) for x in args)

    def hessian_times_tangents(f):
        gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), tuple(range(len(args))))
        return jax.jit(lambda *args: jax.jvp(gradient, args, tangents)[1])(*args)

    ours = hessian_times_tangents(sharded(of_shard, in_specs, out_specs))
    for got, expected in zip(ours, hessian_times_tangents(whole), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_an_invariant_argument_that_gets_a_varying_gradient_is_an_error():
    f = sharded(Matmul.apply, (ALL, COLUMNS), COLUMNS)
    with pytest.raises(ValueError, match=r"'x'.*psum"):
        jax.jit(jax.grad(lambda x, a, _: f(x, a).sum()))(*MLP)

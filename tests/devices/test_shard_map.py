"""Layers and blocks of hooks under `jax.shard_map`, and within meshes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from pylayer_jax import PyLayer, saved_tensors_hooks
from pylayer_jax.testing import assert_equivalent
from tests.kit.case import grid
from tests.kit.layers import Matmul, Tanh, bits, layer


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


ROWS, COLUMNS, ALL = P("i"), P(None, "i"), P()
MLP = grid(4, 6), grid(6, 8, low=-0.8, high=0.9), grid(8, 4, low=-0.7, high=0.8)
CASES = {  # what a device computes, the whole, arguments, how they and the result are split
    "tensor parallel": (tensor_parallel, network, MLP, (ALL, COLUMNS, ROWS), ALL),
    "sequence parallel": (sequence_parallel, network, MLP, (ROWS, COLUMNS, ROWS), ROWS),
    "cross entropy": (lambda z: CrossEntropy.apply(z, LABELS, "i"), plain_cross_entropy, [grid(6, 8)], (COLUMNS,), ALL),
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


# -- JAX finds the devices of a mesh within layers and within operations of a block ----------------


def sine():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)


Sine = layer(lambda x: sine()(x), lambda x, dy: dy * jnp.cos(x), name="Sine", plain=True, forward_mode=True)


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


# -- vmap of shard_map: each device along the axis has examples of its own -------------------------


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


def products():
    for name, product in PRODUCTS.items():
        # jax 0.10 cannot transpose its own pvary in the vjp function of an operation there.
        fails = name == "operation in a block" and jax.__version_info__ < (0, 11)
        yield pytest.param(product, id=name, marks=[pytest.mark.xfail(raises=ValueError, strict=True)] if fails else [])


@pytest.mark.parametrize("product", list(products()))
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


@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "forward mode"])
def test_a_gradient_may_be_the_same_on_all_devices_though_the_argument_varies(forward_mode):
    zero = layer(lambda ctx, x: 3 * x, lambda ctx, dy: jnp.zeros(dy.shape), forward_mode=forward_mode)
    mesh = jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(zero.apply, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    assert not jax.jit(jax.grad(lambda x: mapped(x).sum()))(jnp.ones(8)).any()

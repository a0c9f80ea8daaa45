"""Layers of tensor, sequence and data parallel training on four devices, each with a collective in both methods.

As in Paddle and torch, every rank has a value of its own, also of a sum. What a layer computes is compared with what it
means for the stack of what all ranks hold. P and a number name a Paddle PyLayer, T and a number a torch Function of the
list that the layers are taken from.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from pylayer_jax import Function
from tests.kit.case import grid
from tests.kit.layers import layer
from tests.kit.transforms import assert_same

pytestmark = pytest.mark.frameworks

AXIS, RANKS = "ranks", 4
OWN = PartitionSpec(AXIS)
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "plain"])
X = grid(RANKS, 4, 4)  # of which each rank has four by four


class Group:
    """The ranks along a mesh axis, a Python object that is no pytree."""

    def same(self, x):
        return x

    def all_reduce(self, x):
        return jax.lax.pcast(jax.lax.psum(x, AXIS), AXIS, to="varying")

    def all_gather(self, x):
        return jax.lax.all_gather(x, AXIS, tiled=True)

    def reduce_scatter(self, x):
        return jax.lax.psum_scatter(x, AXIS, tiled=True)

    def exchange(self, x):
        return jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)


WORLD = Group()


def region(there, back):
    """P1, P2, P5, P6, T1, T2 and T7: forward and backward use different collectives, and ctx keeps the group."""

    def forward(ctx, x, group):
        ctx.group = group
        return there(group, x)

    made = layer(forward, lambda ctx, grad_output: (back(ctx.group, grad_output), None), Function)
    return lambda x: made.apply(x, WORLD)


class AllToAll(Function):
    """T10: the group is the first argument, and backward applies the same class with swapped sizes."""

    @staticmethod
    def forward(ctx, group, x, output_split_sizes, input_split_sizes):
        ctx.group, ctx.output_split_sizes, ctx.input_split_sizes = group, output_split_sizes, input_split_sizes
        return group.exchange(x)

    @staticmethod
    def backward(ctx, *grad_output):
        return None, AllToAll.apply(ctx.group, *grad_output, ctx.input_split_sizes, ctx.output_split_sizes), None, None


# -- what they mean for the stack of what all ranks hold ----------------------------------------------------


def total(xs):
    return jnp.broadcast_to(xs.sum(0), xs.shape)


def chunk(xs):
    return jnp.stack([jnp.split(x, RANKS)[rank] for rank, x in enumerate(xs)])


def joined(xs):
    return jnp.stack([jnp.concatenate(list(xs))] * RANKS)


def exchanged(xs):
    return jnp.stack([jnp.concatenate([jnp.split(x, RANKS)[rank] for x in xs]) for rank in range(RANKS)])


# The layer of one rank, and of all ranks the values and the gradients.
CASES = {
    "P1, T1": (region(Group.same, Group.all_reduce), lambda xs: xs, total),
    "P2, T2": (region(Group.all_reduce, Group.same), total, lambda xs: xs),
    "P5": (region(Group.all_gather, Group.reduce_scatter), joined, lambda xs: chunk(total(xs))),
    "P6, T7": (region(Group.reduce_scatter, Group.all_gather), lambda xs: chunk(total(xs)), joined),
    "T10": (lambda x: AllToAll.apply(WORLD, x, None, [1] * RANKS), exchanged, exchanged),
}


def reference(name):
    """Compute a value from those of all ranks, and the gradient, at every order, from their gradients."""
    _, forward, backward = CASES[name]

    def run(xs):
        value = forward(xs)
        (slope,) = jax.linear_transpose(backward, value)(xs)
        return jax.lax.stop_gradient(value - slope) + slope

    return run


def on_ranks(f, check_vma):
    mesh = jax.make_mesh((RANKS,), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.shard_map(lambda x: f(x[0])[None], mesh=mesh, in_specs=OWN, out_specs=OWN, check_vma=check_vma)


def slope(f):
    """Return the gradient of a loss whose cotangents depend on the outputs, and so on the rank."""
    return jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))


def derivatives(f):
    """Return f, its first and second derivatives, and forward over reverse."""
    return [f, slope(f), slope(slope(f)), lambda x: jax.jvp(slope(f), (x,), (jnp.sin(x),))[1]]


def numbers(functions):
    return jax.jit(lambda x: [f(x) for f in functions])(X)


@functools.cache
def expected(name):
    return numbers(derivatives(reference(name)))


@pytest.mark.parametrize("name", CASES)
@VMA
def test_derivatives_around_all_ranks_and_on_each_rank(name, check_vma):
    f = CASES[name][0]
    assert_same(numbers(derivatives(on_ranks(f, check_vma))), expected(name))
    assert_same(numbers([on_ranks(g, check_vma) for g in derivatives(f)]), expected(name))


def repeated(functions):
    step = jax.checkpoint(lambda x: functools.reduce(lambda x, f: f(jnp.sin(x)), functions, x))
    return lambda x: jax.lax.scan(lambda carry, _: (step(carry), None), x, None, length=2)[0]


@pytest.mark.parametrize("names", [("P2, T2",), ("T10",), ("P5", "P6, T7")], ids="-".join)
def test_in_a_scan_of_a_checkpoint(names):
    plain = numbers(derivatives(repeated([reference(name) for name in names])))
    for check_vma in (True, False):
        ours = on_ranks(repeated([CASES[name][0] for name in names]), check_vma)
        assert_same(numbers(derivatives(ours)), plain)

"""A network, a cross entropy and a batch norm in parallel, against the same on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from tests.frameworks.torch.layers import ported
from tests.kit.case import grid
from tests.kit.transforms import along, assert_same, gradient

from . import collective_layers as layers
from .collective_layers import AXIS, RANKS, WORLD, Group
from .ranks import (
    ALL,
    OWN,
    SHARED,
    VMA,
    loss,
    numbers,
    shard,
    spread,
)

pytestmark = pytest.mark.frameworks
lax = jax.lax


def network(x, a, b):
    return jnp.tanh(x @ a) @ b


NETWORK = grid(4, 3), grid(3, 8, low=-0.8, high=0.9), grid(8, 3, low=-0.7, high=0.8)
COLUMNS, ROWS = PartitionSpec(None, AXIS), PartitionSpec(AXIS)
PARALLEL = {
    "P1-P2": (layers.Identity.apply, lambda y, group: layers.AllReduce.apply(y, group, True, True)),
    "T1-T2": (layers.CopyToRegion.apply, layers.ReduceFromRegion.apply),
}
SEQUENCE = {
    "P5-P6": (lambda x, group: layers.AllGather.apply(x), lambda y, group: layers.ReduceScatter.apply(y)),
    "T6-T7": (layers.GatherFromSequence.apply, layers.ReduceScatterToSequence.apply),
}


def between(ends: tuple[Callable[..., Any], Callable[..., Any]], group: Group) -> Callable[..., Any]:
    """One column-parallel and one row-parallel matrix product."""
    enter, leave = ends
    return lambda x, a, b: leave(jnp.tanh(enter(x, group) @ a) @ b, group)


@functools.cache
def of_network() -> Any:
    f = loss(network)
    return jax.jit(lambda *args: (f(*args), gradient(f, args)(*args), gradient(along(f, args), args)(*args)))(*NETWORK)


@pytest.mark.parametrize("name", PARALLEL)
@VMA
def test_tensor_parallel_network_differentiated_on_each_rank(name, check_vma):
    # Not outside of a shard_map without check_vma: JAX takes psum for its own transpose there, and hands each rank
    # a quarter of the cotangent of what all share, which would be all that the weights get. First order alone: at
    # the second, the losses of all ranks add up.
    f = loss(between(PARALLEL[name], WORLD))

    def of_rank(*args):
        if check_vma:  # each rank has a value of its own
            args = (lax.pcast(args[0], AXIS, to="varying"), *args[1:])
        value, (dx, da, db) = jax.value_and_grad(f, (0, 1, 2))(*args)
        return value[None], dx[None], da, db

    out_specs = OWN, OWN, COLUMNS, ROWS
    values, dx, da, db = jax.jit(shard(of_rank, check_vma, (ALL, COLUMNS, ROWS), out_specs))(*NETWORK)
    value, slopes, _ = of_network()
    assert_same((values, dx), (spread(value), spread(slopes[0])))
    assert_same((da, db), slopes[1:])


@pytest.mark.parametrize("name", PARALLEL)
def test_tensor_parallel_network_differentiated_outside(name):
    """check_vma counts what all ranks share once, at every order."""
    f = loss(shard(between(PARALLEL[name], SHARED), True, (ALL, COLUMNS, ROWS), ALL))
    ours = jax.jit(lambda *args: (f(*args), gradient(f, args)(*args), gradient(along(f, args), args)(*args)))
    assert_same(ours(*NETWORK), of_network())


@pytest.mark.parametrize("name", SEQUENCE)
@VMA
def test_sequence_parallel_network(name, check_vma):
    f = loss(shard(between(SEQUENCE[name], WORLD), check_vma, (ROWS, COLUMNS, ROWS), ROWS))
    ours = jax.jit(lambda *args: (f(*args), gradient(f, args)(*args), gradient(along(f, args), args)(*args)))
    assert_same(ours(*NETWORK), of_network())


TARGET = jnp.array([2, 7, 0])
LOGITS = grid(3, 8)


def cross_entropy(logits):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), TARGET[:, None], 1)[:, 0]


def of_vocabulary(group):
    # Without smoothing, which would use the mean of the own part of the vocabulary, another on each rank.
    return lambda logits, target: ported.VocabParallelCrossEntropy.apply(logits, target, 0.0, group)


def test_vocabulary_parallel_cross_entropy_differentiated_outside():
    # With check_vma alone, as the network above.
    mapped = shard(of_vocabulary(SHARED), True, (COLUMNS, ALL), ALL)
    ours = jax.jit(numbers(lambda z: mapped(z, TARGET)))
    assert_same(ours(LOGITS), jax.jit(numbers(cross_entropy))(LOGITS))


@VMA
def test_vocabulary_parallel_cross_entropy_differentiated_on_each_rank(check_vma):
    layer = of_vocabulary(WORLD)

    def of_rank(logits, target, direction):
        # The second derivative of a plain sum: a bent loss would be one of each rank, with a cotangent of its own.
        slope = lambda z: jnp.sum(jax.grad(lambda z: layer(z, target).sum())(z) * direction)  # noqa: E731
        return layer(logits, target)[None], jax.grad(loss(lambda z: layer(z, target)))(logits), jax.grad(slope)(logits)

    direction = jnp.cos(LOGITS)
    mapped = shard(of_rank, check_vma, (COLUMNS, ALL, COLUMNS), (OWN, COLUMNS, COLUMNS))
    plain = jax.grad(lambda z: jnp.sum(jax.grad(lambda z: cross_entropy(z).sum())(z) * direction))
    assert_same(
        jax.jit(mapped)(LOGITS, TARGET, direction),
        (spread(cross_entropy(LOGITS)), jax.grad(loss(cross_entropy))(LOGITS), plain(LOGITS)),
    )


IMAGES, SCALE, SHIFT = grid(8, 3, 2), grid(3), grid(3) * 2


def batch_norm(x, weight, bias):
    mean, var = x.mean((0, 2), keepdims=True), x.var((0, 2), keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-5) * weight[:, None] + bias[:, None]


@VMA
def test_synchronized_batch_norm(check_vma):
    """Its gradients of weight and bias are those of the own rank, which the copies for each rank add up."""

    def of_rank(x, weight, bias):
        mean, var = jnp.zeros(3), jnp.ones(3)
        return ported.SyncBatchNorm.apply(x, weight[0], bias[0], mean, var, 1e-5, 0.1, WORLD, RANKS)

    mapped = shard(of_rank, check_vma)
    args = IMAGES, SCALE, SHIFT
    f, g = loss(lambda x, w, b: mapped(x, spread(w), spread(b))), loss(batch_norm)
    ours, plain = (
        jax.jit(lambda *a, f=f: (f(*a), gradient(f, a)(*a), gradient(along(f, a), a)(*a)))(*args) for f in (f, g)
    )
    assert_same(ours, plain)

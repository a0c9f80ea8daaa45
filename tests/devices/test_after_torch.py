"""A cross entropy and a batch norm after torch that communicate, against those of one device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from tests.kit.case import grid
from tests.kit.transforms import along, assert_same, gradient
from tests.layers.after_torch import ported

from .collective_layers import AXIS, RANKS, WORLD
from .ranks import ALL, OWN, SHARED, VMA, loss, numbers, shard, spread

pytestmark = pytest.mark.frameworks
COLUMNS = PartitionSpec(None, AXIS)
TARGET = jnp.array([2, 7, 0])
LOGITS = grid(3, 8)


def cross_entropy(logits):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), TARGET[:, None], 1)[:, 0]


def of_vocabulary(group):
    # Without smoothing, which would use the mean of the own part of the vocabulary, another on each rank.
    return lambda logits, target: ported.VocabParallelCrossEntropy.apply(logits, target, 0.0, group)


def test_vocabulary_parallel_cross_entropy_differentiated_outside():
    # With check_vma alone: without it JAX takes psum for its own transpose, and each rank gets a part of a cotangent.
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

"""Layers that communicate, on four devices, against what they mean for the stack of what all ranks hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.kit.case import grid
from tests.kit.transforms import assert_same

from . import collective_layers as layers
from .collective_layers import RANKS, WORLD
from .ranks import (
    VMA,
    chunk,
    direction,
    exchanged,
    joined,
    loss,
    numbers,
    same,
    shard,
    spread,
    stacked,
    summed_chunk,
    total,
    weights,
)

pytestmark = pytest.mark.frameworks


@dataclasses.dataclass(frozen=True)
class Collective:
    layer: Callable[..., Any]  # of the array of one rank
    forward: Callable[..., Any]  # of those of all ranks
    backward: Callable[..., Any]

    def reference(self, xs: jax.Array) -> jax.Array:
        """The value by `forward`; the gradient, of every order, by `backward`."""
        value = self.forward(xs)
        (slope,) = jax.linear_transpose(self.backward, value)(xs)
        return jax.lax.stop_gradient(value - slope) + slope


X = grid(RANKS, 4, 4)  # of which each rank has four by four


def region(name: str, *options: Any) -> Callable[..., Any]:
    return lambda x: getattr(layers, name).apply(x, WORLD, *options)


def own_rank(name: str) -> Callable[..., Any]:
    return lambda x: getattr(layers, name).apply(x, WORLD.rank, RANKS, WORLD)


CASES = {
    "P1": Collective(region("Identity"), same, total),
    "P2": Collective(region("AllReduce", True, True), total, same),
    "P3": Collective(layers.Scatter.apply, chunk(0), joined(0)),
    "P4": Collective(layers.Gather.apply, joined(0), chunk(0)),
    "P5": Collective(layers.AllGather.apply, joined(0), summed_chunk(0)),
    "P6": Collective(layers.ReduceScatter.apply, summed_chunk(0), joined(0)),
    "P11": Collective(own_rank("ExpertsGather"), joined(0), chunk(0)),
    "P12": Collective(own_rank("ExpertsSlice"), chunk(0), joined(0)),
    "P25": Collective(lambda x: jnp.stack(layers.GatherEach.apply(x)), spread, lambda gs: gs.sum(0)),
    "T1": Collective(region("CopyToRegion"), same, total),
    "T2": Collective(region("ReduceFromRegion"), total, same),
    "T3": Collective(region("ScatterToRegion"), chunk(-1), joined(-1)),
    "T4": Collective(region("GatherFromRegion"), joined(-1), chunk(-1)),
    "T5": Collective(region("ScatterToSequence"), chunk(0), joined(0)),
    "T6": Collective(region("GatherFromSequence", True, [4] * RANKS), joined(0), summed_chunk(0)),
    "T6-unsummed": Collective(region("GatherFromSequence", False), joined(0), chunk(0)),
    "T7": Collective(region("ReduceScatterToSequence"), summed_chunk(0), joined(0)),
    "T8": Collective(region("AllGatherFromRegion"), joined(-1), summed_chunk(-1)),
    "T9": Collective(region("ReduceScatterToRegion"), summed_chunk(-1), joined(-1)),
    "T10": Collective(lambda x: layers.AllToAll.apply(WORLD, x, None, [1] * RANKS), exchanged, exchanged),
}
EVERY = pytest.mark.parametrize("name", CASES)


@functools.cache
def expected(name: str) -> Any:
    return jax.jit(numbers(CASES[name].reference))(X)


@EVERY
@VMA
def test_jit(name, check_vma):
    assert_same(jax.jit(numbers(stacked(CASES[name].layer, check_vma)))(X), expected(name))


@EVERY
@VMA
def test_differentiated_on_each_rank(name, check_vma):
    """As in Paddle and torch: each rank has a loss of its own, and communicates in its backward."""
    outputs, slopes, second = expected(name)

    def of_rank(x, weight, along):
        f = lambda x: jnp.sum(weight * jnp.sin(CASES[name].layer(x)))  # noqa: E731
        slope = lambda x: jnp.sum(jax.grad(f)(x) * along)  # noqa: E731
        return jax.grad(f)(x), jax.grad(slope)(x)

    mapped = shard(lambda *a: jax.tree.map(lambda v: v[None], of_rank(*(v[0] for v in a))), check_vma)
    assert_same(jax.jit(mapped)(X, weights(outputs), direction(X)), (slopes[0], second[0]))


def repeated(functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    """One after the other, in a checkpoint within a scan."""
    step = jax.checkpoint(lambda x: functools.reduce(lambda x, f: f(jnp.sin(x)), functions, x))
    return lambda x: jax.lax.scan(lambda carry, _: (step(carry), None), x, None, length=2)[0]


@pytest.mark.parametrize("names", [("P2",), ("T10",), ("P5", "P6"), ("T7", "T6-unsummed")], ids="-".join)
def test_in_a_scan_of_a_checkpoint(names):
    plain = jax.jit(numbers(repeated([CASES[name].reference for name in names])))(X)
    for check_vma in (True, False):
        ours = stacked(repeated([CASES[name].layer for name in names]), check_vma)
        assert_same(jax.jit(numbers(ours))(X), plain)


def pushed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda xs: jax.jvp(jax.grad(loss(f)), (xs,), (jnp.sin(xs),))[1]


@pytest.mark.parametrize("name", ["P1", "P2", "P5", "T6-unsummed"])
def test_forward_over_reverse(name):
    plain = jax.jit(pushed(CASES[name].reference))(X)
    for check_vma in (True, False):
        assert_same(jax.jit(pushed(stacked(CASES[name].layer, check_vma)))(X), plain)


def test_forward_mode_of_a_layer_that_applies_itself(monkeypatch):
    monkeypatch.setattr(layers, "AllToAll", type("AllToAll", (layers.AllToAll,), {"forward_mode": True}))
    one = CASES["T10"]

    def both(f):
        return jax.jit(lambda xs: (jax.jvp(f, (xs,), (jnp.sin(xs),)), pushed(f)(xs)))(X)

    plain = both(one.reference)
    for check_vma in (True, False):
        assert_same(both(stacked(one.layer, check_vma)), plain)

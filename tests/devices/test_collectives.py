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
from tests.kit.transforms import along, assert_same, gradient

from . import collective_layers as layers
from .collective_layers import AXIS, ONE_RANK, RANKS, WORLD
from .ranks import (
    VMA,
    chunk,
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
stop = jax.lax.stop_gradient


@dataclasses.dataclass(frozen=True)
class Collective:
    name: str
    layer: Callable[..., Any]  # of the array of one rank
    forward: Callable[..., Any]  # of those of all ranks
    backward: Callable[..., Any]
    plain: Callable[..., Any] | None = None  # JAX's own collective, where the layer has its gradient

    def reference(self, xs: jax.Array) -> jax.Array:
        """The value by `forward`; the gradient, of every order, by `backward`."""
        value = self.forward(xs)
        (slope,) = jax.linear_transpose(self.backward, value)(xs)
        return stop(value - slope) + slope


X = grid(RANKS, 4, 4)  # of which each rank has four by four
lax = jax.lax


def region(name: str, *options: Any) -> Callable[..., Any]:
    return lambda x: getattr(layers, name).apply(x, WORLD, *options)


def own_rank(name: str) -> Callable[..., Any]:
    return lambda x: getattr(layers, name).apply(x, WORLD.rank, RANKS, WORLD)


def gathered(dim):
    return lambda x: lax.all_gather(x, AXIS, axis=dim, tiled=True)


def scattered(dim):
    return lambda x: lax.psum_scatter(x, AXIS, scatter_dimension=dim, tiled=True)


CASES = [
    Collective("P1", lambda x: layers.Identity.apply(x, WORLD), same, total),
    Collective("P2", lambda x: layers.AllReduce.apply(x, WORLD, True, True), total, same),
    Collective("P3", layers.Scatter.apply, chunk(0), joined(0)),
    Collective("P4", layers.Gather.apply, joined(0), chunk(0)),
    Collective("P5", layers.AllGather.apply, joined(0), summed_chunk(0), gathered(0)),
    Collective("P6", layers.ReduceScatter.apply, summed_chunk(0), joined(0), scattered(0)),
    Collective("P11", own_rank("ExpertsGather"), joined(0), chunk(0)),
    Collective("P12", own_rank("ExpertsSlice"), chunk(0), joined(0)),
    Collective(
        "P25",
        lambda x: jnp.stack(layers.GatherEach.apply(x)),
        spread,
        lambda gs: gs.sum(0),
        lambda x: lax.all_gather(x, AXIS),
    ),
    Collective("T1", region("CopyToRegion"), same, total),
    Collective("T2", region("ReduceFromRegion"), total, same),
    Collective("T3", region("ScatterToRegion"), chunk(-1), joined(-1)),
    Collective("T4", region("GatherFromRegion"), joined(-1), chunk(-1)),
    Collective("T5", region("ScatterToSequence"), chunk(0), joined(0)),
    Collective("T6", region("GatherFromSequence", True, [4] * RANKS), joined(0), summed_chunk(0), gathered(0)),
    Collective("T6-unsummed", region("GatherFromSequence", False), joined(0), chunk(0)),
    Collective("T7", region("ReduceScatterToSequence"), summed_chunk(0), joined(0), scattered(0)),
    Collective("T8", region("AllGatherFromRegion"), joined(-1), summed_chunk(-1), gathered(1)),
    Collective("T9", region("ReduceScatterToRegion"), summed_chunk(-1), joined(-1), scattered(1)),
    Collective(
        "T10",
        lambda x: layers.AllToAll.apply(WORLD, x, None, [1] * RANKS),
        exchanged,
        exchanged,
        lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
    ),
]
BY_NAME = {c.name: c for c in CASES}
EVERY = pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)


@functools.cache
def expected(one: Collective) -> Any:
    return jax.jit(numbers(one.reference))(X), jax.jit(lambda xs: one.backward(weights(one.forward(xs))))(X)


# Operation by operation is slow, so that not every collective that two layers share is here twice.
EAGER = {
    "vma": ("P1", "P2", "P3", "P5", "P6", "P11", "P25", "T1", "T4", "T6-unsummed", "T10"),
    "plain": ("P1", "P5", "T10"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("check", "name"), [(check, name) for check in EAGER for name in EAGER[check]])
def test_eager(check, name):
    one = BY_NAME[name]
    (outputs, *_), pulled = expected(one)
    y, pull = jax.vjp(stacked(one.layer, check == "vma"), X)
    assert_same(y, outputs)
    assert_same(pull(weights(y))[0], pulled)


@pytest.mark.slow
def test_eager_second_order():
    one = BY_NAME["T10"]  # whose backward applies the layer
    assert_same(numbers(stacked(one.layer, True))(X), expected(one)[0])


@EVERY
@VMA
def test_jit(one, check_vma):
    assert_same(jax.jit(numbers(stacked(one.layer, check_vma)))(X), expected(one)[0])


@EVERY
@VMA
def test_differentiated_on_each_rank(one, check_vma):
    """As in Paddle and torch: each rank has a loss of its own, and communicates in its backward."""
    outputs, slopes, second = expected(one)[0]

    def of_rank(x, weight, direction):
        f = lambda x: jnp.sum(weight * jnp.sin(one.layer(x)))  # noqa: E731
        slope = lambda x: jnp.sum(jax.grad(f)(x) * direction)  # noqa: E731
        return jax.grad(f)(x), jax.grad(slope)(x)

    direction = jnp.cos(jnp.arange(X.size, dtype=jnp.float32)).reshape(X.shape)  # of `along`
    mapped = shard(lambda *a: jax.tree.map(lambda v: v[None], of_rank(*(v[0] for v in a))), check_vma)
    assert_same(jax.jit(mapped)(X, weights(outputs), direction), (slopes[0], second[0]))


def test_sizes_of_a_sequence_whose_gradient_is_not_summed():
    f = loss(stacked(region("GatherFromSequence", False, [4] * RANKS), True))
    with pytest.raises(AssertionError):  # of the layer's own backward
        jax.jit(jax.grad(f))(X)


@pytest.mark.parametrize("one", [c for c in CASES if c.plain], ids=lambda one: one.name)
def test_exact_transposes_have_the_gradients_of_plain_collectives(one):
    """Other layers do not: they mean one loss that all ranks compute."""
    assert_same(jax.jit(numbers(stacked(one.plain, True)))(X), expected(one)[0])


def repeated(functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    """One after the other, in a checkpoint within a scan."""
    step = jax.checkpoint(lambda x: functools.reduce(lambda x, f: f(jnp.sin(x)), functions, x))
    return lambda x: lax.scan(lambda carry, _: (step(carry), None), x, None, length=2)[0]


@functools.cache
def expected_of_repeated(*names: str) -> Any:
    return jax.jit(numbers(repeated([BY_NAME[n].reference for n in names])))(X)


@pytest.mark.parametrize("names", [("P2",), ("T10",), ("P5", "P6"), ("T7", "T6-unsummed")], ids="-".join)
@VMA
def test_in_a_scan_of_a_checkpoint(names, check_vma):
    ours = stacked(repeated([BY_NAME[n].layer for n in names]), check_vma)
    assert_same(jax.jit(numbers(ours))(X), expected_of_repeated(*names))


def pushed(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda xs: jax.jvp(jax.grad(loss(f)), (xs,), (jnp.sin(xs),))[1]


@pytest.mark.parametrize("name", ["P1", "P2", "P5", "T6-unsummed"])
@VMA
def test_forward_over_reverse(name, check_vma):
    one = BY_NAME[name]
    assert_same(jax.jit(pushed(stacked(one.layer, check_vma)))(X), jax.jit(pushed(one.reference))(X))


@VMA
def test_forward_mode_of_a_layer_that_applies_itself(monkeypatch, check_vma):
    monkeypatch.setattr(layers, "AllToAll", type("AllToAll", (layers.AllToAll,), {"forward_mode": True}))
    one = BY_NAME["T10"]

    def both(f):
        return jax.jit(lambda xs: (jax.jvp(f, (xs,), (jnp.sin(xs),)), pushed(f)(xs)))(X)

    assert_same(both(stacked(one.layer, check_vma)), both(one.reference))


ALONE = {
    "CopyToRegion": (),
    "ReduceFromRegion": (),
    "ScatterToRegion": (),
    "GatherFromRegion": (),
    "ScatterToSequence": (),
    "GatherFromSequence": (False, None, True),
    "ReduceScatterToSequence": (),
    "AllGatherFromRegion": (),
    "ReduceScatterToRegion": (),
    "AllToAll": (None, None),
}


@pytest.mark.parametrize("name", ALONE)
def test_group_of_one_returns_the_input_itself(name):
    def layer(x):
        first = (ONE_RANK, x) if name == "AllToAll" else (x, ONE_RANK)
        return getattr(layers, name).apply(*first, *ALONE[name])

    x = X[0]
    assert layer(x) is x
    for mode in (lambda f: f, jax.jit):
        assert_same(mode(jax.grad(loss(layer)))(x), weights(x) * jnp.cos(x))
    assert_same(jax.jit(gradient(along(loss(layer), [x]), [x]))(x), gradient(along(loss(same), [x]), [x])(x))


def test_gather_without_initialisation_returns_a_tuple_of_one(monkeypatch):
    monkeypatch.setattr(layers, "WORLD", None)
    x = X[0]
    for mode in (lambda f: f, jax.jit):
        outputs = mode(layers.GatherEach.apply)(x)
        assert type(outputs) is tuple
        assert_same(outputs, (x,))
        assert_same(mode(jax.grad(loss(lambda x: layers.GatherEach.apply(x)[0])))(x), weights(x) * jnp.cos(x))

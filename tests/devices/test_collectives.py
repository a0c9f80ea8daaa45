"""Layers that communicate, on four devices, against what they mean for the stack of what all ranks hold."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.frameworks.torch import ports as ported
from tests.kit.case import grid
from tests.kit.transforms import along, assert_same, gradient

from . import collective_layers as layers
from .collective_layers import AXIS, ONE_RANK, RANKS, WORLD, Group

pytestmark = pytest.mark.frameworks

stop = jax.lax.stop_gradient
OWN, ALL = PartitionSpec(AXIS), PartitionSpec()
SHARED = Group(AXIS, RANKS, shared=True)
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "plain"])


def shard(f: Callable[..., Any], check_vma: bool, in_specs: Any = OWN, out_specs: Any = OWN) -> Callable[..., Any]:
    mesh = jax.make_mesh((RANKS,), (AXIS,), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def stacked(layer: Callable[..., Any], check_vma: bool) -> Callable[..., Any]:
    """The layer on each rank, as a function of the arrays of all ranks along a leading axis."""
    return shard(lambda *xs: layer(*(x[0] for x in xs))[None], check_vma)


# -- what a layer does to the stack of all ranks, without communication --------------------------------


def same(xs):
    return xs


def total(xs):
    return jnp.broadcast_to(xs.sum(0), xs.shape)


def chunk(dim):
    return lambda xs: jnp.stack([jnp.split(x, RANKS, dim)[rank] for rank, x in enumerate(xs)])


def joined(dim):
    return lambda xs: jnp.stack([jnp.concatenate(list(xs), dim)] * RANKS)


def summed_chunk(dim):
    return lambda xs: chunk(dim)(total(xs))


def exchanged(xs):
    return jnp.stack([jnp.concatenate([jnp.split(x, RANKS)[rank] for x in xs]) for rank in range(RANKS)])


def spread(xs):
    return jnp.stack([xs] * RANKS)


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


def weights(y: jax.Array) -> jax.Array:
    return 1 + 0.5 * jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)


def loss(f: Callable[..., Any]) -> Callable[..., Any]:
    """Bent, and different on each rank, so that cotangents depend on the outputs and on the rank."""

    def of(*xs: Any) -> jax.Array:
        y = f(*xs)
        return jnp.sum(weights(y) * jnp.sin(y))

    return of


# -- each layer -------------------------------------------------------------------------------------


@functools.cache
def expected(one: Collective) -> Any:
    return jax.jit(numbers(one.reference))(X), jax.jit(lambda xs: one.backward(weights(one.forward(xs))))(X)


def numbers(f: Callable[..., Any]) -> Callable[..., Any]:
    """The outputs of f, and the first and second derivatives of its loss."""
    return lambda xs: (f(xs), gradient(loss(f), [xs])(xs), gradient(along(loss(f), [xs]), [xs])(xs))


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


# -- groups of one, and no group ----------------------------------------------------------------------

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


# -- a network in parallel is the network --------------------------------------------------------------


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


# -- cross entropy and batch norm in parallel ------------------------------------------------------------

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

"""Functions of the shards of one device, built from `pylayer_jax.parallel`, beside the maths of the whole arrays.

A shard is described by one letter per axis of the array: M where the axis is cut along the mesh axes of the layer, D
where it is cut along the axis of data parallelism (if the mesh has one), a dot where it is whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from pylayer_jax import parallel
from tests.kit.case import grid
from tests.kit.transforms import floats

from .ranks import direction, loss, weights


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh of four devices, and the axes for M and for D."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    axis: str | tuple[str, ...]
    data: str | None = None

    @property
    def mesh(self) -> Any:
        return jax.make_mesh(self.shape, self.names, axis_types=(AxisType.Auto,) * len(self.names))

    def spec(self, letters: str) -> Any:
        return PartitionSpec(*({"M": self.axis, "D": self.data, ".": None}[letter] for letter in letters))

    def axes_of(self, letters: str) -> tuple[str, ...]:
        names = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        data = (self.data,) if self.data and "D" in letters else ()
        return (*names, *data) if "M" in letters else data

    def map(self, f: Callable[..., Any], ins: Any, outs: Any, check_vma: bool) -> Callable[..., Any]:
        ins, outs = jax.tree.map(self.spec, (ins, outs))
        return jax.shard_map(f, mesh=self.mesh, in_specs=ins, out_specs=outs, check_vma=check_vma)


LAYOUTS = {
    "one axis": Layout((4,), ("model",), "model"),
    "data and model": Layout((2, 2), ("data", "model"), "model", "data"),
    "two axes": Layout((2, 2), ("x", "y"), ("x", "y")),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    name: str
    local: Callable[..., jax.Array]  # of the mesh axes and the shards
    whole: Callable[..., jax.Array]
    args: tuple[jax.Array, ...]
    ins: tuple[str, ...]
    out: str

    def shards(self, layout: Layout, *args: Any) -> jax.Array:
        return self.local(layout.axis, *args)

    def mapped(self, layout: Layout, check_vma: bool) -> Callable[..., jax.Array]:
        """The function of whole arrays that the shards mean."""

        def of_shards(*args: Any) -> jax.Array:
            args = tuple(
                a if "M" in s else parallel.replicated_input(a, layout.axis)
                for a, s in zip(args, self.ins, strict=True)
            )
            y = self.shards(layout, *args)
            return y if "M" in self.out else parallel.replicated_output(y, layout.axis)

        return layout.map(of_shards, self.ins, self.out, check_vma)


# -- cases ----------------------------------------------------------------------------------------


def network(x, a, b):
    return jnp.tanh(x @ a) @ b


def network_of_columns(x, a, b):
    return a @ jnp.tanh(b @ x)


def scaled(x, w):
    return jnp.tanh(x) * w


def summed(x, w):
    return jnp.tanh(jnp.cumsum(x, 0)) * w


def columns_and_rows(axis, x, a, b):
    return parallel.reduce_from(jnp.tanh(parallel.copy_to(x, axis) @ a) @ b, axis)


def part(axis_name, x, w, **options):
    return parallel.gather_from(jnp.tanh(parallel.scatter_to(x, axis_name, **options)) * w, axis_name, **options)


def sequence(axis, x, a, b):
    return parallel.reduce_scatter(jnp.tanh(parallel.all_gather(x, axis) @ a) @ b, axis)


def columns(axis, x, a, b):
    return parallel.reduce_scatter(a @ jnp.tanh(b @ parallel.all_gather(x, axis, 1)), axis, axis=-1)


def heads_of_whole_sequences(axis, x, w):
    of_head = parallel.all_to_all(x, axis, 1, 0)
    return parallel.all_to_all(jnp.tanh(jnp.cumsum(of_head, 0)), axis, split_axis=0, concat_axis=1) * w


def blocks_of_rows(axis, x, w):
    return parallel.all_to_all(jnp.sin(x), axis) * w


def whole_blocks_of_rows(x, w):
    return jnp.sin(x).reshape(4, 4, -1, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape) * w


LABELS = jnp.array([2, 7, -100, 0, 8, 5])


def cross_entropy(logits):
    inside = (LABELS >= 0) & (logits.shape[-1] > LABELS)
    picked = jnp.take_along_axis(logits, LABELS[:, None], 1, mode="clip")[:, 0]
    return jnp.where(inside, jax.nn.logsumexp(logits, 1) - picked, 0.0)


def parallel_cross_entropy(axis, logits):
    return parallel.vocab_parallel_cross_entropy(logits, LABELS, axis)


def batch_norm(x, scale, bias):
    """Also of the statistics, whose gradients have to be right as well."""
    mean, variance = x.mean((0, 2)), x.var((0, 2))
    y = (x - mean[:, None]) * jax.lax.rsqrt(variance + 1e-5)[:, None] * scale[:, None] + bias[:, None]
    return y * (1 + jnp.sin(mean) + variance**2)[:, None]


def parallel_batch_norm(axis, x, scale, bias):
    y, mean, variance = parallel.sync_batch_norm(x, scale, bias, axis, channel_axis=1)
    factor = parallel.copy_to(1 + jnp.sin(mean) + variance**2, axis)[:, None]
    return y * factor.astype(y.dtype)


def in_a_scan(f):
    def repeated(x, *args):
        step = jax.checkpoint(lambda x: x + f(jnp.sin(x), *args))
        return jax.lax.scan(lambda x, _: (step(x), None), x, None, length=2)[0]

    return repeated


def within(name: str, transform: Callable[..., Any], local: Any, whole: Any, *rest: Any) -> Case:
    def transformed(axis, *args):
        return transform(functools.partial(local, axis))(*args)

    return Case(name, transformed, transform(whole), *rest)


X, WEIGHT = grid(4, 8), grid(4, 8, low=0.4, high=1.9)
A, B, C = grid(8, 4, low=-0.8, high=0.9), grid(4, 8, low=-0.7, high=0.8), grid(4, 4)
ROWS, X3, LOGITS3 = grid(16, 2), grid(3, 4, 8), grid(3, 6, 8)
NORM, NORM3 = (grid(8, 2, 3), grid(2), grid(2) * 2), (grid(3, 8, 2, 3), grid(3, 2), grid(3, 2) * 2)

CASES = [
    Case("copy_to-reduce_from", columns_and_rows, network, (X, A, B), ("D.", ".M", "M."), "D."),
    Case("scatter_to-gather_from", part, scaled, (X, WEIGHT), ("D.", "DM"), "D."),
    Case("scatter_to-gather_from-rows", functools.partial(part, axis=0), scaled, (X, WEIGHT), (".D", "MD"), ".D"),
    Case("all_gather-reduce_scatter", sequence, network, (X, A, B), ("M.", ".M", "M."), "M."),
    Case("all_gather-reduce_scatter-columns", columns, network_of_columns, (X, A, C), (".M", ".M", "M."), ".M"),
    Case("all_to_all", heads_of_whole_sequences, summed, (X, WEIGHT), ("M.", "M."), "M."),
    Case("cross_entropy", parallel_cross_entropy, cross_entropy, (grid(6, 8),), (".M",), "."),
    Case("batch_norm", parallel_batch_norm, batch_norm, NORM, ("MD.", "D", "D"), "MD."),
]
# These mean what they say on one mesh: with four pieces, or with two batches along D.
MANY_X = functools.partial(jax.vmap, in_axes=(0, None, None))
ON_ONE_AXIS = [
    Case("all_to_all-one-axis", blocks_of_rows, whole_blocks_of_rows, (ROWS, ROWS * 2), ("M.", "M."), "M."),
    within("in-a-scan", in_a_scan, columns_and_rows, network, (X, A, B), ("..", ".M", "M."), ".."),
    within("sequence-in-a-scan", in_a_scan, sequence, network, (X, A, B), ("M.", ".M", "M."), "M."),
    within("cross_entropy-in-a-batch", jax.vmap, parallel_cross_entropy, cross_entropy, (LOGITS3,), ("..M",), ".."),
    within("network-in-a-batch", MANY_X, columns_and_rows, network, (X3, A, B), ("...", ".M", "M."), "..."),
    within("norm-in-a-batch", jax.vmap, parallel_batch_norm, batch_norm, NORM3, (".M..", "..", ".."), ".M.."),
]
TWO_BATCHES = Case(
    "two-batches",
    parallel_batch_norm,
    lambda x, *args: jnp.concatenate([batch_norm(half, *args) for half in jnp.split(x, 2, 2)], 2),
    (grid(4, 3, 6), grid(3), grid(3) * 2),
    ("M.D", ".", "."),
    "M.D",
)


# -- numbers --------------------------------------------------------------------------------------


def derivatives(loss: Callable[..., jax.Array], dot: Callable[..., jax.Array], args: Any, ways: Any) -> tuple[Any, ...]:
    """The value, the derivative along `ways`, the gradient, and its derivative along `ways` in each order of modes."""
    slopes = jax.grad(loss, floats(args))
    return (
        loss(*args),
        jax.jvp(loss, args, ways)[1],
        slopes(*args),
        jax.jvp(slopes, args, ways)[1],
        jax.grad(lambda *a: dot(slopes(*a), ways), floats(args))(*args),
        jax.grad(lambda *a: jax.jvp(loss, a, ways)[1], floats(args))(*args),
    )


def inner_product(xs: Any, ys: Any) -> jax.Array:
    return sum(jnp.sum(x * y) for x, y in zip(xs, ys, strict=True))


def of_whole_arrays(f: Callable[..., jax.Array], args: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    return f(*args), *derivatives(loss(f), inner_product, args, tuple(map(direction, args)))


@functools.cache
def expected(case: Case) -> tuple[Any, ...]:
    return jax.jit(lambda *args: of_whole_arrays(case.whole, args))(*case.args)


def outside(case: Case, layout: Layout, check_vma: bool) -> tuple[Any, ...]:
    """Differentiated around the shard_map."""
    return jax.jit(lambda *args: of_whole_arrays(case.mapped(layout, check_vma), args))(*case.args)


def on_each_device(case: Case, layout: Layout, check_vma: bool) -> tuple[Any, ...]:
    """Differentiated inside of the mapped function, of which every device has the same loss."""

    def of_shards(args: Any, ways: Any, weights: Any) -> tuple[Any, ...]:
        def loss(*args: Any) -> jax.Array:
            if layout.data and "D" in case.out:  # data parallelism, by the same layers
                args = tuple(
                    a if "D" in s else parallel.copy_to(a, layout.data) for a, s in zip(args, case.ins, strict=True)
                )
            y = case.shards(layout, *args)
            return total(jnp.sum(weights * jnp.sin(y)), case.out)

        def total(x: Any, letters: str) -> jax.Array:
            axes = layout.axes_of(letters)
            return parallel.reduce_from(x, axes) if axes else x

        def dot(xs: Any, ys: Any) -> jax.Array:
            return sum(total(jnp.sum(x * y), s) for x, y, s in zip(xs, ys, case.ins, strict=True))

        return case.shards(layout, *args), *derivatives(loss, dot, args, ways)

    outs = (case.out, "", "", case.ins, case.ins, case.ins, case.ins)
    mapped = layout.map(of_shards, (case.ins, case.ins, case.out), outs, check_vma)
    return jax.jit(mapped)(case.args, tuple(map(direction, case.args)), weights(case.whole(*case.args)))

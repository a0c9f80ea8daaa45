"""The collectives, each a linear layer whose gradient is another one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import jax

from pylayer_jax._layer import PyLayer
from pylayer_jax._methods.context import PyLayerContext

from ._axes import Axes, as_varying, varies_over


class Collective(PyLayer):
    """A linear map, `send`: its tangent map is itself, its pullback another one, with the options in reverse order.

    The pullback is a layer, not a collective of JAX: without check_vma, JAX takes a sum over devices for its own
    transpose, and the second derivative would be N times as large as it is.
    """

    send: ClassVar[Callable[..., jax.Array]]
    pullback: ClassVar[type[Collective]]

    @classmethod
    def forward(cls, ctx: PyLayerContext, x: jax.Array, axes: Axes, *options: int) -> jax.Array:
        ctx.args = axes, options
        return cls.send(x, axes, *options)

    @classmethod
    def backward(cls, ctx: PyLayerContext, dy: jax.Array) -> jax.Array:
        axes, options = ctx.args
        return cls.pullback.apply(dy, axes, *reversed(options))

    @classmethod
    def jvp(cls, ctx: PyLayerContext, dx: jax.Array, *_: None) -> jax.Array:
        axes, options = ctx.args
        return cls.apply(dx, axes, *options)


class CopyTo(Collective):
    send = staticmethod(as_varying)


class ReduceFrom(Collective):
    send = staticmethod(jax.lax.psum)


class ScatterTo(Collective):
    @staticmethod
    def send(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
        size = x.shape[axis] // jax.lax.axis_size(axes)
        return jax.lax.dynamic_slice_in_dim(as_varying(x, axes), jax.lax.axis_index(axes) * size, size, axis)


class GatherFrom(Collective):
    @staticmethod
    def send(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
        to = "invarying" if varies_over(x, axes) else "varying"  # without check_vma, no value has the former type
        return jax.lax.all_gather(x, axes, axis=axis, tiled=True, to=to)


class AllGather(Collective):
    @staticmethod
    def send(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
        return jax.lax.all_gather(x, axes, axis=axis, tiled=True)


class ReduceScatter(Collective):
    @staticmethod
    def send(x: jax.Array, axes: Axes, axis: int) -> jax.Array:
        return jax.lax.psum_scatter(x, axes, scatter_dimension=axis, tiled=True)


class AllToAll(Collective):
    @staticmethod
    def send(x: jax.Array, axes: Axes, split_axis: int, concat_axis: int) -> jax.Array:
        return jax.lax.all_to_all(x, axes, split_axis, concat_axis, tiled=True)


class ReplicatedInput(Collective):
    """From an input of a shard_map without check_vma, whose copies JAX adds up, to a replicated value."""

    @staticmethod
    def send(x: jax.Array, axes: Axes) -> jax.Array:
        del axes
        return x


class EqualPart(Collective):
    """One of N equal parts of a replicated value. Its cotangents are replicated: those of an input's gradient."""

    @staticmethod
    def send(x: jax.Array, axes: Axes) -> jax.Array:
        return x / jax.lax.axis_size(axes)


CopyTo.pullback, ReduceFrom.pullback = ReduceFrom, CopyTo
ScatterTo.pullback, GatherFrom.pullback = GatherFrom, ScatterTo
AllGather.pullback, ReduceScatter.pullback = ReduceScatter, AllGather
AllToAll.pullback = AllToAll
ReplicatedInput.pullback, EqualPart.pullback = EqualPart, ReplicatedInput

"""Layers that are wrong, each in one way, and right ones: two tables, which the tests cross with the checkers."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pylayer_jax import PyLayer, once_differentiable

from .case import X
from .layers import Multiply, Tanh, layer_with

INDEX = jnp.array([2, 0, 1, 1])


class Sine(PyLayer):
    """Right; what is wrong with the layers below is said in what they change."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(ctx.saved_tensors[0])


def sine(**methods):
    """`Sine` with other methods."""
    return layer_with(Sine, **methods)


slope = Sine.backward


class WrongSign(Sine):
    @staticmethod
    def backward(ctx, dy):
        return -slope(ctx, dy)


class WrongAtSecondOrder(Sine):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(jax.lax.stop_gradient(x))
        return jnp.sin(x)


WrongAtOneIndex = sine(backward=lambda ctx, dy: slope(ctx, dy).at[1, 2].multiply(1.01))
# Its gradient cannot be differentiated.
Forgets = sine(backward=lambda ctx, dy: jax.lax.stop_gradient(slope(ctx, dy)))
# Right in float64.
ThreeTimesInFloat32 = sine(backward=lambda ctx, dy: slope(ctx, dy) * (3 if dy.dtype == jnp.float32 else 1))
AbsoluteCotangent = sine(backward=lambda ctx, dy: slope(ctx, jnp.abs(dy)))
ClippedCotangent = sine(backward=lambda ctx, dy: slope(ctx, jnp.clip(dy, -5, 5)))


def nan_in_float32(ctx, dy):
    tiny = jnp.asarray(1e-60, dy.dtype)  # zero in float32
    return slope(ctx, dy) * tiny / tiny


def other_under_jit(ctx, dy):
    (x,) = ctx.saved_tensors
    return dy * (x if isinstance(x, jax.core.Tracer) else jnp.cos(x))


class OnHost(Sine):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return np.sin(np.asarray(x))


def sine_and_square(x):
    return jnp.sin(x), x * x


class DropsNone(PyLayer):
    """Forgets one output's gradient where the other's is missing."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return sine_and_square(x)

    @staticmethod
    def backward(ctx, ds, dq):
        (x,) = ctx.saved_tensors
        return (None,) if ds is None or dq is None else ds * jnp.cos(x) + dq * 2 * x


class SineAndSquare(DropsNone):
    """Right."""

    @staticmethod
    def backward(ctx, ds, dq):
        (x,) = ctx.saved_tensors
        parts = [None if ds is None else ds * jnp.cos(x), None if dq is None else dq * 2 * x]
        return sum(part for part in parts if part is not None)


class DropsAnArgument(Multiply):
    """Takes an argument that needs no gradient for a reason to give none at all."""

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return (dy * b, dy * a) if all(ctx.needs_input_grad) else (None, None)


# -- globals --------------------------------------------------------------------------------------

LEAKED: list[jax.Array] = []
LAST = {}
TABLE = {}
CALLS = [0]


class Leaks(Sine):
    @staticmethod
    def forward(ctx, x):
        LEAKED[:] = [x]
        return Sine.forward(ctx, x)


class ReadsGlobal(Sine):
    """Keeps its input in a global in the place of ctx."""

    @staticmethod
    def forward(ctx, x):
        LAST["x"] = x
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(LAST["x"])


class Counts(Sine):
    """Changes a global on each call of backward."""

    @staticmethod
    def backward(ctx, dy):
        CALLS[0] += 1
        return slope(ctx, dy) * (1 + 0.1 * CALLS[0])


class KeepsATable(Sine):
    """Right for the first values of a shape."""

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * TABLE.setdefault(x.shape, np.cos(np.asarray(x)))


class OnClass(PyLayer):
    """Keeps a static on the class in the place of ctx."""

    @staticmethod
    def forward(ctx, x, factor):
        OnClass.factor = factor
        return factor * x

    @staticmethod
    def backward(ctx, dy):
        return OnClass.factor * dy, None


class ShapeOnClass(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ShapeOnClass.count = len(x)
        ctx.shape = x.shape
        return x.mean(0)

    @staticmethod
    def backward(ctx, dy):
        return jnp.broadcast_to(dy / ShapeOnClass.count, ctx.shape)


# -- outputs, cotangents and arguments ------------------------------------------------------------


# Five times its gradient, which is far below one.
SmallUnits = layer_with(forward=lambda ctx, x: x * 1e-9, backward=lambda ctx, dy: dy * 5e-9)


class Log(PyLayer):
    """Right."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.log(x)

    @staticmethod
    def backward(ctx, dy):
        return dy / ctx.saved_tensors[0]


ClippedLog = layer_with(Log, backward=lambda ctx, dy: dy / jnp.maximum(ctx.saved_tensors[0], 1e-2))


class Conjugated(PyLayer):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.conj(2 * ctx.saved_tensors[0])


class WithoutTransposes(PyLayer):
    """A product with gradients that are right for symmetric matrices alone."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return dy @ b, a @ dy


class SwapsGradients(Multiply):
    @staticmethod
    def backward(ctx, dy):
        return Multiply.backward(ctx, dy)[::-1]


class BreaksOnNone(DropsNone):
    """Its backward computes with a cotangent that may be missing."""

    @staticmethod
    def backward(ctx, ds, dq):
        (x,) = ctx.saved_tensors
        return ds * jnp.cos(x) + dq * 2 * x


class MiscountsOnNone(PyLayer):
    """Leaves a gradient out where a cotangent is missing."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx, dp, ds):
        a, b = ctx.saved_tensors
        if ds is None:
            return dp * b
        return (ds, ds) if dp is None else (dp * b + ds, dp * a + ds)


class DropsOneOfThree(PyLayer):
    """Right for each output alone, wrong where one cotangent is missing."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x, 2 * x, 3 * x

    @staticmethod
    def backward(ctx, *cotangents):
        given = [i * dy for i, dy in enumerate(cotangents, 1) if dy is not None]
        return sum(given) if len(given) != 2 else given[0]


# Gives a gradient only if each output has a cotangent that is not zero.
NeedsEveryCotangent = layer_with(
    forward=lambda ctx, x: (x, 2 * x),
    backward=lambda ctx, da, db: jnp.where(jnp.any(da != 0) & jnp.any(db != 0), da + 2 * db, 0),
)


def other_where_not_differentiated(ctx, x):
    return Sine.forward(ctx, x) * (1.0 if any(ctx.needs_input_grad) else 1.1)


# -- wrong under one transform ----------------------------------------------------------------------


def within(file):
    """Whether JAX's function of that file runs this."""
    frames = traceback.walk_stack(None)  # inspect.stack() would look up the module of each
    return any(f"/{file}.py" in frame.f_code.co_filename for frame, _ in frames)


def wrong_within(file, but_not="nothing"):
    """Its backward is another one where forward ran in one of JAX's functions."""

    def forward(ctx, x):
        ctx.factor = 1.1 if within(file) and not within(but_not) else 1.0
        return Sine.forward(ctx, x)

    return sine(forward=forward, backward=lambda ctx, dy: ctx.factor * slope(ctx, dy))


def in_front(x, axis):
    return x if axis is None else jnp.moveaxis(x, axis, 0)


class SharesTheFirst(Multiply):
    """Wrong where its second argument alone is mapped."""

    @staticmethod
    def vmap(info, in_dims, a, b):
        if in_dims[0] is None:
            return jnp.stack([a * b[0]] * info.batch_size), 0
        return in_front(a, in_dims[0]) * b, 0


class SharesTheSecondOfThree(PyLayer):
    """Wrong where its second argument alone is mapped."""

    @staticmethod
    def forward(ctx, a, b, c):
        ctx.save_for_backward(a, b, c)
        return a * b * c

    @staticmethod
    def backward(ctx, dy):
        a, b, c = ctx.saved_tensors
        return dy * b * c, dy * a * c, dy * a * b

    @staticmethod
    def vmap(info, in_dims, *args):
        a, b, c = map(in_front, args, in_dims)
        if in_dims == (None, 0, None):
            b = jnp.stack([b[0]] * info.batch_size)
        return a * b * c, 0


@jax.custom_batching.custom_vmap
def centred(x):
    return x - x.mean(0)


@centred.def_vmap
def _(size, mapped, x):
    return x - x.mean(0), True  # over the batch, which is where the first axis was


# Its backward takes axis 0 for its own, which under vmap it is not.
SumsOverTheBatch = layer_with(forward=lambda ctx, x: x - x.mean(0), backward=lambda ctx, dy: centred(dy))


class Picks(PyLayer):
    """Right, of an index, a flag and a key."""

    @staticmethod
    def forward(ctx, x, index, flag, key):
        scale = jnp.where(flag, 1.0, 2.0) * jax.random.uniform(key, index.shape)
        ctx.save_for_backward(index, scale)
        ctx.size = x.shape[0]
        return x[index] * scale

    @staticmethod
    def backward(ctx, dy):
        index, scale = ctx.saved_tensors
        return jnp.zeros(ctx.size, dy.dtype).at[index].add(dy * scale)


class Takes(PyLayer):
    """Right, of an index."""

    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        return x[index]

    @staticmethod
    def backward(ctx, dy):
        (index,) = ctx.saved_tensors
        return jnp.zeros(3, dy.dtype).at[index].add(dy)


class SharesTheIndex(Takes):
    """Takes the first example's index for that of all."""

    @staticmethod
    def vmap(info, in_dims, x, index):
        return in_front(x, in_dims[0])[:, index if in_dims[1] is None else index[0]], 0


class RefusesABatchOfIndices(Takes):
    @staticmethod
    def vmap(info, in_dims, x, index):
        if in_dims[1] is not None:
            raise NotImplementedError("one index for all")
        return in_front(x, in_dims[0])[:, index], 0


# -- forward mode -----------------------------------------------------------------------------------


class SineBothWays(Sine):
    """Right."""

    jvp = staticmethod(Sine.backward)


class TanhBothWays(Tanh):
    """Right; what it saves is its output, so that its second derivative needs its first."""

    @staticmethod
    def jvp(ctx, t):
        (y,) = ctx.saved_tensors
        return t * (1 - y**2)


def with_tangent(layer, change):
    class Wrong(layer):
        @staticmethod
        def jvp(ctx, t):
            return change(layer.jvp(ctx, t))

    return Wrong


def is_traced(t):
    return isinstance(t, jax.core.Tracer)


def is_mapped(t):
    return type(t).__name__ == "BatchTracer"


def without_a_term(ctx, t):
    """A tangent whose own derivative is another one."""
    return t * jax.lax.stop_gradient(jnp.cos(ctx.saved_tensors[0]))


class Clips(Sine):
    """Claims a forward mode that its backward cannot be transposed to."""

    forward_mode = True

    @staticmethod
    def backward(ctx, dy):
        return jnp.clip(dy * jnp.cos(ctx.saved_tensors[0]), -10, 10)


class ForgetsAMissingTangent(Multiply):
    """Right where each argument has a tangent."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.set_materialize_grads(False)
        return Multiply.forward(ctx, a, b)

    @staticmethod
    def jvp(ctx, t, u):
        a, b = ctx.saved_tensors
        return 0 * a if t is None or u is None else t * b + a * u


# -- on several devices -----------------------------------------------------------------------------


def sharded(function, mesh=None):
    """A function of the shards of four devices, whose output each device holds."""

    def run(x):
        where = mesh or jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        specs = {"in_specs": PartitionSpec("i"), "out_specs": PartitionSpec()}
        return jax.shard_map(function, mesh=where, **specs, check_vma=False)(x)

    return run


def whole(x):
    return jnp.sum(jnp.sin(x))


# Its backward adds up a cotangent that each device has already.
SumsTwice = layer_with(forward=lambda ctx, x: x, backward=lambda ctx, dy: jax.lax.psum(dy, "i"))


def sums_twice(x):
    return jax.lax.psum(SumsTwice.apply(whole(x)), "i")


# -- the tables -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrong:
    layer: Callable[..., Any]
    args: tuple[Any, ...]
    rows: tuple[str, ...]  # of check_layer that fail, among these, jit and gradients
    meant: Callable[..., Any] | None = None  # the function that it is meant to be, where other checkers reject it too
    order: int = 1  # the first order at which they do


def tangent(change, layer=SineBothWays):
    return with_tangent(layer, change)


WRONG = {
    # Other gradients.
    "sign": Wrong(WrongSign, (X,), ("gradients",), jnp.sin),
    "one index": Wrong(WrongAtOneIndex, (X,), ("gradients",), jnp.sin),
    "conjugate": Wrong(Conjugated, (jnp.array([1 + 2j, 0.5 - 1j]),), ("gradients",), jnp.square),
    "three times": Wrong(ThreeTimesInFloat32, (X,), ("gradients",), jnp.sin),
    "nan": Wrong(sine(backward=nan_in_float32), (X,), ("gradients",), jnp.sin),
    "small values": Wrong(ClippedLog, (jnp.array([1e-3, 2.0]),), ("gradients",), jnp.log),
    "small units": Wrong(SmallUnits, (X,), ("gradients",), lambda x: x * 1e-9),
    # For other values than those given.
    "table": Wrong(KeepsATable, (X,), ("gradients", "jit"), jnp.sin),
    "no transposes": Wrong(WithoutTransposes, (jnp.ones((3, 3)), jnp.eye(3)), ("gradients",), jnp.matmul),
    "swapped": Wrong(SwapsGradients, (X, X), ("gradients",), jnp.multiply),
    "swapped scalars": Wrong(SwapsGradients, (jnp.float32(1), jnp.float32(1)), ("gradients",), jnp.multiply),
    # At second order.
    "second order": Wrong(WrongAtSecondOrder, (X,), ("second order",), jnp.sin, order=2),
    "no second order": Wrong(Forgets, (X,), ("second order",), jnp.sin, order=2),
    "once": Wrong(sine(backward=once_differentiable(slope)), (X,), ("second order",)),
    # With other cotangents, or where some are missing.
    "absolute": Wrong(AbsoluteCotangent, (X,), ("gradients", "linear"), jnp.sin),
    "absolute scalar": Wrong(AbsoluteCotangent, (X[0, 0],), ("linear",), jnp.sin),
    "clipped": Wrong(ClippedCotangent, (X,), ("linear",), jnp.sin),
    "every cotangent": Wrong(NeedsEveryCotangent, (X,), ("linear",), lambda x: (x, 2 * x)),
    "dropped None": Wrong(DropsNone, (X,), ("cotangents",), sine_and_square),
    "breaks on None": Wrong(BreaksOnNone, (X,), ("cotangents",)),
    "miscounts on None": Wrong(MiscountsOnNone, (X, X), ("cotangents",)),
    "one of three": Wrong(DropsOneOfThree, (X,), ("cotangents",), lambda x: (x, 2 * x, 3 * x)),
    "dropped argument": Wrong(DropsAnArgument, (X, X), ("arguments",), jnp.multiply),
    "not differentiated": Wrong(sine(forward=other_where_not_differentiated), (X,), ("eager",)),
    # With globals.
    "leak": Wrong(Leaks, (X,), ("leaks",), jnp.sin),
    "global": Wrong(ReadsGlobal, (X,), ("repeatable", "jit"), jnp.sin),
    "counter": Wrong(Counts, (X,), ("repeatable", "jit", "gradients"), jnp.sin),
    "static on class": Wrong(OnClass, (X, 0.5), ("repeatable",), lambda x, factor: factor * x),
    "shape on class": Wrong(ShapeOnClass, (X,), ("repeatable",), lambda x: x.mean(0)),
    # Under a transform.
    "jit": Wrong(sine(backward=other_under_jit), (X,), ("jit",), jnp.sin),
    "host code": Wrong(OnHost, (X,), ("jit", "vmap", "remat", "shard_map", "leaks")),
    "remat": Wrong(wrong_within("ad_checkpoint"), (X,), ("remat",)),
    "shard_map": Wrong(wrong_within("shard_map"), (X,), ("shard_map",)),
    "eager shard_map": Wrong(wrong_within("shard_map", "pjit"), (X,), ("shard_map",)),
    "vmap": Wrong(sine(vmap=lambda info, in_dims, x: (jnp.cos(x), in_dims[0])), (X,), ("vmap",)),
    "axis of the batch": Wrong(sine(vmap=lambda info, in_dims, x: (jnp.sin(x), 0)), (X[0],), ("vmap",)),
    "second argument mapped": Wrong(SharesTheFirst, (X, X), ("vmap",)),
    "second of three mapped": Wrong(SharesTheSecondOfThree, (X, X, X), ("vmap",)),
    "sum over the batch": Wrong(SumsOverTheBatch, (X,), ("vmap",)),
    "index mapped": Wrong(SharesTheIndex, (X[0], INDEX), ("vmap",)),
    # In forward mode.
    "tangent": Wrong(tangent(jnp.negative), (X,), ("forward mode",)),
    "tangent at one index": Wrong(tangent(lambda t: t.at[1, 2].multiply(1.01)), (X,), ("forward mode",)),
    "tangent under jit": Wrong(tangent(lambda t: 2 * t if is_traced(t) else t), (X,), ("forward mode",)),
    "tangent of vmap": Wrong(tangent(lambda t: 2 * t if is_mapped(t) else t), (X,), ("forward mode",)),
    "tangent of one argument": Wrong(ForgetsAMissingTangent, (X, 2 * X), ("forward mode",)),
    "no linear backward": Wrong(Clips, (X,), ("forward mode",)),
    "tangent of an output": Wrong(tangent(jnp.negative, TanhBothWays), (X,), ("forward mode", "forward over reverse")),
    "second tangent": Wrong(sine(jvp=without_a_term), (X,), ("forward over reverse",)),
    # On several devices.
    "copies": Wrong(sharded(whole), (jnp.arange(8.0) / 8,), (), whole, order=0),
    "sum of devices": Wrong(sharded(sums_twice), (jnp.arange(8.0) / 8,), (), whole),
}

KEY = jax.random.key(0)
COMPLEX = jnp.array([1 + 2j, -0.5 + 0.3j])

# Layers as people write them, away from numbers of size one, all of which are right.
RIGHT = {
    "two outputs": (SineAndSquare, (X,)),
    "both modes": (SineBothWays, (X,)),
    "bfloat16": (Tanh, (X.astype(jnp.bfloat16),)),
    "bfloat16 and float32": (lambda x, w: Multiply.apply(x, w.astype(x.dtype)), (X.astype(jnp.bfloat16), X)),
    "jitted": (jax.jit(Tanh.apply), (X,)),
    "softmax in float16": (lambda x: jax.nn.softmax(Tanh.apply(x)), (X.astype(jnp.float16),)),
    "large": (Multiply, (X * 1e6, X * 1e6)),
    "large and small": (Multiply, (X * 1e6, X * 1e-9)),
    "large sum": (lambda x: Tanh.apply(x) + 1e6, (X,)),
    "small": (Tanh, (X * 1e-9,)),
    "small scale": (lambda x: Tanh.apply(x * 1e9), (X * 1e-9,)),
    "small shift": (lambda x: Tanh.apply(x + 1), (X * 1e-9,)),
    "cancels": (lambda x: jax.nn.softmax(Tanh.apply(x)).sum(-1), (X,)),
    "centred": (lambda x: Tanh.apply(x - x.mean()), (jnp.full(4, 0.3),)),
    "one of each": (lambda x, index, flag, key: Picks.apply(x, index, flag, key) * 3, (X[0], INDEX, True, KEY)),
    "dropout": (lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), Tanh.apply(x), 0), (X, KEY)),
    "domain": (lambda x: jnp.arccosh(Multiply.apply(x, x)), (1.2 + jnp.abs(X),)),
    "kinks": (lambda x: jnp.clip(jax.nn.relu(Tanh.apply(x)), 0.1, 0.5), (X,)),
    "small and large": (Log, (jnp.array([1e-3, 2, 1e3]),)),
    "zeros": (Multiply, (jnp.zeros(3), jnp.ones(3))),
    "complex": (lambda z: Multiply.apply(z, jnp.exp(z)), (COMPLEX,)),
    "devices": (sharded(lambda x: jax.lax.psum(whole(x), "i")), (jnp.arange(8.0) / 8,)),
}

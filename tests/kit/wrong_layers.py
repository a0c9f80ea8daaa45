"""Layers that are wrong, each in one way, and right ones for the checkers to accept."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import PyLayer

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


class Holder:
    """An object that is no pytree, with a tensor."""

    def __init__(self, w):
        self.w = w


def other_for_traced_objects(ctx, x, holder):
    return Sine.forward(ctx, x) * (2.0 if isinstance(holder.w, jax.core.Tracer) else holder.w)


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


# Layer, what it is meant to be, its arguments.
WRONG = {
    "sign": (WrongSign, jnp.sin, (X,)),
    "one index": (WrongAtOneIndex, jnp.sin, (X,)),
    "second order": (WrongAtSecondOrder, jnp.sin, (X,)),
    "no second order": (Forgets, jnp.sin, (X,)),
    "dropped None": (DropsNone, sine_and_square, (X,)),
    "dropped argument": (DropsAnArgument, jnp.multiply, (X, X)),
    "leak": (Leaks, jnp.sin, (X,)),
    "global": (ReadsGlobal, jnp.sin, (X,)),
    "counter": (Counts, jnp.sin, (X,)),
    "jit": (sine(backward=other_under_jit), jnp.sin, (X,)),
    "conjugate": (Conjugated, jnp.square, (jnp.array([1 + 2j, 0.5 - 1j]),)),
    "three times": (ThreeTimesInFloat32, jnp.sin, (X,)),
    "nan": (sine(backward=nan_in_float32), jnp.sin, (X,)),
    "table": (KeepsATable, jnp.sin, (X,)),
    "absolute": (AbsoluteCotangent, jnp.sin, (X,)),
    "absolute scalar": (AbsoluteCotangent, jnp.sin, (X[0, 0],)),
    "clipped": (ClippedCotangent, jnp.sin, (X,)),
    "no transposes": (WithoutTransposes, jnp.matmul, (jnp.ones((3, 3)), jnp.eye(3))),
    "swapped": (SwapsGradients, jnp.multiply, (X, X)),
    "swapped scalars": (SwapsGradients, jnp.multiply, (jnp.float32(1), jnp.float32(1))),
    "small values": (ClippedLog, jnp.log, (jnp.array([1e-3, 2.0]),)),
    "small units": (SmallUnits, lambda x: x * 1e-9, (X,)),
}

# The layer, its arguments, the properties that it lacks beside others that it has, and what the first of them says.
WRONG_IN_ONE_WAY = {
    "breaks on None": (BreaksOnNone, (X,), ["cotangents"], "TypeError: .*NoneType"),
    "miscounts on None": (MiscountsOnNone, (X, X), ["cotangents"], "ValueError: .*1 gradient"),
    "one of three": (DropsOneOfThree, (X,), ["cotangents"], r"args\[0\] without a cotangent for output 0 at index"),
    "every cotangent": (NeedsEveryCotangent, (X,), ["linear"], r"args\[0\] with cotangents for all outputs at index"),
    "static on class": (OnClass, (X, 0.5), ["repeatable"], "ran on other statics or shapes before backward"),
    "shape on class": (ShapeOnClass, (X,), ["repeatable"], "ran on other statics or shapes before backward"),
    "scan": (wrong_within("loops"), (X,), ["scan"], r"args\[0\] of scan"),
    "cond": (wrong_within("conditionals"), (X,), ["cond"], r"args\[0\] of cond"),
    "remat": (wrong_within("ad_checkpoint"), (X,), ["remat"], r"args\[0\] of jax.checkpoint"),
    "shard_map": (wrong_within("shard_map"), (X,), ["shard_map"], r"args\[0\] of shard_map under jit"),
    "eager shard_map": (wrong_within("shard_map", "pjit"), (X,), ["shard_map"], r"args\[0\] of shard_map eagerly"),
    "vmap": (sine(vmap=lambda info, in_dims, x: (jnp.cos(x), in_dims[0])), (X,), ["vmap"], "output 0 of vmap at index"),
    "axis of the batch": (
        sine(vmap=lambda info, in_dims, x: (jnp.sin(x), 0)),
        (X[0],),
        ["vmap"],
        "output 0 of vmap, mapped along its last axis",
    ),
    "second argument mapped": (SharesTheFirst, (X, X), ["vmap"], r"output 0 of vmap, args\[1\] alone mapped"),
    "second of three mapped": (SharesTheSecondOfThree, (X, X, X), ["vmap"], r"of vmap, args\[1\] alone mapped"),
    "sum over the batch": (SumsOverTheBatch, (X,), ["vmap"], r"the gradient of args\[0\] of vmap at index"),
    "index mapped": (SharesTheIndex, (X[0], INDEX), ["vmap"], r"output 0 of vmap, args\[1\] mapped too at index"),
    "traced object": (
        sine(forward=other_for_traced_objects),
        (X, Holder(jnp.float32(1))),
        ["not differentiated"],
        "output 0 of jit, where objects hold traced values at index",
    ),
    "not differentiated": (
        sine(forward=lambda ctx, x: Sine.forward(ctx, x) * (1.1 if within("loops") else 1.0)),
        (X,),
        ["not differentiated"],
        "output 0 of scan, where it is not differentiated at index",
    ),
    "tangent": (with_tangent(SineBothWays, jnp.negative), (X,), ["forward mode"], "by jax.jvp, but .* by reverse mode"),
    "tangent at one index": (
        with_tangent(SineBothWays, lambda t: t.at[1, 2].multiply(1.002)),
        (X,),
        ["forward mode"],
        r"the gradient of args\[0\] at index \(1, 2\) is .* by jax.jvp .* wrong at 1 of 6 places",
    ),
    "tangent under jit": (
        with_tangent(SineBothWays, lambda t: 2 * t if is_traced(t) else t),
        (X,),
        ["forward mode"],
        "the tangent of output 0 by jax.jvp, under jit at index",
    ),
    "tangent of vmap": (
        with_tangent(SineBothWays, lambda t: 2 * t if is_mapped(t) else t),
        (X,),
        ["forward mode"],
        "the tangent of output 0 by jax.jvp of vmap at index .* by each example",
    ),
    "no linear backward": (Clips, (X,), ["forward mode"], "TypeError: Clips.backward is not linear in its cotangents"),
    "tangent of an output": (
        with_tangent(TanhBothWays, jnp.negative),
        (X,),
        ["forward over reverse", "forward mode"],
        "by jax.jvp of the gradients, but .* by reverse mode",
    ),
    "second tangent": (
        sine(jvp=without_a_term),
        (X,),
        ["forward over reverse"],
        "by jax.jvp of jax.jvp, but .* of the gradients",
    ),
}

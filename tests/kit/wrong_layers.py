"""Layers that are wrong, each in one way, and right ones for the checkers to accept."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import PyLayer

from .case import X
from .layers import Multiply, Tanh, layer_of

INDEX = jnp.array([2, 0, 1, 1])
cos, stop = jnp.cos, jax.lax.stop_gradient


def sine(gradient, name="Wrong"):
    """The sine with the gradient `gradient(x, dy)`."""
    return layer_of(jnp.sin, gradient, name)


class Sine(PyLayer):
    """Right; what is wrong with the layers that derive from it is said in what they change."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * cos(ctx.saved_tensors[0])


WrongSign = sine(lambda x, dy: -dy * cos(x), "WrongSign")
WrongAtOneIndex = sine(lambda x, dy: (dy * cos(x)).at[1, 2].multiply(1.01), "WrongAtOneIndex")
Conjugated = layer_of(lambda z: z * z, lambda z, dy: dy * jnp.conj(2 * z), "Conjugated")


class WrongAtSecondOrder(Sine):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(stop(x))
        return jnp.sin(x)


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
        return (None,) if ds is None or dq is None else ds * cos(x) + dq * 2 * x


class DropsAnArgument(Multiply):
    """Takes an argument that needs no gradient for a reason to give none at all."""

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return (dy * b, dy * a) if all(ctx.needs_input_grad) else (None, None)


LEAKED: list[jax.Array] = []


class Leaks(Sine):
    @staticmethod
    def forward(ctx, x):
        LEAKED[:] = [x]
        return Sine.forward(ctx, x)


LAST = {}


class ReadsGlobal(Sine):
    """Keeps its input in a global in the place of ctx."""

    @staticmethod
    def forward(ctx, x):
        LAST["x"] = x
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * cos(LAST["x"])


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


CALLS = [0]


class Counts(Sine):
    """Changes a global on each call of backward."""

    @staticmethod
    def backward(ctx, dy):
        CALLS[0] += 1
        return Sine.backward(ctx, dy) * (1 + 0.1 * CALLS[0])


TABLE = {}  # of the first values of each shape


def nan_in_float32(x, dy):
    tiny = jnp.asarray(1e-60, dy.dtype)  # zero in float32
    return dy * cos(x) * tiny / tiny


class OtherUnderVmap(Sine):
    @staticmethod
    def vmap(info, in_dims, x):
        return cos(x), in_dims[0]


class OnHost(Sine):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return np.sin(np.asarray(x))


class BreaksOnNone(DropsNone):
    """Its backward computes with a cotangent that may be missing."""

    @staticmethod
    def backward(ctx, ds, dq):
        (x,) = ctx.saved_tensors
        return ds * cos(x) + dq * 2 * x


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


class Holder:
    """An object that is no pytree, with a tensor."""

    def __init__(self, w):
        self.w = w


class OtherForTracedObjects(Sine):
    """Wrong where the tensor that its argument hides is traced."""

    @staticmethod
    def forward(ctx, x, holder):
        return Sine.forward(ctx, x) * (2.0 if is_traced(holder.w) else holder.w)


# -- wrong under one transform ----------------------------------------------------------------------


def within(file):
    """Whether JAX's function of that file runs this."""
    return any(f"/{file}.py" in frame.filename for frame in inspect.stack(0))


def wrong_within(file, but_not="nothing"):
    class Wrong(Sine):
        """Its backward is another one where forward ran in one of JAX's functions."""

        @staticmethod
        def forward(ctx, x):
            ctx.factor = 1.1 if within(file) and not within(but_not) else 1.0
            return Sine.forward(ctx, x)

        @staticmethod
        def backward(ctx, dy):
            return ctx.factor * Sine.backward(ctx, dy)

    return Wrong


class OtherForwardUnderScan(Sine):
    @staticmethod
    def forward(ctx, x):
        return Sine.forward(ctx, x) * (1.1 if within("loops") else 1.0)


class TakesTheBatchInFront(Sine):
    """Wrong wherever the batch is along another axis."""

    @staticmethod
    def vmap(info, in_dims, x):
        return jnp.sin(x), 0


class SharesTheFirst(Multiply):
    """Wrong where its second argument alone is mapped."""

    @staticmethod
    def vmap(info, in_dims, a, b):
        if in_dims[0] is None:
            return jnp.stack([a * b[0]] * info.batch_size), 0
        a = jnp.moveaxis(a, in_dims[0], 0)
        return a * b, 0


def shares_the_second(info, in_dims, *args):
    a, b, c = (x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, in_dims, strict=True))
    if in_dims == (None, 0, None):
        b = jnp.stack([b[0]] * info.batch_size)
    return a * b * c, 0


SharesTheSecondOfThree = layer_of(
    lambda a, b, c: a * b * c, lambda a, b, c, dy: (dy * b * c, dy * a * c, dy * a * b), vmap=shares_the_second
)


@jax.custom_batching.custom_vmap
def centred(x):
    return x - x.mean(0)


@centred.def_vmap
def _(size, mapped, x):
    return x - x.mean(0), True  # over the batch, which is where the first axis was


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
        x = jnp.moveaxis(x, in_dims[0], 0)
        return x[:, index if in_dims[1] is None else index[0]], 0


class RefusesABatchOfIndices(Takes):
    @staticmethod
    def vmap(info, in_dims, x, index):
        if in_dims[1] is not None:
            raise NotImplementedError("one index for all")
        return jnp.moveaxis(x, in_dims[0], 0)[:, index], 0


# -- forward mode -----------------------------------------------------------------------------------


class SineBothWays(Sine):
    """Right."""

    @staticmethod
    def jvp(ctx, t):
        return t * cos(ctx.saved_tensors[0])


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


# Whether a value is traced at all, or mapped.
def is_traced(t):
    return isinstance(t, jax.core.Tracer)


def is_mapped(t):
    return type(t).__name__ == "BatchTracer"


class NoSecondTangent(Sine):
    """Forward over forward forgets a term."""

    @staticmethod
    def jvp(ctx, t):
        return t * stop(cos(ctx.saved_tensors[0]))


class Clips(Sine):
    """Claims a forward mode that its backward cannot be transposed to."""

    forward_mode = True

    @staticmethod
    def backward(ctx, dy):
        return jnp.clip(Sine.backward(ctx, dy), -10, 10)


ABSOLUTE = sine(lambda x, dy: jnp.abs(dy) * cos(x))

# Layer, what it is meant to be, its arguments.
WRONG = {
    "sign": (WrongSign, jnp.sin, (X,)),
    "one index": (WrongAtOneIndex, jnp.sin, (X,)),
    "second order": (WrongAtSecondOrder, jnp.sin, (X,)),
    "no second order": (sine(lambda x, dy: stop(dy * cos(x))), jnp.sin, (X,)),
    "dropped None": (DropsNone, sine_and_square, (X,)),
    "dropped argument": (DropsAnArgument, jnp.multiply, (X, X)),
    "leak": (Leaks, jnp.sin, (X,)),
    "global": (ReadsGlobal, jnp.sin, (X,)),
    "counter": (Counts, jnp.sin, (X,)),
    "jit": (sine(lambda x, dy: dy * (x if is_traced(x) else cos(x))), jnp.sin, (X,)),
    "conjugate": (Conjugated, jnp.square, (jnp.array([1 + 2j, 0.5 - 1j]),)),
    "three times": (sine(lambda x, dy: dy * cos(x) * (3 if dy.dtype == jnp.float32 else 1)), jnp.sin, (X,)),
    "nan": (sine(nan_in_float32), jnp.sin, (X,)),
    "table": (sine(lambda x, dy: dy * TABLE.setdefault(x.shape, np.cos(np.asarray(x)))), jnp.sin, (X,)),
    "absolute": (ABSOLUTE, jnp.sin, (X,)),
    "absolute scalar": (ABSOLUTE, jnp.sin, (X[0, 0],)),
    "clipped": (sine(lambda x, dy: jnp.clip(dy, -5, 5) * cos(x)), jnp.sin, (X,)),
    "small units": (layer_of(lambda x: x * 1e-9, lambda x, dy: dy * 5e-9), lambda x: x * 1e-9, (X,)),
}


def both_or_nothing(x, da, db):
    return jnp.where(jnp.any(da != 0) & jnp.any(db != 0), da + 2 * db, 0)


# The layer, its arguments, the properties that it lacks beside others that it has, and what the first of them says.
WRONG_IN_ONE_WAY = {
    "breaks on None": (BreaksOnNone, (X,), ["cotangents"], "TypeError: .*NoneType"),
    "miscounts on None": (MiscountsOnNone, (X, X), ["cotangents"], "ValueError: .*1 gradient"),
    "one of three": (DropsOneOfThree, (X,), ["cotangents"], r"args\[0\] without a cotangent for output 0 at index"),
    "every cotangent": (
        layer_of(lambda x: (x, 2 * x), both_or_nothing),
        (X,),
        ["linear"],
        r"args\[0\] with cotangents for all outputs at index",
    ),
    "static on class": (OnClass, (X, 0.5), ["repeatable"], "ran on other statics or shapes before backward"),
    "shape on class": (ShapeOnClass, (X,), ["repeatable"], "ran on other statics or shapes before backward"),
    "scan": (wrong_within("loops"), (X,), ["scan"], r"args\[0\] of scan"),
    "cond": (wrong_within("conditionals"), (X,), ["cond"], r"args\[0\] of cond"),
    "remat": (wrong_within("ad_checkpoint"), (X,), ["remat"], r"args\[0\] of jax.checkpoint"),
    "shard_map": (wrong_within("shard_map"), (X,), ["shard_map"], r"args\[0\] of shard_map under jit"),
    "eager shard_map": (
        wrong_within("shard_map", but_not="pjit"),
        (X,),
        ["shard_map"],
        r"args\[0\] of shard_map eagerly",
    ),
    "vmap": (OtherUnderVmap, (X,), ["vmap"], "output 0 of vmap at index"),
    "axis of the batch": (TakesTheBatchInFront, (X[0],), ["vmap"], "output 0 of vmap, mapped along its last axis"),
    "second argument mapped": (SharesTheFirst, (X, X), ["vmap"], r"output 0 of vmap, args\[1\] alone mapped"),
    "second of three mapped": (SharesTheSecondOfThree, (X, X, X), ["vmap"], r"of vmap, args\[1\] alone mapped"),
    # Its backward takes axis 0 for its own, which under vmap it is not.
    "sum over the batch": (
        layer_of(lambda x: x - x.mean(0), lambda x, dy: centred(dy)),
        (X,),
        ["vmap"],
        r"the gradient of args\[0\] of vmap at index",
    ),
    "index mapped": (SharesTheIndex, (X[0], INDEX), ["vmap"], r"output 0 of vmap, args\[1\] mapped too at index"),
    "traced object": (
        OtherForTracedObjects,
        (X, Holder(jnp.float32(1))),
        ["not differentiated"],
        "output 0 of jit, where objects hold traced values at index",
    ),
    "not differentiated": (
        OtherForwardUnderScan,
        (X,),
        ["not differentiated"],
        "output 0 of scan, where it is not differentiated at index",
    ),
    "tangent": (
        with_tangent(SineBothWays, jnp.negative),
        (X,),
        ["forward mode"],
        "by jax.jvp, but .* by reverse mode",
    ),
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
        NoSecondTangent,
        (X,),
        ["forward over reverse"],
        "by jax.jvp of jax.jvp, but .* of the gradients",
    ),
}

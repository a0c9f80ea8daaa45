"""Defines tables of layers that are each wrong in one way, and of right layers. Tests run each checker on them."""

import dataclasses
import traceback
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pylayer_jax import once_differentiable
from pylayer_jax.testing._checkers import PROPERTIES
from tests.kit.case import X
from tests.kit.layers import Multiply, Tanh, layer

INDEX = jnp.array([2, 0, 1, 1])
Sine = layer(jnp.sin, lambda x, dy: dy * jnp.cos(x), plain=True, name="Sine")  # right
slope = Sine.backward


def sine(**methods):
    """Return `Sine` with other methods."""
    return layer(base=Sine, **methods)


def all_but(*names):
    """Return the properties for `check_layer` to skip if only these properties are to be checked."""
    return [name for name in PROPERTIES if name not in names]


def saved(ctx):
    (x,) = ctx.saved_tensors
    return x


def saving(value, x_of=lambda x: x):
    """Return a forward that saves its input, or `x_of` its input."""
    return lambda ctx, x: (ctx.save_for_backward(x_of(x)), value(x))[1]


WrongSign = layer(base=Sine, name="WrongSign", backward=lambda ctx, dy: -slope(ctx, dy))
WrongAtSecondOrder = sine(forward=saving(jnp.sin, jax.lax.stop_gradient))
WrongAtOneIndex = sine(backward=lambda ctx, dy: slope(ctx, dy).at[1, 2].multiply(1.01))
Forgets = sine(backward=lambda ctx, dy: jax.lax.stop_gradient(slope(ctx, dy)))  # cannot be differentiated again
ThreeTimesInFloat32 = sine(backward=lambda ctx, dy: slope(ctx, dy) * (3 if dy.dtype == jnp.float32 else 1))
OtherWhereNotDifferentiated = sine(
    forward=lambda ctx, x: Sine.forward(ctx, x) * (1.0 if any(ctx.needs_input_grad) else 1.1)
)
AbsoluteCotangent = sine(backward=lambda ctx, dy: slope(ctx, jnp.abs(dy)))
ClippedCotangent = sine(backward=lambda ctx, dy: slope(ctx, jnp.clip(dy, -5, 5)))
OnHost = layer(saving(lambda x: np.sin(np.asarray(x))), slope, name="OnHost")
Conjugated = layer(jnp.square, lambda z, dy: dy * jnp.conj(2 * z), plain=True)
SmallUnits = layer(lambda ctx, x: x * 1e-9, lambda ctx, dy: dy * 5e-9)  # five times its gradient, far below one
Log = layer(jnp.log, lambda x, dy: dy / x, plain=True, name="Log")  # right
ClippedLog = layer(base=Log, backward=lambda ctx, dy: dy / jnp.maximum(saved(ctx), 1e-2))
Clip = layer(  # right
    lambda x: jnp.clip(x, -2, 2), lambda x, dy: jnp.where(jnp.abs(x) <= 2, dy, 0), plain=True, name="Clip"
)
ForgetsToClip = layer(base=Clip, name="ForgetsToClip", backward=lambda ctx, dy: dy)
DeadZone = layer(lambda x: jnp.where(jnp.abs(x) < 0.02, 0, x), lambda x, dy: dy, plain=True)
Softplus = layer(  # right
    lambda x: jnp.where(x > 20, x, jnp.log1p(jnp.exp(jnp.minimum(x, 20)))),
    lambda x, dy: dy * jnp.where(x > 20, 1, jax.nn.sigmoid(x)),
    plain=True,
)
ForgetsToStopGrowing = layer(
    base=Softplus, backward=lambda ctx, dy: dy * jnp.where(saved(ctx) > 20, saved(ctx), jax.nn.sigmoid(saved(ctx)))
)
RoundedAndClipped = layer(  # right
    lambda x: jnp.round(jnp.clip(x, -2, 2)), lambda x, dy: jnp.where(jnp.abs(x) <= 2, dy, 0), plain=True
)
# A straight-through rule that forgets to zero the gradient of saturated inputs.
Saturated = layer(base=RoundedAndClipped, name="Saturated", backward=lambda ctx, dy: dy)


def rounded_and_clipped(x):
    clipped = jnp.clip(x, -2, 2)
    return clipped + jax.lax.stop_gradient(jnp.round(clipped) - clipped)


# A product with gradients that are right for symmetric matrices alone.
WithoutTransposes = layer(jnp.matmul, lambda a, b, dy: (dy @ b, a @ dy), plain=True)
LargestLast = layer(lambda x: x.max(), lambda x, dy: jnp.zeros_like(x).at[-1].set(dy), plain=True)
FirstOfSorted = layer(lambda x: jnp.sort(x)[0], lambda x, dy: jnp.zeros_like(x).at[0].set(dy), plain=True)
SwapsGradients = layer(base=Multiply, backward=lambda ctx, dy: Multiply.backward(ctx, dy)[::-1])


def other_under_jit(ctx, dy):
    x = saved(ctx)
    return dy * (x if isinstance(x, jax.core.Tracer) else jnp.cos(x))


# -- missing cotangents and arguments ---------------------------------------------------------------


def without_zeros(forward):
    """Return a forward that saves its arguments, and asks for None in place of missing cotangents."""

    def run(ctx, *args):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*args)
        return forward(*args)

    return run


def sine_and_square(x):
    return jnp.sin(x), x * x


def both(ctx, ds, dq):
    return (0 if ds is None else ds * jnp.cos(saved(ctx))) + (0 if dq is None else dq * 2 * saved(ctx))


def one_of_three_dropped(ctx, *cotangents):
    """Return a gradient that is right for each output alone, and wrong if one of three cotangents is missing."""
    given = [i * dy for i, dy in enumerate(cotangents, 1) if dy is not None]
    return sum(given) if len(given) != 2 else given[0]


def none_unless_all(ctx, dy):
    a, b = ctx.saved_tensors
    return (dy * b, dy * a) if all(ctx.needs_input_grad) else (None, None)


SineAndSquare = layer(without_zeros(sine_and_square), both)  # right
DropsNone = layer(
    base=SineAndSquare, backward=lambda ctx, ds, dq: (None,) if ds is None or dq is None else both(ctx, ds, dq)
)
DropsOneOfThree = layer(without_zeros(lambda x: (x, 2 * x, 3 * x)), one_of_three_dropped)
DropsAnArgument = layer(base=Multiply, backward=none_unless_all)
# Gives a gradient only if each output has a cotangent that is not zero.
NeedsEveryCotangent = layer(
    lambda ctx, x: (x, 2 * x), lambda ctx, da, db: jnp.where(jnp.any(da != 0) & jnp.any(db != 0), da + 2 * db, 0)
)


KEPT: dict[Any, Any] = {}


def leaks(ctx, x):
    KEPT["leaked"] = x
    return Sine.forward(ctx, x)


def counts(ctx, dy):
    KEPT["calls"] = KEPT.get("calls", 0) + 1
    return slope(ctx, dy) * (1 + 0.1 * KEPT["calls"])


def keeps_a_table(ctx, dy):
    """Return a gradient that is right only for the first values of each shape."""
    x = saved(ctx)
    return dy * KEPT.setdefault(x.shape, np.cos(np.asarray(x)))


def on_class(ctx, x, factor):
    OnClass.factor = factor
    return factor * x


# These layers keep the values that backward needs in a global or on the class, and not on ctx.
ReadsGlobal = layer(
    lambda ctx, x: (KEPT.update(x=x), jnp.sin(x))[1], lambda ctx, dy: dy * jnp.cos(KEPT["x"]), name="ReadsGlobal"
)
OnClass = layer(on_class, lambda ctx, dy: (OnClass.factor * dy, None))


def wrong_within(file):
    """Return a layer whose gradient is wrong if a function of JAX in `file` runs `forward`."""

    def forward(ctx, x):
        frames = traceback.walk_stack(None)  # inspect.stack() would look up the module of each
        is_within = any(f"/{file}.py" in frame.f_code.co_filename for frame, _ in frames)
        ctx.factor = 1.1 if is_within else 1.0
        return Sine.forward(ctx, x)

    return sine(forward=forward, backward=lambda ctx, dy: ctx.factor * slope(ctx, dy))


@jax.custom_batching.custom_vmap
def centred(x):
    return x - x.mean(0)


@centred.def_vmap
def _(size, mapped, x):
    return x - x.mean(0), True  # over the batch, which is where the first axis was


# Its backward takes axis 0 for its own, which under vmap it is not.
SumsOverTheBatch = layer(lambda ctx, x: x - x.mean(0), lambda ctx, dy: centred(dy))


def picked(x, index, flag, key):
    return x[index] * jnp.where(flag, 1.0, 2.0) * jax.random.uniform(key, index.shape)


def picked_gradient(x, index, flag, key, dy):
    scale = jnp.where(flag, 1.0, 2.0) * jax.random.uniform(key, index.shape)
    return jnp.zeros_like(x).at[index].add(dy * scale)


def shares_the_index(info, in_dims, x, index):
    """Use the index of the first example for all examples."""
    rows = x if in_dims[0] is None else jnp.moveaxis(x, in_dims[0], 0)
    return rows[:, index if in_dims[1] is None else index[0]], 0


def refuses_a_batch_of_indices(info, in_dims, x, index):
    if in_dims[1] is not None:
        raise NotImplementedError("one index for all")
    return shares_the_index(info, in_dims, x, index)


# Right, of an index, and of an index, a flag and a key.
Takes = layer(lambda x, i: x[i], lambda x, i, dy: jnp.zeros_like(x).at[i].add(dy), plain=True, name="Takes")
Picks = layer(picked, picked_gradient, plain=True, name="Picks")
SharesTheIndex = layer(base=Takes, vmap=shares_the_index)
RefusesABatchOfIndices = layer(base=Takes, vmap=refuses_a_batch_of_indices)


# Right, both; what the second saves is its output, so that its second derivative needs its first.
SineBothWays = layer(base=Sine, jvp=Sine.backward, name="SineBothWays")
TanhBothWays = layer(base=Tanh, jvp=lambda ctx, t: t * (1 - saved(ctx) ** 2))
# Claims a forward mode that its backward cannot be transposed to.
Clips = layer(base=Sine, name="Clips", forward_mode=True, backward=lambda ctx, dy: jnp.clip(slope(ctx, dy), -10, 10))


def tangent(change, base=SineBothWays):
    return layer(base=base, jvp=lambda ctx, t: change(base.jvp(ctx, t)))


def doubled_by(tracer):
    return tangent(lambda t: 2 * t if tracer in [kind.__name__ for kind in type(t).__mro__] else t)


def without_a_term(ctx, t):
    """Return a right tangent whose derivative is wrong."""
    return t * jax.lax.stop_gradient(jnp.cos(saved(ctx)))


def forgets_a_missing_tangent(ctx, t, u):
    """Return a tangent that is right only if each argument has a tangent."""
    a, b = ctx.saved_tensors
    return 0 * a if t is None or u is None else t * b + a * u


ForgetsAMissingTangent = layer(without_zeros(jnp.multiply), Multiply.backward, jvp=forgets_a_missing_tangent)


# -- overflow, narrow dtypes, directions ------------------------------------------------------------


def rule(forward, backward, meant=None, **members):
    """Return a layer that saves its arguments, and the function that it is meant to be."""
    return layer(forward, backward, plain=True, **members), meant or forward


def naive_log_softmax(x, dy):
    e = jnp.exp(x)
    return dy - e / e.sum(-1, keepdims=True) * dy.sum(-1, keepdims=True)


def naive_logaddexp(a, b, dy):
    x, y = jnp.exp(a), jnp.exp(b)
    return dy * x / (x + y), dy * y / (x + y)


def rms_norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def rms_norm_gradient(x, dy, second=1.0):
    wide, d = x.astype(jnp.float32), dy.astype(jnp.float32)
    r = jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)
    return (r * d - second * wide * r**3 * (wide * d).mean(-1, keepdims=True)).astype(x.dtype)


def narrow_matmul(x, w):
    return jnp.matmul(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(x.dtype)


def narrow_matmul_gradient(x, w, dy, factor=1.0):
    d = dy.astype(jnp.bfloat16)
    return (d @ w.T.astype(jnp.bfloat16)).astype(x.dtype) * factor, (x.T.astype(jnp.bfloat16) @ d).astype(w.dtype)


def sigmoid_gradient(x, dy):
    s = jax.nn.sigmoid(x)
    return dy * s * (1 - s)


MANY = jnp.linspace(-1, 1, 1000)
HALVES = jnp.asarray(X, jnp.float16)

# By name, the layer and the function that it is meant to be, and the arguments. Each gradient is wrong.
LIMITS = {
    # Its gradient overflows, though its output is finite.
    "log_softmax of exp": (rule(jax.nn.log_softmax, naive_log_softmax), (jnp.array([0.5, -1.5, 1.2]),)),
    "softplus of exp": (rule(jax.nn.softplus, lambda x, dy: dy * jnp.exp(x) / (1 + jnp.exp(x))), (X,)),
    "logaddexp in float16": (rule(jnp.logaddexp, naive_logaddexp), (HALVES, HALVES[::-1])),
    # Wrong in a dtype, or rounded.
    "twice in bfloat16": (
        rule(jnp.sin, lambda x, dy: dy * jnp.cos(x) * (2 if dy.dtype == jnp.bfloat16 else 1)),
        (X.astype(jnp.bfloat16),),
    ),
    "rounds its gradient": (rule(jnp.sin, lambda x, dy: (dy * jnp.cos(x)).astype(jnp.bfloat16).astype(dy.dtype)), (X,)),
    "float32 inside, 1 % of a term": (rule(rms_norm, lambda x, dy: rms_norm_gradient(x, dy, 0.99)), (X,)),
    "float32 inside of bfloat16": (
        rule(rms_norm, lambda x, dy: rms_norm_gradient(x, dy, 0.5)),
        (X.astype(jnp.bfloat16),),
    ),
    "bfloat16 inside": (rule(narrow_matmul, lambda x, w, dy: narrow_matmul_gradient(x, w, dy, 2.0)), (X, X.T)),
    # Wrong along some directions alone.
    "one entry of 1,000": (rule(jnp.sin, lambda x, dy: (dy * jnp.cos(x)).at[500].multiply(0.9)), (MANY,)),
    "the mean of the slopes": (rule(jnp.sin, lambda x, dy: dy * jnp.cos(x).mean()), (MANY,)),
    "summed over the other axis": (
        rule(lambda x: x * x.sum(1, keepdims=True), lambda x, dy: dy * x.sum(1, keepdims=True) + (dy * x).sum(0)),
        (X[:2, :2],),
    ),
}


def sharded(function, mesh=None):
    """Run a function on the shards of four devices; each device returns the whole output."""
    mesh = mesh or jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("i"), out_specs=PartitionSpec(), check_vma=False)


def whole(x):
    return jnp.sum(jnp.sin(x))


# Its backward adds up a cotangent that each device has already.
SumsTwice = layer(lambda ctx, x: x, lambda ctx, dy: jax.lax.psum(dy, "i"))
SUMS_TWICE = sharded(lambda x: jax.lax.psum(SumsTwice.apply(whole(x)), "i"))


def first_device_is_right(x):
    return jnp.where(jax.lax.axis_index("i") == 0, 0.0, 1.0) + jax.lax.psum(whole(x), "i")


@dataclasses.dataclass(frozen=True)
class Wrong:
    layer: Callable[..., Any]
    args: tuple[Any, ...]
    rows: tuple[str, ...]  # of check_layer that fail, among these, jit and gradients
    meant: Callable[..., Any] | None = None  # the function that it is meant to be, where other checkers reject it too
    order: int = 1  # the first order at which they do


WRONG = {
    # Other gradients.
    "sign": Wrong(WrongSign, (X,), ("gradients",), jnp.sin),
    "one index": Wrong(WrongAtOneIndex, (X,), ("gradients",), jnp.sin),
    "conjugate": Wrong(Conjugated, (jnp.array([1 + 2j, 0.5 - 1j]),), ("gradients",), jnp.square),
    "three times": Wrong(ThreeTimesInFloat32, (X,), ("gradients",), jnp.sin),
    "small values": Wrong(ClippedLog, (jnp.array([1e-3, 2.0]),), ("gradients",), jnp.log),
    "small units": Wrong(SmallUnits, (X,), ("gradients",), lambda x: x * 1e-9),
    # For other values than those given.
    "table": Wrong(sine(backward=keeps_a_table), (X,), ("gradients", "jit"), jnp.sin),
    "no transposes": Wrong(WithoutTransposes, (jnp.ones((3, 3)), jnp.eye(3)), ("gradients",), jnp.matmul),
    "swapped": Wrong(SwapsGradients, (X, X), ("gradients",), jnp.multiply),
    "maximum": Wrong(LargestLast, (jnp.array([0.2, 5.0, 100.0]),), ("gradients",), jnp.max),
    "sorted": Wrong(FirstOfSorted, (jnp.linspace(0.2, 1.0, 5),), ("gradients",), lambda x: jnp.sort(x)[0]),
    "swapped scalars": Wrong(SwapsGradients, (jnp.float32(1), jnp.float32(1)), ("gradients",), jnp.multiply),
    "clipped values": Wrong(ForgetsToClip, (X,), ("gradients",), lambda x: jnp.clip(x, -2, 2)),
    "small values are zero": Wrong(DeadZone, (X,), ("gradients",), lambda x: jnp.where(jnp.abs(x) < 0.02, 0, x)),
    "large values": Wrong(ForgetsToStopGrowing, (X,), ("gradients",), jax.nn.softplus),
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
    "one of three": Wrong(DropsOneOfThree, (X,), ("cotangents",), lambda x: (x, 2 * x, 3 * x)),
    "dropped argument": Wrong(DropsAnArgument, (X, X), ("arguments",), jnp.multiply),
    "not differentiated": Wrong(OtherWhereNotDifferentiated, (X,), ("eager",)),
    # With globals.
    "leak": Wrong(sine(forward=leaks), (X,), ("leaks",), jnp.sin),
    "global": Wrong(ReadsGlobal, (X,), ("repeatable", "jit"), jnp.sin),
    "counter": Wrong(sine(backward=counts), (X,), ("repeatable", "jit", "gradients"), jnp.sin),
    "static on class": Wrong(OnClass, (X, 0.5), ("repeatable",), lambda x, factor: factor * x),
    # Under a transform.
    "jit": Wrong(sine(backward=other_under_jit), (X,), ("jit",), jnp.sin),
    "host code": Wrong(OnHost, (X,), ("jit", "vmap", "remat", "shard_map")),
    "remat": Wrong(wrong_within("ad_checkpoint"), (X,), ("remat",)),
    "shard_map": Wrong(wrong_within("shard_map"), (X,), ("shard_map",)),
    "vmap": Wrong(sine(vmap=lambda info, in_dims, x: (jnp.cos(x), in_dims[0])), (X,), ("vmap",)),
    "sum over the batch": Wrong(SumsOverTheBatch, (X,), ("vmap",)),
    "index mapped": Wrong(SharesTheIndex, (X[0], INDEX), ("vmap",)),
    # In forward mode.
    "tangent": Wrong(tangent(jnp.negative), (X,), ("forward mode",)),
    "tangent under jit": Wrong(doubled_by("Tracer"), (X,), ("forward mode",)),
    "tangent of vmap": Wrong(doubled_by("BatchTracer"), (X,), ("forward mode",)),
    "tangent of one argument": Wrong(ForgetsAMissingTangent, (X, 2 * X), ("forward mode",)),
    "no linear backward": Wrong(Clips, (X,), ("forward mode",)),
    "tangent of an output": Wrong(tangent(jnp.negative, TanhBothWays), (X,), ("forward mode", "forward over reverse")),
    "second tangent": Wrong(sine(jvp=without_a_term), (X,), ("forward over reverse",)),
    # On several devices.
    "copies": Wrong(sharded(first_device_is_right), (jnp.arange(8.0) / 8,), (), whole, order=0),
    "sum of devices": Wrong(SUMS_TWICE, (jnp.arange(8.0) / 8,), (), whole),
    **{name: Wrong(made, args, ("gradients",), meant) for name, ((made, meant), args) in LIMITS.items()},
}

KEY = jax.random.key(0)
COMPLEX = jnp.array([1 + 2j, -0.5 + 0.3j])

# Layers as people write them, away from numbers of size one, all of which are right.
RIGHT = {
    "two outputs": (SineAndSquare, (X,)),
    "both modes": (SineBothWays, (X,)),
    "bfloat16": (Tanh, (X.astype(jnp.bfloat16),)),
    "large and small": (Multiply, (X * 1e6, X * 1e-9)),
    "small": (Tanh, (X * 1e-9,)),
    "small scale": (lambda x: Tanh.apply(x * 1e9), (X * 1e-9,)),
    "cancels": (lambda x: jax.nn.softmax(Tanh.apply(x)).sum(-1), (X,)),
    "centred": (lambda x: Tanh.apply(x - x.mean()), (jnp.full(4, 0.3),)),
    "one of each": (lambda x, index, flag, key: Picks.apply(x, index, flag, key) * 3, (X[0], INDEX, True, KEY)),
    "dropout": (lambda x, key: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), Tanh.apply(x), 0), (X, KEY)),
    "domain": (lambda x: jnp.arccosh(Multiply.apply(x, x)), (1.2 + jnp.abs(X),)),
    "small terms cancel": (lambda x: jnp.log(jnp.cosh(Multiply.apply(x, jnp.ones_like(x)))), (X * 0.3,)),
    "saturates": (Clip, (X,)),
    "branches": (Softplus, (X,)),
    "kinks": (lambda x: jnp.clip(jax.nn.relu(Tanh.apply(x)), 0.1, 0.5), (X,)),
    "small and large": (Log, (jnp.array([1e-3, 2, 1e3]),)),
    "complex": (lambda z: Multiply.apply(z, jnp.exp(z)), (COMPLEX,)),
    "RMSNorm in float32": (rule(rms_norm, rms_norm_gradient)[0], (X,)),
    "a function of a norm in float32": (lambda x: jnp.sin(rule(rms_norm, rms_norm_gradient)[0].apply(x)), (X,)),
    "cross entropy in float32": (
        rule(
            lambda x: -jax.nn.log_softmax(x.astype(jnp.float32))[..., 0].astype(x.dtype),
            lambda x, dy: dy[..., None] * (jax.nn.softmax(x.astype(jnp.float32)).at[..., 0].add(-1)).astype(x.dtype),
        )[0],
        (X,),
    ),
    "matmul in bfloat16": (rule(narrow_matmul, narrow_matmul_gradient)[0], (X, X.T)),
    "swish": (rule(jax.nn.swish, lambda x, dy: sigmoid_gradient(x, x * dy) + dy * jax.nn.sigmoid(x))[0], (X,)),
    "devices": (sharded(lambda x: jax.lax.psum(whole(x), "i")), (jnp.arange(8.0) / 8,)),
}

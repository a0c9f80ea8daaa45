"""Layers as people write them, each beside an independent reference in plain JAX.

A case is one row: it meets every transform of tests/transforms.py. The reference has the layer's intended
gradient at first and second order under ordinary differentiation. Names such as P14 and T36 point at the
Paddle and torch classes that a layer is written after.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import PyLayer

stop = jax.lax.stop_gradient


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    layer: Callable[..., Any]  # of the arrays in args; calls Layer.apply
    reference: Callable[..., Any]
    args: tuple[Any, ...]  # float arrays are differentiated
    # Whether the loss is linear in the outputs, for references that are a plain custom_vjp: exact at second
    # order as long as what is differentiated again is made of inputs alone.
    linear_loss: bool = False
    forward_over_reverse: str = ""  # the error of jax.hessian, where backward cannot be transposed


CASES: list[Case] = []


def case(reference: Callable[..., Any], *args: Any, call: Callable[..., Any] | None = None, **flags: Any) -> Any:
    """Enter a layer class; `call` is how it is applied, where that is not `apply(*args)`."""

    def enter(layer: type[PyLayer]) -> type[PyLayer]:
        arrays = tuple(jnp.asarray(a, jnp.float32) if isinstance(a, (float, list)) else a for a in args)
        CASES.append(Case(layer.__name__, call or layer.apply, reference, arrays, **flags))
        return layer

    return enter


def ruled(value: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
    """`value` with gradients by `rule(args, cotangent)`, as a plain custom_vjp that saves inputs alone."""
    function = jax.custom_vjp(value)
    function.defvjp(lambda *args: (value(*args), args), rule)
    return function


def straight_through(value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: x + stop(value(x) - x)


def grid(*shape: int, low: float = -1.4, high: float = 1.7) -> jax.Array:
    return jnp.asarray(
        np.random.default_rng(sum(shape)).permutation(np.linspace(low, high, int(np.prod(shape)))).reshape(shape),
        jnp.float32,
    )


X = grid(2, 3)
W = grid(3, 3, low=-0.8, high=0.9)
R3 = grid(3, low=0.2, high=1.1)


# -- the rule itself ------------------------------------------------------------------------------


@case(lambda x: jnp.tanh(stop(x) + 2 * (x - stop(x))), X)
class DoubledTanh(PyLayer):
    """The saved output carries the rule: y' = 2 (1 - y^2) has the solution tanh(a + 2 (x - a))."""

    @staticmethod
    def forward(ctx, x):
        y = jnp.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return 2 * dy * (1 - y**2)


@case(straight_through(jnp.round), X)
class Round(PyLayer):
    @staticmethod
    def forward(ctx, x):
        return jnp.round(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


@case(lambda x: jnp.sin(x * x), X)
class SavedIntermediate(PyLayer):
    @staticmethod
    def forward(ctx, x):
        square = x * x
        ctx.save_for_backward(square, x)
        return jnp.sin(square)

    @staticmethod
    def backward(ctx, dy):
        square, x = ctx.saved_tensors
        return dy * jnp.cos(square) * 2 * x


@case(lambda x, w: jnp.tanh(x @ w), X, W)
class TwoInputs(PyLayer):
    def forward(ctx, x, w):
        y = jnp.tanh(x @ w)
        ctx.save_for_backward(x, w, y)
        return y

    def backward(ctx, dy):
        x, w, y = ctx.saved_tensor()
        d = dy * (1 - y**2)
        return d @ w.T, x.T @ d


# -- what is passed and kept ----------------------------------------------------------------------


@case(lambda x, s: x**2 * s[0] + s[1], X, R3[:2])
class ArraysOnAttributes(PyLayer):
    @staticmethod
    def forward(ctx, x, s):
        ctx.kept = {"x": x, "deep": [s, (x * s[0], "text")], "count": 2}
        return x**2 * s[0] + s[1]

    @staticmethod
    def backward(ctx, dy):
        s, (xs, text) = ctx.kept["deep"]
        assert (text, ctx.kept["count"]) == ("text", 2)
        return 2 * xs * dy, jnp.stack([jnp.sum(dy * ctx.kept["x"] ** 2), jnp.sum(dy)])


@case(
    lambda x: jnp.sin(x) * 3,
    X,
    call=lambda x: FreshStatics.apply(x, lambda v: jnp.sin(v), {"unhashable": [1.0]}, float("nan")),
)
class FreshStatics(PyLayer):
    @staticmethod
    def forward(ctx, x, function, config, nan):
        ctx.save_for_backward(x, None, nan)
        ctx.derivative = lambda v: jnp.cos(v)
        ctx.module = object()
        return function(x) * 3

    @staticmethod
    def backward(ctx, dy):
        x, none, nan = ctx.saved_tensor()
        assert none is None
        assert nan != nan
        return dy * ctx.derivative(x) * 3, None, None, None


@case(
    lambda x, y, z: x * y + 2 * z * x,
    0.3,
    0.7,
    -1.2,
    call=lambda x, y, z: Keywords.apply(z=z, y=y, x=x),
)
class Keywords(PyLayer):
    @staticmethod
    def forward(ctx, x, y=1.0, *rest, scale=2.0, **more):
        ctx.save_for_backward(x, y, more["z"])
        return x * y + scale * more["z"] * x

    @staticmethod
    def backward(ctx, dy):
        x, y, z = ctx.saved_tensor()
        return dy * (y + 2 * z), dy * x, dy * 2 * x


@case(
    lambda a, b, c: a * b * c + b,
    0.3,
    0.7,
    -1.2,
    call=lambda a, b, c: VariableArguments.apply(a, 5, b, "text", c),
)
class VariableArguments(PyLayer):
    @staticmethod
    def forward(ctx, *values):
        a, _, b, _, c = values
        ctx.save_for_backward(a, b, c)
        return a * b * c + b

    @staticmethod
    def backward(ctx, dy):
        a, b, c = ctx.saved_tensor()
        return dy * b * c, None, dy * (a * c + 1), None, dy * a * b


@case(
    lambda a, b: {"sum": a + b, "product": a * b},
    X,
    X * 0.5 + 0.1,
    call=lambda a, b: {k: v for k, v in Trees.apply([a, {"b": b, "n": 3}]).items() if k != "text"},
)
class Trees(PyLayer):
    @staticmethod
    def forward(ctx, tree):
        a, b = tree[0], tree[1]["b"]
        ctx.save_for_backward(tree)
        return {"sum": a + b, "product": a * b, "text": "kept"}

    @staticmethod
    def backward(ctx, d):
        assert d["text"] is None
        ((a, rest),) = ctx.saved_tensor()
        assert rest["n"] == 3
        return [d["sum"] + d["product"] * rest["b"], {"b": d["sum"] + d["product"] * a, "n": None}]


class Pair(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    activation: Callable[..., Any]


@case(
    lambda w, b, x: jnp.tanh(w * x + b), R3, R3 * 0.3, X, call=lambda w, b, x: OfModule.apply(Pair(w, b, jnp.tanh), x)
)
class OfModule(PyLayer):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.x = module, x
        ctx.y = module.activation(module.weight * x + module.bias)
        return ctx.y

    @staticmethod
    def backward(ctx, dy):
        d = dy * (1 - ctx.y**2)
        return Pair(d * ctx.x, d, ctx.module.activation), d * ctx.module.weight


@case(lambda x, w: x @ w, X, W, call=lambda x, w: AskedLinear.apply(x, w, "static"))
class AskedLinear(PyLayer):
    """Saves and computes only what needs_input_grad asks for."""

    @staticmethod
    def forward(ctx, x, w, mode):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensor()
        asked = ctx.needs_input_grad
        return dy @ w.T if asked[0] else None, x.T @ dy if asked[1] else None, None


@case(lambda x, i: x[i] * 2, grid(4, 2), jnp.array([2, 0, 2]))
class Gather(PyLayer):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.rows = x.shape[0]
        return x[index] * 2

    @staticmethod
    def backward(ctx, dy):
        (index,) = ctx.saved_tensor()
        return jnp.zeros((ctx.rows, *dy.shape[1:]), dy.dtype).at[index].add(2 * dy), "an index has no gradient"


def _mask(key: jax.Array, x: jax.Array) -> jax.Array:
    return jax.random.bernoulli(key, 0.5, x.shape).astype(x.dtype)


@case(
    lambda x: x * _mask(jax.random.key(3), x),
    X,
    call=lambda x: Dropout.apply(x, jax.random.key(3)),
)
class Dropout(PyLayer):
    @staticmethod
    def forward(ctx, x, key):
        ctx.save_for_backward(key)
        return x * _mask(key, x)

    @staticmethod
    def backward(ctx, dy):
        return dy * _mask(ctx.saved_tensors[0], dy), None


# -- what is returned -----------------------------------------------------------------------------


@case(lambda x: (jnp.sin(x), x * x), X, call=lambda x: [v for v in MixedOutputs.apply(x) if hasattr(v, "shape")])
class MixedOutputs(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x), None, x * x, "text"

    @staticmethod
    def backward(ctx, ds, dq):
        (x,) = ctx.saved_tensor()
        return ds * jnp.cos(x) + dq * 2 * x


@case(lambda x: (x * 3,), X)
class OneTuple(PyLayer):
    @staticmethod
    def forward(ctx, x):
        return (x * 3,)

    @staticmethod
    def backward(ctx, dy):
        return (dy * 3,)


@case(lambda x: jnp.sin(x), X, call=lambda x: NoneForMissing.apply(x)[1])
class NoneForMissing(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x * 5, jnp.sin(x)

    @staticmethod
    def backward(ctx, unused, dy):
        # Forward mode over reverse transposes backward, for which it gives all cotangents.
        return dy * jnp.cos(ctx.saved_tensors[0]) + (0.0 if unused is None else 5 * unused)


@case(lambda x: (x**3, stop(x * 2)), X, call=lambda x: MarkedOutput.apply(x)[:2])
class MarkedOutput(PyLayer):
    @staticmethod
    def forward(ctx, x):
        marked, places = x * 2, jnp.argsort(x, axis=-1)
        ctx.mark_non_differentiable(marked, places)
        ctx.save_for_backward(x)
        return x**3, marked, places

    @staticmethod
    def backward(ctx, dy, dmarked, dplaces):
        assert dplaces.dtype == jnp.int32
        return dy * 3 * ctx.saved_tensors[0] ** 2 + dmarked


@case(lambda x: stop(x) + 3 * (x - stop(x)), X)
class InputReturned(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_not_inplace(x)
        return x

    @staticmethod
    def backward(ctx, dy):
        return 3 * dy


def _complex(f: Callable[[Any], Any]) -> Callable[..., Any]:
    def parts(re, im):
        z = f(jax.lax.complex(re, im))
        return z.real, z.imag

    return parts


@case(_complex(lambda z: z**2 * (1 + 2j)), X, X[:, ::-1] * 0.4, call=_complex(lambda z: ComplexAsInTorch.apply(z)))
class ComplexAsInTorch(PyLayer):
    complex_convention = "paddle"

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z**2 * (1 + 2j)

    @staticmethod
    def backward(ctx, dy):
        (z,) = ctx.saved_tensor()
        return dy * jnp.conj(2 * z * (1 + 2j))


@case(_complex(lambda z: z**2 * (1 + 2j)), X, X[:, ::-1] * 0.4, call=_complex(lambda z: ComplexAsInJax.apply(z)))
class ComplexAsInJax(PyLayer):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z**2 * (1 + 2j)

    @staticmethod
    def backward(ctx, dy):
        (z,) = ctx.saved_tensor()
        return dy * 2 * z * (1 + 2j)


# -- layers within layers -------------------------------------------------------------------------


@case(lambda x: 0.5 * jnp.tanh(stop(x) + 2 * (x - stop(x))), X, forward_over_reverse="forward-mode")
class AppliesAnother(PyLayer):
    """Its forward and, for the backward of its own, another layer's output saved as an intermediate."""

    @staticmethod
    def forward(ctx, x):
        y = DoubledTanh.apply(x)
        ctx.save_for_backward(y)
        return 0.5 * y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return dy * (1 - y**2)


@case(
    lambda x: x * jnp.tanh(stop(x) + 2 * (x - stop(x))) - stop(x * jnp.tanh(x)) + stop(2 * x),
    X,
    forward_over_reverse="forward-mode",
)
class BackwardApplies(PyLayer):
    """Its backward applies a layer, to a saved input."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        y = DoubledTanh.apply(x)
        return dy * (y + x * 2 * (1 - y**2))


# -- after real Paddle layers ---------------------------------------------------------------------

POSITIONS = jnp.array([3, 0, 2])
COUNTS = jnp.array([3])


class MoEScatter(PyLayer):
    """P9, one rank. Its backward overwrites rows, so that one contribution of repeated rows is left."""

    @staticmethod
    def forward(ctx, inp, pos, local_count, global_count, fwd_batch, world_size, group=None):
        ctx.moe_args = (inp.shape[0], world_size, group)
        ctx.save_for_backward(pos, local_count, global_count)
        return inp[pos]

    @staticmethod
    def backward(ctx, dy):
        pos, _, _ = ctx.saved_tensor()
        rows, _, _ = ctx.moe_args
        return jnp.zeros((rows, *dy.shape[1:]), dy.dtype).at[pos].set(dy), None, None, None


def _scatter(pos: jax.Array) -> Callable[..., Any]:
    return lambda x: MoEScatter.apply(x, pos, COUNTS, COUNTS, fwd_batch=3, world_size=1)


UNTRANSPOSABLE = "scatter transpose is only implemented where unique_indices=True"
CASES.append(
    Case(
        "MoEScatter-unique",
        _scatter(POSITIONS),
        lambda x: x[POSITIONS],
        (grid(4, 2),),
        forward_over_reverse=UNTRANSPOSABLE,
    )
)
CASES.append(
    Case(
        "MoEScatter-repeated",
        _scatter(jnp.array([1, 1, 2])),
        ruled(lambda x: x[jnp.array([1, 1, 2])], lambda x, g: (jnp.zeros_like(x[0]).at[jnp.array([1, 2])].set(g[1:]),)),
        (grid(4, 2),),
        linear_loss=True,
        forward_over_reverse=UNTRANSPOSABLE,
    )
)


def _half_away(x: jax.Array) -> jax.Array:
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5)


def _lsq_rule(residuals, g):
    w, alpha = residuals
    q = w / alpha
    low, up = q < -2, q > 3
    mid = ~(low | up)
    change = jnp.where(mid, _half_away(q) - q, jnp.where(low, -2.0, 3.0))
    return jnp.where(mid, g, 0.0), 0.25 * jnp.sum(g * change)


@case(
    ruled(lambda w, a: jnp.clip(_half_away(w / a), -2, 3) * a, _lsq_rule),
    X * 2,
    0.6,
    linear_loss=True,
    call=lambda w, a: LSQ.apply(w, a, jnp.float32(0.25), -2, 3, per_channel=False),
)
class LSQ(PyLayer):
    """P14: the gradient scale is a tensor on an attribute, and its slot is left out of the result."""

    @staticmethod
    def forward(ctx, weight, alpha, g, qn, qp, per_channel=False, quant_axis=0):
        ctx.save_for_backward(weight, alpha)
        ctx.other = g, qn, qp, per_channel, quant_axis
        return jnp.clip(_half_away(weight / alpha), qn, qp) * alpha

    @staticmethod
    def backward(ctx, dy):
        weight, alpha = ctx.saved_tensor()
        g, qn, qp, _, _ = ctx.other
        q = weight / alpha
        low, up = (q < qn).astype(q.dtype), (q > qp).astype(q.dtype)
        mid = 1 - low - up
        dalpha = jnp.sum(dy * (low * qn + up * qp + mid * (_half_away(q) - q))) * g
        return mid * dy, dalpha


@case(
    ruled(lambda x, loss: x, lambda r, g: (g, jnp.full_like(r[1], 0.25))),
    X,
    0.7,
    linear_loss=True,
    call=lambda x, loss: RouterLoss.apply(x, loss, 4, False),
    forward_over_reverse="does not depend on them",
)
class RouterLoss(PyLayer):
    """P19: the gradient of the loss does not depend on the cotangent."""

    @staticmethod
    def forward(ctx, x, router_loss, num_acc_steps, enable_delay_scale_loss):
        ctx.shape, ctx.dtype, ctx.steps = router_loss.shape, router_loss.dtype, num_acc_steps
        ctx.delay = enable_delay_scale_loss
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, jnp.full(ctx.shape, 1.0 if ctx.delay else 1 / ctx.steps, ctx.dtype)


@case(
    ruled(lambda x, loss: x, lambda r, g: (g, jnp.ones_like(r[1]))),
    X,
    0.7,
    linear_loss=True,
    forward_over_reverse="does not depend on them",
)
class AuxiliaryLoss(PyLayer):
    """P24, variant A: ones of shape [1] for a loss without dimensions."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.dtype = loss.dtype
        ctx.required_aux_loss = ctx.needs_input_grad[1]
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy, jnp.ones(1, ctx.dtype) if ctx.required_aux_loss else None


def _layer_norm(x, weight, bias, eps=1e-5):
    mu, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    y = (x - mu) / jnp.sqrt(var + eps)
    return weight[:, None, None] * y + bias[:, None, None]


@case(_layer_norm, grid(2, 3, 1, 2), R3, R3 * 0.2, call=lambda x, w, b: LayerNorm2d.apply(x, w, b, 1e-5))
class LayerNorm2d(PyLayer):
    """P26: saves two intermediates and an input."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        ctx.eps = eps
        mu, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
        y = (x - mu) / jnp.sqrt(var + eps)
        ctx.save_for_backward(y, var, weight)
        return weight[:, None, None] * y + bias[:, None, None]

    @staticmethod
    def backward(ctx, dy):
        y, var, weight = ctx.saved_tensor()
        g = dy * weight[:, None, None]
        dx = (g - y * (g * y).mean(1, keepdims=True) - g.mean(1, keepdims=True)) / jnp.sqrt(var + ctx.eps)
        return dx, (dy * y).sum((0, 2, 3)), dy.sum((0, 2, 3))


@case(
    ruled(lambda x: x, lambda r, g: (jnp.clip(-2.0 * g, -0.5, 0.5),)),
    X,
    linear_loss=True,
    call=lambda x: ClippedReversal.apply(x, lambda_=2),
    forward_over_reverse="is not linear in its cotangents",
)
class ClippedReversal(PyLayer):
    """P28: saves a plain int, and clips the cotangent."""

    @staticmethod
    def forward(ctx, x, lambda_=1):
        ctx.save_for_backward(lambda_)
        return x.copy()

    @staticmethod
    def backward(ctx, dy):
        (lambda_,) = ctx.saved_tensor()
        return jnp.clip(-lambda_ * dy, -0.5, 0.5)


@case(lambda x: -0.3 * x + stop(1.3 * x), X, call=lambda x: Reversal.apply(x, 0.3))
class Reversal(PyLayer):
    """P29: a float made an array to save it, and torch's slots in the result."""

    @staticmethod
    def forward(ctx, x, lambda_):
        ctx.save_for_backward(jnp.asarray(lambda_, x.dtype))
        return x.copy()

    @staticmethod
    def backward(ctx, dy):
        return -ctx.saved_tensors[0] * dy, None


def _block(x, w):
    return jnp.tanh(x @ w) * x


@case(_block, X, W, call=lambda x, w: Recompute.apply(_block, True, (x, w)))
class Recompute(PyLayer):
    """P8: nested differentiation in backward; one tuple argument takes one tuple of gradients."""

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, inputs):
        ctx.run_function = run_function
        ctx.save_for_backward(inputs)
        return run_function(*inputs)

    @staticmethod
    def backward(ctx, dy):
        (inputs,) = ctx.saved_tensor()
        return (jax.vjp(ctx.run_function, *inputs)[1](dy),)


# -- after real torch functions -------------------------------------------------------------------

TARGET = jnp.array([2, 0])


@case(
    lambda z: -jnp.take_along_axis(jax.nn.log_softmax(z), TARGET[:, None], 1)[:, 0],
    X,
    call=lambda z: CrossEntropy.apply(z, TARGET, tp_group=None),
)
class CrossEntropy(PyLayer):
    """T11 on one rank, without smoothing."""

    @staticmethod
    def forward(ctx, logits, target, label_smoothing=0.0, tp_group=None):
        shifted = logits - jnp.max(logits, -1, keepdims=True)
        exps = jnp.exp(shifted)
        total = exps.sum(-1)
        index = jnp.where(target >= logits.shape[-1], 0, target)
        predicted = jnp.take_along_axis(shifted, index[:, None], -1)[:, 0]
        ctx.save_for_backward(exps / total[:, None], target >= logits.shape[-1], index)
        return jnp.log(total) - predicted

    @staticmethod
    def backward(ctx, dy):
        softmax, out, index = ctx.saved_tensors
        one_hot = jax.nn.one_hot(index, softmax.shape[-1]) * (1.0 - out.astype(jnp.float32))[:, None]
        return (softmax - one_hot) * dy[..., None], None, None


def _sparsemax(x):
    s = jnp.sort(x)[..., ::-1]
    c = jnp.cumsum(s, -1) - 1
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    k = (i * s > c).sum(-1, keepdims=True)
    return jnp.maximum(x - jnp.take_along_axis(c, k - 1, -1) / k.astype(x.dtype), 0)


@case(_sparsemax, X)
class Sparsemax(PyLayer):
    """T12."""

    @staticmethod
    def forward(ctx, x):
        y = _sparsemax(x)
        ctx.save_for_backward((y != 0).sum(-1, keepdims=True), y)
        return y

    @staticmethod
    def backward(ctx, dy):
        k, y = ctx.saved_tensors
        support = (y != 0).astype(dy.dtype)
        g = dy * support
        return g - g.sum(-1, keepdims=True) / k.astype(dy.dtype) * support


def _entmax15(x):
    z = (x - stop(x.max(-1, keepdims=True))) / 2
    s = jnp.sort(z)[..., ::-1]
    i = jnp.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    mean, mean_square = jnp.cumsum(s, -1) / i, jnp.cumsum(s * s, -1) / i
    inner = (1 - i * (mean_square - mean**2)) / i
    tau = mean - jnp.sqrt(jnp.where(inner > 1e-9, inner, 1.0)) * (inner > 1e-9).astype(x.dtype)
    k = (tau <= s).sum(-1, keepdims=True)
    return jnp.maximum(z - jnp.take_along_axis(tau, k - 1, -1), 0) ** 2


@case(_entmax15, X * 0.8)
class Entmax15(PyLayer):
    """T14: saves its output alone; the square root has no derivative at zero, so it is masked."""

    @staticmethod
    def forward(ctx, x):
        y = _entmax15(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        q = jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1.0)), 0.0)
        d = dy * q
        return d - q * d.sum(-1, keepdims=True) / q.sum(-1, keepdims=True)


def _attention(q, k, v):
    s = q @ k.T / 3**0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape, bool)), s, -1e9)
    return jax.nn.softmax(s) @ v


@case(_attention, X[:2], X[:2] * 0.7, X[:2] + 0.2, call=lambda q, k, v: FlashAttention.apply(q, k, v, None, True, 1))
class FlashAttention(PyLayer):
    """T20: online softmax over buckets of keys; a tuple of statics and Nones on an attribute."""

    @staticmethod
    def forward(ctx, q, k, v, mask, causal, bucket):
        scale, n = q.shape[-1] ** -0.5, k.shape[0]
        o, total, top = jnp.zeros_like(q), jnp.zeros(q.shape[0]), jnp.full(q.shape[0], -1e9)
        for first in range(0, n, bucket):
            columns = slice(first, first + bucket)
            s = q @ k[columns].T * scale
            if causal:
                s = jnp.where(jnp.arange(q.shape[0])[:, None] >= jnp.arange(n)[columns], s, -1e9)
            new_top = jnp.maximum(top, s.max(-1))
            p, shrink = jnp.exp(s - new_top[:, None]), jnp.exp(top - new_top)
            total, o, top = total * shrink + p.sum(-1), o * shrink[:, None] + p @ v[columns], new_top
        lse = jnp.log(jnp.maximum(total, 1e-6)) + top
        o = o / total[:, None]
        ctx.args = causal, scale, (mask,) * (n // bucket), bucket
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx, do):
        causal, scale, _, bucket = ctx.args
        q, k, v, o, lse = ctx.saved_tensors
        dq, dk, dv = jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
        delta = (do * o).sum(-1, keepdims=True)
        for first in range(0, k.shape[0], bucket):
            columns = slice(first, first + bucket)
            s = q @ k[columns].T * scale
            if causal:
                s = jnp.where(jnp.arange(q.shape[0])[:, None] >= jnp.arange(k.shape[0])[columns], s, -1e9)
            p = jnp.exp(s - lse[:, None])
            dv = dv.at[columns].add(p.T @ do)
            ds = p * (do @ v[columns].T - delta) * scale
            dq, dk = dq + ds @ k[columns], dk.at[columns].add(ds.T @ q)
        return dq, dk, dv, None, None, None


def _reversible(x, wf, wg):
    x1, x2 = jnp.split(x, 2, -1)
    y1 = x1 + jnp.tanh(x2 @ wf)
    return jnp.concatenate([y1, x2 + jnp.sin(y1 @ wg)], -1)


@case(_reversible, grid(2, 4), W[:2, :2], W[1:, 1:])
class Reversible(PyLayer):
    """T26 with explicit parameters: saves its output, and rebuilds its input from it."""

    @staticmethod
    def forward(ctx, x, wf, wg):
        y = _reversible(x, wf, wg)
        ctx.y, ctx.parameters, ctx.blocks = y, (wf, wg), (lambda v, w: jnp.tanh(v @ w), lambda v, w: jnp.sin(v @ w))
        return y

    @staticmethod
    def backward(ctx, dy):
        (f, g), (wf, wg) = ctx.blocks, ctx.parameters
        y1, y2 = jnp.split(ctx.y, 2, -1)
        dy1, dy2 = jnp.split(dy, 2, -1)
        gy1, pull_g = jax.vjp(g, y1, wg)
        d, dwg = pull_g(dy2)
        dx1, x2 = dy1 + d, y2 - gy1
        _, pull_f = jax.vjp(f, x2, wf)
        d, dwf = pull_f(dx1)
        return jnp.concatenate([dx1, dy2 + d], -1), dwf, dwg


class NearestCode(PyLayer):
    """T30: an index; its backward always raises, and must not be called."""

    @staticmethod
    def forward(ctx, inputs, codebook):
        index = jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)
        ctx.mark_non_differentiable(index)
        return index

    @staticmethod
    def backward(ctx, dy):
        raise RuntimeError("an index has no gradient")


def _codes(inputs, codebook):
    return codebook[jnp.argmin(((inputs[..., None, :] - codebook) ** 2).sum(-1), -1)]


@case(
    lambda x, c: _codes(stop(x), c) + x - stop(x),
    X,
    grid(4, 3),
    call=lambda x, c: VectorQuantize.apply(x, c)[0],
)
class VectorQuantize(PyLayer):
    """T31: straight through to the inputs, scattered to the codebook, each only if asked for."""

    @staticmethod
    def forward(ctx, inputs, codebook):
        index = NearestCode.apply(inputs, codebook)
        ctx.save_for_backward(index.reshape(-1), codebook)
        ctx.mark_non_differentiable(index)
        return codebook[index], index

    @staticmethod
    def backward(ctx, dy, unused):
        index, codebook = ctx.saved_tensors
        dinputs = dy.copy() if ctx.needs_input_grad[0] else None
        rows = dy.reshape(-1, dy.shape[-1])
        return dinputs, jnp.zeros_like(codebook).at[index].add(rows) if ctx.needs_input_grad[1] else None


def _window(x, size):
    padded = jnp.pad(x, ((0, 0), (size // 2, size // 2)))
    return sum(padded[:, i : i + x.shape[1]] for i in range(size))


def _lrn(x, size, alpha=0.3, beta=0.75, k=1.0):
    return x * (k + alpha / size * _window(x * x, size)) ** -beta


@case(lambda x: _lrn(x, 3), X, call=lambda x: CrossMapLRN.apply(x, 3))
class CrossMapLRN(PyLayer):
    """T33: an input, an output, and an intermediate on an attribute."""

    @staticmethod
    def forward(ctx, x, size, alpha=0.3, beta=0.75, k=1.0):
        ctx.scale = k + alpha / size * _window(x * x, size)
        ctx.size, ctx.alpha, ctx.beta = size, alpha, beta
        y = x * ctx.scale**-beta
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        pulled = _window(dy * y / ctx.scale, ctx.size)
        return dy * ctx.scale**-ctx.beta - 2 * ctx.alpha * ctx.beta / ctx.size * x * pulled, None


@case(lambda x, y: (x, y), X, R3)
class Identity(PyLayer):
    """T34: returns the tuple of its arguments as it is, and marks those that need no gradient."""

    @staticmethod
    def forward(ctx, *args):
        asked = ctx.needs_input_grad
        ctx.mark_non_differentiable(*[a for a, wanted in zip(args, asked, strict=True) if not wanted])
        return args

    @staticmethod
    def backward(ctx, *grads):
        return grads


def _clipped_rule(residuals, g):
    x, c = residuals
    return jnp.where((x > 0) & (x < c), g, 0.0), jnp.sum(jnp.where(x >= c, g, 0.0)).reshape(1)


@case(
    ruled(lambda x, c: jnp.floor(15 / c * jnp.clip(x, 0, c)) / (15 / c), _clipped_rule),
    X,
    R3[:1],
    linear_loss=True,
    call=lambda x, c: LearnedClip.apply(x, c, 4, True, False),
)
class LearnedClip(PyLayer):
    """T36."""

    @staticmethod
    def forward(ctx, x, clip, num_bits, dequantize, inplace):
        ctx.save_for_backward(x, clip)
        scale = (2**num_bits - 1) / clip
        return jnp.floor(scale * jnp.clip(x, 0, clip)) / scale

    @staticmethod
    def backward(ctx, dy):
        x, clip = ctx.saved_tensors
        dx = jnp.where((x > 0) & (x < clip), dy, 0.0)
        return dx, jnp.sum(jnp.where(x >= clip, dy, 0.0)).reshape(clip.shape), None, None, None


@case(lambda x: x * jnp.tanh(jax.nn.softplus(x)), X)
class Mish(PyLayer):
    """T41."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jnp.tanh(jax.nn.softplus(x))

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0]
        t, s = jnp.tanh(jax.nn.softplus(x)), jax.nn.sigmoid(x)
        return dy * (t + x * s * (1 - t**2))


@case(lambda x: x * jnp.clip(x + 3, 0, 6) / 6, X * 3)
class HardSwish(PyLayer):
    """T43."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * jnp.clip(x + 3, 0, 6) / 6

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0]
        return jnp.where(jnp.abs(x) <= 3, dy * (x / 3 + 0.5), jnp.where(x > 3, dy, 0.0))


@case(
    ruled(lambda x, loss: x, lambda r, g: (g, 3 * jnp.ones_like(r[1]))),
    X,
    0.7,
    linear_loss=True,
    forward_over_reverse="does not depend on them",
)
class AutoScaler(PyLayer):
    """T61: the scale is an attribute of the class, changed at run time."""

    scale = 3

    @staticmethod
    def forward(ctx, output, aux_loss):
        ctx.save_for_backward(aux_loss)
        return output

    @classmethod
    def backward(cls, ctx, dy):
        (aux_loss,) = ctx.saved_tensors
        return dy, jnp.ones_like(aux_loss) * cls.scale


def _jump_rule(residuals, g):
    x, theta = residuals
    near = (jnp.abs((x - theta) / 0.8) < 0.5).astype(x.dtype)
    return g * (x > theta).astype(x.dtype), -(theta / 0.8 * near * g).sum(0)


@case(
    ruled(lambda x, theta: x * (x > theta).astype(x.dtype), _jump_rule),
    X,
    R3,
    linear_loss=True,
    call=lambda x, theta: JumpReLU.apply(x, theta, 0.8),
)
class JumpReLU(PyLayer):
    """T68: the gradient of the threshold is larger than it, and is summed down."""

    @staticmethod
    def forward(ctx, x, theta, bandwidth):
        ctx.save_for_backward(x, theta)
        ctx.bandwidth = bandwidth
        return x * (x > theta).astype(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, theta = ctx.saved_tensors
        near = (jnp.abs((x - theta) / ctx.bandwidth) < 0.5).astype(x.dtype)
        return (x > theta).astype(dy.dtype) * dy, -(theta / ctx.bandwidth) * near * dy, None


class Steps(NamedTuple):
    quantized: jax.Array
    passed: jax.Array
    unused: Any


@case(
    ruled(
        lambda x, s: jnp.clip(jnp.round(x / s), -2, 2) * s,
        lambda r, g: (
            jnp.where(jnp.abs(r[0] / r[1]) <= 2, g, 0.0),
            jnp.sum(
                g * (jnp.clip(jnp.round(r[0] / r[1]), -2, 2) - jnp.where(jnp.abs(r[0] / r[1]) <= 2, r[0] / r[1], 0.0)),
                (0,),
                keepdims=True,
            ),
        ),
    ),
    X,
    jnp.full((1, 3), 0.45),
    linear_loss=True,
    call=lambda x, s: LearnedSteps.apply(x, s).quantized,
)
class LearnedSteps(PyLayer):
    """T67, mended: a named tuple of outputs with a None, and None for missing cotangents."""

    @staticmethod
    def forward(ctx, x, step, neg=-2, pos=2):
        passed = jnp.abs(x / step) <= pos
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, step)
        return Steps(jnp.clip(jnp.round(x / step), neg, pos) * step, passed, None)

    @staticmethod
    def backward(ctx, dy, dpassed):
        assert dpassed is None
        x, step = ctx.saved_tensors
        inside = jnp.abs(x / step) <= 2
        mult = jnp.clip(jnp.round(x / step), -2, 2) - jnp.where(inside, x / step, 0.0)
        return jnp.where(inside, dy, 0.0), mult * dy

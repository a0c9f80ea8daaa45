"""Defines one layer for each feature of a layer: containers, statics, saved intermediates, marked outputs, ..."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer
from tests.kit.case import W, X, case, stop
from tests.kit.layers import Multiply, Steep, Tanh, layer

saving = functools.partial(layer, plain=True, __module__=__name__)


# Its saved output has the custom rule at second order: tanh(a + 2 (x - a)) solves y' = 2 (1 - y^2).
DoubledTanh = case(lambda x: jnp.tanh(stop(x) + 2 * (x - stop(x))), X)(
    layer(base=Steep, name="DoubledTanh", __module__=__name__)
)


Round = case(lambda x: x + stop(jnp.round(x) - x), X)(saving(jnp.round, lambda x, dy: dy, name="Round"))


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


@case(lambda x: jnp.ravel(x)[jnp.flatnonzero(x > 0, size=4)] ** 2, X)
class SquaredPositives(PyLayer):
    """Layer with a hijax primitive: since jax 0.12, JAX replaces jnp.flatnonzero before it lowers a jaxpr."""

    @staticmethod
    def forward(ctx, x):
        index = jnp.flatnonzero(x > 0, size=4)
        ctx.save_for_backward(x, index)
        return jnp.ravel(x)[index] ** 2

    @staticmethod
    def backward(ctx, dy):
        x, index = ctx.saved_tensors
        return jnp.zeros(x.size, x.dtype).at[index].add(2 * jnp.ravel(x)[index] * dy).reshape(x.shape)


# -- what is passed and kept ----------------------------------------------------------------------


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


@case(lambda x, w: x @ w, X, W, call=lambda x, w: AskedLinear.apply(x, w, "static"))
class AskedLinear(PyLayer):
    @staticmethod
    def forward(ctx, x, w, mode):
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w if ctx.needs_input_grad[0] else None)
        return x @ w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensor()
        asked = ctx.needs_input_grad
        return dy @ w.T if asked[0] else None, x.T @ dy if asked[1] else None, None


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


def _complex(f: Callable[[Any], Any]) -> Callable[..., Any]:
    def parts(re, im):
        z = f(jax.lax.complex(re, im))
        return z.real, z.imag

    return parts


def _squared(z):
    return z**2 * (1 + 2j)


ComplexAsInJax = case(_complex(_squared), X, X[:, ::-1] * 0.4, call=_complex(lambda z: ComplexAsInJax.apply(z)))(
    saving(_squared, lambda z, dy: dy * 2 * z * (1 + 2j), name="ComplexAsInJax")
)


# -- layers within layers -------------------------------------------------------------------------


@case(lambda x: 0.5 * jnp.tanh(stop(x) + 2 * (x - stop(x))), X)
class AppliesAnother(PyLayer):
    @staticmethod
    def forward(ctx, x):
        y = DoubledTanh.apply(x)
        ctx.save_for_backward(y)
        return 0.5 * y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return dy * (1 - y**2)


@case(jnp.tanh, X)
class AppliesToTheCotangent(Tanh):
    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return dy - Multiply.apply(dy, Multiply.apply(y, y))


def _applies_a_layer(x, dy):
    y = DoubledTanh.apply(x)
    return dy * (y + x * 2 * (1 - y**2))


# Its backward applies a layer, to a saved input.
BackwardApplies = case(lambda x: x * jnp.tanh(stop(x) + 2 * (x - stop(x))) - stop(x * jnp.tanh(x)) + stop(2 * x), X)(
    saving(lambda x: 2 * x, _applies_a_layer, name="BackwardApplies")
)

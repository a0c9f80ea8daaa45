"""What is kept for backward, and what is left behind: nothing that was not saved, and not for longer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, PyLayerContext
from pylayer_jax._autodiff.call import LayerCall
from tests.kit.layers import Matmul, Tanh

VJP3 = jax.config.jax_custom_vjp3


class Twice(PyLayer):
    """Keeps an input and an intermediate, each in two ways."""

    @staticmethod
    def forward(ctx, x, w):
        scale = jnp.exp(w)
        ctx.save_for_backward(x, scale, x)
        ctx.also = {"scale": scale}
        return jnp.sin(x) * scale

    @staticmethod
    def backward(ctx, dy):
        x, scale, _ = ctx.saved_tensor()
        return dy * jnp.cos(x) * scale, dy * jnp.sin(x) * ctx.also["scale"]


class Nothing(PyLayer):
    """Computes much and keeps none of it."""

    @staticmethod
    def forward(ctx, x):
        return jnp.sin(jnp.cos(x)) + jnp.exp(x)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


def by_hand(forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    rule = jax.custom_vjp(lambda *xs: forward(*xs)[0])
    rule.defvjp(forward, backward)
    return rule


def _twice_forward(x, w):
    scale = jnp.exp(w)
    return jnp.sin(x) * scale, (x, scale)


BY_HAND = {
    Tanh: by_hand(lambda x: (jnp.tanh(x),) * 2, lambda y, dy: (dy * (1 - y * y),)),
    Matmul: by_hand(lambda x, w: (x @ w, (x, w)), lambda r, dy: (dy @ r[1].T, r[0].T @ dy)),
    Twice: by_hand(_twice_forward, lambda r, dy: (dy * jnp.cos(r[0]) * r[1], dy * jnp.sin(r[0]) * r[1])),
    Nothing: by_hand(lambda x: (jnp.sin(jnp.cos(x)) + jnp.exp(x), ()), lambda _, dy: (2 * dy,)),
}
X = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)
W = X / 2


# -- what is kept for backward --------------------------------------------------------------------

KEPT = {Tanh: 1, Matmul: 2, Twice: 2, Nothing: 0}  # in units of one input


def arguments_of(layer: type[PyLayer]) -> tuple[jax.Array, ...]:
    return (X,) if layer in (Tanh, Nothing) else (X, W)


def eager_bytes(function: Callable[..., Any], *arguments: jax.Array) -> int:
    _, pull = jax.vjp(function, *arguments)
    return sum({x.unsafe_buffer_pointer(): x.nbytes for x in jax.tree_util.tree_leaves(pull)}.values())


def traced_bytes(function: Callable[..., Any], *arguments: jax.Array) -> int:
    """Bytes of the distinct values that the vjp function of a traced call holds."""
    jaxpr = jax.make_jaxpr(lambda *xs: jax.vjp(function, *xs)[1])(*arguments).jaxpr
    return sum(v.aval.size * v.aval.dtype.itemsize for v in {id(v): v for v in jaxpr.outvars}.values())


@pytest.mark.parametrize("count", [eager_bytes, traced_bytes])
@pytest.mark.parametrize("layer", KEPT)
def test_keeps_what_was_saved_and_each_tensor_once(layer: type[PyLayer], count: Callable[..., int]) -> None:
    arguments = arguments_of(layer)
    kept = count(layer.apply, *arguments)
    assert kept == KEPT[layer] * X.nbytes
    assert kept == count(BY_HAND[layer], *arguments)


@pytest.mark.parametrize("layer", KEPT)
def test_a_jitted_vjp_hands_out_no_more_than_a_hand_written_one(layer: type[PyLayer]) -> None:
    def size(function: Callable[..., Any]) -> int:
        lowered = jax.jit(lambda *xs: jax.vjp(function, *xs)).lower(*arguments_of(layer))
        return lowered.compile().memory_analysis().output_size_in_bytes

    assert size(layer.apply) == size(BY_HAND[layer])


def test_what_was_not_saved_is_freed() -> None:
    unsaved: list[weakref.ref[Any]] = []

    class Wasteful(PyLayer):
        @staticmethod
        def forward(ctx, x):
            large = jnp.exp(x)
            unsaved.append(weakref.ref(large))
            ctx.save_for_backward(x)
            return large.sum()

        @staticmethod
        def backward(ctx, dy):
            (x,) = ctx.saved_tensor()
            return dy * jnp.exp(x)

    _, pull = jax.vjp(Wasteful.apply, X)
    gc.collect()
    assert [ref() for ref in unsaved] == [None] * len(unsaved)
    np.testing.assert_allclose(pull(jnp.float32(1))[0], jnp.exp(X), rtol=1e-6)


def test_the_vjp_function_alone_holds_the_residuals() -> None:
    x = X + 1
    saved = weakref.ref(x)
    _, pull = jax.vjp(lambda x: Matmul.apply(x, W), x)
    del x
    gc.collect()
    assert saved() is not None, "the vjp function still needs it"
    del pull
    gc.collect()
    assert saved() is None


# -- what is left behind --------------------------------------------------------------------------


class Scaled(PyLayer):
    """Takes a live Python object and carries it to backward."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        ctx.save_for_backward(x)
        return scale(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        return ctx.scale(dy) + 0 * x


class Static:
    """A static that can be watched, and that cannot be hashed or compared."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a static must not be compared")

    def __call__(self, x: jax.Array) -> jax.Array:
        return 3 * x


def eager_forward(x, scale):
    return Scaled.apply(x, scale)


def eager_gradient(x, scale):
    return jax.grad(lambda x: Scaled.apply(x, scale).sum())(x)


def eager_second(x, scale):
    return jax.grad(lambda x: eager_gradient(x, scale).sum())(x)


CLEARING = [eager_second, *([eager_gradient] if VJP3 else [])]
STEPS = [
    pytest.param(step, marks=[pytest.mark.clears_caches] * (step in CLEARING))
    for step in (eager_forward, eager_gradient, eager_second)
]


def forget(step: Callable[..., Any]) -> None:
    """Drop what JAX itself keeps, where it keeps anything.

    JAX caches the types that an equation gives, by the parameters of the equation, for the last 2048 of them. A
    second derivative stages the equations of a layer even in eager mode, and VJP3 stages the first one.
    """
    if step in CLEARING:
        jax.clear_caches()
    gc.collect()


@pytest.mark.parametrize("step", STEPS)
def test_a_static_dies_with_the_call_that_it_was_passed_to(step: Callable[..., Any]) -> None:
    static = Static()
    died = weakref.ref(static)
    step(X, static)
    del static
    forget(step)
    assert died() is None


@pytest.mark.parametrize("step", STEPS)
def test_a_training_loop_does_not_grow(step: Callable[..., Any]) -> None:
    def left(steps: int) -> tuple[int, int]:
        x = X
        for i in range(steps):
            x = x - 0.01 * step(x, lambda y, i=i: y * i)
        del x
        forget(step)
        objects = sum(type(x) in (PyLayerContext, LayerCall) for x in gc.get_objects())
        return objects, len(jax.live_arrays())

    objects, arrays = left(3)
    more_objects, more_arrays = left(20)
    assert more_objects <= objects
    assert more_arrays <= arrays

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
from tests.kit.layers import Matmul, Tanh
from tests.kit.modes import DERIVATIVES, STAGED


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

    forward = staticmethod(lambda ctx, x: jnp.sin(jnp.cos(x)) + jnp.exp(x))
    backward = staticmethod(lambda ctx, dy: 2 * dy)


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
    assert count(layer.apply, *arguments) == KEPT[layer] * X.nbytes


@pytest.mark.parametrize("layer", KEPT)
def test_a_jitted_vjp_hands_out_no_more(layer):
    compiled = jax.jit(lambda *xs: jax.vjp(layer.apply, *xs)).lower(*arguments_of(layer)).compile()
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(compiled.out_info)]
    assert sum(sizes) == (KEPT[layer] + 1) * X.nbytes


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


class Scale(PyLayer):
    """Takes a live Python object and carries it to backward."""

    @staticmethod
    def forward(ctx, x, model):
        y = jnp.tanh(x) * model.factor
        ctx.save_for_backward(x, y, jnp.sin(x))
        ctx.model = model
        return y

    @staticmethod
    def backward(ctx, dy):
        x, _, _ = ctx.saved_tensor()
        return dy * ctx.model.factor * (1 - jnp.tanh(x) ** 2), None


class ScaleWithForwardMode(Scale):
    forward_mode = True


class Model:
    """A static that can be watched, and that cannot be hashed or compared."""

    factor = 2.0
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a static must not be compared")


@pytest.mark.parametrize("layer", [Scale, ScaleWithForwardMode])
@pytest.mark.parametrize("way", DERIVATIVES)
def test_a_static_argument_dies_with_the_program(layer, way):
    models = []
    for _ in range(3):
        model = Model()
        models.append(weakref.ref(model))
        jax.block_until_ready(DERIVATIVES[way](lambda x, model=model: layer.apply(x, model).sum())(X))
        del model
    gc.collect()
    assert [model() for model in models] == [None, None, None]


@pytest.mark.clears_caches
@pytest.mark.parametrize("layer", [Scale, ScaleWithForwardMode])
def test_a_static_argument_in_an_eager_loop_dies_with_the_caches_of_jax(layer):
    # JAX remembers the body of a loop that it ran in eager mode, and with it the static arguments of a custom_vjp
    # function, of JAX's own or of ours.
    model = Model()
    found = weakref.ref(model)
    jax.grad(lambda x, model=model: STAGED["scan"](lambda x: layer.apply(x, model))(x).sum())(X)
    del model
    jax.clear_caches()
    gc.collect()
    assert found() is None


@pytest.mark.parametrize("way", ["eager", "grad", "grad of grad"])
def test_a_training_loop_does_not_grow(way):
    def left(steps: int) -> tuple[int, int]:
        x = X
        for _ in range(steps):
            x = x - 0.01 * DERIVATIVES[way](lambda x, model: Scale.apply(x, model).sum())(x, Model())
        del x
        gc.collect()
        objects = sum(type(x) in (PyLayerContext, Model) for x in gc.get_objects())
        return objects, len(jax.live_arrays())

    objects, arrays = left(3)
    more_objects, more_arrays = left(20)
    assert more_objects <= objects
    assert more_arrays <= arrays

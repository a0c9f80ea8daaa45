"""Traced values where JAX does not look: in objects that are no pytrees, and in functions among the arguments."""

from __future__ import annotations

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer
from tests.kit.modes import MODES, X, modes

from .made import gradients, layer, loss

WEIGHT = jnp.float32(2.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    w: object

    def __call__(self, x):
        return x * self.w


class Model:
    def __init__(self, w):
        self.layers = [types.SimpleNamespace(w=w, parent=self)]

    def __call__(self, x):
        return x * self.layers[0].w

    def method(self, x):
        return x * self.layers[0].w


def decorated(w):
    return functools.wraps(Model)(lambda x: x * w)


# Objects and functions that multiply by `w`, which they hold.
HIDING = {
    "slots": Frozen,
    "nested object": Model,
    "method": lambda w: Model(w).method,
    "closure": lambda w: lambda x: x * w,
    "default": lambda w: lambda x, w=w: x * w,
    "partial": lambda w: functools.partial(lambda w, x: x * w, w),
    "partial by keyword": lambda w: functools.partial(lambda x, w: x * w, w=w),
    "decorated": decorated,
}


@dataclasses.dataclass
class Weighted(PyLayer):
    w: object


class Applies(PyLayer):
    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.function(dy) * 3


class AppliesForward(Applies):
    forward_mode = True


class Keeps(PyLayer):
    """Keeps an object that holds what it computed."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.kept = types.SimpleNamespace(y=function(jnp.ones(3)))
        return x * ctx.kept.y

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.kept.y * 3


@modes
@pytest.mark.parametrize("layer", [Applies, AppliesForward, Keeps])
@pytest.mark.parametrize("hide", HIDING.values(), ids=HIDING)
def test_a_hidden_value_is_a_constant(hide, layer, mode):
    # `w` is computed within the transform, from no value that is differentiated.
    def loss(x):
        return layer.apply(x, hide(WEIGHT * jax.lax.stop_gradient(jnp.ones_like(x)))).sum()

    assert MODES[mode](loss)(X).tolist() == [6, 6, 6]


@modes
def test_a_jitted_function_hides_a_constant_from_forward_alone(mode):
    def loss(x, keep):
        w = WEIGHT * jax.lax.stop_gradient(jnp.ones_like(x))

        class Jitted(Applies):
            @staticmethod
            def forward(ctx, x, function):
                if keep:
                    ctx.function = function
                return function(x)

            @staticmethod
            def backward(ctx, dy):
                return dy * 6

        return Jitted.apply(x, jax.jit(lambda x: x * w)).sum()

    assert MODES[mode](lambda x: loss(x, False))(X).tolist() == [6, 6, 6]
    if mode not in ("grad", "vmap"):  # there, `w` is concrete
        with pytest.raises(
            ValueError, match=r"ctx\.function in .*Jitted\.forward is a function that closes over traced"
        ):
            MODES[mode](lambda x: loss(x, True))(X)


@pytest.mark.parametrize("hide", ["nested object", "closure"])
@pytest.mark.parametrize(
    "run",
    [
        lambda f: jax.grad(jax.jit(f))(X, WEIGHT),
        lambda f: jax.vmap(jax.grad(f), (None, 0))(X, WEIGHT[None])[0],
        lambda f: jax.grad(lambda x, w: jax.vmap(f, (None, 0))(x, w).sum())(X, WEIGHT[None]),
        lambda f: jax.grad(lambda x: jax.lax.map(lambda w: f(x, w), WEIGHT[None]).sum())(X),
        lambda f: jax.jit(jax.grad(jax.checkpoint(f)))(X, WEIGHT),
    ],
    ids=["grad of jit", "vmap of grad", "grad of vmap", "map", "jit of grad of remat"],
)
def test_a_hidden_value_that_the_transform_traces(hide, run):
    assert run(lambda x, w: loss(Applies, HIDING[hide](w))(x)).tolist() == [6, 6, 6]


@modes
@pytest.mark.parametrize("layer", [Applies, AppliesForward, Keeps])
@pytest.mark.parametrize(
    ("hide", "message"),
    [
        ("slots", r"argument function holds a traced value in \.w, but its type Frozen is no pytree"),
        ("method", r"argument function holds a traced value in \.layers\.w, but its type Model is no pytree"),
        ("closure", r"closes over \(w \(in argument function\)\)\. .*Pass it as an argument: \w+\.apply\(\.\.\., w\)"),
    ],
)
def test_a_hidden_value_that_is_differentiated_is_named(hide, message, layer, mode):
    loss = lambda w: layer.apply(X * 1, HIDING[hide](w)).sum()  # noqa: E731
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        MODES[mode](loss)(X)


@modes
def test_an_object_with_differentiated_values_that_nobody_reads(mode):
    class Flagged(PyLayer):
        @staticmethod
        def forward(ctx, x, model):
            ctx.model = model
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return dy * len(ctx.model.layers)

    assert MODES[mode](lambda x: (Flagged.apply(x, Model(x)) + x).sum())(X).tolist() == [2, 2, 2]
    assert MODES[mode](lambda x: (Flagged.apply(X, Model(x)) + x).sum())(X).tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("forward", "hide", "where"),
    [
        (lambda ctx, boxes, x: boxes[0].w * x, lambda w: [Frozen(w)], r"boxes\[0\]"),
        (lambda ctx, own, x: own.w * x, lambda w: Weighted(w), "own"),
    ],
    ids=["in a list", "layer"],
)
def test_an_argument_that_hides_a_differentiated_value_is_named(forward, hide, where):
    made = layer(forward)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=rf"argument {where} holds a traced value in \.w, but"):
        jax.grad(lambda w: made.apply(hide(w), X).sum())(2.0)


# -- what a method closes over --------------------------------------------------------------------


def closing_over(w):
    return layer(lambda ctx, x: x * w, lambda ctx, dy: dy * w)


def with_backward_over(w, use=lambda dy, w: dy * w):
    return layer(backward=lambda ctx, dy: use(dy, w))


@modes
def test_a_differentiated_value_that_a_method_closes_over_is_named(mode):
    ways_out = r"Pass it as an argument.*apply\(\.\.\., w\)"
    message = rf"Made\.forward uses .* closes over \(w\)\. .*{ways_out}"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        MODES[mode](lambda w: loss(closing_over(w))(X))(X)
    message = r"Made\.backward uses a traced value that it closes over \(w\).*as an argument: .*apply\(\.\.\., w\)"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        MODES[mode](lambda x: loss(with_backward_over(jnp.sum(x)))(x))(X)


@gradients
def test_a_value_that_is_differentiated_as_an_argument_too_is_never_silent(run):
    with pytest.raises(Exception, match="as an argument") as caught:
        run(lambda w: loss(closing_over(w))(X * w))(2.0)
    assert type(caught.value).__name__ in ("UnexpectedTracerError", "CustomVJPException")


def test_a_value_that_forward_closes_over_at_the_outer_order():
    for run in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(jax.errors.UnexpectedTracerError, match="Pass it as an argument"):
            run(lambda w: jax.grad(loss(closing_over(w)))(X).sum())(2.0)


def test_constants_that_methods_close_over():
    assert jax.jit(jax.grad(loss(closing_over(jnp.float32(3)))))(X).tolist() == [3, 3, 3]
    scaled = lambda w, x: loss(closing_over(w))(x)  # noqa: E731
    assert jax.jit(scaled)(3.0, X) == 3 * X.sum()
    assert jax.jit(jax.grad(scaled, 1))(3.0, X).tolist() == [3, 3, 3]


@modes
def test_the_shape_of_a_value_that_backward_closes_over(mode):
    by_size = lambda dy, w: dy * w.shape[0]  # noqa: E731
    assert MODES[mode](lambda x: loss(with_backward_over(x, by_size))(x))(X).tolist() == [3, 3, 3]


def reads_object(x, w):
    def forward(ctx, x, model):
        ctx.model = model
        return x * 2

    return loss(layer(forward, lambda ctx, dy: dy * ctx.model.w), Frozen(w))(x)


@pytest.mark.parametrize(
    ("reads", "inner"),
    [
        # Under grad of jit JAX itself refuses a backward that closes over a traced value.
        (lambda x, w: loss(with_backward_over(w))(x), lambda f: f),
        (reads_object, lambda f: f),
        (reads_object, jax.jit),
    ],
    ids=["closure", "object", "object, jit"],
)
def test_values_of_transformations_that_have_not_ended(reads, inner):
    def slope(w):
        return jax.grad(inner(lambda x: reads(x, w)))(X)

    for run in (jax.jit, lambda f: lambda w: jax.vmap(f)(w[None])[0], lambda f: jax.jit(jax.checkpoint(f))):
        assert run(slope)(jnp.float32(3)).tolist() == [3, 3, 3]
    looped = jax.jit(lambda w: jax.lax.scan(lambda total, _: (total + slope(w), None), jnp.zeros(3), None, length=2)[0])
    assert looped(3.0).tolist() == [6, 6, 6]
    for run in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(jax.jit(f))), lambda f: jax.grad(jax.checkpoint(f))):
        assert run(lambda w: slope(w).sum())(3.0) == 3


# -- what a method writes -------------------------------------------------------------------------


def writing(method, **members):
    def forward(ctx, x, model):
        ctx.model = model
        if method == "forward":
            model.mask = x > 0
        return x * 2

    def backward(ctx, dy):
        if method == "backward":
            ctx.model.mask = dy * 1
        return dy

    members |= {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Writes", (PyLayer,), members)


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("method", ["forward", "backward"])
@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("grad", "vmap")])
def test_a_traced_value_written_to_an_object(mode, method, forward_mode):
    made = writing(method, forward_mode=forward_mode)
    name = {"forward": "model", "backward": r"ctx\.model"}[method]
    with pytest.raises(
        ValueError, match=rf"Writes\.{method} wrote a traced value to {name}\.mask, .*Return it as"
    ) as e:
        MODES[mode](lambda x: made.apply(x, types.SimpleNamespace()).sum())(X)
    assert "save_for_backward" in str(e.value) or method == "backward"


@pytest.mark.parametrize("method", ["forward", "backward"])
def test_in_eager_mode_an_object_takes_arrays(method):
    if jax.config.jax_custom_vjp3 and method == "forward":
        pytest.skip("under jax_custom_vjp3 forward is always traced")
    model = types.SimpleNamespace()
    jax.grad(lambda x: writing(method).apply(x, model).sum())(X)
    np.testing.assert_array_equal(model.mask, X > 0 if method == "forward" else jnp.full(3, 1.0))
    with pytest.raises(ValueError, match="wrote a traced value to model"):
        jax.vmap(lambda x: writing("forward").apply(x, model))(X)

"""Easy mistakes in a class or a call, and the warnings and errors that say what was meant."""

from __future__ import annotations

import dataclasses
import functools
import gc
import warnings
import weakref

import jax
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable
from tests.kit.modes import X
from tests.kit.threads import in_threads

from .made import gradients, layer, loss, text_of

bases = pytest.mark.parametrize("base", [PyLayer, Function])


# -- backward without return ----------------------------------------------------------------------


def forget(ctx, dy):
    dy * 2


def forgetful(wrap=lambda f: f):
    return layer(backward=wrap(forget))


@gradients
@pytest.mark.parametrize("wrap", [lambda f: f, once_differentiable], ids=["plain", "once differentiable"])
def test_backward_without_return_warns_once(run, wrap):
    total = loss(forgetful(wrap))
    with pytest.warns(UserWarning, match=r"Made\.backward returned None") as caught:
        assert run(total)(X).tolist() == [0, 0, 0]
    assert len(caught) == 1
    # Warnings are errors here: neither another run nor another trace gives one.
    run(total)(X)
    jax.jit(jax.vmap(jax.grad(total)))(X[None])


def test_a_tuple_of_nones_is_silent():
    assert jax.grad(loss(layer(backward=lambda ctx, dy: (None,))))(X).tolist() == [0, 0, 0]
    two = layer(lambda ctx, x, w: x * w, lambda ctx, dy: (None, None))
    assert jax.jit(jax.grad(lambda x: two.apply(x, x).sum()))(X).tolist() == [0, 0, 0]


def test_one_warning_from_many_threads():
    made = forgetful()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert in_threads(8, lambda i: jax.grad(loss(made))(X)) == []
    assert len([w for w in caught if "returned None" in str(w.message)]) == 1


def test_where_warnings_are_errors_each_run_raises():
    made = forgetful()
    for _ in range(2):
        with pytest.raises(UserWarning, match="returned None"):
            jax.grad(loss(made))(X)


@pytest.mark.clears_caches
@pytest.mark.parametrize("method", [staticmethod, classmethod])
def test_neither_the_warning_nor_what_forward_closes_over_keeps_a_class_alive(method):
    class Data:
        pass

    def run():
        data, forgets = Data(), forgetful()
        made = layer()
        made.forward = method(lambda *args: (data, args[-1] * 2)[1])
        jax.grad(loss(made))(X)
        with pytest.warns(UserWarning, match="returned None"):
            jax.grad(loss(forgets))(X)
        return [weakref.ref(x) for x in (data, made, forgets)]

    found = run()
    jax.clear_caches()
    gc.collect()
    assert [x() for x in found] == [None, None, None]


@bases
def test_backward_without_return_where_two_gradients_are_needed(base):
    made = layer(lambda ctx, x, w: x * w, lambda ctx, dy: None, base)
    with pytest.raises(ValueError, match=r"Made\.backward returned"):
        jax.grad(lambda w: made.apply(X, w).sum())(X)


# -- parameters too few or too many ---------------------------------------------------------------


@gradients
@bases
@pytest.mark.parametrize(
    "backward", [lambda ctx, dy: dy, lambda ctx, a, b, c, d: a, lambda: 1], ids=["one", "four", "none"]
)
@pytest.mark.parametrize("wrap", [lambda f: f, once_differentiable], ids=["plain", "once differentiable"])
def test_backward_of_another_number_of_cotangents(run, base, backward, wrap):
    made = layer(lambda ctx, x: (x, 2 * x, "static"), wrap(backward), base)
    with pytest.raises(TypeError, match=rf"Made\.backward.*{2 if base is PyLayer else 3} cotangents"):
        run(lambda x: made.apply(x)[0].sum())(X)


def doubled(function):
    @functools.wraps(function)
    def changed(ctx, dy):
        return function(ctx, dy, dy)

    return changed


@gradients
def test_a_type_error_of_backward_stays_as_it_is(run):
    def helper(x):
        return x

    def raises(ctx, *dys):
        raise TypeError("raises() takes 1 positional argument but 2 were given")

    def calls(ctx, dy):
        return helper(dy, dy)

    def changed(ctx, dy, again):  # its decorator gives it what the signature asks for
        raise TypeError("of the user")

    for backward, message in ((raises, r"^raises\(\)"), (calls, r"helper\(\)"), (doubled(changed), "^of the user")):
        with pytest.raises(TypeError, match=message) as caught:
            run(loss(layer(backward=backward)))(X)
        assert "Made.backward" in text_of(caught.value)
    assert run(loss(layer(backward=doubled(lambda ctx, a, b: a + b))))(X).tolist() == [2, 2, 2]


# -- calls of the class ---------------------------------------------------------------------------


class Scaled(PyLayer):
    @staticmethod
    def forward(ctx, x: jax.Array, w: float = 2.0):
        return x * w


class TorchScaled(Function):
    @staticmethod
    def forward(x, w=2.0):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("made", [Scaled, TorchScaled])
def test_a_layer_is_not_called(made):
    expected = rf"{made.__name__}\.apply"
    for of in (made, made()):
        with pytest.raises(TypeError, match=expected):
            of(X)
        with pytest.raises(TypeError, match=expected):
            of(x=X)
    assert made().apply(X).tolist() == made.apply(X).tolist() == (2 * X).tolist()


def test_objects_of_classes_with_their_own_construction():
    @dataclasses.dataclass(slots=True)
    class Fields(Scaled):
        factor: int = 1

    class Init(Scaled):
        def __init__(self, a, *, b):
            super().__init__()
            self.total = a + b

        def __call__(self, x):
            return self.apply(x) + self.total

    class New(Scaled):
        def __new__(cls, a):
            made = super().__new__(cls)
            made.total = a
            return made

    class Mixin:
        def __init__(self, a):
            self.total = a

        def __call__(self, b):
            return self.total + b

    class Mixed(Scaled, Mixin):
        pass

    assert Fields(4).factor == 4
    assert (Init(1, b=2).total, New(3).total, Mixed(4).total, Mixed(4)(5)) == (3, 3, 4, 9)
    assert Init(1, b=2)(X).tolist() == (2 * X + 3).tolist()
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments"):
        Fields(1, 2)


def test_setup_context_belongs_to_function():
    with pytest.raises(TypeError, match=r"Made\.setup_context.*Function"):
        layer(setup_context=staticmethod(lambda ctx, inputs, output: None))

"""Easy mistakes in a class, and the warnings and errors that say what was meant."""

from __future__ import annotations

import dataclasses
import functools
import gc
import linecache
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable
from tests.kit.modes import MODES, X, modes

GRADIENTS = {"grad": jax.grad, "jit-grad": lambda f: jax.jit(jax.grad(f)), "grad-jit": lambda f: jax.grad(jax.jit(f))}
gradients = pytest.mark.parametrize("run", GRADIENTS.values(), ids=GRADIENTS)
bases = pytest.mark.parametrize("base", [PyLayer, Function])


def layer(backward, forward=lambda ctx, x: x * 2, base=PyLayer, **members):
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), **members}
    return type("Made", (base,), members)


def notes_of(error):
    return "\n".join(getattr(error, "__notes__", ()))


# -- backward without return ----------------------------------------------------------------------


def forgetful(wrap=lambda f: f):
    class Forgets(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        @wrap
        def backward(ctx, dy):
            dy * 2

    return Forgets


@gradients
@pytest.mark.parametrize("wrap", [lambda f: f, once_differentiable], ids=["plain", "once differentiable"])
def test_backward_without_return_warns_once_at_its_first_line(run, wrap):
    made = forgetful(wrap)
    loss = lambda x: made.apply(x).sum()  # noqa: E731
    with pytest.warns(UserWarning, match=r"Forgets\.backward returned None, .* Return \(None,\) if zero") as caught:
        assert run(loss)(X).tolist() == [0, 0, 0]
    assert len(caught) == 1
    assert "Did you forget return?" in str(caught[0].message)
    # Python counts the decorators to the function.
    assert linecache.getline(caught[0].filename, caught[0].lineno).strip() == "@staticmethod"
    # Warnings are errors here: neither another run nor another trace gives one.
    run(loss)(X)
    jax.jit(jax.vmap(jax.grad(loss)))(X[None])


def test_a_tuple_of_nones_is_silent():
    made = layer(lambda ctx, dy: (None,))
    assert jax.grad(lambda x: made.apply(x).sum())(X).tolist() == [0, 0, 0]
    two = layer(lambda ctx, dy: (None, None), lambda ctx, x, w: x * w)
    assert jax.jit(jax.grad(lambda x: two.apply(x, x).sum()))(X).tolist() == [0, 0, 0]


def test_one_warning_from_many_threads():
    made, start = forgetful(), threading.Barrier(8)

    def run():
        start.wait()
        jax.grad(lambda x: made.apply(x).sum())(X)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=run) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len([w for w in caught if "forget return" in str(w.message)]) == 1


def test_where_warnings_are_errors_each_run_raises():
    made = forgetful()
    for _ in range(2):
        with pytest.raises(UserWarning, match="Did you forget return"):
            jax.grad(lambda x: made.apply(x).sum())(X)


@pytest.mark.clears_caches
def test_the_warning_keeps_no_class_alive():
    def run():
        made = forgetful()
        with pytest.warns(UserWarning, match="forget return"):
            jax.grad(lambda x: made.apply(x).sum())(X)
        return weakref.ref(made)

    found = run()
    jax.clear_caches()
    gc.collect()
    assert found() is None


@pytest.mark.clears_caches
@pytest.mark.parametrize("method", [staticmethod, classmethod])
def test_what_forward_closes_over_keeps_no_class_alive(method):
    class Data:
        pass

    def run():
        data = Data()
        forward = lambda *args: (data, args[-1] * 2)[1]  # noqa: E731
        made = type("Made", (PyLayer,), {"forward": method(forward), "backward": staticmethod(lambda ctx, dy: dy)})
        jax.grad(lambda x: made.apply(x).sum())(X)
        return weakref.ref(data), weakref.ref(made)

    found = run()
    jax.clear_caches()
    gc.collect()
    assert [x() for x in found] == [None, None]


@bases
def test_backward_without_return_where_two_gradients_are_needed(base):
    made = layer(lambda ctx, dy: None, lambda ctx, x, w: x * w, base)
    with pytest.raises(ValueError, match=r"returned 1 gradient; expected 2.* Did you forget return\?"):
        jax.grad(lambda w: made.apply(X, w).sum())(X)


# -- parameters too few or too many ---------------------------------------------------------------


def outputs(ctx, x):
    return x, 2 * x, "static"


@gradients
@bases
@pytest.mark.parametrize(
    "backward", [lambda ctx, dy: dy, lambda ctx, a, b, c, d: a, lambda: 1], ids=["one", "four", "none"]
)
@pytest.mark.parametrize("wrap", [lambda f: f, once_differentiable], ids=["plain", "once differentiable"])
def test_backward_of_another_number_of_cotangents(run, base, backward, wrap):
    made = layer(wrap(backward), outputs, base)
    expected = (
        r"3 outputs, of which 2 hold tensors, so backward takes ctx and 2 cotangents: def backward\(ctx, dy0, dy1\)\."
        if base is PyLayer
        else r"3 outputs, so backward takes ctx and 3 cotangents: def backward\(ctx, dy0, dy1, dy2\)\."
    )
    with pytest.raises(TypeError, match=rf"Made\.backward: forward returned {expected}"):
        run(lambda x: made.apply(x)[0].sum())(X)


def test_backward_without_ctx():
    made = layer(lambda dy: dy)
    message = r"returned 1 output, so backward takes ctx and 1 cotangent: def backward\(ctx, dy\).*Is ctx missing"
    with pytest.raises(TypeError, match=message):
        jax.grad(lambda x: made.apply(x).sum())(X)


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
            run(lambda x, backward=backward: layer(backward).apply(x).sum())(X)
        assert "This happened in Made.backward." in notes_of(caught.value)
    assert run(lambda x: layer(doubled(lambda ctx, a, b: a + b)).apply(x).sum())(X).tolist() == [2, 2, 2]


def test_jvp_of_another_number_of_tangents():
    made = layer(lambda ctx, dy: dy, lambda ctx, x, n: x * n, jvp=staticmethod(lambda ctx, dx: dx))
    message = r"Made\.jvp: the call has 2 arguments \(x, n\), so jvp takes ctx and 2 tangents"
    with pytest.raises(TypeError, match=message):
        jax.jvp(lambda x: made.apply(x, 2), (X,), (X,))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
@pytest.mark.parametrize("use", [lambda x: x * 2, lambda x: 2 * x, jnp.sin])
def test_forward_without_ctx_that_takes_the_context_for_a_tensor(run, use):
    made = layer(lambda ctx, dy: dy, lambda x, w=2.0: use(x))
    with pytest.raises(TypeError) as caught:
        run(lambda x: made.apply(x).sum())(X)
    assert "The first parameter of forward takes it: def forward(ctx, ...)." in notes_of(caught.value)
    with pytest.raises(AttributeError, match=r"It is an attribute of arrays\. Is ctx, which comes first, missing"):
        run(lambda x: layer(lambda ctx, dy: dy, lambda x, w=2.0: x.sum()).apply(x))(X)


# -- what backward closes over --------------------------------------------------------------------


def closing_over(w, use=lambda dy, w: dy * w):
    class Closes(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return use(dy, w)

    return Closes


@modes
def test_a_traced_value_that_only_backward_closes_over(mode):
    def loss(x):
        return closing_over(jnp.sum(x)).apply(x).sum()

    message = r"Closes\.backward uses a traced value that it closes over \(w\).*as an argument: .*apply\(\.\.\., w\)"
    with pytest.raises(jax.errors.UnexpectedTracerError, match=message):
        MODES[mode](loss)(X)


@modes
def test_the_shape_of_a_value_that_backward_closes_over(mode):
    def loss(x):
        return closing_over(x, lambda dy, w: dy * w.shape[0]).apply(x).sum()

    assert MODES[mode](loss)(X).tolist() == [3, 3, 3]


def test_values_of_transformations_that_have_not_ended():
    def slope(w):
        return jax.grad(lambda x: closing_over(w).apply(x).sum())(X)

    for run in (jax.jit, lambda f: lambda w: jax.vmap(f)(w[None])[0], lambda f: jax.jit(jax.checkpoint(f))):
        assert run(slope)(jnp.float32(3)).tolist() == [3, 3, 3]
    looped = jax.jit(lambda w: jax.lax.scan(lambda total, _: (total + slope(w), None), jnp.zeros(3), None, length=2)[0])
    assert looped(3.0).tolist() == [6, 6, 6]
    for run in (jax.grad, jax.jacfwd, lambda f: jax.jit(jax.grad(jax.jit(f)))):
        assert run(lambda w: slope(w).sum())(3.0) == 3


# -- calls of the class ---------------------------------------------------------------------------


class Scaled(PyLayer):
    @staticmethod
    def forward(ctx, x: jax.Array, w: float = 2.0):
        return x * w

    @staticmethod
    def backward(ctx, dy):
        return dy


class TorchScaled(Function):
    @staticmethod
    def forward(x, w=2.0):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@pytest.mark.parametrize("made", [Scaled, TorchScaled])
def test_a_layer_is_not_called(made):
    expected = rf"use {made.__name__}\.apply\(x, w=2\.0\)"
    for call in (lambda: made(X), lambda: made(x=X), lambda: made()(X), lambda: made()(x=X)):
        with pytest.raises(TypeError, match=expected):
            call()
    assert made().apply(X).tolist() == made.apply(X).tolist() == (2 * X).tolist()


def test_objects_of_classes_with_their_own_construction():
    @dataclasses.dataclass(slots=True)
    class Fields(Scaled):
        factor: int = 1

    class Init(Scaled):
        def __init__(self, a, *, b):
            super().__init__()
            self.total = a + b

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

    class Called(Scaled):
        def __call__(self, x):
            return self.apply(x)

    assert Fields(4).factor == 4
    assert (Init(1, b=2).total, New(3).total, Mixed(4).total, Mixed(4)(5)) == (3, 3, 4, 9)
    assert Called()(X).tolist() == (2 * X).tolist()
    with pytest.raises(TypeError, match="takes from 1 to 2 positional arguments"):
        Fields(1, 2)


def test_a_layer_with_traced_fields_as_an_argument_is_refused():
    @dataclasses.dataclass
    class Weighted(Scaled):
        w: object

        @staticmethod
        def forward(ctx, own, x):
            return x * own.w

    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"argument own holds a traced value in \.w"):
        jax.grad(lambda w: Weighted.apply(Weighted(w), X).sum())(2.0)


def test_setup_context_belongs_to_function():
    with pytest.raises(TypeError, match=r"Made\.setup_context: it belongs to Function\. Derive the class from"):
        layer(lambda ctx, dy: dy, setup_context=staticmethod(lambda ctx, inputs, output: None))


# -- names of the context -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "meant"),
    [
        (lambda ctx: ctx.saved_tensor[0], "with parentheses: ctx.saved_tensor()."),
        (lambda ctx: [*ctx.saved_tensor], "with parentheses: ctx.saved_tensor()."),
        (lambda ctx: len(ctx.saved_tensor), "with parentheses: ctx.saved_tensor()."),
        (lambda ctx: X * ctx.saved_tensor, "with parentheses: ctx.saved_tensor()."),
        (lambda ctx: ctx.saved_tensors(), "without parentheses: ctx.saved_tensors."),
    ],
)
@gradients
def test_a_method_without_and_a_property_with_parentheses(run, use, meant):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    made = layer(lambda ctx, dy: use(ctx), forward)
    with pytest.raises(TypeError) as caught:
        run(lambda x: made.apply(x).sum())(X)
    assert meant in notes_of(caught.value)


def test_other_type_errors_get_no_hint():
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return (x, dy)[0]()

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    with pytest.raises(TypeError) as caught:
        jax.grad(lambda x: layer(backward, forward).apply(x).sum())(X)
    assert "parentheses" not in notes_of(caught.value)


def test_saved_tensors_are_a_tuple_to_jax():
    def forward(ctx, x):
        ctx.save_for_backward(x, 2 * x)
        return x * 2

    def backward(ctx, dy):
        assert type(ctx.saved_tensors) is type(ctx.saved_tensor()) is tuple
        return jax.tree.map(jnp.add, ctx.saved_tensors, (dy, dy))[1]

    np.testing.assert_allclose(jax.grad(lambda x: layer(backward, forward).apply(x).sum())(X), 2 * X + 1)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("save_for_backwards", r"Did you mean ctx\.save_for_backward\?"),
        ("need_input_grad", r"Did you mean ctx\.needs_input_grad\?"),
        ("mark_dirty", r"The context of a pylayer_jax\.Function has mark_dirty"),
        ("shape", r"It is an attribute of arrays\."),
    ],
)
def test_names_that_a_context_does_not_have(name, advice):
    with pytest.raises(AttributeError, match=rf"ctx\.{name} does not exist: .*{advice}"):
        layer(lambda ctx, dy: dy, lambda ctx, x: getattr(ctx, name)(x)).apply(X)


def test_an_attribute_of_the_user_with_a_name_like_that_of_a_method():
    def forward(ctx, x):
        ctx.save_for_backwards = x
        ctx.shape = x.shape
        return x * 2

    made = layer(lambda ctx, dy: dy * ctx.save_for_backwards * ctx.shape[0], forward)
    np.testing.assert_allclose(jax.grad(lambda x: made.apply(x).sum())(X), 3 * X)

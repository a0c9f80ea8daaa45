"""Easy mistakes in a class or a call, and the warnings and errors that say what was meant."""

from __future__ import annotations

import dataclasses
import functools
import gc
import linecache
import re
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable, saved_tensors_report
from pylayer_jax.__main__ import main
from pylayer_jax.packers import quantize_saved
from pylayer_jax.testing import check_layer
from tests.kit.layers import Tanh
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
def test_backward_without_return_warns_once_at_its_first_line(run, wrap):
    total = loss(forgetful(wrap))
    message = r"Made\.backward returned None, .*Did you forget return\? Return \(None,\) if zero"
    with pytest.warns(UserWarning, match=message) as caught:
        assert run(total)(X).tolist() == [0, 0, 0]
    assert len(caught) == 1
    assert linecache.getline(caught[0].filename, caught[0].lineno).strip() == "def forget(ctx, dy):"
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
    assert len([w for w in caught if "forget return" in str(w.message)]) == 1


def test_where_warnings_are_errors_each_run_raises():
    made = forgetful()
    for _ in range(2):
        with pytest.raises(UserWarning, match="Did you forget return"):
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
        with pytest.warns(UserWarning, match="forget return"):
            jax.grad(loss(forgets))(X)
        return [weakref.ref(x) for x in (data, made, forgets)]

    found = run()
    jax.clear_caches()
    gc.collect()
    assert [x() for x in found] == [None, None, None]


@bases
def test_backward_without_return_where_two_gradients_are_needed(base):
    made = layer(lambda ctx, x, w: x * w, lambda ctx, dy: None, base)
    with pytest.raises(ValueError, match=r"returned 1 gradient; expected 2.* Did you forget return\?"):
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
    expected = (
        r"3 outputs, of which 2 hold tensors, so backward takes ctx and 2 cotangents: def backward\(ctx, dy0, dy1\)\."
        if base is PyLayer
        else r"3 outputs, so backward takes ctx and 3 cotangents: def backward\(ctx, dy0, dy1, dy2\)\."
    )
    with pytest.raises(TypeError, match=rf"Made\.backward: forward returned {expected}"):
        run(lambda x: made.apply(x)[0].sum())(X)


def test_backward_without_ctx():
    message = r"returned 1 output, so backward takes ctx and 1 cotangent: def backward\(ctx, dy\).*Is ctx missing"
    with pytest.raises(TypeError, match=message):
        jax.grad(loss(layer(backward=lambda dy: dy)))(X)


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
        assert "This happened in Made.backward." in text_of(caught.value)
    assert run(loss(layer(backward=doubled(lambda ctx, a, b: a + b))))(X).tolist() == [2, 2, 2]


def test_jvp_of_another_number_of_tangents():
    made = layer(lambda ctx, x, n: x * n, jvp=staticmethod(lambda ctx, dx: dx))
    message = r"Made\.jvp: the call has 2 arguments \(x, n\), so jvp takes ctx and 2 tangents"
    with pytest.raises(TypeError, match=message):
        jax.jvp(lambda x: made.apply(x, 2), (X,), (X,))


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.grad], ids=["eager", "jit", "grad"])
def test_forward_without_ctx_that_takes_the_context_for_a_tensor(run):
    for use in (lambda x: x * 2, lambda x: 2 * x, jnp.sin):
        with pytest.raises(TypeError) as caught:
            run(loss(layer(lambda x, w=2.0, use=use: use(x))))(X)
        assert "The first parameter of forward takes it: def forward(ctx, ...)." in text_of(caught.value)
    with pytest.raises(AttributeError, match=r"It is an attribute of arrays\. Is ctx, which comes first, missing"):
        run(layer(lambda x, w=2.0: x.sum()).apply)(X)


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
    expected = rf"use {made.__name__}\.apply\(x, w=2\.0\)"
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
    with pytest.raises(TypeError, match=r"Made\.setup_context: it belongs to Function\. Derive the class from"):
        layer(setup_context=staticmethod(lambda ctx, inputs, output: None))


# -- slips with the context -----------------------------------------------------------------------

PARENTHESES = "with parentheses: ctx.saved_tensor()."
SLIPS = {
    "ctx.saved_tensor[0]": PARENTHESES,
    "[*ctx.saved_tensor]": PARENTHESES,
    "len(ctx.saved_tensor)": PARENTHESES,
    "dy * ctx.saved_tensor": PARENTHESES,
    "ctx.saved_tensors()": "without parentheses: ctx.saved_tensors.",
    "dy * (1 - ctx.saved_tensor() ** 2)": "(x,) = ctx.saved_tensor()",
    "jnp.sin(ctx.saved_tensor()) * dy": "(x,) = ctx.saved_tensor()",
    "unpacked(ctx)": "as many entries as ctx.save_for_backward got",
    "dy if ctx.needs_input_grad(0) else None": "ctx.needs_input_grad[0]",
    "dy if ctx.needs_input_grad[3] else None": "one entry for each argument of forward",
    "(dy, dy)[0]()": "",
    "ctx.saved_tensor()[0].__setitem__(0, 1.0)": "",
}


def unpacked(ctx):
    a, b = ctx.saved_tensor()
    return a


def saves(ctx, x):
    ctx.save_for_backward(x)
    return x * 2


@gradients
@pytest.mark.parametrize("code", SLIPS)
def test_a_slip_with_the_context_gets_a_hint(code, run):
    backward = eval(f"lambda ctx, dy: {code}", globals())
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        run(loss(layer(saves, backward)))(X)
    assert SLIPS[code] in text_of(caught.value)
    assert SLIPS[code] or "saved_tensor" not in text_of(caught.value)


# -- a cotangent that is None ---------------------------------------------------------------------

WITH_NONE = ["b * x", "x * b", "-b", "b.shape", "b[0]", "jnp.sin(b)", "jnp.where(x > 0, b, 0)", "jnp.asarray(b)"]


def uses_none(code, base=PyLayer, last=lambda y: y):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x * 2, 3, last(x * 3)

    def backward(ctx, *dys):
        (x,), b = ctx.saved_tensor(), dys[-1]
        return eval(code, {"x": x, "b": b, "jnp": jnp})

    return layer(forward, backward, base)


@gradients
@pytest.mark.parametrize("code", WITH_NONE)
@bases
def test_a_missing_cotangent_that_is_used(base, code, run):
    with pytest.raises((TypeError, AttributeError, ValueError)) as caught:
        run(lambda x: uses_none(code, base).apply(x)[0].sum())(X)
    assert "Made.backward, where the cotangent of output[2] is None: no gradient came for it" in text_of(caught.value)
    assert "ctx.set_materialize_grads(False). Test it with `is None`" in text_of(caught.value)


def test_a_missing_cotangent_within_an_output():
    with pytest.raises(TypeError) as caught:
        jax.grad(lambda x: uses_none("b['y'][0] * x", last=lambda y: {"y": [y]}).apply(x)[0].sum())(X)
    assert "the cotangent of output[2]['y'][0] is None" in text_of(caught.value)


@pytest.mark.parametrize(
    ("made", "outputs"),
    [
        (uses_none("x.nothing"), [0]),
        (uses_none("x * None"), [0, 2]),
        (layer(lambda ctx, x: (x, 3, x * 2), lambda ctx, a, b: a * None), [0]),
    ],
    ids=["no None", "none missing", "zeros"],
)
def test_another_error_says_nothing_of_cotangents(made, outputs):
    with pytest.raises((TypeError, AttributeError)) as caught:
        jax.grad(lambda x: sum(y.sum() for i, y in enumerate(made.apply(x)) if i in outputs))(X)
    assert "This happened in Made.backward." in text_of(caught.value)
    assert "materialize" not in text_of(caught.value)


# -- slips whose first message was one of Python or JAX --------------------------------------------

ROWS = jnp.ones((2, 3))


def branches(ctx, x, n):
    return x if n.sum() > 0 else -x


def counts(ctx, x, n):
    for _ in range(n):
        x = x * 2
    return x


def leaves_jax(ctx, x, n):
    return jnp.asarray(np.asarray(x) + n)


def branches_on_gradient(ctx, dy):
    if dy[0, 0] > 0:
        return dy
    return -dy


def enter_the_class():
    with quantize_saved:
        pass


def of_dict():
    made = layer(lambda ctx, p: p["b"][0]["c"] * 1, lambda ctx, dy: ({"w": dy, "b": [{}]},))
    jax.grad(loss(made))({"w": ROWS, "b": [{"c": ROWS}]})


@pytest.mark.parametrize(
    ("slip", "text"),
    [
        (enter_the_class, r"quantize_saved in `with` is the class\. .* with quantize_saved\(\.\.\.\):"),
        (
            lambda: jax.jit(layer(branches).apply)(ROWS, ROWS),
            r"Made\.forward asks for numbers at HERE:\d+, in `n.sum\(\) > 0`, .* \(n: float32\[2,3\]\)\. Use jnp.where",
        ),
        (lambda: jax.jit(layer(counts).apply)(X, np.int32(3)), r"at HERE:\d+, in `.*range\(n\).*\(n: int32\[\]\)"),
        (lambda: jax.jit(layer(leaves_jax).apply)(X, X), r"`np.asarray\(x\)`, .*jnp in place of np"),
        (
            lambda: jax.jit(jax.grad(loss(layer(backward=branches_on_gradient))))(ROWS),
            r"Made\.backward asks for numbers at HERE:\d+, in `dy\[0, 0\] > 0`, .* \(dy: float32\[2,3\]\)",
        ),
        (
            lambda: saved_tensors_report(Tanh.apply(X)),
            r"expected a function or a layer, got ArrayImpl .* saved_tensors_report\(Tanh\.apply, x\)",
        ),
        (lambda: check_layer(Tanh, X, skip="second"), r"skip=\['second'\]: expected names among .* second order"),
        (of_dict, r"gradient of 'p': .* at \['b'\]\[0\] with the keys .*, 'c'; got one without 'c'.* HERE:\d"),
    ],
)
def test_an_error_says_where_and_what_to_do(slip, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        slip()
    message = text_of(caught.value)
    assert re.search(text.replace("HERE", re.escape(__file__)), message, re.DOTALL), message


def test_an_unknown_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["chekc", "layers:Tanh"])
    assert "unknown command 'chekc'. To check a layer: python -m pylayer_jax check" in capsys.readouterr().err


def test_a_gradient_that_is_cast_to_one_byte_warns_once_per_class():
    def weighted(backward):
        return layer(lambda ctx, w: w.astype(jnp.float32) * X, backward)

    wide, w = weighted(lambda ctx, dy: dy * X), X.astype(jnp.float8_e4m3fn)
    with pytest.warns(UserWarning, match=r"Made.backward returned a float32 gradient for 'w', .*pass the wide tensor"):
        jax.grad(loss(wide))(w)
    with warnings.catch_warnings(action="error"):
        jax.jit(jax.grad(loss(wide)))(w)  # not again
        jax.grad(loss(weighted(lambda ctx, dy: dy.astype(w.dtype))))(w)

"""Errors name the class, the method and the argument, and say what to do."""

import functools
import gc
import re
import warnings
import weakref
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable
from tests.kit.layers import layer, loss, text_of
from tests.kit.modes import EAGER_AND_JIT, RUNS, X, gradients, runs
from tests.kit.oracle import fail
from tests.kit.threads import in_threads

Linear = layer(forward=lambda ctx, x, w=2.0: x * w, backward=lambda ctx, dy: dy * 2, name="Linear")


class Unbound(PyLayer):
    def forward(self, ctx, x):
        return x * 2


Half = type("Half", (PyLayer,), {"forward": staticmethod(lambda ctx, x: x * 2)})
OnlySetup = type("OnlySetup", (Function,), {"setup_context": staticmethod(fail)})
# A layer, and the error of a gradient.
INCOMPLETE = [
    (type("Empty", (PyLayer,), {}), NotImplementedError, r"Empty\.forward"),
    (Half, NotImplementedError, r"Half\.backward"),
    (OnlySetup, NotImplementedError, r"OnlySetup\.forward"),
    (layer(lambda x: x * 2), TypeError, r"Made\.apply.*ctx"),
    (Unbound, TypeError, r"Unbound\.apply.*ctx"),
]


@runs
@pytest.mark.parametrize(("made", "error", "message"), INCOMPLETE, ids=[made.__name__ for made, *_ in INCOMPLETE])
def test_a_layer_without_a_method_or_a_context(run, made, error, message):
    if made is Half and run in (RUNS["eager"], RUNS["jit"]):
        assert run(loss(made))(X) == 2 * X.sum()
        return
    with pytest.raises(error, match=message):
        run(loss(made))(X)


def test_both_styles_of_forward_at_once():
    with pytest.raises(TypeError, match=r"Mixed.*setup_context"):
        layer(base=Function, name="Mixed", setup_context=lambda ctx, inputs, output: None)


CALLS = {
    "'x'|'nope'": ((), {"nope": 3}),
    "'nope'": ((X,), {"nope": 3}),
    "'x'": ((), {}),
    "too many": ((X, 1.0, 2.0), {}),
}


@runs
@pytest.mark.parametrize("message", CALLS)
def test_calls_that_do_not_fit(run, message):
    args, named = CALLS[message]
    with pytest.raises(TypeError, match=message) as caught:
        run(lambda x: Linear.apply(*args, **named).sum())(X)
    assert "Linear.apply" in str(caught.value)


PUSHED = {
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "jvp of vmap": lambda f: jax.jvp(jax.vmap(f), (X,), (X,)),
    "grad of jvp": lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1].sum())(X),
}


@pytest.mark.parametrize("members", [{}, {"vmap": lambda info, in_dims, x: (2 * x, in_dims[0])}], ids=["", "vmap"])
@pytest.mark.parametrize("run", PUSHED.values(), ids=PUSHED)
def test_forward_mode_without_a_rule(run, members):
    with pytest.raises(TypeError, match=r"(?s)Made.*forward_mode.*jvp"):
        run(layer(**members).apply)


def forgetful(wrap=lambda f: f):
    return layer(backward=wrap(lambda ctx, dy: None))


def test_one_warning_from_many_threads():
    made = forgetful()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert in_threads(8, lambda i: jax.grad(loss(made))(X)) == []
    assert len([w for w in caught if "returned None" in str(w.message)]) == 1


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


def rounds(give=lambda ctx, x: jnp.round(x).astype(jnp.int32), **members):
    return layer(give, lambda ctx, *dys: pytest.fail("backward was called"), name="Rounds", **members)


def total_of(made):
    return lambda x: sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(made.apply(x)))


# Layers that give no gradient: `backward` returns nothing, or all outputs are integers.
NO_GRADIENT = {
    "no return": forgetful,
    "no return, once differentiable": lambda: forgetful(once_differentiable),
    "integers": rounds,
    "bool": lambda: rounds(lambda ctx, x: x > 0),
    "several": lambda: rounds(lambda ctx, x: {"sign": x > 0, "code": (x * 3).astype(jnp.int8)}),
    "Function": lambda: rounds(base=Function),
    "forward mode": lambda: rounds(forward_mode=True),
}


@gradients
@pytest.mark.parametrize("make", NO_GRADIENT.values(), ids=NO_GRADIENT)
def test_a_differentiated_layer_without_a_gradient_warns_once(make, run):
    made = make()
    total = total_of(made)
    text = {"Made": r"Made\.backward returned None", "Rounds": r"Rounds.*no gradient"}[made.__name__]
    with pytest.warns(UserWarning, match=text) as caught:
        assert run(total)(X).tolist() == [0, 0, 0]
    assert len(caught) == 1
    # Warnings are errors here: neither another run nor another trace gives one.
    run(total)(X)
    jax.jit(jax.vmap(jax.grad(total)))(X[None])


def marked(ctx, x):
    y = (x * 2).astype(jnp.int32)
    ctx.mark_non_differentiable(y)
    return y


@gradients
def test_integer_outputs_are_silent_where_no_gradient_is_asked_for(run):
    total = total_of(rounds())
    total(X)
    jax.jit(total)(X)
    assert run(lambda x: jnp.sum(x) * total(jax.lax.stop_gradient(x)))(X).shape == X.shape
    assert run(lambda x: jnp.sum(x) * total(jnp.ones(3)))(X).tolist() == [3, 3, 3]
    bare = type("Bare", (PyLayer,), {"forward": staticmethod(lambda ctx, x: x > 0)})
    for silent in (rounds(marked), bare):
        assert run(total_of(silent))(X).tolist() == [0, 0, 0]


@gradients
@pytest.mark.parametrize(("base", "wrap"), [(PyLayer, lambda f: f), (Function, once_differentiable)])
@pytest.mark.parametrize(
    "backward", [lambda ctx, dy: dy, lambda ctx, a, b, c, d: a, lambda: 1], ids=["one", "four", "none"]
)
def test_backward_of_another_number_of_cotangents(run, base, backward, wrap):
    made = layer(lambda ctx, x: (x, 2 * x, "static"), wrap(backward), base)
    with pytest.raises(TypeError, match=rf"Made\.backward.*{2 if base is PyLayer else 3} cotangents"):
        run(lambda x: made.apply(x)[0].sum())(X)


def doubled(function):
    return functools.wraps(function)(lambda ctx, dy: function(ctx, dy, dy))


@gradients
def test_a_type_error_of_backward_stays_as_it_is(run):
    def raises(ctx, *dys):
        raise TypeError("raises() takes 1 positional argument but 2 were given")

    def changed(ctx, dy, again):  # its decorator gives it what the signature asks for
        raise TypeError("of the user")

    calls = lambda ctx, dy: text_of(dy, dy)
    for backward, message in ((raises, r"^raises\(\)"), (calls, r"text_of\(\)"), (doubled(changed), "^of the user")):
        with pytest.raises(TypeError, match=message) as caught:
            run(loss(layer(backward=backward)))(X)
        assert "Made.backward" in text_of(caught.value)
    assert run(loss(layer(backward=doubled(lambda ctx, a, b: a + b))))(X).tolist() == [2, 2, 2]


def test_the_error_about_a_cotangent_too_few_tells_which_output_has_none():
    made = layer(lambda ctx, x: (None, x * 2), lambda ctx, a, b: b)
    with pytest.raises(TypeError, match=r"Made\.backward.*output 0 holds no array.*1 cotangent"):
        jax.grad(lambda x: made.apply(x)[1].sum())(X)


class Weights(NamedTuple):
    a: jax.Array
    b: jax.Array


@gradients
@pytest.mark.parametrize("kind", [Weights, lambda *xs: xs], ids=["named tuple", "tuple"])
def test_the_gradient_of_a_tuple_that_is_not_wrapped(run, kind):
    made = layer(lambda ctx, p: p[0] * p[1], lambda ctx, dy: kind(dy, 2 * dy))
    with pytest.raises(ValueError, match=r"Made\.backward returned 2 gradients for 1 tensor argument"):
        run(lambda x: made.apply(kind(x, x)).sum())(X)
    right = layer(base=made, backward=lambda ctx, dy: (kind(dy, 2 * dy),))
    assert run(lambda x: right.apply(kind(x, x)).sum())(X).tolist() == [3, 3, 3]


Split = layer(lambda x, w=2.0: x * w, base=Function, name="Split", setup_context=lambda ctx, inputs, output: None)


@pytest.mark.parametrize("made", [Linear, Split])
def test_a_layer_is_not_called(made):
    for of in (made, made()):
        with pytest.raises(TypeError, match=rf"{made.__name__}\.apply"):
            of(X)
        with pytest.raises(TypeError, match=rf"{made.__name__}\.apply"):
            of(x=X)
    assert made().apply(X).tolist() == made.apply(X).tolist() == (2 * X).tolist()


def test_objects_of_a_class_with_its_own_construction_may_be_called():
    own = {"__init__": lambda self, *, b: setattr(self, "b", b), "__call__": lambda self, x: self.apply(x) + self.b}
    assert type("Own", (Linear,), own)(b=3)(X).tolist() == (2 * X + 3).tolist()


# -- code that uses an array as a tensor of torch or Paddle ----------------------------------------------

HOST_CODE = {"asarray": np.asarray, "ufunc": np.sin, "float": lambda x: float(x.sum()), "tolist": lambda x: x.tolist()}


def said_of(run, use):
    """Return the text of the error of a layer whose forward applies `use` to its argument."""
    with pytest.raises((AttributeError, TypeError, NotImplementedError, ValueError)) as raised:
        RUNS[run](loss(layer(lambda ctx, x: (use(x), x * 1)[1])))(X)
    return text_of(raised.value)


@pytest.mark.parametrize("use", HOST_CODE.values(), ids=HOST_CODE)
def test_host_code_in_traced_code_is_told_of_host_layers_and_pure_callback(use):
    text = said_of("jit", use)
    assert "host = True" in text
    assert "jax.pure_callback" in text


@EAGER_AND_JIT
def test_the_error_of_a_differentiated_callback_in_backward_says_what_to_do(mode):
    host = layer(jnp.sin, lambda x, dy: dy * jax.pure_callback(np.cos, jax.typeof(x), x), plain=True)
    with pytest.raises(ValueError, match="callback") as raised:
        mode(jax.grad(lambda x: jax.grad(loss(host))(x).sum()))(X)
    text = text_of(raised.value)
    assert "apply that layer in backward" in text
    assert "@once_differentiable" in text


@pytest.mark.parametrize("run", ["jit", "jit-grad"])
def test_a_traced_flag_is_named_and_told_how_to_be_a_python_value(run):
    flagged = layer(lambda ctx, x, train: x * 2 if train else x, lambda ctx, dy: dy, name="Flagged")
    sized = layer(lambda ctx, x, n: jnp.zeros(n["rows"]) + x[0], lambda ctx, dy: dy, name="Sized")
    for made, value, name in ((flagged, True, "train"), (sized, {"rows": 3}, "n['rows']")):
        with pytest.raises(TypeError) as caught:
            jax.jit(lambda x, value, made=made: RUNS[run](lambda x: made.apply(x, value).sum())(x))(X, value)
        text = text_of(caught.value)
        assert f"argument {name}" in text
        assert "static_argnums" in text
        assert f"{made.__name__}.apply(x, True)" in text


Centred = layer(lambda ctx, x: x - jax.lax.pmean(x, "i"), lambda ctx, dy: dy - jax.lax.pmean(dy, "i"), name="Centred")


@EAGER_AND_JIT
def test_a_collective_in_backward_of_a_named_vmap_is_told_of_forward_mode(mode):
    def total(made):
        return lambda x: (jax.vmap(made.apply, axis_name="i")(x) ** 3).sum()

    x = jnp.arange(12.0).reshape(4, 3)
    with pytest.raises(NameError) as caught:
        mode(jax.grad(total(Centred)))(x)
    assert "forward_mode = True on Centred" in text_of(caught.value)
    got = mode(jax.grad(total(layer(base=Centred, forward_mode=True))))(x)
    assert np.allclose(got, jax.grad(lambda x: ((x - x.mean(0)) ** 3).sum())(x))


def test_a_solver_in_backward_has_second_derivatives_in_reverse_mode_and_its_error_says_so():
    matrix, solver = 2 * jnp.eye(3) + 0.1, jax.scipy.sparse.linalg.bicgstab
    solve = layer(lambda ctx, b: jnp.linalg.solve(matrix, b), lambda ctx, dy: solver(lambda v: matrix.T @ v, dy)[0])
    total = lambda b: (solve.apply(b) ** 2).sum()
    with pytest.raises(TypeError, match=r"Made\.backward.*jax\.jacrev\(jax\.grad\(f\)\)") as caught:
        jax.hessian(total)(X)
    assert "issue" not in text_of(caught.value)
    expected = jax.hessian(lambda b: (jnp.linalg.solve(matrix, b) ** 2).sum())(X)
    assert np.allclose(jax.jacrev(jax.grad(total))(X), expected, rtol=1e-3)


def test_the_error_of_a_staged_layer_in_forward_mode_names_forward_mode():
    outer = layer(lambda ctx, x: jax.jvp(jax.jit(Linear.apply), (x,), (x,))[1])
    with pytest.raises(TypeError, match="custom_vjp") as caught:  # of JAX
        outer.apply(X)
    assert re.search(r"(?s)Made\.forward.*forward_mode = True", text_of(caught.value))


@pytest.mark.parametrize("use", [lambda x: [].detach(), lambda x: x.nothing, lambda x: len(5), lambda x: jnp.nothing])
def test_other_errors_get_no_advice(use):
    assert "In JAX" not in said_of("eager", use)

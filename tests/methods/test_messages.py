"""What a user reads when something is wrong: the class, the method, the argument, and what to do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import Function, PyLayer
from tests.kit.modes import X

from .made import RUNS, gradients, layer, loss, runs, text_of


class Linear(PyLayer):
    @staticmethod
    def forward(ctx, x, w=2.0):
        return x * w

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


# -- methods that are missing or of another form --------------------------------------------------


@runs
def test_missing_forward(run):
    with pytest.raises(NotImplementedError, match=r"Empty\.forward"):
        run(loss(type("Empty", (PyLayer,), {})))(X)


@gradients
def test_missing_backward(run):
    half = type("Half", (PyLayer,), {"forward": staticmethod(lambda ctx, x: x * 2)})
    assert half.apply(X).tolist() == (2 * X).tolist()
    with pytest.raises(NotImplementedError, match=r"Half\.backward"):
        run(loss(half))(X)


def test_forward_without_a_context():
    bare = layer(lambda x: x * 2)
    with pytest.raises(TypeError, match=r"Made.*ctx"):
        bare.apply(X)

    class Unbound(PyLayer):
        def forward(self, ctx, x):
            return x * 2

    with pytest.raises(TypeError, match=r"Unbound\.apply"):
        Unbound.apply(X)


def test_both_styles_of_forward_at_once():
    members = {"forward": lambda ctx, x: x, "setup_context": lambda ctx, inputs, output: None}
    with pytest.raises(TypeError, match=r"Mixed.*setup_context"):
        type("Mixed", (Function,), {name: staticmethod(method) for name, method in members.items()})


@runs
def test_setup_context_without_forward(run):
    class Base(Function):
        @staticmethod
        def setup_context(ctx, inputs, output):
            raise ValueError("of the user")

    with pytest.raises(NotImplementedError, match=r"Base\.forward"):
        run(loss(Base))(X)
    derived = type("Derived", (Base,), {"forward": staticmethod(lambda x: x)})
    with pytest.raises(ValueError, match="of the user") as caught:
        run(loss(derived))(X)
    assert "Derived.forward" in text_of(caught.value)


# -- calls and exceptions -------------------------------------------------------------------------


@runs
@pytest.mark.parametrize(
    ("args", "named", "message"),
    [
        ((), {"nope": 3}, "missing a required argument: 'x'|got an unexpected keyword argument 'nope'"),
        ((X,), {"nope": 3}, "got an unexpected keyword argument 'nope'"),
        ((), {}, "missing a required argument: 'x'"),
        ((X, 1.0, 2.0), {}, "too many positional arguments"),
    ],
)
def test_calls_that_do_not_fit(run, args, named, message):
    with pytest.raises(TypeError, match=message) as caught:
        run(lambda x: Linear.apply(*args, **named).sum())(X)
    assert "Linear.apply" in str(caught.value)


def test_errors_leave_no_state_behind():
    for _ in range(3):
        with pytest.raises(TypeError):
            jax.grad(loss(Linear, 1, 2, 3))(X)
    assert jax.grad(loss(Linear))(X).tolist() == [2, 2, 2]
    with jax.checking_leaks():
        assert jax.jit(jax.grad(loss(Linear)))(X).tolist() == [2, 2, 2]


class OwnError(Exception):
    pass


def fail(*args):
    raise OwnError("mine")


@pytest.mark.parametrize(
    ("method", "run"),
    [*(("forward", run) for run in RUNS), *(("backward", run) for run in ("grad", "jit-grad"))],
)
def test_exceptions_of_a_method_keep_their_type_and_gain_a_note(method, run):
    with pytest.raises(OwnError, match="mine") as caught:
        RUNS[run](loss(layer(**{method: fail})))(X)
    assert any(f"Made.{method}" in note for note in caught.value.__notes__)


# -- forward mode without a rule ------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.jit(jax.jacfwd(f))(X),
        lambda f: jax.jvp(jax.vmap(f), (X,), (X,)),
        lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1].sum())(X),
    ],
)
def test_forward_mode_without_a_rule(run):
    with pytest.raises(TypeError, match=r"(?s)Linear.*forward_mode.*jvp"):
        run(lambda x: Linear.apply(x))


STAGED = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, f, x),
    "vmap of jit": lambda f: jax.vmap(jax.jit(f)),
    "jit of vmap of vmap": lambda f: lambda x: jax.jit(jax.vmap(jax.vmap(f)))(x[None, None])[0, 0],
}


@pytest.mark.parametrize("staged", STAGED.values(), ids=STAGED)
@pytest.mark.parametrize(
    "run",
    [
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.linearize(f, X)[1](X),
        lambda f: jax.jit(jax.jacfwd(f))(X),
    ],
    ids=["jvp", "linearize", "jit of jacfwd"],
)
def test_forward_mode_without_a_rule_of_staged_code(run, staged):
    # JAX notices when it compiles or runs the tangents, long after `apply` has returned, and raises its own error.
    with pytest.raises(TypeError):
        run(staged(Linear.apply))


def test_forward_mode_of_other_functions_keeps_the_error_of_jax():
    def ruled():
        function, later = jax.custom_vjp(jnp.sin), None
        function.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: later)  # noqa: F821
        del later
        return function

    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(jax.jit(ruled()), (X,), (X,))

"""What a user reads when something is wrong: the class, the method, the argument, and what to do."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.jet import jet

import pylayer_jax
from pylayer_jax import Function, PyLayer, saved_tensors_hooks
from tests.kit.modes import X

FIRST = {"eager": lambda f: f, "grad": jax.grad, "jit": jax.jit, "jit-grad": lambda f: jax.jit(jax.grad(f))}
GRADIENTS = {"grad": jax.grad, "jit-grad": lambda f: jax.jit(jax.grad(f)), "grad-jit": lambda f: jax.grad(jax.jit(f))}
first = pytest.mark.parametrize("run", FIRST.values(), ids=FIRST)
gradients = pytest.mark.parametrize("run", GRADIENTS.values(), ids=GRADIENTS)


class Linear(PyLayer):
    @staticmethod
    def forward(ctx, x, w=2.0):
        return x * w

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


@first
def test_missing_forward(run):
    class Empty(PyLayer):
        pass

    with pytest.raises(NotImplementedError, match=r"Empty\.forward is not defined\. Add to the class"):
        run(lambda x: Empty.apply(x).sum())(X)


@gradients
def test_missing_backward(run):
    class Half(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2

    assert Half.apply(X).tolist() == (2 * X).tolist()
    with pytest.raises(NotImplementedError, match=r"Half\.backward is not defined, but its gradient was asked for"):
        run(lambda x: Half.apply(x).sum())(X)


@first
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: Linear.apply(nope=3), "missing a required argument: 'x'|got an unexpected keyword argument 'nope'"),
        (lambda x: Linear.apply(x, nope=3), "got an unexpected keyword argument 'nope'"),
        (lambda x: Linear.apply(), "missing a required argument: 'x'"),
        (lambda x: Linear.apply(x, 1.0, 2.0), "too many positional arguments"),
    ],
)
def test_calls_that_do_not_fit(run, call, message):
    with pytest.raises(TypeError, match=message) as caught:
        run(lambda x: call(x).sum())(X)
    assert str(caught.value).startswith("Linear.apply: ")
    assert "It takes the arguments of forward without the context: Linear.apply(x, w=2.0)." in str(caught.value)


@first
def test_exceptions_of_forward_keep_their_type_and_gain_a_note(run):
    class Own(Exception):
        pass

    class Fails(PyLayer):
        @staticmethod
        def forward(ctx, x):
            raise Own("mine")

    with pytest.raises(Own, match="mine") as caught:
        run(lambda x: Fails.apply(x).sum())(X)
    assert any("Fails.forward" in note for note in caught.value.__notes__)


@gradients
def test_exceptions_of_backward_keep_their_type_and_gain_a_note(run):
    class Fails(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, dy):
            return {}["key"]

    with pytest.raises(KeyError) as caught:
        run(lambda x: Fails.apply(x).sum())(X)
    assert any("Fails.backward" in note for note in caught.value.__notes__)


def closing_over(w):
    class Closes(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * w

        @staticmethod
        def backward(ctx, dy):
            return dy * w

    return Closes


@pytest.mark.parametrize("argnums", [0, (0, 1)])
@gradients
def test_closed_over_value_is_never_silent(run, argnums):
    f = lambda w, x: closing_over(w).apply(x).sum()  # noqa: E731
    with pytest.raises(Exception, match=r"as an argument") as caught:
        # One function of one argument, as the modes take it.
        run(lambda w: f(w, X) if argnums == 0 else f(w, X * w))(2.0)
    assert type(caught.value).__name__ in ("UnexpectedTracerError", "CustomVJPException")


def test_closed_over_value_is_named():
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"closes over \(w\)\. .*apply\(\.\.\., w\)"):
        jax.grad(lambda w: closing_over(w).apply(X).sum())(2.0)

    class Takes(PyLayer):
        @staticmethod
        def forward(ctx, x, function):
            return function(x)

        @staticmethod
        def backward(ctx, dy):
            return dy, None

    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"slope \(in argument function\)"):
        jax.grad(lambda slope: Takes.apply(X, lambda v: v * slope).sum())(2.0)


def test_closed_over_value_at_the_outer_order():
    def f(w, x):
        return jax.grad(lambda x: closing_over(w).apply(x).sum())(x).sum()

    for run in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(jax.errors.UnexpectedTracerError, match="Pass it as an argument"):
            run(f)(2.0, X)


def test_closed_over_constants_are_fine():
    assert jax.jit(jax.grad(lambda x: closing_over(jnp.float32(3)).apply(x).sum()))(X).tolist() == [3, 3, 3]
    scaled = lambda w, x: closing_over(w).apply(x).sum()  # noqa: E731
    assert jax.jit(scaled)(3.0, X) == 3 * X.sum()
    assert jax.jit(jax.grad(scaled, 1))(3.0, X).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    "run",
    [
        lambda f: jax.jvp(f, (X,), (X,)),
        lambda f: jax.jacfwd(f)(X),
        lambda f: jax.jit(jax.jacfwd(f))(X),
        lambda f: jax.jvp(jax.vmap(f), (X,), (X,)),
        lambda f: jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1].sum())(X),
        lambda f: jet(jax.vmap(f), (X,), ([X],)),
    ],
)
def test_forward_mode_without_a_rule(run):
    with pytest.raises(TypeError, match=r"Linear has no rule for forward.*Add forward_mode = True.* jvp\(ctx"):
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


def test_forward_mode_of_staged_code_with_a_block_inside():
    def blocked(x):
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            return jnp.sin(x)

    with pytest.raises(TypeError):
        jax.jvp(jax.jit(blocked), (X,), (X,))


def test_forward_mode_of_other_functions_keeps_the_error_of_jax():
    def ruled():
        function, later = jax.custom_vjp(jnp.sin), None
        function.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: later)  # noqa: F821
        del later
        return function

    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(jax.jit(ruled()), (X,), (X,))


def test_both_styles_of_forward_at_once():
    with pytest.raises(TypeError, match=r"Mixed defines setup_context, so that its forward takes no ctx: remove that"):

        class Mixed(Function):
            @staticmethod
            def forward(ctx, x):
                return x

            @staticmethod
            def setup_context(ctx, inputs, output):
                pass


def test_setup_context_without_forward():
    class Base(Function):
        @staticmethod
        def setup_context(ctx, inputs, output):
            raise ValueError("of the user")

    for run in (Base.apply, jax.jit(Base.apply), jax.grad(lambda x: Base.apply(x).sum())):
        with pytest.raises(NotImplementedError, match=r"Base.forward is not defined"):
            run(X)

    class Derived(Base):
        @staticmethod
        def forward(x):
            return x

    for run in (Derived.apply, jax.jit(Derived.apply), jax.grad(lambda x: Derived.apply(x).sum())):
        with pytest.raises(ValueError, match="of the user") as caught:
            run(X)
        assert any("Derived.forward" in note for note in caught.value.__notes__)


def test_errors_leave_no_state_behind():
    for _ in range(3):
        with pytest.raises(TypeError):
            jax.grad(lambda x: Linear.apply(x, 1, 2, 3).sum())(X)
    assert jax.grad(lambda x: Linear.apply(x).sum())(X).tolist() == [2, 2, 2]
    with jax.checking_leaks():
        assert jax.jit(jax.grad(lambda x: Linear.apply(x).sum()))(X).tolist() == [2, 2, 2]


def test_importing_needs_jax_and_numpy_alone():
    code = (
        "import sys\n"
        "for name in ('optax', 'sklearn', 'tqdm', 'torch', 'paddle', 'equinox'): sys.modules[name] = None\n"
        "import pylayer_jax\n"
        "print(sorted(pylayer_jax.__all__))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(sorted(pylayer_jax.__all__))


def test_import_inside_a_trace_is_harmless():
    code = (
        "import jax, importlib\n"
        "jax.jit(lambda x: importlib.import_module('pylayer_jax') and x)(1.0)\n"
        "from pylayer_jax._jax.tracers import nothing_is_traced\n"
        "print(nothing_is_traced(), jax.jit(lambda x: x * nothing_is_traced())(1.0))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0.0"]


def test_forward_without_a_context():
    class Bare(PyLayer):
        @staticmethod
        def forward(x):
            return x * 2

    class Unbound(PyLayer):
        def forward(self, ctx, x):
            return x * 2

    with pytest.raises(
        TypeError, match=r"forward at .*:\d+, 'x', takes the context: forward\(ctx, .* with setup_context\("
    ):
        Bare.apply(X)
    with pytest.raises(TypeError, match=r"Unbound\.apply: .* 'self', takes the context: .*Is @staticmethod missing\?"):
        Unbound.apply(X)


def test_a_traced_value_in_an_object_that_is_no_pytree():
    class Box:
        def __init__(self, w):
            self.w = w

    class Boxed(PyLayer):
        @staticmethod
        def forward(ctx, boxes, x):
            return boxes[0].w * x

        @staticmethod
        def backward(ctx, dy):
            return dy

    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"argument boxes\[0\] holds a traced value in \.w, but"):
        jax.grad(lambda w: Boxed.apply([Box(w)], X).sum())(X)


SLIPS = {
    "y = ctx.saved_tensor(); return dy * (1 - y**2)": "(x,) = ctx.saved_tensor()",
    "y = ctx.saved_tensor(); return jnp.sin(y) * dy": "(x,) = ctx.saved_tensor()",
    "a, b = ctx.saved_tensor(); return dy * a": "as many entries as ctx.save_for_backward got",
    "return dy if ctx.needs_input_grad(0) else None": "ctx.needs_input_grad[0]",
    "return dy if ctx.needs_input_grad[3] else None": "one entry for each argument of forward",
}


@pytest.mark.parametrize("run", [jax.grad, lambda f: jax.jit(jax.grad(f))], ids=["eager", "jit"])
@pytest.mark.parametrize("code", SLIPS)
def test_a_slip_with_the_context_gets_a_hint(code, run):
    methods = {}
    exec(f"def backward(ctx, dy): {code}", {"jnp": jnp}, methods)

    class Slip(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        backward = staticmethod(methods["backward"])

    with pytest.raises((TypeError, ValueError, IndexError)) as raised:
        run(lambda x: Slip.apply(x).sum())(jnp.ones(3))
    assert any(SLIPS[code] in note for note in raised.value.__notes__)

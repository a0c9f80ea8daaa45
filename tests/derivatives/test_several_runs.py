"""A staged function with layers has right derivatives each time that JAX differentiates it."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import save_on_disk
from tests.hooks.spy import IDLE, in_block
from tests.kit.layers import Multiply, Tanh, layer
from tests.kit.threads import in_threads

X = jnp.asarray([0.3, -1.2, 2.0])


Product = layer(lambda x, y: x * y + jnp.sin(x), lambda x, y, dy: (dy * (y + jnp.cos(x)), dy * x), plain=True)


@pytest.mark.parametrize("rounds", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_threads_differentiate_one_jitted_function_for_different_arguments(rounds):
    x, done = jnp.asarray([0.3, -1.2]), []
    expected = (x + jnp.cos(x), x)
    for _ in range(rounds):
        f = jax.jit(lambda x, y: jnp.sum(Product.apply(x, y)))

        def work(i, f=f):
            arguments = [(0,), (1,), (0, 1)][i % 3]
            # JAX itself raises StoreException, rarely, if two threads differentiate a staged `custom_vjp` at once.
            try:
                gradients = jax.grad(f, arguments)(x, x)
            except Exception as error:
                if type(error).__name__ != "StoreException":
                    raise
                return
            for argument, gradient in zip(arguments, gradients, strict=True):
                np.testing.assert_allclose(gradient, expected[argument], rtol=1e-5)
            done.append(i)

        assert in_threads(8, work) == []
    assert len(done) > 7 * rounds


def what_is_needed(ctx, dy):
    needs, (a, b) = ctx.needs_input_grad, ctx.saved_tensor()
    return dy * b**2 if needs[0] else None, 2 * dy * a * b if needs[1] else None


# In a traced forward both are needed, whatever is differentiated.
GivesWhatIsNeeded = layer(
    lambda ctx, a, b: ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b) or a * b**2, what_is_needed
)


def test_vjp_functions_of_one_jitted_function():
    f = jax.jit(GivesWhatIsNeeded.apply)
    runs = (  # all of the vjp functions are made before the first is called
        (jax.vjp(lambda a: f(a, 3.0), 2.0)[1], (9,)),
        (jax.vjp(lambda b: f(2.0, b), 3.0)[1], (12,)),
        (jax.vjp(f, 2.0, 3.0)[1], (9, 12)),
    )
    for pullback, expected in runs:
        assert pullback(jnp.ones(())) == expected


def evaluated(f):
    jaxpr = jax.make_jaxpr(f)(2.0, 3.0)
    return lambda a, b: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, a, b)[0]


STAGED = {
    "jit": jax.jit,
    "jaxpr": evaluated,
    "scan": lambda f: lambda a, b: jax.lax.scan(lambda c, _: (c + f(a, b), None), 0.0, None, length=1)[0],
    "cond": lambda f: lambda a, b: jax.lax.cond(a > -9, f, lambda a, b: a, a, b),
    "checkpoint": jax.checkpoint,
    "jit of vmap": lambda f: jax.jit(lambda a, b: jax.vmap(f, (0, None))(a[None], b)[0]),
}
DERIVATIVES = {
    "grad 0": (lambda f: jax.grad(f, 0), lambda a, b: b**2),
    "grad 1": (lambda f: jax.grad(f, 1), lambda a, b: 2 * a * b),
    "hessian 0": (lambda f: jax.hessian(f, 0), lambda a, b: 0.0),
    "hessian 1": (lambda f: jax.hessian(f, 1), lambda a, b: 2 * a),
    "mixed": (lambda f: jax.jacfwd(jax.grad(f, 1), 0), lambda a, b: 2 * b),
    "jvp of grad": (
        lambda f: lambda a, b: jax.jvp(lambda b: jax.grad(f, 1)(a, b), (b,), (1.0,))[1],
        lambda a, b: 2 * a,
    ),
    "reverse over reverse": (lambda f: jax.jacrev(jax.grad(f, 1), 0), lambda a, b: 2 * b),
}


@pytest.mark.parametrize("staged", STAGED)
@pytest.mark.parametrize(  # each derivative follows each
    ("made", "names"),
    [
        (GivesWhatIsNeeded, [*DERIVATIVES]),
        (GivesWhatIsNeeded, [*reversed(DERIVATIVES)]),
        (layer(base=GivesWhatIsNeeded, forward_mode=True), [*reversed(DERIVATIVES)]),
    ],
)
def test_no_derivative_disturbs_the_next(staged, made, names):
    f = STAGED[staged](lambda a, b: made.apply(a, b))  # of its own, which nothing has staged
    a, b = jnp.asarray(2.0), jnp.asarray(3.0)
    for name in names:
        derivative, expected = DERIVATIVES[name]
        np.testing.assert_allclose(derivative(f)(a, b), expected(a, b), rtol=1e-6, err_msg=name)


def test_a_differentiated_value_that_staged_code_closes_over_counts_as_staged():
    def f(x):
        g = jax.jit(lambda y: Product.apply(x, y).sum())
        return jax.grad(g)(x) * x + g(x)

    # f(x) is x^2 + the sum of x^2 + sin x, three times.
    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), 2 * X + 3 * (2 * X + jnp.cos(X)), rtol=1e-5)


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_save_to_one_directory(many_switches, tmp_path):
    def work(i):
        for k in range(10):
            x = X + i + k
            gradient = jax.grad(save_on_disk(tmp_path)(lambda x: jnp.sum(Product.apply(x, x))))(x)
            np.testing.assert_allclose(gradient, 2 * x + jnp.cos(x), rtol=1e-5)

    assert in_threads(8, work) == []


@IDLE
@pytest.mark.timeout(60)
def test_hooks_on_the_host_that_are_collected_at_any_line(many_switches, tmp_path):
    # The finalizer of a pair runs in whatever thread, and at whatever line, the last reference to it goes.
    def work(_):
        for _ in range(200):
            with save_on_disk(tmp_path):
                pass

    assert in_threads(8, work) == []


HOOKED = {
    "operation": lambda x, w: x @ w,
    "scan": lambda x, w: jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=2)[0],
}


@pytest.mark.parametrize("function", HOOKED.values(), ids=HOOKED)
def test_staged_code_with_a_block_is_differentiated_for_a_value_that_it_closes_over_in_turn(function):
    # A checkpointed loop of equinox does this. The second run of the forward rule keeps more than the first one.
    def slopes(around):
        def total(w, x):
            staged = jax.make_jaxpr(around(lambda x: function(x, w)))(x)

            def run(consts, x):
                return jax.core.eval_jaxpr(staged.jaxpr, consts, x)[0]

            product = run(map(jax.lax.stop_gradient, staged.consts), x) * run(staged.consts, jax.lax.stop_gradient(x))
            return jnp.sum(product + run(staged.consts, x))

        return jax.grad(total, (0, 1))(
            jnp.linspace(-0.5, 0.8, 9).reshape(3, 3), jnp.linspace(0.2, -0.9, 6).reshape(2, 3)
        )

    blocked = functools.partial(in_block, saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2))
    for got, want in zip(slopes(blocked), slopes(lambda f: f), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


FOUR = jnp.array([0.3, -0.7, 1.1, 0.5])


def associative_scan(tanh, multiply):
    return lambda x: jax.lax.associative_scan(lambda a, b: multiply(a, b) + tanh(b), x)


def closure_convert(tanh, multiply):
    def run(x):
        function, hoisted = jax.closure_convert(lambda z: tanh(multiply(z, x)), x)
        return function(x, *hoisted)

    return run


def within_custom_vjp(tanh, multiply):
    @jax.custom_vjp
    def function(x):
        return tanh(x)

    function.defvjp(lambda x: jax.vjp(tanh, x), lambda pullback, dy: pullback(dy))
    return lambda x: multiply(function(x), x)


def of_derivatives(tanh, multiply):
    slope = jax.grad(lambda w, x: multiply(tanh(w), x).sum())
    return lambda x: jax.lax.scan(lambda w, _: (w - 0.1 * slope(w, x), None), x, None, length=3)[0]


PROGRAMS = {
    "associative_scan": associative_scan,
    "closure_convert": closure_convert,
    "within a custom_vjp": within_custom_vjp,
    "derivatives in a scan": of_derivatives,
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_right_layers_has_the_derivatives_of_plain_jax(name, order):
    layers, plain = PROGRAMS[name](Tanh.apply, Multiply.apply), PROGRAMS[name](jnp.tanh, jnp.multiply)

    def derivative(function):
        def loss(x):
            values = function(x)
            return (values * jnp.cos(jnp.arange(values.size, dtype=float)).reshape(values.shape)).sum()

        slope = jax.grad(loss)
        return jax.jit(slope if order == 1 else jax.grad(lambda x: slope(x) @ jnp.sin(FOUR)))(FOUR)

    np.testing.assert_allclose(derivative(layers), derivative(plain), rtol=1e-4, atol=1e-6)

"""One staged function that is differentiated several times: for different arguments, and in several threads."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, saved_tensors_hooks
from pylayer_jax._jax.custom_vjp import RunLog
from pylayer_jax.packers import save_on_disk
from tests.kit.threads import in_threads

X = jnp.asarray([0.3, -1.2, 2.0])


class Product(PyLayer):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x * y + jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensor()
        return dy * (y + jnp.cos(x)), dy * x


@pytest.mark.parametrize("rounds", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_threads_differentiate_one_jitted_function_for_different_arguments(rounds):
    x = jnp.asarray([0.3, -1.2])
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

        assert in_threads(8, work) == []


def test_needs_input_grad_in_backward_is_what_this_differentiation_asked_for():
    seen = []

    class Scale(PyLayer):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, dy):
            seen.append(ctx.needs_input_grad)
            x, y = ctx.saved_tensor()
            return dy * y, dy * x

    f = jax.jit(lambda x, y: Scale.apply(x, y).sum())
    pullbacks = [jax.vjp(lambda x: f(x, X), X)[1], jax.vjp(lambda y: f(X, y), X)[1], jax.vjp(f, X, X)[1]]
    for pullback in pullbacks:
        pullback(jnp.ones(()))
    assert seen == [(True, False), (False, True), (True, True)]


def test_a_jaxpr_that_is_differentiated_in_turn_keeps_what_each_turn_saved():
    class Chooses(PyLayer):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(*((y,) if ctx.needs_input_grad[0] else (jnp.cos(x) * 0 + x,)))
            return x * y

        @staticmethod
        def backward(ctx, dy):
            (kept,) = ctx.saved_tensor()
            return (dy * kept, None) if ctx.needs_input_grad[0] else (None, dy * kept)

    jaxpr = jax.make_jaxpr(lambda x, y: Chooses.apply(x, y).sum())(X, X + 1)

    def f(x, y):
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x, y)[0]

    for _ in range(3):
        np.testing.assert_allclose(jax.grad(f, 0)(X, X + 1), X + 1, rtol=1e-6)
        np.testing.assert_allclose(jax.grad(f, 1)(X, X + 1), X, rtol=1e-6)


class SavesWhatIsNeeded(PyLayer):
    """a b^2, which saves another number of tensors for each choice of arguments."""

    @staticmethod
    def forward(ctx, a, b):
        needs = ctx.needs_input_grad
        if all(needs):
            ctx.save_for_backward(a, b)
        elif needs[0]:
            ctx.save_for_backward(b)
        elif needs[1]:
            ctx.save_for_backward(a * b)
        return a * b**2

    @staticmethod
    def backward(ctx, dy):
        needs, saved = ctx.needs_input_grad, ctx.saved_tensor()
        if all(needs):
            a, b = saved
            return dy * b**2, 2 * dy * a * b
        return (dy * saved[0] ** 2, None) if needs[0] else (None, 2 * dy * saved[0])


class SavesWithForwardMode(SavesWhatIsNeeded):
    forward_mode = True


STAGED = {
    "jit": jax.jit,
    "scan": lambda f: lambda a, b: jax.lax.scan(lambda c, _: (c + f(a, b), None), 0.0, None, length=1)[0],
    "cond": lambda f: lambda a, b: jax.lax.cond(a > -9, f, lambda a, b: a, a, b),
    "checkpoint": jax.checkpoint,
    "fori_loop": lambda f: lambda a, b: jax.lax.fori_loop(0, 1, lambda _, c: c + f(a, b), 0.0),
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
@pytest.mark.parametrize("layer", [SavesWhatIsNeeded, SavesWithForwardMode])
@pytest.mark.parametrize("backwards", [False, True])  # so that each follows each
def test_no_derivative_disturbs_the_next(staged, layer, backwards):
    f = STAGED[staged](lambda a, b: layer.apply(a, b))
    a, b = jnp.asarray(2.0), jnp.asarray(3.0)
    for name in reversed(DERIVATIVES) if backwards else DERIVATIVES:
        derivative, expected = DERIVATIVES[name]
        np.testing.assert_allclose(derivative(f)(a, b), expected(a, b), rtol=1e-6, err_msg=name)


def test_a_differentiated_value_that_staged_code_closes_over_counts_as_staged():
    def f(x):
        g = jax.jit(lambda y: Product.apply(x, y).sum())
        return jax.grad(g)(x) * x + g(x)

    np.testing.assert_allclose(jax.grad(lambda x: f(x).sum())(X), jax.grad(lambda x: plain(x).sum())(X), rtol=1e-5)


def plain(x):
    def product(x, y):
        return (x * y + jnp.sin(x)).sum()

    return jax.grad(product, 1)(x, x) * x + product(x, x)


@pytest.fixture
def many_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_threads_that_run_one_compiled_program_with_host_hooks(many_switches):
    hooks = saved_tensors_hooks(lambda x: (x + 1,), lambda packed: packed[0] - 1, host=True)
    step = jax.jit(jax.grad(hooks(lambda x: jnp.sum(Product.apply(x, x + 1)))))
    expected = [np.asarray(step(X + i)) for i in range(8)]

    def work(i):
        for _ in range(40):
            np.testing.assert_allclose(step(X + i), expected[i], rtol=1e-5)

    assert in_threads(8, work) == []


def test_threads_that_enter_runs_get_numbers_of_their_own(many_switches):
    log = RunLog()
    found = []

    def work(i):
        numbers = [log.add((i, k)) for k in range(300)]
        found.extend((log.find(number), (i, k)) for k, number in enumerate(numbers))

    assert in_threads(8, work) == []
    assert len(found) == 2400
    assert all(run == entered for run, entered in found)


def test_threads_that_save_to_one_directory(many_switches, tmp_path):
    def work(i):
        for k in range(10):
            x = X + i + k
            gradient = jax.grad(save_on_disk(tmp_path)(lambda x: jnp.sum(Product.apply(x, x))))(x)
            np.testing.assert_allclose(gradient, 2 * x + jnp.cos(x), rtol=1e-5)

    assert in_threads(8, work) == []


@pytest.mark.timeout(60)
def test_hooks_on_the_host_that_are_collected_at_any_line(many_switches, tmp_path):
    # The finalizer of a pair runs in whatever thread, and at whatever line, the last reference to it goes.
    def work(_):
        for _ in range(1000):
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
    hooks = saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2)

    def loss(hook):
        def total(w, x):
            staged = jax.make_jaxpr(hook(lambda x: function(x, w)))(x)

            def run(consts, x):
                return jax.core.eval_jaxpr(staged.jaxpr, consts, x)[0]

            stop = jax.lax.stop_gradient
            product = run([stop(c) for c in staged.consts], x) * run(staged.consts, stop(x))
            return jnp.sum(product + run(staged.consts, x))

        return jax.grad(total, (0, 1))

    def blocked(function):
        def run(x):
            with hooks:
                return function(x)

        return run

    arguments = jnp.linspace(-0.5, 0.8, 9).reshape(3, 3), jnp.linspace(0.2, -0.9, 6).reshape(2, 3)
    for got, want in zip(loss(blocked)(*arguments), loss(lambda f: f)(*arguments), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

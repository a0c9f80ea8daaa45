"""The rule at every order: pinned numbers, and regressions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import PyLayer, once_differentiable
from tests.registry import AskedLinear, ClippedReversal, DoubledTanh, Round, RouterLoss, SavedIntermediate

grad = jax.grad


@jax.custom_vjp
def plain_doubled_tanh(x):
    return jnp.tanh(x)


plain_doubled_tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, dy: (2 * dy * (1 - y**2),))


@jax.custom_vjp
def plain_round(x):
    return jnp.round(x)


plain_round.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (dy,))


def twice(x):
    return DoubledTanh.apply(DoubledTanh.apply(x))


WITHIN = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "fori": lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda _, c: f(c), x),
    "cond": lambda f: lambda x: jax.lax.cond(x > 0, f, lambda x: x, x),
    "remat": jax.checkpoint,
    "scan of remat": lambda f: lambda x: jax.lax.scan(lambda c, _: (jax.checkpoint(f)(c), None), x, None, length=1)[0],
}
within = pytest.mark.parametrize("place", WITHIN)


@within
@pytest.mark.parametrize(
    "second",
    [
        lambda f: grad(grad(f)),
        lambda f: jax.jit(grad(grad(f))),
        lambda f: grad(jax.jit(grad(f))),
        jax.hessian,
        lambda f: lambda x: jax.jvp(grad(f), (x,), (1.0,))[1],
    ],
    ids=["grad-grad", "jit-grad-grad", "grad-jit-grad", "hessian", "jvp-grad"],
)
def test_second_derivative_of_doubled_tanh_applied_twice(place, second):
    np.testing.assert_allclose(second(WITHIN[place](twice))(0.3), -10.9068, rtol=1e-5)


@pytest.mark.parametrize("place", ["plain", "cond", "scan of remat"])
@pytest.mark.parametrize(
    "third",
    [lambda f: grad(grad(grad(f))), lambda f: jax.hessian(grad(f)), lambda f: jax.jit(grad(jax.hessian(f)))],
    ids=["grad-grad-grad", "hessian-grad", "jit-grad-hessian"],
)
def test_third_derivative(place, third):
    np.testing.assert_allclose(third(WITHIN[place](twice))(0.3), -64.157, rtol=1e-5)


def test_plain_custom_vjp_loses_the_rule():
    # What a user of plain JAX gets, so that the numbers above are seen to differ from it.
    plain_twice = lambda x: plain_doubled_tanh(plain_doubled_tanh(x))  # noqa: E731
    np.testing.assert_allclose(grad(grad(plain_twice))(0.3), -3.7074, rtol=1e-4)
    assert grad(grad(lambda x: plain_round(x) ** 3))(1.3) == 0.0
    assert grad(grad(lambda x: Round.apply(x) ** 3))(1.3) == 6.0
    np.testing.assert_allclose(grad(grad(plain_doubled_tanh))(0.3), -1.0664, rtol=1e-4)
    np.testing.assert_allclose(grad(grad(DoubledTanh.apply))(0.3), -2.1327, rtol=1e-4)


def test_saved_intermediate_takes_part():
    f = lambda x: jnp.sin(x * x)  # noqa: E731
    for order in (grad(grad(SavedIntermediate.apply)), jax.jit(jax.hessian(SavedIntermediate.apply))):
        np.testing.assert_allclose(order(0.8), grad(grad(f))(0.8), rtol=1e-5)


class Product(PyLayer):
    calls = 0

    @staticmethod
    def forward(ctx, x, y):
        Product.calls += 1
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, d):
        x, y = ctx.saved_tensor()
        return d * y, d * x


def test_one_array_in_two_places():
    x = jnp.array([0.5, -1.5])
    expected = jax.hessian(lambda v: jnp.sum(v * x * v))(x)
    np.testing.assert_allclose(jax.hessian(lambda v: jnp.sum(Product.apply(v, x) * v))(x), expected)
    np.testing.assert_allclose(jax.hessian(lambda v: jnp.sum(Product.apply(v, v)))(x), 2 * np.eye(2))
    np.testing.assert_allclose(grad(lambda v: grad(lambda u: jnp.sum(Product.apply(u, u) * v))(v).sum())(x), 4 * x)


@pytest.mark.parametrize(
    ("transform", "runs"),
    [
        (lambda f: f, 1),
        (grad, 1),
        (lambda f: grad(grad(f)), 1),
        (lambda f: jax.jit(grad(f)), 1),
        (lambda f: jax.jit(grad(grad(f))), 1),
        (jax.hessian, 1),
        (lambda f: grad(jax.jit(f)), 2),  # staged by jit, then differentiated
    ],
)
def test_forward_runs_once_per_application(transform, runs):
    Product.calls = 0
    transform(lambda x: Product.apply(x, 2.0 * x))(jnp.float32(0.7))
    if jax.config.jax_custom_vjp3:
        runs = max(runs, min(Product.calls, runs + 1))  # JAX traces the primal once more
    assert Product.calls == runs


def test_saved_intermediate_is_computed_once():
    runs = []

    class Noisy(PyLayer):
        @staticmethod
        def forward(ctx, x):
            runs.append(x)
            noise = np.float32(len(runs))
            scaled = x * noise
            ctx.save_for_backward(scaled)
            return scaled * scaled

        @staticmethod
        def backward(ctx, d):
            (scaled,) = ctx.saved_tensor()
            return 2 * d * scaled

    if not jax.config.jax_custom_vjp3:
        assert grad(grad(Noisy.apply))(3.0) == 2.0  # with another draw of the noise it would be another number
        assert len(runs) == 1


class OnceOnly(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        (x,) = ctx.saved_tensor()
        assert ctx.needs_input_grad == (True,)
        return 3 * d * x**2


@pytest.mark.parametrize("first", [grad, lambda f: jax.jit(grad(f)), lambda f: grad(jax.jit(f))])
def test_once_differentiable_allows_the_first(first):
    np.testing.assert_allclose(first(OnceOnly.apply)(2.0), 12.0)


@pytest.mark.parametrize(
    "second",
    [lambda f: grad(grad(f)), lambda f: jax.jit(grad(grad(f))), lambda f: grad(jax.jit(grad(f))), jax.hessian],
)
def test_once_differentiable_refuses_the_second(second):
    with pytest.raises(RuntimeError, match=r"OnceOnly\.backward is marked @once_differentiable"):
        second(OnceOnly.apply)(2.0)


@within
def test_once_differentiable_backward_may_be_transposed(place):
    f, x = WITHIN[place](OnceOnly.apply), 2.0

    def transposed(t):
        return jax.linear_transpose(lambda dy: jax.vjp(f, x)[1](dy)[0], x)(t)[0]

    for run in (transposed, jax.jit(transposed)):
        np.testing.assert_allclose(run(0.5), 12.0 * 0.5)  # no derivative of backward, which is linear in dy


@pytest.mark.parametrize("order", [jax.hessian, lambda f: jax.jit(jax.hessian(f))])
@pytest.mark.parametrize(
    ("f", "message"),
    [
        (lambda x: ClippedReversal.apply(x) ** 2, r"ClippedReversal\.backward is not linear in its cotangents"),
        (lambda x: RouterLoss.apply(x, x, 2, False) ** 2, r"RouterLoss\.backward .* does not depend on them"),
    ],
)
def test_forward_over_reverse_of_a_nonlinear_backward(order, f, message):
    with pytest.raises(TypeError, match=message) as caught:
        order(f)(0.4)
    assert "jax.jacrev(jax.grad(f))" in str(caught.value)


def test_affine_backward_is_refused():
    class Affine(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, d):
            return d + 1

    with pytest.raises(TypeError, match="adds a term that does not depend on them"):
        jax.hessian(lambda x: Affine.apply(x) ** 2)(0.4)
    assert grad(grad(lambda x: Affine.apply(x) ** 2))(0.4) == 2 * 1 + 1 + 0  # 2 y' with y' = d + 1, by reverse mode


def test_host_code_in_forward_at_second_order():
    class Host(PyLayer):
        @staticmethod
        def forward(ctx, x):
            y = jnp.asarray(np.exp(np.asarray(x)))
            assert float(x) > 0
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, d):
            (y,) = ctx.saved_tensor()
            return d * y

    if jax.config.jax_custom_vjp3:
        pytest.skip("under jax_custom_vjp3 forward must be traceable")
    x = jnp.float32(0.5)
    np.testing.assert_allclose(grad(Host.apply)(x), np.exp(0.5), rtol=1e-6)
    np.testing.assert_allclose(grad(grad(Host.apply))(x), np.exp(0.5), rtol=1e-6)
    np.testing.assert_allclose(jax.hessian(Host.apply)(x), np.exp(0.5), rtol=1e-6)
    with pytest.raises(jax.errors.TracerArrayConversionError) as caught:
        jax.jit(grad(Host.apply))(x)
    assert "This happened in test_host_code_in_forward_at_second_order.<locals>.Host.forward." in caught.value.__notes__


def test_host_code_that_saves_an_intermediate_is_refused_at_second_order():
    class Host(PyLayer):
        @staticmethod
        def forward(ctx, x):
            double = jnp.asarray(2 * np.asarray(x))
            ctx.save_for_backward(double)
            return double * double

        @staticmethod
        def backward(ctx, d):
            (double,) = ctx.saved_tensor()
            return d * 4 * double

    if jax.config.jax_custom_vjp3:
        pytest.skip("under jax_custom_vjp3 forward must be traceable")
    np.testing.assert_allclose(grad(Host.apply)(jnp.float32(0.5)), 4.0)
    with pytest.raises(TypeError, match="forward, which needs concrete values and cannot be traced"):
        grad(grad(Host.apply))(jnp.float32(0.5))


def test_needs_input_grad_widens_at_the_outer_order():
    x, w = jnp.ones((2, 2)) * 0.3, jnp.array([[0.2, -0.5], [0.7, 0.1]])

    def mixed(apply):
        # The inner gradient asks for x alone, the outer one for w.
        return lambda w: jnp.sum(grad(lambda x: jnp.sum(jnp.sin(apply(x, w))))(x) ** 2)

    def mixed_vmap(apply):
        inner = lambda x, w: jnp.sum(grad(lambda x: jnp.sum(jnp.sin(apply(x, w))))(x) ** 2)  # noqa: E731
        return lambda w: jax.vmap(inner, in_axes=(0, None))(jnp.stack([x, 2 * x]), w).sum()

    for build in (mixed, mixed_vmap):
        for outer in (grad, lambda f: jax.jit(grad(f))):
            ours = outer(build(lambda x, w: AskedLinear.apply(x, w, "static")))(w)
            np.testing.assert_allclose(ours, grad(build(lambda x, w: x @ w))(w), rtol=1e-5)


def test_once_differentiable_wins_over_host_code_in_backward():
    class OnHost(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jnp.sin(x)

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            return np.asarray(dy) * np.cos(np.asarray(ctx.saved_tensor()[0]))

    np.testing.assert_allclose(jax.grad(OnHost.apply)(0.3), np.cos(0.3), rtol=1e-6)
    message = r"OnHost\.backward is marked @once_differentiable"
    for second in (jax.hessian(OnHost.apply), lambda x: jax.jvp(jax.grad(OnHost.apply), (x,), (1.0,))):
        with pytest.raises(RuntimeError, match=message):
            second(0.3)

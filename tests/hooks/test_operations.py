"""Hooks around every kind of JAX operation: the gradient is that without them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.kit.case import ruled
from tests.kit.layers import Multiply, Tanh, bits
from tests.kit.modes import EAGER_AND_JIT

from .spy import TRANSFORMS, in_block, noting, without_hooks

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) * 0.3 + np.eye(4), jnp.float32)


@jax.custom_gradient
def gradient_of_its_own(x):
    return jnp.sin(x), lambda g: g * 2 * x


vjp_of_its_own = ruled(jnp.sin, lambda args, g: (3 * g * args[0],))
jvp_of_its_own = jax.custom_jvp(jnp.cos)
jvp_of_its_own.defjvp(lambda p, t: (jvp_of_its_own(*p), 5 * t[0] * p[0]))


def through_a_ref(x):
    ref = jax.new_ref(jnp.zeros_like(x))
    ref[...] = x * x
    return ref[...]


OPERATIONS = {
    "custom_gradient": gradient_of_its_own,
    "custom_vjp": vjp_of_its_own,
    "custom_jvp": jvp_of_its_own,
    "solve": lambda x: jnp.linalg.solve(x @ x.T + 2 * jnp.eye(4), x),
    "eigh": lambda x: jnp.linalg.eigh(x + x.T)[0],
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "sort": lambda x: jnp.sort(x, 0) ** 2,
    "cumprod": jnp.cumprod,
    "convolution": lambda x: lax.conv(x[None, None], x[None, None, :2, :2], (1, 1), "SAME"),
    "gather": lambda x: x[jnp.array([0, 2, 2])] ** 2,
    "scatter": lambda x: (x.at[1].set(2.0) * x).at[jnp.array([0, 1])].mul(x[2:], unique_indices=True),
    "nonzero": lambda x: x[jnp.nonzero(x > 0, size=3)] ** 2,
    "dynamic_slice": lambda x: lax.dynamic_slice(x, (1, jnp.argmax(x[0])), (2, 2)) ** 2,
    "where": lambda x: jnp.where(x > 0, x, x**2),
    "associative_scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "scan": lambda x: lax.scan(lambda c, row: (c * jnp.sin(row), c), x[0], x)[1],
    "scan of a layer": lambda x: lax.scan(lambda c, row: (Multiply.apply(c, row), None), x[0], x)[0],
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda i, c: c * x, x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))),
    "checkpoint of scan": jax.checkpoint(lambda x: lax.scan(lambda c, _: (Tanh.apply(c), None), x, None, length=3)[0]),
    "checkpoint with a policy": jax.checkpoint(lambda x: jnp.sin(x @ x), policy=jax.checkpoint_policies.dots_saveable),
    "grad": jax.grad(lambda x: jnp.sum(Tanh.apply(x) * jnp.sin(x))),
    "hessian": lambda x: jax.hessian(lambda row: jnp.sum(jnp.sin(row) ** 3))(x[0]),
    "jvp": lambda x: jax.jvp(lambda x: jnp.sin(x) * x, (x,), (x,))[1],
    "random": lambda x: x * jax.random.normal(jax.random.key(0), x.shape),
    "conjugate gradients": lambda x: jax.scipy.sparse.linalg.cg(x @ x.T + jnp.eye(4), x[0])[0],
    "complex": lambda x: jnp.abs(jnp.exp(lax.complex(jnp.zeros_like(x), x)) * lax.complex(x, x)),
    "numpy": lambda x: x * lax.convert_element_type(np.ones((4, 4), np.float32), jnp.float32).at[0].set(3.0),
    "ref": through_a_ref,
    "optimization_barrier": lambda x: jnp.sin(lax.optimization_barrier(x)),
}


@functools.cache
def loss_of(operation):
    def loss(x):
        return jnp.sum(jnp.sin(OPERATIONS[operation](x)))

    return loss, without_hooks(loss, (X,))


@pytest.mark.parametrize(
    "transform", ["grad", "jit_of_grad_of_grad", pytest.param("grad_of_jit", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gradients(operation, transform):
    loss, expected = loss_of(operation)
    hooked = bits()(loss) if transform == "grad_of_jit" else in_block(bits(), loss)
    try:
        (found,) = TRANSFORMS[transform](hooked, (X,))
    except TypeError as error:
        # What is packed in staged code has no second derivative unless the pair says so.
        is_second = transform == "jit_of_grad_of_grad" or (operation, transform) == ("grad", "grad_of_jit")
        if is_second and "differentiable=True" in str(error):
            return
        raise
    np.testing.assert_allclose(found, expected(transform)[0], rtol=2e-4, atol=1e-4)


@EAGER_AND_JIT
def test_the_matrix_of_a_linear_solve(mode):
    def solution(a):
        multiply = noting([], differentiable=True)(lambda x: x * a)
        solve = lambda multiply, b: b / multiply(jnp.ones_like(b))
        return jnp.sum(jax.lax.custom_linear_solve(multiply, jnp.ones(3), solve, solve))

    np.testing.assert_allclose(mode(jax.grad(solution))(2.0), -0.75, rtol=1e-6)
    np.testing.assert_allclose(mode(jax.grad(jax.grad(solution)))(2.0), 0.75, rtol=1e-6)


@pytest.mark.parametrize("function", [Tanh.apply, jax.nn.relu], ids=["layer", "custom_jvp"])
def test_a_block_in_a_derivative_of_another_argument(function):
    """JAX calls the Python functions of a custom gradient once for all derivatives that enclose it."""

    def gradients(function):
        def loss(x, w):
            return jnp.sum(function(x) * w)

        return jax.grad(lambda x: jnp.sum(jax.grad(loss, 1)(x, x)))(X)

    mapped = jax.vmap(function)
    np.testing.assert_allclose(gradients(bits()(mapped)), gradients(mapped), rtol=1e-5)

"""Layers within functions of JAX that call, batch or differentiate them in ways of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint

from tests.kit.layers import Multiply, Tanh, bits

X = jnp.array([0.3, -0.7, 1.1, 0.5])


def associative_scan(tanh, multiply):
    return lambda x: jax.lax.associative_scan(lambda a, b: multiply(a, b) + tanh(b), x)


def reverse_scan(tanh, multiply):
    def body(c, z):
        c = multiply(tanh(c), z)
        return c, c

    return lambda x: jax.lax.scan(body, x[0], x, reverse=True, unroll=3)[1]


def closure_convert(tanh, multiply):
    def run(x):
        function, hoisted = jax.closure_convert(lambda z: tanh(multiply(z, x)), x)
        return function(x, *hoisted)

    return run


def initial_value_problem(tanh, multiply):
    times = jnp.linspace(0.0, 1.0, 3)
    return lambda x: odeint(lambda y, t, w: tanh(multiply(y, jnp.broadcast_to(w, y.shape))), x, times, x[1])


def within_custom_vjp(tanh, multiply):
    @jax.custom_vjp
    def function(x):
        return tanh(x)

    function.defvjp(lambda x: jax.vjp(tanh, x), lambda pullback, dy: pullback(dy))
    return lambda x: multiply(function(x), x)


def of_derivatives(tanh, multiply):
    slope = jax.grad(lambda w, x: multiply(tanh(w), x).sum())
    return lambda x: jax.lax.scan(lambda w, _: (w - 0.1 * slope(w, x), None), x, None, length=3)[0]


PLAIN = lambda f: f  # noqa: E731
PROGRAMS = {
    "associative_scan": associative_scan,
    "map in batches": lambda tanh, multiply: lambda x: jax.lax.map(lambda z: tanh(multiply(z, z)), x, batch_size=3),
    "scan in reverse, unrolled": reverse_scan,
    "closure_convert": closure_convert,
    "vectorize": lambda tanh, multiply: jnp.vectorize(lambda a: multiply(tanh(a), a), signature="(n)->(n)"),
    "initial value problem": initial_value_problem,
    "within a custom_vjp": within_custom_vjp,
    "derivatives in a scan": of_derivatives,
}


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("block", [PLAIN, bits()], ids=["", "in a block"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_right_layers_has_the_derivatives_of_plain_jax(name, block, order):
    layers = block(PROGRAMS[name](Tanh.apply, Multiply.apply))
    plain = PROGRAMS[name](jnp.tanh, jnp.multiply)

    def derivative(function):
        def loss(x):
            values = function(x)
            return (values * jnp.cos(jnp.arange(values.size, dtype=float)).reshape(values.shape)).sum()

        slope = jax.grad(loss)
        return slope if order == 1 else jax.grad(lambda x: slope(x) @ jnp.sin(X))

    try:
        found = jax.jit(derivative(layers))(X)
    except TypeError as error:
        # A second derivative over what was packed in staged code is refused, and never wrong.
        is_second = order == 2 or name == "derivatives in a scan"
        if is_second and block is not PLAIN and "differentiable=True" in str(error):
            return
        raise
    np.testing.assert_allclose(found, derivative(plain)(X), rtol=1e-4, atol=1e-6)

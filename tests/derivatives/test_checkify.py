"""`checkify` sees the operations of `forward`: checks of the user, and NaNs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from tests.kit.layers import layer
from tests.kit.modes import EAGER_AND_JIT


def _checked_log(x):
    checkify.check(jnp.all(x > 0), "log of {x}", x=jnp.min(x))
    return jnp.log(x)


# The slope of `CheckedLog` is twice the true one.
CheckedLog = layer(_checked_log, lambda x, dy: 2 * dy / x, plain=True, name="CheckedLog")
Log = layer(jnp.log, lambda x, dy: dy / x, plain=True, name="Log")
GOOD, BAD = jnp.array([1.0, 3.0, 2.0]), jnp.array([1.0, -1.0, 2.0])


def _loss(x):
    return jnp.sum(CheckedLog.apply(x) ** 2)


PROGRAMS = {
    "value": CheckedLog.apply,
    "jit": jax.jit(CheckedLog.apply),
    "vmap": jax.vmap(CheckedLog.apply),
    "scan": lambda x: jax.lax.scan(lambda total, x: (total + CheckedLog.apply(x) ** 2, None), 0.0, x)[0],
    "grad": jax.grad(_loss),
    "grad of jit": jax.grad(jax.jit(_loss)),
    "grad of checkpoint": jax.grad(jax.checkpoint(_loss)),
    "second derivative": jax.jacrev(jax.grad(_loss)),
    "hessian": jax.hessian(_loss),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_check_in_forward_reports_its_error(name):
    checked = jax.jit(checkify.checkify(PROGRAMS[name]))
    error, value = checked(GOOD)
    assert error.get() is None
    assert np.all(np.isfinite(value))
    if name == "second derivative":
        unchecked = layer(base=Log, backward=lambda ctx, dy: 2 * Log.backward(ctx, dy))
        expected = jax.jacrev(jax.grad(lambda x: jnp.sum(unchecked.apply(x) ** 2)))(GOOD)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    error, _ = checked(BAD)
    assert "log of -1.0" in error.get()


def test_each_example_of_a_batch_has_its_own_error():
    error, _ = jax.vmap(checkify.checkify(CheckedLog.apply))(BAD)
    assert "index 1" in error.get()


@EAGER_AND_JIT
def test_the_operation_that_makes_a_nan_is_named(mode):
    loss = mode(jax.value_and_grad(lambda x: jnp.sum(Log.apply(x) ** 2)))
    error, _ = checkify.checkify(loss, errors=checkify.nan_checks)(BAD)
    assert "log" in error.get()


def test_the_derivative_of_a_checked_gradient_is_refused():
    def checked(x):
        return jnp.sum(checkify.checkify(jax.grad(_loss))(x)[1])

    with pytest.raises(TypeError, match="CheckedLog"):
        jax.grad(checked)(GOOD)


def test_the_derivative_of_a_checked_function_has_the_rule():
    gradient = jax.grad(lambda x: jnp.sum(checkify.checkify(Log.apply)(x)[1]))
    np.testing.assert_allclose(gradient(GOOD), 1 / GOOD, rtol=1e-6)

"""`checkify` sees the operations of `forward`: checks of the user, and NaNs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from tests.kit.layers import layer


def _forward(ctx, x):
    checkify.check(jnp.all(x > 0), "log of {x}", x=jnp.min(x))
    ctx.save_for_backward(x)
    return jnp.log(x)


CheckedLog = layer(_forward, lambda ctx, dy: 2 * dy / ctx.saved_tensor()[0], name="CheckedLog")
Log = layer(
    lambda ctx, x: ctx.save_for_backward(x) or jnp.log(x),
    lambda ctx, dy: dy / ctx.saved_tensor()[0],
    name="Log",
)
GOOD, BAD = jnp.array([1.0, 3.0, 2.0]), jnp.array([1.0, -1.0, 2.0])


def _loss(x):
    return jnp.sum(CheckedLog.apply(x) ** 2)


def _scanned(x):
    return jax.lax.scan(lambda total, x: (total + CheckedLog.apply(x) ** 2, None), 0.0, x)[0]


PROGRAMS = {
    "value": CheckedLog.apply,
    "jit": jax.jit(CheckedLog.apply),
    "vmap": jax.vmap(CheckedLog.apply),
    "scan": _scanned,
    "grad": jax.grad(_loss),
    "jit of grad": jax.jit(jax.grad(_loss)),
    "grad of jit": jax.grad(jax.jit(_loss)),
    "grad of checkpoint": jax.grad(jax.checkpoint(_loss)),
    "vmap of grad": jax.vmap(jax.grad(CheckedLog.apply)),
    "second derivative": jax.jacrev(jax.grad(_loss)),
    "hessian": jax.hessian(_loss),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_check_in_forward_reports_its_error(name):
    checked = jax.jit(checkify.checkify(PROGRAMS[name]))
    error, value = checked(GOOD)
    assert error.get() is None
    unchecked = layer(base=CheckedLog, forward=lambda ctx, x: ctx.save_for_backward(x) or jnp.log(x))
    assert np.all(np.isfinite(value))
    if name == "second derivative":  # by the rule, whose slope is twice the true one
        expected = jax.jacrev(jax.grad(lambda x: jnp.sum(unchecked.apply(x) ** 2)))(GOOD)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
    error, _ = checked(BAD)
    assert "log of -1.0" in error.get()


def test_each_example_of_a_batch_has_its_own_error():
    error, _ = jax.vmap(checkify.checkify(CheckedLog.apply))(BAD)
    assert "index 1" in error.get()


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_operation_that_makes_a_nan_is_named(transform):
    loss = transform(jax.value_and_grad(lambda x: jnp.sum(Log.apply(x) ** 2)))
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

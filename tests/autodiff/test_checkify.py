"""`checkify.check` in `forward`: under every transform it reports as it does in plain JAX."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from pylayer_jax import PyLayer
from tests.kit.modes import DERIVATIVES


class Log(PyLayer):
    @staticmethod
    def forward(ctx, x):
        checkify.check(jnp.all(x > 0), "x must be positive")
        ctx.save_for_backward(x)
        return jnp.log(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        return dy / x


class LogWithForwardMode(Log):
    forward_mode = True


@pytest.mark.parametrize("layer", [Log, LogWithForwardMode])
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=list(DERIVATIVES))
def test_a_check_in_forward(layer, derivative):
    if layer is Log and jax.config.jax_custom_vjp3:
        pytest.skip("under jax_custom_vjp3 JAX refuses checks in a custom_vjp function")
    checked = checkify.checkify(derivative(lambda x: jnp.sum(layer.apply(x))))
    assert checked(jnp.ones((2, 2)))[0].get() is None
    assert "x must be positive" in checked(-jnp.ones((2, 2)))[0].get()

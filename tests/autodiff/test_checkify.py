"""`checkify.check` in `forward`: under transforms of the first order it reports as it does in plain JAX."""

import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from pylayer_jax import PyLayer
from tests.kit.modes import DERIVATIVES

FIRST = {name: f for name, f in DERIVATIVES.items() if "grad of grad" not in name and name != "hessian"}


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
@pytest.mark.parametrize("derivative", FIRST.values(), ids=FIRST)
def test_a_check_in_forward(layer, derivative):
    checked = checkify.checkify(derivative(lambda x: jnp.sum(layer.apply(x))))
    assert checked(jnp.ones((2, 2)))[0].get() is None
    assert "x must be positive" in checked(-jnp.ones((2, 2)))[0].get()

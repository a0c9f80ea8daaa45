"""`checkify.check` in `forward`: under every transform it reports as it does in plain JAX."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from pylayer_jax import PyLayer


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


def second(f):
    return jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))


@pytest.mark.parametrize("layer", [Log, LogWithForwardMode])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        second,
        lambda f: jax.jit(second(f)),
        jax.hessian,
        lambda f: jax.vmap(jax.grad(f)),
        lambda f: jax.jit(jax.vmap(jax.grad(f))),
        lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(x) + c, None), 0.0, None, length=2)[0],
    ],
    ids=[
        "eager", "jit", "grad", "jit of grad", "grad of jit", "grad of grad", "jit of grad of grad", "hessian",
        "vmap of grad", "jit of vmap of grad", "grad of vmap", "scan",
    ],
)  # fmt: skip
def test_a_check_in_forward(layer, transform):
    if layer is Log and jax.config.jax_custom_vjp3:
        pytest.skip("under jax_custom_vjp3 JAX refuses checks in a custom_vjp function")
    checked = checkify.checkify(transform(lambda x: jnp.sum(layer.apply(x))))
    error, _ = checked(jnp.ones((2, 2)))
    assert error.get() is None
    error, _ = checked(-jnp.ones((2, 2)))
    assert "x must be positive" in error.get()

"""A static argument that the caller drops dies after a collection, whatever JAX remembers."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import PyLayer

X = jnp.array([0.3, -0.7])


class Model:
    factor = 2.0


class Scale(PyLayer):
    @staticmethod
    def forward(ctx, x, model):
        y = jnp.tanh(x) * model.factor
        ctx.save_for_backward(x, y, jnp.sin(x))
        ctx.model = model
        return y

    @staticmethod
    def backward(ctx, dy):
        x, _, _ = ctx.saved_tensor()
        return dy * ctx.model.factor * (1 - jnp.tanh(x) ** 2)


class ScaleWithForwardMode(Scale):
    forward_mode = True


def grad(f):
    return jax.grad(lambda x: jnp.sum(f(x)))


@pytest.mark.parametrize("layer", [Scale, ScaleWithForwardMode])
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        grad,
        lambda f: grad(grad(f)),
        lambda f: jax.jit(grad(f)),
        lambda f: grad(jax.jit(f)),
        lambda f: jax.jit(grad(grad(f))),
        lambda f: jax.hessian(lambda x: jnp.sum(f(x))),
        lambda f: jax.vmap(grad(f)),
        lambda f: jax.jit(jax.vmap(grad(f))),
        lambda f: grad(jax.checkpoint(f)),
        lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (grad(f)(c), None), x, None, length=2)[0]),
    ],
    ids=[
        "eager", "jit", "grad", "grad of grad", "jit of grad", "grad of jit", "jit of grad of grad", "hessian",
        "vmap of grad", "jit of vmap of grad", "grad of remat", "jit of scan of grad",
    ],
)  # fmt: skip
def test_a_static_argument_dies_with_the_program(layer, transform):
    if layer is Scale and jax.config.jax_custom_vjp3:
        pytest.skip("under jax_custom_vjp3 JAX remembers the static arguments of a custom_vjp function")
    models = []
    for _ in range(3):
        model = Model()
        models.append(weakref.ref(model))
        jax.block_until_ready(transform(lambda x, model=model: layer.apply(x, model))(X))
        del model
    gc.collect()
    assert [model() for model in models] == [None, None, None]


@pytest.mark.clears_caches
@pytest.mark.parametrize("layer", [Scale, ScaleWithForwardMode])
def test_a_static_argument_in_an_eager_loop_dies_with_the_caches_of_jax(layer):
    # JAX remembers the body of a loop that it ran in eager mode, and with it the static arguments of a custom_vjp
    # function, of JAX's own or of ours.
    model = Model()
    found = weakref.ref(model)
    grad(lambda x, model=model: jax.lax.scan(lambda c, _: (layer.apply(c, model), None), x, None, length=2)[0])(X)
    del model
    jax.clear_caches()
    gc.collect()
    assert found() is None

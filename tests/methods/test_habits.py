"""Code that uses an array as a tensor of torch or Paddle: the error says what to write in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from tests.kit.modes import EAGER_AND_JIT

from .made import layer, loss, text_of

X = jnp.ones((2, 3))

HABITS = {
    "x.size(0)": "x.shape[0]",
    "x.view(3, 2)": "x.reshape(a, b)",
    "x.view(-1)": "x.reshape(a, b)",
    "x.requires_grad": "ctx.needs_input_grad[i]",
    "x.stop_gradient": "ctx.needs_input_grad[i]",
    "x.detach()": "jax.lax.stop_gradient(x)",
    "x.unsqueeze(0)": "jnp.expand_dims(x, axis)",
    "x.add_(1)": "y = x + 1 for x.add_(1)",
    "x.to(jnp.float32)": "x.astype(dtype)",
    "x.half()": "x.astype(jnp.float16)",
    "x.numpy()": "np.asarray(x), outside of traced code",
    "x.cuda()": "jax.device_put(x, device)",
    "x.sigmoid()": "jax.nn.sigmoid(x, ...)",
    "x.tile((2, 2))": "jnp.tile(x, ...)",
    "x.sum(dim=1)": "axis",
    "x.mean(axis=1, keepdim=True)": "In JAX: keepdims",
    "x.backward(x)": "jax.vjp(f, x)",
    "x.main_grad": "a jax.Ref",
}
RUNS = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
}


def method_of(code):
    run = eval(f"lambda x: {code}")
    return lambda ctx, x: (run(x), x * 1)[1]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("code", HABITS)
def test_the_error_says_what_to_write(code, run):
    with pytest.raises((AttributeError, TypeError, NotImplementedError)) as raised:
        RUNS[run](layer(method_of(code)).apply)
    assert HABITS[code] in text_of(raised.value)
    assert "This happened in Made.forward" in text_of(raised.value)


@EAGER_AND_JIT
@pytest.mark.parametrize("code", ["x.detach()", "x.size(0)"])
def test_so_does_that_of_backward(code, mode):
    with pytest.raises((AttributeError, TypeError)) as raised:
        mode(jax.grad(loss(layer(backward=method_of(code)))))(X)
    assert HABITS[code] in text_of(raised.value)
    assert "This happened in Made.backward" in text_of(raised.value)


@pytest.mark.parametrize("code", ["[].detach()", "x.nothing", "x.x", "x.__add_", "len(5)", "{}['view']"])
def test_other_errors_get_no_advice(code):
    with pytest.raises((AttributeError, TypeError, KeyError)) as raised:
        layer(method_of(code)).apply(X)
    assert not any("JAX" in note for note in raised.value.__notes__)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, jax.vmap], ids=["eager", "jit", "vmap"])
@pytest.mark.parametrize(
    ("method", "attribute", "advice"),
    [
        ("forward", "stop_gradient", "ctx.mark_non_differentiable"),
        ("forward", "note", "nder jit an array takes no attributes. Return the value, as one more output of forward"),
        ("backward", "main_grad", "a jax.Ref, to which backward adds"),
    ],
)
def test_an_attribute_of_an_array(method, attribute, advice, run):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return noting("forward", x)

    def noting(name, x):
        if name == method:
            setattr(x, attribute, 1)
        return x * 1

    made = layer(forward, lambda ctx, dy: noting("backward", ctx.saved_tensors[0]))
    with pytest.raises(AttributeError, match=attribute) as caught:
        run(jax.grad(loss(made)))(X)
    assert advice in text_of(caught.value)
    assert f"Made.{method}" in text_of(caught.value)
    assert not hasattr(X, attribute)

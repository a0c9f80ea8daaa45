"""Code that uses an array as a tensor of torch or Paddle: the error says what to write in JAX."""

from __future__ import annotations

import operator  # noqa: F401 (in code below that is evaluated)
import re

import jax
import jax.numpy as jnp
import numpy as np  # noqa: F401
import pytest

from tests.kit.modes import EAGER_AND_JIT

from .made import layer, loss, text_of

X = jnp.ones((2, 3))

HABITS = {
    "x.numel()": "x.size",
    "x.dim()": "x.ndim",
    "x.size(0)": "x.shape[0]",
    "x.view(3, 2)": "x.reshape(a, b)",
    "x.unsqueeze(0)": "jnp.expand_dims(x, axis)",
    "x.permute(1, 0)": "jnp.transpose(x, axes)",
    "x.expand(2, 3)": "jnp.broadcast_to(x, shape)",
    "x.t()": "x.T",
    "x.to(jnp.float32)": "x.astype(dtype)",
    "x.float()": "x.astype(jnp.float32)",
    "x.half()": "x.astype(jnp.float16)",
    "x.long()": "x.astype(jnp.int32)",
    "x.contiguous()": "x itself",
    "x.detach()": "jax.lax.stop_gradient(x)",
    "x.data": "jax.lax.stop_gradient(x)",
    "x.cuda()": "jax.device_put(x, device)",
    "x.numpy()": "np.asarray(x)",
    "x.exp()": "jnp.exp",
    "x.sigmoid()": "jax.nn",
    "x.pow(2)": "x ** n",
    "x.mul(x)": "x * y",
    "x.matmul(x)": "x @ y",
    "x.clamp(0, 1)": "jnp.clip(x, ",
    "x.masked_fill(x > 0, 0)": "jnp.where(mask, value, x)",
    "x.scatter_add(0, x, x)": "x.at[index].add(y)",
    "x.index_select(0, x)": "jnp.take(x, index, axis)",
    "x.topk(1)": "jax.lax.top_k(x, k)",
    "x.requires_grad": "ctx.needs_input_grad[i]",
    "x.stop_gradient": "ctx.needs_input_grad[i]",
    "x.backward(x)": "jax.vjp(f, x)",
    "x.new_zeros(3)": "jnp.zeros(shape, x.dtype)",
    "x.add_(1)": "in place",
    "operator.setitem(x, 0, 1.0)": "x.at[",
    "x.sum(dim=1)": "axis",
    "x.mean(axis=1, keepdim=True)": "keepdims",
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
    with pytest.raises((AttributeError, TypeError, NotImplementedError, ValueError)) as raised:
        RUNS[run](layer(method_of(code)).apply)
    text = text_of(raised.value)
    assert HABITS[code] in text
    assert "Made.forward" in text
    for name in re.findall(r"(?<![\w./])(?:jax|jnp)(?:\.\w+)+", text):
        eval(name)  # is in JAX


HOST_CODE = ("np.asarray(x)", "np.sin(x)", "float(x.sum())", "x.sum().item()", "x.tolist()")


@pytest.mark.parametrize("run", ["jit", "vmap"])
@pytest.mark.parametrize("code", HOST_CODE)
def test_host_code_in_traced_code_is_told_of_pure_callback(code, run):
    with pytest.raises(TypeError) as raised:
        RUNS[run](layer(method_of(code)).apply)
    assert "jax.pure_callback" in text_of(raised.value)


@EAGER_AND_JIT
@pytest.mark.parametrize("code", ["x.detach()", "x.size(0)"])
def test_so_does_that_of_backward(code, mode):
    with pytest.raises((AttributeError, TypeError)) as raised:
        mode(jax.grad(loss(layer(backward=method_of(code)))))(X)
    assert HABITS[code] in text_of(raised.value)
    assert "Made.backward" in text_of(raised.value)


@pytest.mark.parametrize("code", ["[].detach()", "x.nothing", "x.x", "len(5)", "{}['view']", "jnp.nothing"])
def test_other_errors_get_no_advice(code):
    with pytest.raises((AttributeError, TypeError, KeyError)) as raised:
        layer(method_of(code)).apply(X)
    assert "In JAX" not in text_of(raised.value)

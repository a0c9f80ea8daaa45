"""Code that uses an array as a tensor of torch or Paddle: the error says what to write in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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
    "x.add_(1)": "arrays never change in place: y = jnp.add(x, ...)",
    "x.scale_(2)": "y = x + 1 for x.add_(1), x.at[i].set(v) for a part of x",
    "x.addmm_(x, x)": "y = x + a @ b",
    "x.addcmul_(x, x)": "y = x + value * a * b",
    "x.scatter_add_(0, x, x)": "y = x.at[index].add(y)",
    "x.copy_(x)": "x.at[:].set(y)",
    "x.requires_grad_()": "ctx.needs_input_grad[i]",
    "x.conj_physical()": "jnp.conj(x)",
    "x.multinomial(1)": "jax.random.categorical(key, jnp.log(x))",
    "x.device.type": "jax.default_backend()",
    "x.flatten(0, 1)": "x.reshape(-1, *x.shape[2:])",
    "x.flatten(1)": "x.reshape(len(x), -1)",
    "x.to(jnp.float32)": "x.astype(dtype)",
    "x.half()": "x.astype(jnp.float16)",
    "x.numpy()": "np.asarray(x), outside of traced code. Code that has to run on the host",
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
    with pytest.raises((AttributeError, TypeError, NotImplementedError, ValueError)) as raised:
        RUNS[run](layer(method_of(code)).apply)
    assert HABITS[code] in text_of(raised.value)
    assert "This happened in Made.forward" in text_of(raised.value)


HOST_CODE = ("np.asarray(x)", "np.sin(x)", "float(x.sum())", "x.sum().item()", "x.tolist()", "x.numpy()")


@pytest.mark.parametrize("run", ["jit", "vmap"])
@pytest.mark.parametrize("code", ["x.clone()", "x.sum() > 0 and x", *HOST_CODE])
def test_what_only_traced_code_refuses(code, run):
    with pytest.raises((AttributeError, TypeError)) as raised:
        RUNS[run](layer(method_of(code)).apply)
    text = text_of(raised.value)
    assert ("x itself, which never changes" in text) == (code == "x.clone()")
    assert ("asks for numbers" in text) == (code not in ("x.clone()", "x.numpy()"))
    assert ("jax.pure_callback" in text) == (code in HOST_CODE)


def test_the_two_lines_for_host_code_work():
    with pytest.raises(TypeError) as raised:
        jax.jit(layer(method_of("np.tanh(x)")).apply)(X)
    lines = "\n".join(line.strip() for line in text_of(raised.value).splitlines() if line.startswith("    "))

    def forward(ctx, x):
        scope = {"jax": jax, "x": x, "function": np.tanh}
        exec(lines, scope)
        return scope["y"]

    np.testing.assert_allclose(jax.jit(jax.vmap(layer(forward).apply))(X), np.tanh(X), rtol=1e-6)


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("code", ["jnp.tanh(x)", "jax.nn.sigmoid(x)", "x * 0.5", "x + 1.0", "x**2", "-x"])
def test_an_argument_that_is_a_list_of_numbers(code, kind):
    with pytest.raises(TypeError) as raised:
        layer(method_of(code)).apply(kind([0.5, 1.0]))
    assert "pass an array: Made.apply(jnp.asarray(...))" in text_of(raised.value)


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

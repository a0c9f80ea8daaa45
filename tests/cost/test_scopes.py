"""The names of layers in programs, as a profiler shows them."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import Function
from tests.kit.layers import ForwardTanh, Tanh

X = jnp.linspace(-1, 1, 64).reshape(8, 8)


class OwnJvp(Tanh):
    @staticmethod
    def jvp(ctx, dx):
        (y,) = ctx.saved_tensor()
        return dx / jnp.cosh(y)


class OwnBatch(Tanh):
    @staticmethod
    def vmap(info, in_dims, x):
        return jnp.tan(x), in_dims[0]


class Split(Function):
    @staticmethod
    def forward(x):
        return jnp.tanh(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, dy):
        return dy * (1 - ctx.saved_tensors[0] ** 2)


def scopes(function, *args):
    """Each operation with its innermost scope: ("Tanh/forward", "tanh") for `jit(f)/jvp(Tanh/forward)/tanh`."""
    # Before the optimization: a compiled program may come from a cache, with the names of another test.
    text = jax.jit(function).lower(*args).as_text("hlo", debug_info=True)
    found = set()
    for name in re.findall(r'op_name="([^"]*)"', text):
        scope, _, operation = re.sub(r"\w+\(|\)", "", name).rpartition("/")
        found.add(("/".join(scope.split("/")[-2:]), operation))
    return found


def loss_of(layer):
    return lambda x: layer.apply(jnp.sin(x)).sum()


def pushed(layer):
    return lambda x: jax.jvp(loss_of(layer), (x,), (x,))


AROUND = {
    "jit of grad": lambda f: jax.grad(f),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "grad of vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, r: (c + f(r), None), 0.0, x)[0]),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("layer", [Tanh, ForwardTanh, OwnJvp, Split])
def test_forward_and_backward_bear_the_name_of_their_class(layer, around):
    found = scopes(AROUND[around](loss_of(layer)), X)
    assert (f"{layer.__name__}/forward", "tanh") in found
    assert (f"{layer.__name__}/backward", "sub") in found
    assert not any(scope.startswith(layer.__name__) for scope, operation in found if operation in ("sin", "cos"))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (loss_of(Tanh), {("Tanh/forward", "tanh")}),
        (pushed(ForwardTanh), {("ForwardTanh/forward", "tanh"), ("ForwardTanh/backward", "sub")}),
        (pushed(OwnJvp), {("OwnJvp/forward", "tanh"), ("OwnJvp/jvp", "div")}),
        (jax.vmap(OwnBatch.apply), {("OwnBatch/vmap", "tan")}),
        (jax.vmap(jax.grad(loss_of(OwnBatch))), {("OwnBatch/vmap", "tan"), ("OwnBatch/backward", "sub")}),
    ],
    ids=["forward", "jvp", "jvp of its own", "vmap of its own", "vmap of its own and grad"],
)
def test_other_methods_bear_the_name_too(function, names):
    assert names <= scopes(function, X)


def test_a_layer_within_a_layer():
    class Outer(Tanh):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jnp.exp(Tanh.apply(x))

        @staticmethod
        def backward(ctx, dy):
            return Tanh.apply(dy)

    text = jax.jit(jax.value_and_grad(loss_of(Outer))).lower(X).as_text("hlo", debug_info=True)
    assert re.search(r"\(Outer/forward\)/exp", text)
    assert re.search(r"\(Outer/forward\)/(eval_jaxpr/)?Tanh/forward/tanh", text)
    assert re.search(r"\(Outer/backward\)\)/Tanh/forward/tanh", text)


def test_eager_mode_does_not_pay_for_names(monkeypatch):
    # JAX compiles an operation of eager mode by itself, without the scopes around it.
    def refuse(name):
        raise AssertionError(f"the scope {name} was entered")

    monkeypatch.setattr(jax, "named_scope", refuse)
    loss_of(Tanh)(X)
    jax.grad(loss_of(Tanh))(X)
    pushed(OwnJvp)(X)
    with pytest.raises(AssertionError, match="the scope Tanh/forward was entered"):
        jax.jit(loss_of(Tanh))(X)

"""What saved_tensors_hooks refuse, and what the errors say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from tests.kit.layers import Multiply, Tanh, bits

from .spy import X


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (lambda x: x[:1], r"shape \(1,\)"),
        (lambda x: x.astype(jnp.float16), "float16"),
        (lambda x: 3, "3 of type int"),
        (lambda x: None, "None"),
    ],
)
@pytest.mark.parametrize("operation", [Tanh.apply, jnp.exp])
def test_unpack_must_return_what_was_packed(bad, got, operation):
    def loss(x):
        with saved_tensors_hooks(lambda x: x, bad):
            return operation(x).sum()

    owner = "Tanh, saved tensor 0" if operation == Tanh.apply else "the operation (jit|exp), residual 0"
    message = rf"unpack_hook returned .*{got}.*{owner}: expected dtype float32 and shape \(3,\)"
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(ValueError, match=message):
            differentiate(loss)(X)


@pytest.mark.parametrize("hook", ["pack", "unpack"])
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_exception_of_a_hook_names_layer_and_tensor(hook, host, around):
    def fails(x):
        raise KeyError("no such key")

    pair = (fails, lambda x: x) if hook == "pack" else (lambda x: x, fails)
    hooks = saved_tensors_hooks(*pair, host=host)
    step = around(jax.grad(lambda x: Multiply.apply(x, x + 1).sum()))
    # XLA hands on the text of an exception in a compiled program, and not the exception.
    compiled = host and around is jax.jit
    with pytest.raises(jax.errors.JaxRuntimeError if compiled else KeyError, match="no such key") as caught, hooks:
        jax.block_until_ready(step(X))
    text = str(caught.value) if compiled else "\n".join(caught.value.__notes__)
    assert f"{hook}_hook" in text
    assert "Multiply, saved tensor " in text


def test_hooks_must_be_callable():
    for pair in ((1, abs), (abs, None)):
        with pytest.raises(TypeError, match=r"saved_tensors_hooks: (un)?pack_hook must be callable, got (1|None)"):
            saved_tensors_hooks(*pair)
    with pytest.raises(TypeError, match="saved_tensors_hooks decorates a function, got 3"):
        bits()(3)


@pytest.mark.parametrize("needy", [np.asarray, lambda x: x if x.sum() > 0 else -x, lambda x: float(x.sum())])
def test_a_hook_that_needs_values_under_jit_says_what_to_do(needy):
    def loss(x):
        with saved_tensors_hooks(needy, lambda x: x):
            return Tanh.apply(x).sum()

    for differentiate in (lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))):
        with pytest.raises(TypeError, match=r"pack_hook needs concrete values, but Tanh, saved tensor 0.*host=True"):
            differentiate(loss)(X)


def test_a_packed_function_that_hides_traced_values_is_refused():
    def loss(x):
        with saved_tensors_hooks(lambda x: lambda: x, lambda f: f()):
            return Tanh.apply(x).sum()

    np.testing.assert_allclose(jax.grad(loss)(X), 1 - jnp.tanh(X) ** 2, rtol=1e-6)
    with pytest.raises(ValueError, match=r"function that closes over traced values .x."):
        jax.jit(jax.grad(loss))(X)


def test_an_exception_in_a_hook_says_where():
    def pack(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught, saved_tensors_hooks(pack, pack):
        jax.grad(lambda x: Tanh.apply(x).sum())(X)
    assert "This happened in pack_hook, for Tanh, saved tensor 0." in caught.value.__notes__


def test_functions_that_run_later_are_not_decorated():
    def generator():
        yield

    async def coroutine():
        pass

    for function in (generator, coroutine):
        with pytest.raises(TypeError, match=r"saved_tensors_hooks decorates a function that runs when it is called"):
            bits()(function)

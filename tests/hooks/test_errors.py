"""What saved_tensors_hooks refuse, and what the errors say."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from tests.kit.layers import ForwardTanh, Multiply, Tanh, bits, layer, loss, text_of
from tests.kit.modes import EAGER_AND_JIT
from tests.kit.oracle import Mine, fail

from .spy import GRADIENTS, X, in_block, tanh_sum


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, x), lambda x, dy: (2 * dy + 0 * x,))
# Operations by the name under which an error has them.
OPERATIONS = {"Tanh": Tanh.apply, "ForwardTanh": jax.vmap(ForwardTanh.apply), "exp": jnp.exp, "doubled": doubled}


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (lambda x: x[:1], r"shape \(1,\)"),
        (lambda x: x.astype(jnp.float16), "float16"),
        (lambda x: 3, "3 of type int"),
        (lambda x: None, "None"),
    ],
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_unpack_must_return_what_was_packed(bad, got, name):
    hooked = in_block(saved_tensors_hooks(lambda x: x, bad), lambda x: OPERATIONS[name](x).sum())
    for differentiate in GRADIENTS:
        with pytest.raises(ValueError, match="unpack_hook") as caught:
            differentiate(hooked)(X)
        assert all(re.search(word, str(caught.value)) for word in (got, name, "float32", r"\(3,\)"))


def test_an_object_that_is_no_pytree_cannot_hold_a_traced_tensor():
    def hold(x):
        return lambda: x

    hooked = in_block(saved_tensors_hooks(hold, lambda held: held()), tanh_sum)
    for differentiate in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        np.testing.assert_allclose(differentiate(hooked)(X), jax.grad(tanh_sum)(X), rtol=1e-6)
    for f in (jax.jit(hooked), lambda x: jax.lax.scan(lambda c, _: (hooked(c * X), None), x[0], length=2)[0]):
        with pytest.raises(TypeError, match="pytree"):
            jax.grad(f)(X)


@pytest.mark.parametrize("hook", ["pack", "unpack"])
@pytest.mark.parametrize("host", [False, True])
@EAGER_AND_JIT
def test_an_exception_of_a_hook_names_layer_and_tensor(hook, host, mode):
    pair = (fail, lambda x: x) if hook == "pack" else (lambda x: x, fail)
    hooks = saved_tensors_hooks(*pair, host=host)
    step = mode(jax.grad(lambda x: Multiply.apply(x, x + 1).sum()))
    # XLA hands on the text of an exception in a compiled program, and not the exception.
    compiled = host and mode is jax.jit
    with pytest.raises(jax.errors.JaxRuntimeError if compiled else Mine, match="on purpose") as caught, hooks:
        jax.block_until_ready(step(X))
    assert all(word in text_of(caught.value) for word in (f"{hook}_hook", "Multiply"))


@EAGER_AND_JIT
def test_an_attribute_error_of_unpack_is_not_one_of_the_context(mode):
    reads = layer(base=Tanh, backward=lambda ctx, dy: dy * (1 - ctx.saved_tensors[0] ** 2))  # a property
    hooked = in_block(saved_tensors_hooks(lambda x: x, lambda x: x.nothing), loss(reads))
    with pytest.raises(AttributeError, match=r"has no attribute.* .?nothing"):
        mode(jax.grad(hooked))(X)


def generator():
    yield


async def coroutine():
    pass


@pytest.mark.parametrize("function", [3, generator, coroutine])
def test_what_cannot_be_decorated(function):
    with pytest.raises(TypeError, match=getattr(function, "__name__", "3")):
        bits()(function)


@pytest.mark.parametrize("hook", [lambda x, y: x, lambda: 1, lambda x, *, level: x, jax.jit(lambda x, y: x), 1, None])
def test_hooks_take_one_argument(hook):
    for pair, name in (((hook, abs), "pack_hook"), ((abs, hook), "unpack_hook")):
        with pytest.raises(TypeError, match=name):
            saved_tensors_hooks(*pair)


class Method:
    def __call__(self, x, level=3):
        return x


@pytest.mark.parametrize(
    "hook", [jnp.asarray, np.positive, Method(), Method().__call__, functools.partial(lambda level, x: x, 3)]
)
def test_what_takes_one_argument_is_a_hook(hook):
    assert jax.grad(in_block(saved_tensors_hooks(hook, lambda x: x), tanh_sum))(X).shape == X.shape


@pytest.mark.parametrize("needy", [np.asarray, lambda x: x if x.sum() > 0 else -x, lambda x: float(x.sum())])
def test_a_hook_that_needs_values_under_jit_says_what_to_do(needy):
    for differentiate in GRADIENTS[1:]:
        with pytest.raises(TypeError, match=r"pack_hook(?s:.*)Tanh(?s:.*)host=True"):
            differentiate(in_block(saved_tensors_hooks(needy, lambda x: x), tanh_sum))(X)

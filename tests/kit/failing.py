"""Tests that fail, each in one way: other tests run this file with pytest, and look at what it shows."""

import jax
import jax.numpy as jnp

from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck
from pylayer_jax.testing._check_layer import PROPERTIES
from tests.kit.layers import layer

X = jnp.ones(2)
WrongSign = layer(jnp.sin, lambda x, dy: -dy * jnp.cos(x), plain=True)


def mistaken(ctx, dy):
    return dy * ctx.nothing


def test_an_attribute():
    made = layer(backward=mistaken)
    jax.grad(lambda x: made.apply(x).sum())(X)


def test_a_key():
    made = layer(backward=lambda ctx, dy: {}["key"])
    jax.grad(lambda x: made.apply(x).sum())(X)


def test_gradcheck():
    gradcheck(WrongSign, (X,))


def test_assert_equivalent():
    assert_equivalent(WrongSign, jnp.sin, (X,))


def test_check_layer():
    check_layer(WrongSign, X, skip=[name for name in PROPERTIES if name != "gradients"])

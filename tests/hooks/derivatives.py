"""Derivatives of a function of two arrays, as the tests of packers take them."""

import jax
import jax.numpy as jnp


def gradient(f):
    return jax.grad(f, (0, 1))


def second(f):
    return gradient(lambda x, w: sum(jnp.sum(g**2) for g in gradient(f)(x, w)))

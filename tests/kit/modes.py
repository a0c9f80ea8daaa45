"""Ways to run a function, and ways to get the gradient of a scalar function of one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

X = jnp.array([0.5, -1.0, 2.0])

MODES = {
    "grad": jax.grad,
    "jit-grad": lambda f: jax.jit(jax.grad(f)),
    "grad-jit": lambda f: jax.grad(jax.jit(f)),
    "scan": lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c + f(x), None), 0.0, None, length=1)[0]),
    "cond": lambda f: jax.grad(lambda x: jax.lax.cond(x.sum() < 99, f, lambda x: x.sum(), x)),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0],
}

modes = pytest.mark.parametrize("mode", MODES)

EAGER_AND_JIT = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])

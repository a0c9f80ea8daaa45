"""A process that saves to a directory, and ends: python -m tests.hooks.on_disk DIRECTORY."""

import gc
import os
import sys

import jax
import jax.numpy as jnp

from pylayer_jax.packers import save_on_disk


def ends(directory: str) -> None:
    """Print a gradient, the number of files while one is held, and the gradient that reads it."""
    f = save_on_disk(directory, recompute=False)(lambda x: jnp.sum(jnp.sin(x)))
    print(jax.jit(jax.grad(f))(jnp.zeros(2)).tolist(), flush=True)  # a child must not print it again
    value, pullback = jax.vjp(f, jnp.zeros(3))
    if os.fork() == 0:  # a child that ends must not take the files of its parent along
        sys.exit(0)
    os.wait()
    gc.collect()
    print(sum(len(names) for _, _, names in os.walk(directory)), pullback(value)[0].tolist())


ends(sys.argv[1])

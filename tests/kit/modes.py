"""Defines modes: transforms under which a test runs a function, or computes the gradient of a scalar function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import saved_tensors_hooks

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

GRADIENTS = {name: MODES[name] for name in ("grad", "jit-grad", "grad-jit")}
RUNS = {"eager": lambda f: f, "jit": jax.jit, "grad": jax.grad, "jit-grad": MODES["jit-grad"]}
runs = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
gradients = pytest.mark.parametrize("run", GRADIENTS.values(), ids=GRADIENTS)
EAGER_AND_JIT = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])

# Code that JAX stages, around a function of one array that gives one like it.
STAGED = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda _, c: f(c), x),
    "cond": lambda f: lambda x: jax.lax.cond(jnp.sum(x) > -99, f, f, x),
    "checkpoint": jax.checkpoint,
}

# Ways to run a function from an array of several rows to a scalar, and its derivatives.
DERIVATIVES = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "grad of jit": lambda f: jax.grad(jax.jit(f)),
    "grad of grad": lambda f: jax.grad(lambda *xs: jnp.sum(jax.grad(f)(*xs))),
    "jit of grad of grad": lambda f: jax.jit(DERIVATIVES["grad of grad"](f)),
    "hessian": jax.hessian,
    "vmap of grad": lambda f: jax.vmap(jax.grad(f)),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(f))),
    "grad of vmap": lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x))),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "jit of scan of grad": lambda f: jax.jit(STAGED["scan"](jax.grad(f))),
}

# Ways to get the second derivative of a function from a scalar to a scalar.
SECOND = {
    "grad of grad": lambda f: jax.grad(jax.grad(f)),
    "jit of grad of grad": lambda f: jax.jit(jax.grad(jax.grad(f))),
    "grad of jit of grad of jit": lambda f: jax.grad(jax.jit(jax.grad(jax.jit(f)))),
    "hessian": jax.hessian,
    "jvp of grad": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (1.0,))[1],
    "jit of jvp of grad": lambda f: jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (1.0,))[1]),
    "vmap of grad of grad": lambda f: lambda x: jax.vmap(jax.grad(jax.grad(f)))(jnp.stack([x, x]))[1],
    "grad of vmap of grad": lambda f: jax.grad(lambda x: 0.5 * jax.vmap(jax.grad(f))(jnp.stack([x, x])).sum()),
    "hessian of vmap": lambda f: jax.hessian(lambda x: 0.5 * jax.vmap(f)(jnp.stack([x, x])).sum()),
    "of scan": lambda f: jax.grad(jax.grad(STAGED["scan"](f))),
    "of checkpoint": lambda f: jax.grad(jax.grad(jax.checkpoint(f))),
    "of hooks": lambda f: jax.grad(jax.grad(saved_tensors_hooks(lambda x: x, lambda x: x)(f))),
}

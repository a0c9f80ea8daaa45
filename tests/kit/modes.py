"""Defines tables of transforms, under which tests run a function or compute its derivatives.

    @modes                                    # runs the test for each key of MODES
    def test_gradient(mode):
        assert MODES[mode](loss(Square))(X).tolist() == (2 * X).tolist()

`@runs`, `@gradients` and `@EAGER_AND_JIT` give the test the transform itself, and not its key.
"""

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import saved_tensors_hooks

X = jnp.array([0.5, -1.0, 2.0])

# Each maps a scalar function of an array to its gradient.
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
NEEDS_BARRIERS = pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 removes optimization barriers on CPU"
)
EAGER_AND_JIT = pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["eager", "jit"])

# Each maps a function f, from an array to an array of the same shape and dtype, to code that JAX stages and that
# applies f once.
STAGED = {
    "jit": jax.jit,
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0],
    "fori_loop": lambda f: lambda x: jax.lax.fori_loop(0, 1, lambda _, c: f(c), x),
    "cond": lambda f: lambda x: jax.lax.cond(jnp.sum(x) > -99, f, f, x),
    "checkpoint": jax.checkpoint,
}

# Each maps a scalar function of an array with several rows to the function, to one of its derivatives, or to a batch of
# these.
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

# Each maps a function from a scalar to a scalar to its second derivative.
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

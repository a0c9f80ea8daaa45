"""A layer after Paddle's that runs without an original to compare with."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer


def _is_tensor(value):
    return isinstance(value, jax.Array)


def _is_float(value):
    return jnp.issubdtype(value.dtype, jnp.floating)


class FullRecompute(PyLayer):
    """P8, long: runs a function again in backward. Tensors and tuples of tensors are saved, side by side.

    A tensor that is random state is a PRNG key here, an argument like any other, and is replayed as such.
    """

    @staticmethod
    def forward(ctx, run_function, *args, **kwargs):
        ctx.run_function, ctx.kwargs = run_function, kwargs
        tensors = [_is_tensor(arg) or (isinstance(arg, tuple) and any(map(_is_tensor, arg))) for arg in args]
        ctx.inputs = [None if is_saved else arg for arg, is_saved in zip(args, tensors, strict=True)]
        ctx.places = [i for i, is_saved in enumerate(tensors) if is_saved]
        ctx.save_for_backward(*(args[i] for i in ctx.places))
        return run_function(*args, **kwargs)

    @staticmethod
    def backward(ctx, *grads):
        saved, inputs = ctx.saved_tensor(), list(ctx.inputs)
        moving = [(isinstance(x, tuple) and _is_float(x[0])) or (_is_tensor(x) and _is_float(x)) for x in saved]

        def run(*moved):
            rest = iter(moved)
            for place, value, moves in zip(ctx.places, saved, moving, strict=True):
                inputs[place] = next(rest) if moves else value
            outputs = ctx.run_function(*inputs, **ctx.kwargs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return [y for y in outputs if _is_tensor(y) and _is_float(y)]

        _, pull = jax.vjp(run, *(x for x, moves in zip(saved, moving, strict=True) if moves))
        found = iter(pull([g for g in grads if _is_float(g)]))
        return tuple(next(found) if moves else None for moves in moving)

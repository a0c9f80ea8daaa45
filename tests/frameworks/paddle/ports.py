"""Layers that people really write in Paddle, all of one device; some have their text in the registry.

P and a number name the layer in the list of layers that they are taken from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from pylayer_jax import PyLayer
from tests.registry.after_paddle import half_away, sides


def _is_tensor(value):
    return isinstance(value, jax.Array)


def _is_float(value):
    return jnp.issubdtype(value.dtype, jnp.floating)


class FullRecompute(PyLayer):
    """P8, long: runs a function again in backward. Tensors and tuples of tensors are saved, side by side.

    A tensor that is random state is a PRNG key here, an argument like any other, and is replayed as such.
    """

    @staticmethod
    def forward(ctx, run_function, preserve_rng_state, offload_indices, get_state, set_state, *args, **kwargs):
        ctx.run_function, ctx.kwargs = run_function, kwargs
        ctx.set_state, ctx.state = set_state, get_state() if preserve_rng_state else None
        saved, ctx.inputs, ctx.places = [], [], []
        for i, arg in enumerate(args):
            if isinstance(arg, tuple) and any(map(_is_tensor, arg)):
                if not all(map(_is_tensor, arg)):
                    raise ValueError(f"argument {i} mixes tensors and other values")
                if len({bool(_is_float(x)) for x in arg}) > 1:
                    raise ValueError(f"argument {i} mixes tensors with and without a gradient")
            elif not _is_tensor(arg):
                ctx.inputs.append(arg)
                continue
            saved.append(arg)
            ctx.places.append(i)
            ctx.inputs.append(None)
        ctx.save_for_backward(*saved)
        return run_function(*args, **kwargs)

    @staticmethod
    def backward(ctx, *grads):
        saved, inputs = ctx.saved_tensor(), list(ctx.inputs)
        moving = [(isinstance(x, tuple) and _is_float(x[0])) or (_is_tensor(x) and _is_float(x)) for x in saved]
        if ctx.set_state is not None:
            ctx.set_state(ctx.state)

        def run(*moved):
            rest = iter(moved)
            for place, value, moves in zip(ctx.places, saved, moving, strict=True):
                inputs[place] = next(rest) if moves else value
            outputs = ctx.run_function(*inputs, **ctx.kwargs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            return [y for y in outputs if _is_tensor(y) and _is_float(y)]

        outputs, pull = jax.vjp(run, *(x for x, moves in zip(saved, moving, strict=True) if moves))
        if not outputs:
            raise RuntimeError("none of the outputs requires a gradient")
        found = iter(pull([g for g in grads if _is_float(g)]))
        return tuple(next(found) if moves else None for moves in moving)


class MoEGather(PyLayer):
    """P10, one rank: rows put in their places; backward takes them from there, repeated or not."""

    @staticmethod
    def forward(ctx, buf, pos, local_count, global_count, local_batch, world_size, group=None):
        ctx.save_for_backward(pos, local_count, global_count)
        ctx.moe_args = local_batch, world_size, group
        return jnp.zeros((local_batch, *buf.shape[1:]), buf.dtype).at[pos].set(buf)

    @staticmethod
    def backward(ctx, dy):
        pos, _, _ = ctx.saved_tensor()
        return dy[pos], None, None, None


class LSQPlus(PyLayer):
    """P15: a step and an offset; the slot of g is left out of the result."""

    @staticmethod
    def forward(ctx, x, alpha, beta, g, qn, qp):
        ctx.save_for_backward(x, alpha, beta)
        ctx.other = g, qn, qp
        return jnp.clip(half_away((x - beta) / alpha), qn, qp) * alpha + beta

    @staticmethod
    def backward(ctx, dy):
        x, alpha, beta = ctx.saved_tensor()
        g, qn, qp = ctx.other
        q = (x - beta) / alpha
        low, up, mid = sides(q, qn, qp)
        dalpha = jnp.sum(dy * (low * qn + up * qp + mid * (half_away(q) - q))) * g
        return mid * dy, dalpha, jnp.sum((low + up) * dy) * g


class SavedAuxiliaryLoss(PyLayer):
    """P24, variant B: saves the loss, hands on a copy, and leaves the slot of a loss without gradient empty."""

    @staticmethod
    def forward(ctx, x, loss):
        ctx.save_for_backward(loss)
        ctx.required = ctx.needs_input_grad[1]
        return x.copy()

    @staticmethod
    def backward(ctx, dy):
        (loss,) = ctx.saved_tensor()
        return dy, jnp.ones_like(loss) if ctx.required else None

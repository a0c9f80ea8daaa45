"""Layers that people really write, beside those of the registry and of `tests/frameworks/torch/ports.py`.

P and a number name a Paddle PyLayer, T and a number a torch Function of the list that the layers are taken from.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from pylayer_jax import Function, PyLayer, once_differentiable
from tests.frameworks.torch.ports import Sparsemax

# -- Paddle -----------------------------------------------------------------------------------------


def _is_tensor(value):
    return isinstance(value, jax.Array)


def _is_float(value):
    return jnp.issubdtype(value.dtype, jnp.floating)


class Recompute(PyLayer):
    """P8: runs a function again in backward. Tensors and tuples of tensors are saved, side by side.

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


def half_away(x):
    return jnp.sign(x) * jnp.floor(jnp.abs(x) + 0.5)


def _sides(q, qn, qp):
    low, up = (q < qn).astype(q.dtype), (q > qp).astype(q.dtype)
    return low, up, 1 - low - up


class LSQ(PyLayer):
    """P14, with one step per channel or one for all."""

    @staticmethod
    def forward(ctx, weight, alpha, g, qn, qp, per_channel=False, quant_axis=0):
        ctx.save_for_backward(weight, alpha)
        ctx.other = g, qn, qp, per_channel, quant_axis
        alpha = LSQ._spread(alpha, weight, per_channel, quant_axis)
        return jnp.clip(half_away(weight / alpha), qn, qp) * alpha

    @staticmethod
    def backward(ctx, dy):
        weight, alpha = ctx.saved_tensor()
        g, qn, qp, per_channel, axis = ctx.other
        q = weight / LSQ._spread(alpha, weight, per_channel, axis)
        low, up, mid = _sides(q, qn, qp)
        slope = dy * (low * qn + up * qp + mid * (half_away(q) - q))
        others = tuple(i for i in range(weight.ndim) if not per_channel or i != axis)
        return mid * dy, slope.sum(others) * g

    @staticmethod
    def _spread(alpha, weight, per_channel, axis):
        return alpha.reshape([-1 if i == axis else 1 for i in range(weight.ndim)]) if per_channel else alpha


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
        low, up, mid = _sides(q, qn, qp)
        dalpha = jnp.sum(dy * (low * qn + up * qp + mid * (half_away(q) - q))) * g
        return mid * dy, dalpha, jnp.sum((low + up) * dy) * g


class AuxiliaryLoss(PyLayer):
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


# -- torch ------------------------------------------------------------------------------------------


def _solved(solve, y, size, x, dim, k):
    """Where as many entries are in the support as were searched, there may be more: search twice as many."""
    if k >= x.shape[dim]:
        return y, size
    wider, wider_size = solve(x, dim, 2 * k)
    return jnp.where(size == k, wider, y), jnp.where(size == k, wider_size, size)


def _top(x, dim, k):
    """The largest entries along an axis in descending order, and their positions, counted from one."""
    ordered = jnp.flip(jnp.sort(x, dim), dim)
    ordered = jax.lax.slice_in_dim(ordered, 0, min(k, x.shape[dim]), axis=dim)
    shape = [1] * x.ndim
    shape[dim] = -1
    return ordered, jnp.arange(1, ordered.shape[dim] + 1, dtype=x.dtype).reshape(shape)


def _sparsemax_of_top(x, dim, k):
    ordered, position = _top(x, dim, k)
    sums = ordered.cumsum(dim) - 1
    size = (position * ordered > sums).sum(dim, keepdims=True)
    y = jnp.maximum(x - jnp.take_along_axis(sums, size - 1, dim) / size.astype(x.dtype), 0)
    return _solved(_sparsemax_of_top, y, size, x, dim, k)


class SparsemaxTopK(Function):
    """T13: backward is that of another class, with a None for one argument more."""

    @staticmethod
    def forward(ctx, x, dim=0, k=100):
        ctx.dim = dim
        y, size = _sparsemax_of_top(x - x.max(dim, keepdims=True), dim, k)
        ctx.save_for_backward(size, y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        return (*Sparsemax.backward(ctx, grad_output), None)


def _entmax_of_top(z, dim, k):
    ordered, position = _top(z, dim, k)
    mean, mean_square = ordered.cumsum(dim) / position, (ordered**2).cumsum(dim) / position
    inner = jnp.maximum((1 - position * (mean_square - mean**2)) / position, 0)
    tau = mean - jnp.sqrt(inner)
    size = (tau <= ordered).sum(dim, keepdims=True)
    y = jnp.maximum(z - jnp.take_along_axis(tau, size - 1, dim), 0) ** 2
    return _solved(_entmax_of_top, y, size, z, dim, k)


class Entmax15(Function):
    """T14: saves its output alone."""

    @staticmethod
    def forward(ctx, x, dim=0):
        return Entmax15._kept(ctx, x, dim, x.shape[dim])

    @staticmethod
    def _kept(ctx, x, dim, k):
        ctx.dim = dim
        y, _ = _entmax_of_top((x - x.max(dim, keepdims=True)) / 2, dim, k)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        # The original takes the root of zeros as well, whose second derivative is no number.
        q = jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1)), 0)
        dx = grad_output * q
        return dx - q * dx.sum(ctx.dim, keepdims=True) / q.sum(ctx.dim, keepdims=True), None


class Entmax15TopK(Entmax15):
    """T15: inherits from T14, and calls its backward."""

    @staticmethod
    def forward(ctx, x, dim=0, k=100):
        return Entmax15._kept(ctx, x, dim, k)

    @staticmethod
    def backward(ctx, grad_output):
        return (*Entmax15.backward(ctx, grad_output), None)


class LinearQuantize(Function):
    """T38: straight through."""

    @staticmethod
    def forward(ctx, x, scale, zero_point, dequantize, inplace):
        y = jnp.round(scale * x - zero_point)
        if dequantize:
            y = (y + zero_point) / scale
        if inplace:
            ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None, None, None, None


class DenseSolver:
    """A live object without arrays of its own."""

    def factor(self, mat):
        return jax.scipy.linalg.lu_factor(mat)

    def solve(self, factors, b, transposed=0):
        return jax.scipy.linalg.lu_solve(factors, b, transposed)


class FactorAndSolve(Function):
    """T69, dense: the solver is the first output, and is kept on ctx beside the factors."""

    @staticmethod
    def forward(ctx, mat, b, solver_fn=None):
        ctx.solver = (solver_fn or DenseSolver)()
        ctx.factors = ctx.solver.factor(mat)
        x = ctx.solver.solve(ctx.factors, b)
        ctx.save_for_backward(x)
        return ctx.solver, x

    @staticmethod
    def backward(ctx, solver, grad_output):
        assert solver is None
        (x,) = ctx.saved_tensors
        db = ctx.solver.solve(ctx.factors, grad_output, 1)
        return -jnp.outer(db, x), db, None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Factored:
    """A solver that holds its factors, and so is made of tensors."""

    lu: jax.Array
    pivots: jax.Array

    def solve(self, b, transposed=0):
        return jax.scipy.linalg.lu_solve((self.lu, self.pivots), b, transposed)


class FactorOnceAndSolve(Function):
    """T69, where the solver that comes out can be used again, without a gradient of its own.

    A second derivative would miss what comes through the factors, and so is refused.
    """

    @staticmethod
    def forward(ctx, mat, b):
        solver = Factored(*jax.scipy.linalg.lu_factor(mat))
        x = solver.solve(b)
        ctx.solver = solver
        ctx.mark_non_differentiable(solver.lu, solver.pivots)
        ctx.save_for_backward(x)
        return solver, x

    @staticmethod
    @once_differentiable
    def backward(ctx, solver, grad_output):
        (x,) = ctx.saved_tensors
        db = ctx.solver.solve(grad_output, 1)
        return -jnp.outer(db, x), db


class NativeLinear:
    """In place of a compiled module, whose backward returns a list."""

    def forward(self, x, weight, bias):
        return x @ weight.T + bias

    def backward(self, grad_output, x, weight):
        return [grad_output @ weight, grad_output.T @ x, grad_output.sum(0)]


NATIVE = NativeLinear()


class MyLinear(Function):
    """T70: what is kept is told apart from forward, which is a call into a module."""

    @staticmethod
    def forward(x, weight, bias, module=NATIVE):
        return module.forward(x, weight, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.module = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad_output):
        return (*ctx.module.backward(grad_output, *ctx.saved_tensors), None)

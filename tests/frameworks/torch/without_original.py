"""Ports of Functions that call compiled code or other packages, so that no original stands beside them.

T and a number name the layer in the list of layers that they are taken from.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import jax.scipy.linalg

from pylayer_jax import Function

from .layers import ported


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
        return (*ported.Sparsemax.backward(ctx, grad_output), None)


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

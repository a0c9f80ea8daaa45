"""Layers of NumPy: `host = True`, and `host = "forward"` for a `backward` in JAX."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import scipy.sparse
import scipy.sparse.linalg

from pylayer_jax import Function, PyLayer, once_differentiable, saved_tensors_report
from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu
from pylayer_jax.testing import check_layer, gradcheck
from tests.kit.case import R3, W, X, Case, grid, ruled
from tests.kit.layers import layer
from tests.kit.modes import MODES, modes
from tests.kit.transforms import FIRST_ORDER, FORWARD_OVER_REVERSE, SECOND_ORDER, assert_same, expected, scalar

CASES: dict[str, Case] = {}
IMAGE = grid(4, 5)


def case(reference, *args, call=None, **flags):
    def enter(kind):
        CASES[kind.__name__] = Case(kind.__name__, call or kind.apply, reference, args, kind=kind, **flags)
        return kind

    return enter


@case(lambda x, kernel: jax.scipy.signal.convolve2d(x, kernel, mode="valid"), IMAGE, grid(2, 3))
class Conv2d(Function):
    host = True

    @staticmethod
    def forward(ctx, x, kernel):
        assert type(x) is type(kernel) is np.ndarray
        ctx.save_for_backward(x, kernel)
        return scipy.signal.convolve2d(x, kernel, mode="valid")

    @staticmethod
    def backward(ctx, dy):
        x, kernel = ctx.saved_tensors
        assert type(dy) is type(x) is np.ndarray
        # Of the flipped filter, as convolve2d turns it round.
        dkernel = scipy.signal.correlate2d(x, dy, mode="valid")[::-1, ::-1]
        return scipy.signal.correlate2d(dy, kernel, mode="full"), dkernel


@case(
    ruled(lambda x: jnp.abs(jnp.fft.rfft2(x)), lambda args, dy: (jnp.fft.irfft2(dy, s=args[0].shape),)),
    grid(4, 4),
    linear_loss=True,
)
class BadFFT(Function):
    """The first example of torch's tutorial, whose gradient is not meant to be right."""

    host = True

    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return np.abs(np.fft.rfft2(x))

    @staticmethod
    def backward(ctx, dy):
        return np.fft.irfft2(dy, s=ctx.shape)


@case(jnp.linalg.solve, W + 3 * jnp.eye(3), R3)
class Solve(PyLayer):
    host = True

    @staticmethod
    def forward(ctx, a, b):
        ctx.factors = scipy.linalg.lu_factor(a)
        x = scipy.linalg.lu_solve(ctx.factors, b)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, dx):
        (x,) = ctx.saved_tensor()
        db = scipy.linalg.lu_solve(ctx.factors, dx, trans=1)
        return -np.outer(db, x), db


POISSON = scipy.sparse.diags([-1.0, 3.0, -1.0], [-1, 0, 1], shape=(3, 3), format="csr", dtype=np.float32)


@case(
    lambda b: jnp.linalg.solve(jnp.asarray(POISSON.toarray()), b),
    R3,
    call=lambda b: ConjugateGradients.apply(b, POISSON),
)
class ConjugateGradients(PyLayer):
    host = True

    @staticmethod
    def forward(ctx, b, matrix):
        ctx.matrix = matrix
        return scipy.sparse.linalg.cg(matrix, b, rtol=1e-7)[0]

    @staticmethod
    def backward(ctx, dx):
        return scipy.sparse.linalg.cg(ctx.matrix.T, dx, rtol=1e-7)[0]


@case(lambda table, index: {"rows": table[index], "count": 5}["rows"], grid(4, 3), np.array([2, 0, 2]))
class Lookup(PyLayer):
    host = True

    @staticmethod
    def forward(ctx, table, index):
        ctx.index, ctx.shape = index, table.shape
        return table[index]

    @staticmethod
    def backward(ctx, drows):
        gradient = np.zeros(ctx.shape)
        np.add.at(gradient, ctx.index, drows)
        return gradient, None


@case(lambda x: jnp.linalg.eigh(x @ x.T)[0], W + jnp.diag(jnp.arange(3.0)), call=lambda x: Eigh.apply(x @ x.T))
class Eigh(PyLayer):
    host = True

    @staticmethod
    def forward(ctx, a):
        values, ctx.vectors = np.linalg.eigh(a)
        return values

    @staticmethod
    def backward(ctx, dvalues):
        return (ctx.vectors * dvalues) @ ctx.vectors.T


libm = ctypes.CDLL(ctypes.util.find_library("m"))
libm.expm1.restype, libm.expm1.argtypes = ctypes.c_double, [ctypes.c_double]


@case(jnp.expm1, X)
class Expm1(PyLayer):
    host = True

    @staticmethod
    def forward(ctx, x):
        y = np.array([libm.expm1(value) for value in x.ravel()]).reshape(x.shape)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        dy *= y + 1  # its own array
        return dy


@case(
    lambda a, b: {"x": jnp.linalg.solve(a, b), "residual": jnp.zeros(3)},
    W + 3 * jnp.eye(3),
    R3,
    call=lambda a, b: {k: v for k, v in DictSolver.apply({"a": a, "b": b}).items() if k != "status"},
)
class DictSolver(PyLayer):
    host = True

    @staticmethod
    def forward(ctx, problem):
        x = np.linalg.solve(problem["a"], problem["b"])
        residual = np.zeros(3)
        ctx.mark_non_differentiable(residual)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(problem["a"], x)
        return {"x": x, "status": "converged", "residual": residual}

    @staticmethod
    def backward(ctx, d):
        a, x = ctx.saved_tensor()
        if d["x"] is None:
            return (None,)
        db = np.linalg.solve(a.T, d["x"])
        return {"a": -np.outer(db, x), "b": db}


@case(lambda x: jnp.sin(x) * 2, X)
class Split(Function):
    host = True

    @staticmethod
    def forward(x, scale=2):
        assert type(x) is np.ndarray
        return scale * np.sin(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        assert type(output) is np.ndarray
        x, ctx.scale = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * ctx.scale * np.cos(x), None


@case(lambda x: jnp.cumsum(x, -1), X)
class Broadcast(PyLayer):
    host, host_vmap = True, "broadcast"

    @staticmethod
    def forward(ctx, x):
        return np.cumsum(x, -1)

    @staticmethod
    def backward(ctx, dy):
        return np.flip(np.cumsum(np.flip(dy, -1), -1), -1)


@case(lambda x: jnp.tanh(x), X)
class OwnVmap(PyLayer):
    host = True

    @staticmethod
    def forward(ctx, x):
        y = np.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return dy * (1 - y**2)

    @staticmethod
    def vmap(info, in_dims, x):
        assert type(x) is np.ndarray
        (dim,) = in_dims
        assert x.shape[dim] == info.batch_size
        return np.tanh(x), dim


@case(lambda a: jnp.linalg.cholesky(a), W @ W.T + jnp.eye(3), call=lambda a: Cholesky.apply(a, 1.0))
class Cholesky(PyLayer):
    host = True

    @staticmethod
    def example(a, scale):
        assert type(a) is np.ndarray
        return np.eye(len(a))

    @staticmethod
    def forward(ctx, a, scale):
        factor = np.linalg.cholesky(a) * scale
        ctx.inverse = np.linalg.inv(factor)
        ctx.save_for_backward(factor)
        return factor

    @staticmethod
    def backward(ctx, dfactor):
        (factor,) = ctx.saved_tensor()
        middle = np.tril(factor.T @ dfactor)
        middle -= np.diag(np.diag(middle)) / 2
        gradient = ctx.inverse.T @ middle @ ctx.inverse
        return (gradient + gradient.T) / 2, None


# Layers whose backward is JAX code.


@case(jnp.tanh, X)
class ForwardTanh(PyLayer):
    host = "forward"

    @staticmethod
    def forward(ctx, x):
        y = np.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        return dy * (1 - y**2)


@case(jnp.linalg.solve, W + 3 * jnp.eye(3), R3, forward_over_reverse="ForwardSolve")
class ForwardSolve(PyLayer):
    host = "forward"

    @staticmethod
    def forward(ctx, a, b):
        x = np.linalg.solve(a, b)
        ctx.save_for_backward(a, x)
        return x

    @staticmethod
    def backward(ctx, dx):
        a, x = ctx.saved_tensor()
        db = ForwardSolve.apply(a.T, dx)
        return -jnp.outer(db, x), db


@case(lambda x: jnp.cumsum(x, -1), X)
class Running(PyLayer):
    host = "forward"

    @staticmethod
    def forward(ctx, x):
        return np.cumsum(x, -1)

    @staticmethod
    def backward(ctx, dy):
        return RunningBack.apply(dy)


@case(lambda x: jnp.flip(jnp.cumsum(jnp.flip(x, -1), -1), -1), X)
class RunningBack(PyLayer):
    host = "forward"

    @staticmethod
    def forward(ctx, x):
        return np.flip(np.cumsum(np.flip(x, -1), -1), -1)

    @staticmethod
    def backward(ctx, dy):
        return Running.apply(dy)


FIRST = {name: transform for name, transform in FIRST_ORDER.items() if name != "export_with_vjp"}
SECOND = {name: case for name, case in CASES.items() if case.kind.host == "forward"}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("transform", FIRST)
def test_first_order(name, transform):
    made = CASES[name]
    ours = FIRST_ORDER[transform](scalar(made.layer, made.linear_loss), made.args)
    assert_same(ours, expected(made, FIRST_ORDER, transform))


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("transform", SECOND_ORDER)
def test_second_order(name, transform):
    made = SECOND[name]
    ours = SECOND_ORDER[transform](scalar(made.layer, made.linear_loss), made.args)
    assert_same(ours, expected(made, SECOND_ORDER, transform))


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("transform", FORWARD_OVER_REVERSE)
def test_forward_over_reverse(name, transform):
    made = SECOND[name]
    run = lambda: FORWARD_OVER_REVERSE[transform](scalar(made.layer, made.linear_loss), made.args)
    if made.forward_over_reverse:
        with pytest.raises(TypeError, match=made.forward_over_reverse):
            run()
    else:
        assert_same(run(), expected(made, FORWARD_OVER_REVERSE, transform))

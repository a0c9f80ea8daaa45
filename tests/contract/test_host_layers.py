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
from tests.kit.case import R3, Case, W, X, grid, ruled
from tests.kit.layers import layer
from tests.kit.modes import EAGER_AND_JIT, MODES, modes
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
        ctx.axis = -1
        return np.cumsum(x, -1)

    @staticmethod
    def backward(ctx, dy):
        return np.flip(np.cumsum(np.flip(dy, ctx.axis), ctx.axis), ctx.axis)


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


@case(lambda x: jnp.cumsum(x, -1), X, forward_over_reverse="Running")
class Running(PyLayer):
    host = "forward"

    @staticmethod
    def forward(ctx, x):
        return np.cumsum(x, -1)

    @staticmethod
    def backward(ctx, dy):
        return RunningBack.apply(dy)


@case(lambda x: jnp.flip(jnp.cumsum(jnp.flip(x, -1), -1), -1), X, forward_over_reverse="Running")
class RunningBack(PyLayer):
    host = "forward"

    @staticmethod
    def forward(ctx, x):
        return np.flip(np.cumsum(np.flip(x, -1), -1), -1)

    @staticmethod
    def backward(ctx, dy):
        return Running.apply(dy)


FIRST = {name: transform for name, transform in FIRST_ORDER.items() if name != "export_with_vjp"}
SECOND = {name: found for name, found in CASES.items() if found.kind.host == "forward"}


def first_in_the_core(names, count):
    """Return the names, of which only the first `count` run in a bare `python -m pytest`."""
    return [pytest.param(n, marks=() if i < count else pytest.mark.slow) for i, n in enumerate(names)]


@pytest.mark.parametrize("name", first_in_the_core(CASES, 2))
@pytest.mark.parametrize("transform", FIRST)
def test_first_order(name, transform):
    made = CASES[name]
    ours = FIRST_ORDER[transform](scalar(made.layer, made.linear_loss), made.args)
    assert_same(ours, expected(made, FIRST_ORDER, transform))


@pytest.mark.parametrize("name", first_in_the_core(SECOND, 1))
@pytest.mark.parametrize("transform", SECOND_ORDER)
def test_second_order(name, transform):
    made = SECOND[name]
    ours = SECOND_ORDER[transform](scalar(made.layer, made.linear_loss), made.args)
    assert_same(ours, expected(made, SECOND_ORDER, transform))


@pytest.mark.parametrize("name", first_in_the_core(SECOND, 1))
@pytest.mark.parametrize("transform", FORWARD_OVER_REVERSE)
def test_forward_over_reverse(name, transform):
    made = SECOND[name]

    def run():
        return FORWARD_OVER_REVERSE[transform](scalar(made.layer, made.linear_loss), made.args)

    if made.forward_over_reverse:
        with pytest.raises(TypeError, match=made.forward_over_reverse):
            run()
    else:
        assert_same(run(), expected(made, FORWARD_OVER_REVERSE, transform))


# -- examples, statics, errors --------------------------------------------------------------------


def host_layer(forward, backward=lambda ctx, dy: dy, **members):
    return layer(forward, backward, host=True, **members)


def text_of(error):
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


def error_of(run, *args):
    with pytest.raises(Exception, match=r".") as caught:
        jax.block_until_ready(run(*args))
    return text_of(caught.value)


def VMAP(f):
    return jax.vmap(f)


def test_methods_run_once_on_examples_and_once_per_call():
    runs = []

    def forward(ctx, x, static):
        runs.append("forward")
        ctx.save_for_backward(np.exp(x))
        return np.exp(x)

    def backward(ctx, dy):
        runs.append("backward")
        return dy * ctx.saved_tensor()[0], None

    made = host_layer(forward, backward)
    for static, calls in (1, 2), (1, 1), (2, 2), ([], 2):
        runs.clear()
        jax.jit(jax.grad(lambda x, s=static: made.apply(x, s).sum()))(X).block_until_ready()
        assert sorted(runs) == ["backward"] * calls + ["forward"] * calls
    runs.clear()
    jax.grad(lambda x: made.apply(x, 1).sum())(X)  # eager mode needs no example
    assert runs == ["forward", "backward"]


@modes
def test_arrays_are_writable_and_own(mode):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        x *= 2
        return x

    def backward(ctx, dy):
        (x,) = ctx.saved_tensor()
        x += 1
        dy *= x
        return dy

    made, x = host_layer(forward, backward), jnp.array([0.5, -1.0, 2.0])
    np.testing.assert_allclose(MODES[mode](lambda x: made.apply(x).sum())(x), x + 1)
    assert x.tolist() == [0.5, -1.0, 2.0]


def test_an_array_that_is_changed_in_place_in_some_runs_only():
    def forward(ctx, x):
        x[x > 100] = 100
        ctx.save_for_backward(x)
        return x * 2

    made = host_layer(forward, lambda ctx, dy: dy * ctx.saved_tensor()[0])
    grad = jax.jit(jax.grad(lambda x: made.apply(x).sum()))
    np.testing.assert_allclose(grad(X), X)
    assert "in place" in error_of(grad, X + 100)


@pytest.mark.parametrize("host", [True, "forward"])
@pytest.mark.parametrize("place", ["ctx", "output"])
def test_objects_made_from_values(place, host):
    # The gradient of the sum does not need the result of forward.
    def forward(ctx, x):
        count = int(np.sum(x > 0))
        if place == "ctx":
            ctx.info = {"count": count}
        return (x * 2, count) if place == "output" else x * 2

    made = layer(forward, lambda ctx, dy: dy * 2, host=host)

    def f(x):
        return jnp.sum(jax.tree.leaves(made.apply(x))[0] ** (1 + (place == "output")))

    text = error_of(jax.jit(jax.grad(f)), jnp.full((4, 5), 2.0))
    assert "ctx.info['count']" in text or "output[1]" in text
    assert "np.asarray" in text


DIFFERS = {  # in the run on example arrays, x is small
    "ctx, None or a mask": (lambda ctx, big: setattr(ctx, "mask", np.ones(3, bool) if big else None), None),
    "ctx, only set where it is needed": (lambda ctx, big: big and setattr(ctx, "mask", np.ones(3, bool)), None),
    "ctx, a list of arrays": (lambda ctx, big: setattr(ctx, "mask", [np.ones(3)] if big else []), None),
    "ctx, an array of another length": (lambda ctx, big: setattr(ctx, "mask", np.ones(3 if big else 0)), None),
    "ctx, another flag": (lambda ctx, big: ctx.set_materialize_grads(big), None),
    "gradient, None in the run": (lambda ctx, big: None, lambda g, big: None if big else g),
}


@pytest.mark.parametrize(
    ("name", "host"), [(name, host) for name in DIFFERS for host in (True, "forward") if host is True or "ctx" in name]
)
@pytest.mark.filterwarnings("ignore:.*returned None")
@pytest.mark.parametrize(
    "transform", [jax.jit, lambda f: jax.jit(jax.vmap(f)), lambda f: lambda x: jax.lax.map(f, x[None])[0]]
)
def test_what_differs_between_runs(name, host, transform):
    keep, returns = DIFFERS[name]

    def forward(ctx, x):
        keep(ctx, bool(np.max(x) > 50))
        ctx.save_for_backward(x)
        return 2 * x

    def backward(ctx, dy):
        return returns(dy, bool(np.max(ctx.saved_tensor()[0]) > 50)) if returns else dy

    made = host_layer(forward, backward) if host is True else layer(forward, backward, host=host)
    with pytest.raises(Exception, match=r"another (structure|flag)|expected float\w+\[0\]"):
        jax.block_until_ready(transform(jax.grad(lambda x: made.apply(x).sum()))(jnp.full((3,), 100.0)))


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [True, "forward"])
def test_an_input_that_is_returned(host, mode):
    # `forward` changes no example array in place, since these are small.
    def forward(ctx, x):
        ctx.save_for_backward(x.copy())
        return np.clip(x, -10, 10, out=x)

    made = layer(forward, lambda ctx, dy: dy * (abs(ctx.saved_tensor()[0]) <= 10).astype(dy.dtype), host=host)
    x = jnp.array([30.0, 8.0, -12.0])
    assert mode(made.apply)(x).tolist() == [10, 8, -10]
    assert mode(jax.vmap(made.apply))(x).tolist() == [10, 8, -10]
    assert mode(jax.grad(lambda x: made.apply(x).sum()))(x).tolist() == [0, 1, 0]


@pytest.mark.parametrize("host", [True, "forward"])
@pytest.mark.parametrize("names", [("sine",), True])
def test_a_policy_that_saves_a_name(host, names):
    runs = []

    def forward(ctx, x):
        y = np.sin(x)
        ctx.save_for_backward(y)
        runs.append(x.shape)
        return y

    made = layer(forward, lambda ctx, dy: dy * (1 - ctx.saved_tensor()[0] ** 2), host=host, saved_names=names)
    policy = jax.checkpoint_policies.save_only_these_names("sine", "Made.saved[0]")
    step = jax.jit(jax.grad(lambda x: jax.checkpoint(lambda x: jnp.cos(made.apply(x)).sum(), policy=policy)(x)))
    jax.block_until_ready(step(X))
    runs.clear()
    jax.block_until_ready(step(X))
    assert runs == [X.shape]


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [True, "forward"])
def test_an_empty_batch(host, mode):
    made = layer(
        lambda ctx, x: ctx.save_for_backward(x) or x * x, lambda ctx, dy: 2 * dy * ctx.saved_tensor()[0], host=host
    )
    nothing = jnp.zeros((0, 3))
    assert mode(jax.vmap(made.apply))(nothing).shape == (0, 3)
    assert mode(jax.grad(lambda x: jax.vmap(made.apply)(x).sum()))(nothing).shape == (0, 3)


@pytest.mark.parametrize("host", [True, "forward"])
def test_a_gradient_that_is_zero_on_example_arrays(host):
    def forward(ctx, x):
        ctx.is_large = bool(np.max(x) > 50)
        return x * 2

    made = layer(forward, lambda ctx, dy: dy * (2 if ctx.is_large else 0), host=host)
    assert "ctx.is_large" in error_of(jax.jit(jax.grad(lambda x: made.apply(x).sum())), X + 100)


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [True, "forward"])
def test_a_gradient_that_is_none_is_no_cotangent(host, mode):
    calls = []
    inner = layer(lambda ctx, x: x * 1, lambda ctx, dy: calls.append(1) or dy)
    made = layer(lambda ctx, x, w: x * w, lambda ctx, dy: (None, dy), host=host)
    found = mode(jax.grad(lambda x, w: made.apply(inner.apply(x), w).sum(), (0, 1)))(X, X)
    assert_same(found, (jnp.zeros_like(X), jnp.ones_like(X)))
    assert not calls


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [True, "forward"])
def test_infinities_and_tiny_numbers_among_gradients(host, mode):
    given = np.array([np.inf + 1j, 1e-40, -0.0], np.complex64)
    constant = given if host is True else jnp.asarray(given)
    made = layer(lambda ctx, x: x * 1, lambda ctx, dy: constant.copy(), host=host)
    found = mode(lambda x: jax.vjp(made.apply, x)[1](jnp.ones(3, complex))[0])(jnp.ones(3, complex))
    np.testing.assert_array_equal(found, given)


def test_a_handle_is_refused_by_name_and_what_is_passed_is_not():
    matrix = POISSON.astype(np.float64).tocsc()
    handle = scipy.sparse.linalg.splu(matrix)
    made = host_layer(lambda ctx, b, a: setattr(ctx, "solver", a or scipy.sparse.linalg.splu(matrix)) or b * 1,
                      lambda ctx, dy: (ctx.solver.solve(dy.astype(float)), None))  # fmt: skip
    run = jax.jit(jax.grad(lambda b, a: made.apply(b, a).sum()), static_argnums=1)
    np.testing.assert_allclose(run(R3, handle), handle.solve(np.ones(3)), rtol=1e-5)
    text = error_of(run, R3, None)
    assert "ctx.solver" in text
    assert "SuperLU" in text


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit, VMAP, lambda f: jax.jit(jax.grad(f))])
def test_an_exception_keeps_its_text(mode):
    def forward(ctx, x):
        if np.any(np.abs(x) > 50):
            raise ValueError("too large for the table")
        return np.sum(x)

    made = host_layer(forward, lambda ctx, dy: dy + np.zeros(2), name="Table")
    text = error_of(mode(lambda x: made.apply(x) ** 2), jnp.full((2, 2)[: 1 + (mode is VMAP)], 99.0))
    assert "too large for the table" in text
    assert "Table.forward" in text


def test_an_example_that_raises_says_how_to_give_another():
    made = host_layer(lambda ctx, a: np.linalg.cholesky(a), name="Factor")
    with pytest.raises(np.linalg.LinAlgError) as caught:
        jax.jit(made.apply)(jnp.eye(3))
    assert "Factor.forward" in text_of(caught.value)
    assert "def example" in text_of(caught.value)
    made.example = staticmethod(lambda a: np.eye(len(a)))
    np.testing.assert_allclose(jax.jit(made.apply)(4 * jnp.eye(3)), 2 * jnp.eye(3))
    made.example = staticmethod(lambda a: np.eye(2))
    assert "float32[4, 4]" in error_of(jax.jit(made.apply), jnp.eye(4))


def test_a_result_of_another_shape_names_both():
    text = error_of(jax.jit(host_layer(lambda ctx, x: x[x < 50], name="Small").apply), jnp.array([1.0, 99.0]))
    assert "Small.forward" in text
    assert "[2]" in text
    assert "[1]" in text


def test_keys_and_refs_are_refused_by_name():
    made = host_layer(lambda ctx, x, other: x)
    for other in (jax.random.key(0), jax.new_ref(jnp.ones(2))):
        for run in (lambda f: f, jax.jit):
            with pytest.raises(TypeError, match="'other'"):
                run(lambda x, other=other: made.apply(x, other))(X)


@pytest.mark.parametrize("members", [{"forward_mode": True}, {"jvp": lambda ctx, dx: dx}])
def test_forward_mode_is_refused(members):
    with pytest.raises(TypeError, match="forward mode"):
        host_layer(lambda ctx, x: x, **members)


def test_a_second_derivative_is_refused_by_name_with_the_way():
    made = layer(base=Conv2d, name="Blur")

    def f(x):
        return jnp.sum(jnp.sin(made.apply(x, grid(2, 2))))

    for second in (jax.hessian(f), jax.jit(jax.hessian(f)), jax.grad(lambda x: jax.grad(f)(x).sum())):
        with pytest.raises(RuntimeError, match=r"Blur(?s:.*)host = 'forward'"):
            second(IMAGE)
    decorated = layer(base=Conv2d, backward=once_differentiable(Conv2d.backward))
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.jit(jax.grad(lambda x: jax.grad(lambda x: decorated.apply(x, W).sum())(x).sum()))(IMAGE)


def test_a_saved_intermediate_is_refused_at_second_order():
    made = layer(
        lambda ctx, x: setattr(ctx, "slope", np.cos(x)) or np.sin(x), lambda ctx, dy: dy * ctx.slope, host="forward"
    )

    def f(x):
        return made.apply(x).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(f))(X), jnp.cos(X), rtol=1e-6)
    for second in (jax.jit(jax.grad(lambda x: jax.grad(f)(x).sum())), jax.hessian(f)):
        with pytest.raises(TypeError, match=r"ctx\.slope"):
            second(X)


def test_closed_over_tracers_are_refused():
    def f(x):
        return host_layer(lambda ctx, y: y * np.sum(x)).apply(2 * x).sum()

    assert "argument" in error_of(jax.grad(f), X)
    assert "argument" in error_of(jax.jit(f), X)


# -- types ------------------------------------------------------------------------------------------


@EAGER_AND_JIT
def test_backward_gets_dtypes_of_jax_on_example_arrays_too(mode):
    seen = set()

    def forward(ctx, x):
        ctx.save_for_backward(x.astype(np.float64))
        ctx.indices = np.arange(3)
        return x * 2

    def backward(ctx, dy):
        seen.add(tuple(str(a.dtype) for a in (*ctx.saved_tensor(), ctx.indices, dy)))
        return dy * 2

    mode(jax.grad(lambda x: host_layer(forward, backward).apply(x).sum()))(jnp.ones(3))
    assert seen == {("float32", "int32", "float32")}


def test_dtypes_are_those_of_jax():
    made = host_layer(
        lambda ctx, x: (np.float64(1) * x, np.int64(3) + np.arange(2)), lambda ctx, a, _: np.float64(2) * a
    )
    for x64, dtypes in (False, ["float32", "int32"]), (True, ["float64", "int64"]):
        with jax.enable_x64(x64):
            x = jnp.linspace(1.0, 2.0, 3)
            for run in (lambda f: f, jax.jit, jax.vmap):
                assert [str(y.dtype) for y in run(made.apply)(x)] == dtypes
            gradient = jax.jit(jax.grad(lambda x: jnp.sum(made.apply(x)[0] * x)))(x)
            assert gradient.dtype == dtypes[0]
            np.testing.assert_allclose(gradient, 3 * x, rtol=1e-12 if x64 else 1e-6)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint32", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arguments_of_any_dtype(dtype, shape):
    made = host_layer(lambda ctx, x, y: (x, y * 2, np.array(x)), lambda ctx, *d: (None, 2 * d[1]))
    x, y = jnp.ones(shape, dtype), jnp.ones(3)
    for run in (lambda f: f, jax.jit, lambda f: jax.vmap(f, (None, 0))):
        same, double, copied = run(made.apply)(x, y)
        assert (same.dtype, copied.dtype) == (x.dtype, x.dtype)
        assert double.tolist() == [2, 2, 2]
    assert jax.jit(jax.grad(lambda y: made.apply(x, y)[1].sum()))(y).tolist() == [2, 2, 2]


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit])
def test_complex_gradients_follow_the_convention_of_the_class(mode):
    forward, backward = lambda ctx, z: setattr(ctx, "z", z) or z * z, lambda ctx, dz: 2 * ctx.z * dz
    made = host_layer(forward, backward)
    z = jnp.array([1 + 2j, -0.5j])

    def loss(f):
        return lambda z: jnp.abs(jnp.sum(f(z) * (1 + 1j)))

    np.testing.assert_allclose(mode(jax.grad(loss(made.apply)))(z), jax.grad(loss(lambda z: z * z))(z), rtol=1e-5)


# -- vmap, hooks, tools -------------------------------------------------------------------------------


def test_broadcast_is_one_call_and_checks_shapes():
    shapes = []

    def forward(ctx, x, w):
        shapes.append((x.shape, w.shape))
        return x @ w if x.ndim == 2 else np.einsum("...ij,...jk->...ik", x, w)

    made = host_layer(forward, lambda ctx, dy: None, host_vmap="broadcast")
    x, w = jnp.ones((4, 5, 2, 3)), jnp.ones((3, 3))
    for run in (lambda f: f, jax.jit):
        shapes.clear()
        ours = run(jax.vmap(jax.vmap(made.apply, (0, None)), (0, None)))(x, w)
        assert ours.shape == (4, 5, 2, 3)
        assert shapes[-1] == ((4, 5, 2, 3), (4, 5, 3, 3))
        assert len(shapes) <= 2
    wrong = host_layer(lambda ctx, x: np.sum(x), lambda ctx, dy: dy, host_vmap="broadcast", name="Total")
    assert "Total.forward" in error_of(jax.jit(jax.vmap(wrong.apply)), X)


@pytest.mark.parametrize("hooks", [cast_saved(), quantize_saved(8), save_on_cpu()])
def test_packers_pack_what_a_host_layer_keeps(hooks):
    ours = jax.jit(jax.grad(hooks(lambda x: jnp.sum(ForwardTanh.apply(Expm1.apply(x) * 0.1)))))(X)
    np.testing.assert_allclose(ours, jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.expm1(x) * 0.1)))(X), rtol=0.05, atol=2e-3)
    packed = saved_tensors_report(hooks(lambda x: jnp.sum(Expm1.apply(jnp.sin(x)))), X)
    assert "Expm1" in str(packed)


def test_the_checkers_take_them():
    report = check_layer(Conv2d, IMAGE, grid(2, 3))
    assert "host" in report["second order"].message
    assert check_layer(Running, X).passed
    gradcheck(Solve.apply, (W + 3 * jnp.eye(3), R3))


def test_donated_arguments():
    run = jax.jit(jax.value_and_grad(lambda x: Expm1.apply(x * 2).sum()), donate_argnums=0)
    np.testing.assert_allclose(run(jnp.array(X))[1], 2 * jnp.exp(2 * X), rtol=1e-5)


def test_needs_input_grad_is_exact_in_backward():
    seen = []
    made = host_layer(lambda ctx, a, b: a * b, lambda ctx, dy: seen.append(ctx.needs_input_grad) or (dy, dy))
    jax.jit(jax.grad(lambda a: made.apply(a, X).sum()))(X).block_until_ready()
    assert set(seen) == {(True, False)}


def test_nothing_outlives_the_class_and_its_programs():
    def run():
        made = type("Local", (Conv2d,), {})

        def f(x):
            return made.apply(x, W).sum()

        for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f)), jax.checkpoint):
            jax.block_until_ready(transform(f)(IMAGE))
        jax.block_until_ready(jax.vmap(f)(IMAGE[None]))
        return weakref.ref(made)

    ref = run()
    for _ in range(4):
        gc.collect()
    assert ref() is None

"""Layers of NumPy: `host = True`, and `host = "forward"` for a `backward` in JAX."""

import functools
import gc
import re
import subprocess
import sys
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
import scipy.signal
import scipy.sparse.csgraph

from pylayer_jax import Function, PyLayer, _host_layer, once_differentiable, saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu
from pylayer_jax.testing import check_layer, gradcheck
from tests.checkers.wrong_layers import all_but
from tests.hooks.spy import Held
from tests.kit.case import R3, Case, W, X, case, grid
from tests.kit.layers import Tanh, layer, loss, text_of
from tests.kit.modes import EAGER_AND_JIT, MODES, STAGED, modes
from tests.kit.transforms import FIRST_ORDER, FORWARD_OVER_REVERSE, SECOND_ORDER, assert_same, compare

CASES: list[Case] = []
case = functools.partial(case, cases=CASES)
IMAGE = grid(4, 5)


def host_layer(forward, backward=lambda ctx, dy: dy, **members):
    return layer(forward, backward, host=True, **members)


def gradients_of_convolution(x, kernel, dy):
    assert type(dy) is type(x) is np.ndarray
    # Of the flipped filter, as convolve2d turns it round.
    dkernel = scipy.signal.correlate2d(x, dy, mode="valid")[::-1, ::-1]
    return scipy.signal.correlate2d(dy, kernel, mode="full"), dkernel


def convolved(x, kernel):
    assert type(x) is type(kernel) is np.ndarray
    return scipy.signal.convolve2d(x, kernel, mode="valid")


Conv2d = case(lambda x, kernel: jax.scipy.signal.convolve2d(x, kernel, mode="valid"), IMAGE, grid(2, 3))(
    host_layer(convolved, gradients_of_convolution, base=Function, name="Conv2d", plain=True)
)


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


Expm1 = case(jnp.expm1, X)(host_layer(np.expm1, lambda x, dy: dy * np.exp(x), name="Expm1", plain=True))
case(lambda x: jnp.cumsum(x, -1), X)(
    host_layer(
        lambda ctx, x: np.cumsum(x, -1),
        lambda ctx, dy: np.flip(np.cumsum(np.flip(dy, -1), -1), -1),
        name="Broadcast",
        host_vmap="broadcast",
    )
)


@EAGER_AND_JIT
@pytest.mark.parametrize("axes", [(None, 0), (None, 1), (0, None), (1, 0)])
@pytest.mark.parametrize("host", [True, "forward"])
def test_a_vmap_method_with_shared_arguments(host, axes, mode):
    seen = []

    def batch(info, in_dims, x, y):
        seen.append((in_dims, x.shape, y.shape))
        x, y = (v if d is None else np.moveaxis(v, d, 0) for v, d in zip((x, y), in_dims, strict=True))
        return x - 2 * y, 0

    made = layer(lambda ctx, x, y: x - 2 * y, lambda ctx, d: (d, -2 * d), host=host, vmap=batch)
    args = [grid(3) if axis is None else grid(3, 3) + 1 for axis in axes]
    f = jax.vmap(made.apply, axes)
    expected = jax.vmap(lambda x, y: x - 2 * y, axes)
    np.testing.assert_allclose(mode(f)(*args), expected(*args))
    assert seen == [(axes, *(x.shape for x in args))]
    weights = grid(3, 3)
    ours, theirs = (mode(jax.grad(lambda *xs, f=f: jnp.sum(f(*xs) * weights), (0, 1)))(*args) for f in (f, expected))
    for x, y in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def masked(ctx, x):
    ctx.x, ctx.mask = x, (x > 0.9) if np.any(x > 0.9) else None
    return np.where(x > 0.9, 0, np.sin(x))


def gradient_of_masked(ctx, dy):
    return dy * np.cos(ctx.x) * (1 if ctx.mask is None else ~ctx.mask)


# Its ctx has another structure in some runs.
case(lambda x: jnp.where(x > 0.9, 0, jnp.sin(x)), R3)(host_layer(masked, gradient_of_masked, name="Masked"))


def tanh(ctx, x):
    y = np.tanh(x)
    ctx.save_for_backward(y)
    return y


ForwardTanh = case(jnp.tanh, X)(layer(tanh, base=Tanh, name="ForwardTanh", host="forward"))


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


FIRST = [name for name in FIRST_ORDER if name != "export_with_vjp"]


@pytest.mark.parametrize("i", range(len(CASES)), ids=[case.name for case in CASES])
def test_first_order(i):
    # All transforms together, and three for each class.
    for transform in ("jit_of_grad", FIRST[2 * i % len(FIRST)], FIRST[(2 * i + 1) % len(FIRST)]):
        compare(CASES[i], transform)


@pytest.mark.parametrize("made", ["ForwardTanh", pytest.param("ForwardSolve", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transform", SECOND_ORDER | FORWARD_OVER_REVERSE)
def test_second_order(transform, made):
    compare({case.name: case for case in CASES}[made], transform)


NUMBERS = 1.5, True, 2, 1j, np.float64(3), "text"


@EAGER_AND_JIT
@pytest.mark.parametrize("declared", [{}, {"result_types": lambda x: (*NUMBERS, x)}], ids=["", "declared"])
def test_numbers_have_dtypes_of_jax_and_statics_stay(declared, mode):
    made = host_layer(lambda ctx, x: (*NUMBERS, x), lambda ctx, *d: d[-1] * len(d), **declared)

    def f(x):
        *numbers, text, y = made.apply(x)
        assert text == "text"
        return [y, *numbers]

    dtypes = ["float32", "float32", "bool", "int32", "complex64", "float32"]
    assert [y.dtype for y in mode(f)(X)] == dtypes
    assert mode(jax.grad(lambda x: f(x)[0].sum()))(X).tolist() == jnp.full_like(X, 6).tolist()


def error_of(run, *args):
    with pytest.raises(Exception, match=r".") as caught:
        jax.block_until_ready(run(*args))
    return text_of(caught.value)


def counting(**members):
    """Return a layer that computes exp, and the list of the runs of its methods."""
    runs = []

    def forward(ctx, x, static):
        runs.append("forward")
        ctx.y = np.exp(x)
        return np.exp(x)

    def backward(ctx, dy):
        runs.append("backward")
        return dy * ctx.y, None

    return host_layer(forward, backward, **members), runs


def test_forward_runs_once_on_examples_and_backward_never():
    made, runs = counting()
    for static, calls in (1, 2), (1, 1), (2, 2), ([], 2):
        runs.clear()
        jax.jit(jax.grad(lambda x, s=static: made.apply(x, s).sum()))(X).block_until_ready()
        assert sorted(runs) == ["backward", *["forward"] * calls]
    runs.clear()
    jax.grad(loss(made, 1))(X)  # eager mode needs no example
    assert runs == ["forward", "backward"]


STEPS = {
    "jit of value_and_grad": (lambda f: jax.value_and_grad(lambda x: f(x).sum()), 1),
    "scan": (lambda f: jax.grad(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x * 0.1, length=3)[0].sum()), 3),
    "vmap": (lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())), 2),
    "checkpoint": (lambda f: jax.value_and_grad(jax.checkpoint(lambda x: f(x).sum())), 2),
}


@pytest.mark.parametrize("name", STEPS)
def test_runs_in_a_step(name):
    (made, runs), (transform, n_forward) = counting(), STEPS[name]
    step = jax.jit(transform(lambda x: made.apply(x, 1)))
    jax.block_until_ready(step(X))
    runs.clear()
    jax.block_until_ready(step(X))
    assert runs.count("forward") == n_forward
    assert runs.count("backward") == n_forward - (name == "checkpoint")


def test_result_types_declares_the_outputs_without_a_run():
    made, runs = counting(result_types=lambda x, static: jax.ShapeDtypeStruct(x.shape, x.dtype))
    for transform in (jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f)), jax.checkpoint):
        lowered = jax.jit(jax.grad(lambda x, t=transform: t(lambda x: made.apply(x, 1))(x).sum())).lower(X)
        assert runs == []
    np.testing.assert_allclose(lowered.compile()(X), jnp.exp(X), rtol=1e-6)
    with pytest.raises(TypeError, match="result_types"):
        layer(lambda ctx, x: x, host="forward", result_types=lambda x: x)


DECLARED = {  # what forward returns where result_types declares {"y": float16[3]}; None stands for an error
    "same kind of dtype": (lambda x: {"y": x}, "float16"),
    "number type": (lambda x: {"y": x.astype(np.int64)}, "float16"),
    "kind of dtype": (lambda x: {"y": x * 1j}, None),
    "shape": (lambda x: {"y": x[:2]}, None),
    "key": (lambda x: {"z": x}, None),
    "container": (lambda x: [x], None),
    "one more": (lambda x: {"y": x, "z": x}, None),
    "none": (lambda x: {"y": None}, None),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("name", DECLARED)
def test_what_is_declared_holds_in_every_mode(name, mode):
    result, dtype = DECLARED[name]
    made = host_layer(
        lambda ctx, x: result(x), result_types=lambda x: {"y": jax.ShapeDtypeStruct(x.shape, "float16")}, name="Half"
    )
    x = jnp.array([0.5, 1.0, 2.0])
    for run in (mode(made.apply), lambda x: jax.vjp(mode(made.apply), x)[0]):
        if dtype:
            assert run(x)["y"].dtype == dtype
        else:
            text = error_of(run, x)
            assert "Half.forward" in text
            assert "result_types" in text


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
    np.testing.assert_allclose(MODES[mode](loss(made))(x), x + 1)
    assert x.tolist() == [0.5, -1.0, 2.0]


@EAGER_AND_JIT
def test_inputs_of_a_forward_whose_backward_is_jax_code_are_read_only(mode):
    # Otherwise JAX drops the call in the gradient, and `backward` gets the input as it was before.
    made = layer(
        lambda ctx, x: x.__setitem__(x > 9, 9) or ctx.save_for_backward(x) or x * 2,
        lambda ctx, dy: dy * ctx.saved_tensor()[0],
        host="forward",
    )
    assert "read-only" in error_of(mode(jax.grad(loss(made))), X)


@EAGER_AND_JIT
def test_what_is_saved_comes_back_as_it_was(mode):
    seen = []

    def forward(ctx, x):
        y, ctx.table, ctx.words = x.astype(np.longdouble), {"z": x[::2], 1: [x]}, np.array(["a", None], object)
        ctx.names = {"a"}
        ctx.save_for_backward(y)
        return x * 2

    def backward(ctx, dy):
        (y,) = ctx.saved_tensor()
        seen.append((y.dtype, y.sum(), list(ctx.table), ctx.table[1][0].flags.writeable, len(ctx.names), ctx.words[0]))
        ctx.table.clear()
        ctx.names.clear()
        y += 1
        return dy * 2

    made = host_layer(forward, backward)
    _, pullback = jax.vjp(mode(made.apply), jnp.ones(3))
    for _ in range(2):
        pullback(jnp.ones(3))
    assert seen == [(np.dtype(np.longdouble), 3, ["z", 1], True, 1, "a")] * 2


KEPT = {  # what a layer whose backward is JAX code may not keep of its input x and output y
    "ctx.slope": lambda ctx, x, y: setattr(ctx, "slope", np.cos(x)),
    "ctx.count": lambda ctx, x, y: setattr(ctx, "count", int(np.sum(x > 0)) + 1000),
    "ctx.mask": lambda ctx, x, y: setattr(ctx, "mask", x > 5 if np.any(x > 5) else None),
    "ctx.info": lambda ctx, x, y: setattr(ctx, "info", {"found": object()}),
    "ctx.save_for_backward": lambda ctx, x, y: ctx.save_for_backward(np.array(x)),
    "ctx.save_for_backward of a value that changes": lambda ctx, x, y: (ctx.save_for_backward(y), y.__imul__(2)),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("name", KEPT)
def test_a_backward_in_jax_gets_inputs_outputs_and_statics_only(name, mode):
    def forward(ctx, x):
        y = np.sin(x)
        KEPT[name](ctx, x, y)
        return y

    text = error_of(mode(jax.grad(loss(layer(forward, host="forward", name="Sine")))), X)
    assert f"Sine.forward, {name.partition(' ')[0]}" in text
    assert "another output" in text


@EAGER_AND_JIT
def test_a_backward_in_jax_gets_all_that_is_allowed(mode):
    def forward(ctx, x, power, bias=None, *, name):
        n = int(np.sum(x > -9))
        y = x**power
        slope = power * y / x
        ctx.mark_non_differentiable(slope)
        ctx.save_for_backward(x, slope, bias)
        ctx.power, ctx.all = power, {"name": name, "y": [y, n]}
        return y, {"slope": slope, "n": n}

    def backward(ctx, dy, _):
        x, slope, bias = ctx.saved_tensor()
        assert (bias, ctx.power, ctx.all["name"]) == (None, 3, "cube")
        return dy * (slope + 0 * (ctx.all["y"][0] + ctx.all["y"][1].astype(x.dtype))), None, None, None

    made = layer(forward, backward, host="forward")
    run = mode(jax.grad(lambda x: made.apply(x, 3, None, name="cube")[0].sum()))
    np.testing.assert_allclose(run(X), 3 * X**2, rtol=1e-5)


DIFFERS = {  # on example arrays, x is small
    "shape": lambda ctx, x, big: x[: 2 if big else 3],
    "kind of dtype": lambda ctx, x, big: x + 1j if big else x,
    "structure": lambda ctx, x, big: (x, x) if big else (x, None),
    "static": lambda ctx, x, big: (x, "big" if big else "small"),
    "marks": lambda ctx, x, big: (ctx.mark_non_differentiable(*[x] * big), x)[1],
    "flag": lambda ctx, x, big: (ctx.set_materialize_grads(not big), x)[1],
}


@pytest.mark.parametrize("transform", [jax.jit, lambda f: jax.jit(jax.vmap(f))])
@pytest.mark.parametrize("host", [True, "forward"])
@pytest.mark.parametrize("name", DIFFERS)
def test_outputs_that_differ_between_runs(name, host, transform):
    made = layer(
        lambda ctx, x: DIFFERS[name](ctx, x, bool(np.max(x) > 50)), lambda ctx, *d: d[0], host=host, name="Odd"
    )
    run = transform(lambda x: jax.tree.leaves(made.apply(x))[0])
    jax.block_until_ready(run(jnp.ones((3, 3))))
    text = error_of(run, jnp.full((3, 3), 99.0))
    assert "Odd.forward" in text
    assert "output" in text
    if name == "shape" and transform is jax.jit:
        assert "[3, 3]" in text
        assert "[2, 3]" in text


KEPT_OF_LARGE = {
    "another input": lambda ctx, x, w, big: ctx.save_for_backward(x if big else w),
    "another output": lambda ctx, x, w, big: ctx.save_for_backward(w, *[ctx.y] * big),
    "a value": lambda ctx, x, w, big: setattr(ctx, "is_big", big),  # the static argument is False too
    "an attribute": lambda ctx, x, w, big: big and setattr(ctx, "x", x),
    "mark": lambda ctx, x, w, big: ctx.mark_non_differentiable(*[ctx.y] * big),
    "flag": lambda ctx, x, w, big: ctx.set_materialize_grads(not big),
}


@pytest.mark.parametrize("transform", [jax.grad, jax.value_and_grad, lambda f: jax.grad(jax.checkpoint(f)), jax.vmap])
@pytest.mark.parametrize("kept", KEPT_OF_LARGE)
def test_what_a_dropped_run_keeps_is_compared(kept, transform):
    # No code reads the output, so that XLA would drop the call.
    def forward(ctx, x, w, static):
        y, big = x * w, bool(np.max(x) > 50)
        ctx.y = y
        KEPT_OF_LARGE[kept](ctx, x, w, big)
        return y

    made = layer(forward, lambda ctx, dy: (dy, None), host="forward", name="Odd")
    f = lambda x: made.apply(x, jnp.full(3, 2.0), False).sum()
    run = jax.jit(jax.vmap(jax.grad(f)) if transform is jax.vmap else lambda x: transform(f)(x[0]))
    assert jax.tree.leaves(run(jnp.ones((1, 3))))[-1].ravel().tolist() == [1, 1, 1]
    assert "Odd.forward" in error_of(run, jnp.full((1, 3), 99.0))


@EAGER_AND_JIT
def test_marks_and_flags_are_those_of_forward(mode):
    seen = []

    def forward(ctx, x):
        twice = 2 * x
        ctx.mark_non_differentiable(twice)
        ctx.set_materialize_grads(False)
        return x * 3, twice

    made = host_layer(forward, lambda ctx, d, other: seen.append((d is None, other is None)) or d)
    gradient = mode(jax.grad(lambda x: sum(y.sum() for y in made.apply(x))))(X)
    assert gradient.tolist() == jnp.ones_like(X).tolist()
    assert seen == [(False, True)]
    # Declared outputs are not marked, and missing cotangents are zeros.
    declared = host_layer(lambda ctx, x: (x * 3, x * 2), lambda ctx, d, other: seen.append(other.sum()) or d,
                          result_types=lambda x: (x, x))  # fmt: skip
    jax.block_until_ready(jax.jit(jax.grad(lambda x: declared.apply(x)[0].sum()))(X))
    assert seen[1:] == [0]


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [True, "forward"])
def test_an_input_that_is_returned(host, mode):
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return np.clip(x, -10, 10, out=x if host is True else None), x

    made = layer(forward, lambda ctx, dy, _: dy * (abs(ctx.saved_tensor()[0]) <= 10).astype(dy.dtype), host=host)
    x = jnp.array([30.0, 8.0, -12.0])
    first = mode(lambda x: made.apply(x)[0])
    assert first(x).tolist() == jax.vmap(first)(x).tolist() == [10, 8, -10]
    assert mode(jax.grad(lambda x: made.apply(x)[0].sum()))(x).tolist() == [0, 1, 0]


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
    made = layer(lambda x: x * x, lambda x, dy: 2 * dy * x, plain=True, host=host)
    nothing = jnp.zeros((0, 3))
    assert mode(jax.vmap(made.apply))(nothing).shape == (0, 3)
    assert mode(jax.grad(lambda x: jax.vmap(made.apply)(x).sum()))(nothing).shape == (0, 3)


@EAGER_AND_JIT
def test_a_gradient_that_is_none_is_zero(mode):
    inner, calls = layer(lambda ctx, x: x * 1, lambda ctx, dy: calls.append(1) or dy), []
    for host in (True, "forward"):
        made = layer(lambda ctx, x, w: x * w, lambda ctx, dy: (None, dy), host=host)
        found = mode(jax.grad(lambda x, w, f=made: f.apply(inner.apply(x), w).sum(), (0, 1)))(X, X)
        assert_same(found, (jnp.zeros_like(X), jnp.ones_like(X)))
    assert len(calls) == 1  # JAX code tells before the run that there is no cotangent


def test_gradients_have_the_types_of_the_inputs():
    def made(gradient):
        return host_layer(lambda ctx, x, y: x + y.sum(), lambda ctx, dy: gradient(dy), name="Sum")

    x, y = jnp.ones(3), jnp.ones((1, 3))
    for mode in (lambda f: f, jax.jit):
        run = lambda gradient: mode(jax.grad(lambda x, y: made(gradient).apply(x, y).sum(), (0, 1)))(x, y)  # noqa: B023
        dx, dy = run(lambda dy: (dy.astype(np.float64), np.ones((4, 1, 3))))
        assert dx.dtype == dy.dtype == np.float32
        assert dy.tolist() == [[4, 4, 4]]
        for wrong, part in [
            (lambda dy: (dy, np.ones(2)), "'y'"),
            (lambda dy: dy, "y"),
            (lambda dy: (dy, dy[None] * 1j), "real"),
            (lambda dy: (1.0, None), "'x'"),
        ]:
            text = error_of(run, wrong)
            assert "Sum.backward" in text
            assert part in text


@pytest.mark.parametrize("mode", [jax.jit, jax.vmap])
def test_a_backward_of_the_wrong_arity_is_found_before_the_program_runs(mode):
    made = host_layer(lambda ctx, x: (x, x), lambda ctx, dy: dy, name="Pair")
    with pytest.raises(TypeError, match="2 cotangents"):
        mode(jax.grad(lambda x: made.apply(x)[0].sum()))(X)


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [True, "forward"])
def test_infinities_and_tiny_numbers_among_gradients(host, mode):
    given = np.array([np.inf + 1j, 1e-40, -0.0], np.complex64)
    constant = given if host is True else jnp.asarray(given)
    made = layer(lambda ctx, x: x * 1, lambda ctx, dy: constant.copy(), host=host)
    found = mode(lambda x: jax.vjp(made.apply, x)[1](jnp.ones(3, complex))[0])(jnp.ones(3, complex))
    np.testing.assert_array_equal(found, given)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit, jax.vmap, lambda f: jax.jit(jax.grad(f))])
def test_an_exception_keeps_its_text(mode):
    def forward(ctx, x):
        if np.any(np.abs(x) > 50):
            raise ValueError("too large for the table")
        return np.sum(x)

    made = host_layer(forward, lambda ctx, dy: dy + np.zeros(2), name="Table")
    text = error_of(mode(lambda x: made.apply(x) ** 2), jnp.full((2, 2)[: 1 + (mode is jax.vmap)], 99.0))
    assert "too large for the table" in text
    assert "Table.forward" in text


def test_an_example_that_raises_says_how_to_give_another():
    made = host_layer(lambda ctx, a, scale: scale * np.linalg.cholesky(a), name="Factor")
    with pytest.raises(np.linalg.LinAlgError) as caught:
        jax.jit(loss(made, 2))(jnp.eye(3))
    assert "Factor.forward" in text_of(caught.value)
    assert "def example" in text_of(caught.value)
    factor = jax.jit(lambda a: made.apply(a, 2))
    made.example = staticmethod(lambda a, scale: np.eye(len(a)) * (scale == 2))
    np.testing.assert_allclose(factor(4 * jnp.eye(3)), 4 * jnp.eye(3))
    made.example = staticmethod(lambda a, scale: np.eye(2))
    assert "float32[4, 4]" in error_of(factor, jnp.eye(4))
    made.example = staticmethod(lambda a, scale: None)
    assert "Factor.example" in error_of(factor, jnp.eye(5))


def test_distances_in_a_graph_need_no_example():
    def forward(ctx, w):
        assert np.all(w >= 0)  # on negative numbers, SciPy does not end
        return scipy.sparse.csgraph.dijkstra(w)

    made = host_layer(forward, lambda ctx, d: None)
    w = jnp.array([[0.0, 1, 9], [1, 0, 2], [9, 2, 0]])
    assert jax.jit(made.apply)(w).tolist() == [[0, 1, 3], [1, 0, 2], [3, 2, 0]]


ENDLESS = """
import jax, pylayer_jax
class Endless(pylayer_jax.PyLayer):
    host = True
    @staticmethod
    def forward(ctx, x): raise KeyboardInterrupt
    @staticmethod
    def backward(ctx, dy): return dy
jax.jit(Endless.apply)(1.0)
"""


def test_an_example_that_does_not_end_is_named_where_it_is_interrupted():
    done = subprocess.run([sys.executable, "-c", ENDLESS], capture_output=True, text=True, check=False)
    assert re.search(r"Endless\.forward(?s:.*)example(?s:.*)result_types", done.stderr)


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


def test_closed_over_tracers_are_refused():
    def f(x, **members):
        return host_layer(lambda ctx, y: y * np.sum(x), **members).apply(2 * x).sum()

    def g(x):
        y = jnp.ones(3)
        return host_layer(lambda ctx, z: z, lambda ctx, dz: dz * np.sum(x)).apply(y * x).sum()

    declared = lambda x: f(x, result_types=lambda y: y)
    w = jnp.ones(3)
    only_closed_over = jax.grad(lambda x: host_layer(lambda ctx, y: y * np.sum(x)).apply(w).sum())
    for run in (jax.grad(f), jax.jit(f), only_closed_over, jax.jit(declared), jax.grad(g), jax.jit(jax.grad(g))):
        text = error_of(run, w)
        assert "argument" in text
        assert "set host = True" not in text


def held_by(objects):
    jax.effects_barrier()
    gc.collect()
    return len(objects)


@pytest.mark.clears_caches
def test_held_contexts():
    alive = weakref.WeakSet()

    def forward(ctx, x):
        ctx.held = Held(np.exp(x))
        alive.add(ctx.held)
        return np.exp(x)

    made = host_layer(forward, lambda ctx, dy: dy * ctx.held.x)

    def f(x):
        return jnp.sum(made.apply(x) * made.apply(2 * x))

    undifferentiated, step = jax.jit(f), jax.jit(jax.grad(f))
    for _ in range(20):
        undifferentiated(X)
        jax.vmap(f)(X)
        f(X)
    assert held_by(alive) == 0
    for _ in range(20):
        step(X)
        assert held_by(alive) <= 2 * 2  # at two places
    _, pullback = jax.vjp(f, X)
    waiting = held_by(alive)
    del pullback
    assert held_by(alive) == waiting - 2
    del step, undifferentiated
    jax.clear_caches()
    assert held_by(alive) == 0


def test_a_late_or_second_backward_runs_forward_again():
    made, runs = counting()
    f = jax.jit(loss(made, 1))
    np.testing.assert_allclose(jax.jit(lambda x: jax.vjp(loss(made, 1), x)[1])(X)(1.0)[0], jnp.exp(X), rtol=1e-6)
    waiting = [(x, jax.vjp(f, x)[1]) for x in (X, X + 1, X - 1)]
    runs.clear()
    for x, pullback in waiting * 2:
        np.testing.assert_allclose(pullback(1.0)[0], jnp.exp(x), rtol=1e-6)
    assert "forward" not in runs
    f(X + 2), jax.vjp(f, X + 2)  # drops those that were used
    runs.clear()
    np.testing.assert_allclose(waiting[1][1](1.0)[0], jnp.exp(X + 1), rtol=1e-6)
    assert runs == ["forward", "backward"]


@pytest.mark.parametrize("n_held", [5, 2, 1])
@pytest.mark.parametrize(("kept", "mebibytes"), [(lambda: {"all": [np.zeros(2**18), 2]}, 3), (lambda: Held(1), 16)])
def test_the_bytes_of_held_contexts_are_bounded(kept, mebibytes, n_held, monkeypatch):
    # A context counts as its arrays and 1 MiB, or 16 MiB if it keeps an object of unknown size; the last one is held.
    monkeypatch.setattr(_host_layer, "MOST_BYTES", ((n_held + 0.5) * mebibytes * 2**20) * (n_held > 1))
    runs = []

    def forward(ctx, x):
        runs.append(1)
        ctx.kept, ctx.y = kept(), np.exp(x)
        return np.exp(x)

    f = jax.jit(loss(host_layer(forward, lambda ctx, dy: dy * ctx.y)))
    waiting = [(x, jax.vjp(f, x)[1]) for x in jnp.arange(8.0)]
    runs.clear()
    for x, pullback in waiting:
        np.testing.assert_allclose(pullback(1.0)[0], jnp.exp(x), rtol=1e-6)
    assert len(runs) == 8 - n_held


IN_A_BLOCK = {"no block": lambda f: f, "8 bits": quantize_saved(8, block_size=2)}


@pytest.mark.parametrize("block", IN_A_BLOCK)
@pytest.mark.parametrize(
    "transform", ["grad", "grad_of_vmap", "scan_of_remat", "jit_of_cond_and_remat", "jacrev", "shard_map"]
)
def test_a_gradient_does_not_depend_on_what_is_held(transform, block, monkeypatch):
    def gradient():
        made = layer(base=Solve)
        f = IN_A_BLOCK[block](lambda a, b: made.apply(jnp.tanh(a) + 3 * jnp.eye(3), b * 0.9).sum())
        return FIRST_ORDER[transform](f, (W, R3))

    held = gradient()
    monkeypatch.setattr(_host_layer._LayerSlot, "put", lambda *args: None)
    for ours, again in zip(jax.tree.leaves(held), jax.tree.leaves(gradient()), strict=True):
        np.testing.assert_array_equal(ours, again)


@pytest.mark.parametrize("host_vmap", ["sequential", "broadcast"])
@pytest.mark.parametrize("mode", [lambda f: f, lambda f: jax.jit(jax.vmap(f))])
def test_broadcast_under_a_further_batch(mode, host_vmap):
    # All axes have the same size, so that NumPy would broadcast an array of another batch without an error.
    def forward(ctx, x):
        ctx.slope = np.cos(x)
        return np.sin(x)

    made = host_layer(forward, lambda ctx, dy: dy * ctx.slope, host_vmap=host_vmap)
    for transform in (lambda f: f, jax.vmap, lambda f: jax.vmap(f, 1, 1), lambda f: jax.vmap(jax.vmap(f), 1)):
        ours, theirs = (mode(jax.jacrev(transform(f)))(grid(3, 3, 3)) for f in (made.apply, jnp.sin))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("host_vmap", ["sequential", "broadcast"])
@EAGER_AND_JIT
def test_branches_of_a_batch(mode, host_vmap):
    # JAX gives the gradient of a branch that an example did not take zeros, which this layer refuses.
    def forward(ctx, a):
        ctx.inverse = np.linalg.inv(a)
        return np.log(abs(np.linalg.det(a)))

    def backward(ctx, dy):
        assert np.isfinite(ctx.inverse).all()
        return dy[..., None, None] * np.swapaxes(ctx.inverse, -1, -2)

    made = host_layer(forward, backward, host_vmap=host_vmap)
    other = host_layer(lambda ctx, x: x * 2, lambda ctx, dy: dy * 2, host_vmap=host_vmap)

    def gradient(f, g):
        def branches(a):
            return jax.lax.cond(jnp.trace(a) > 3, lambda a: f(a * 1.5) * 2, g, a)

        return jax.vmap(jax.grad(branches))

    a = jnp.eye(3) * jnp.arange(0.7, 1.7, 0.2)[:, None, None] + 0.1
    pairs = [(lambda a: a[0, 0],) * 2, (lambda a: other.apply(a[0, 0]), lambda a: 2 * a[0, 0])]
    for ours, theirs in pairs:
        expected = gradient(lambda a: jnp.linalg.slogdet(a)[1], theirs)(a)
        np.testing.assert_allclose(mode(gradient(made.apply, ours))(a), expected, rtol=1e-4, atol=1e-5)


def test_dtypes_are_those_of_jax():
    made = host_layer(
        lambda ctx, x: (np.float64(1) * x, np.int64(3) + np.arange(2)), lambda ctx, a, _: np.float64(2) * a
    )
    for x64, dtypes in (False, ["float32", "int32"]), (True, ["float64", "int64"]):
        with jax.enable_x64(x64):
            x = jnp.linspace(1.0, 2.0, 3)
            for run in (lambda f: f, jax.jit, jax.vmap):
                assert [str(y.dtype) for y in run(made.apply)(x)] == dtypes
            narrow = jax.jit(lambda x: made.apply(x)[1])(x.astype(np.float32))  # of one type with and without x64
            assert narrow.dtype == dtypes[1]
            gradient = jax.jit(jax.grad(lambda x: jnp.sum(made.apply(x)[0] * x)))(x)
            assert gradient.dtype == dtypes[0]
            np.testing.assert_allclose(gradient, 3 * x, rtol=1e-12 if x64 else 1e-6)


@EAGER_AND_JIT
def test_integers_of_some_runs_become_floats(mode):
    made = host_layer(lambda ctx, x: x if np.max(x) < 50 else np.arange(3))
    found = mode(jax.vmap(made.apply))(jnp.array([[0.0] * 3, [99.0] * 3]))
    assert found.dtype == np.float32
    assert found.tolist() == [[0, 0, 0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("bool", (2, 3)), ("int8", (0,)), ("uint32", ()), ("float16", (0,)), ("bfloat16", ()), ("complex64", (2, 3))],
)
def test_arguments_of_any_dtype(dtype, shape):
    made = host_layer(lambda ctx, x, y: (x, y * 2, np.array(x)), lambda ctx, *d: (None, 2 * d[1]))
    x, y = jnp.ones(shape, dtype), jnp.ones(3)
    for run in (lambda f: f, jax.jit, lambda f: jax.vmap(f, (None, 0))):
        same, double, copied = run(made.apply)(x, y)
        assert (same.dtype, copied.dtype) == (x.dtype, x.dtype)
        assert double.tolist() == [2, 2, 2]
    assert jax.jit(jax.grad(lambda y: made.apply(x, y)[1].sum()))(y).tolist() == [2, 2, 2]


@EAGER_AND_JIT
def test_complex_gradients_follow_the_convention_of_the_class(mode):
    made = host_layer(lambda z: z * z, lambda z, dz: 2 * z * dz, plain=True)
    z = jnp.array([1 + 2j, -0.5j])

    def loss(f):
        return lambda z: jnp.abs(jnp.sum(f(z) * (1 + 1j)))

    np.testing.assert_allclose(mode(jax.grad(loss(made.apply)))(z), jax.grad(loss(lambda z: z * z))(z), rtol=1e-5)


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


@pytest.mark.parametrize("hooks", [cast_saved(), save_on_cpu()])
def test_packers_pack_what_a_host_layer_keeps(hooks):
    ours = jax.jit(jax.grad(hooks(lambda x: jnp.sum(ForwardTanh.apply(Expm1.apply(x) * 0.1)))))(X)
    np.testing.assert_allclose(ours, jax.grad(lambda x: jnp.sum(jnp.tanh(jnp.expm1(x) * 0.1)))(X), rtol=0.05, atol=2e-3)
    packed = saved_tensors_report(hooks(lambda x: jnp.sum(Expm1.apply(jnp.sin(x)))), X)
    assert "Expm1" in str(packed)


@pytest.mark.parametrize("staged", ["jit", "scan", "fori_loop", "checkpoint"])  # hooks get the index of a cond
@pytest.mark.parametrize("made", [Expm1, ForwardTanh], ids=["host", "forward"])
def test_hooks_do_not_get_the_number_of_a_run(made, staged):
    seen = set()
    hooks = saved_tensors_hooks(
        lambda x: seen.add(x.dtype.name) or x.astype(jnp.bfloat16), lambda x: x.astype(jnp.float32)
    )
    f = STAGED[staged](lambda x: made.apply(x * 0.1))
    ours, theirs = (jax.grad(lambda x, g=g: g(x).sum())(X) for g in (hooks(f), f))
    np.testing.assert_allclose(ours, theirs, rtol=0.05)
    assert "uint32" not in seen


def test_the_checkers_take_them():
    skip = all_but("jit", "vmap", "gradients", "second order")
    report = check_layer(Conv2d, IMAGE, grid(2, 3), skip=skip)
    assert "host" in report["second order"].message
    assert check_layer(ForwardTanh, X, skip=skip).passed
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
        f = loss(made, W)
        for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f)), jax.checkpoint):
            jax.block_until_ready(transform(f)(IMAGE))
        jax.block_until_ready(jax.vmap(f)(IMAGE[None]))
        return weakref.ref(made)

    ref = run()
    for _ in range(4):
        gc.collect()
    assert ref() is None

"""Packers under the flags of JAX: each packer, each flag, and each way to run a function."""

import contextlib
import inspect
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import by_name, cast_saved, quantize_saved, recompute_saved, save_on_cpu, save_on_disk
from tests.kit.case import grid
from tests.kit.layers import Tanh, layer
from tests.kit.modes import MODES, STAGED

from .spy import AT_LEAST, assert_close

# Not each function has a `sin`.
pytestmark = [AT_LEAST, pytest.mark.filterwarnings("ignore:by_name. no tensor:UserWarning")]

X = grid(8, 32)


def of_host():
    def pack(x):
        kept = x.copy()
        x[...] = 0  # the array is the hook's own
        return kept

    return saved_tensors_hooks(pack, lambda packed: packed, host=True)


# The largest error of a gradient next to its largest entry.
PACKERS = {
    "cast": (lambda _: cast_saved(), 0.02),
    "8 bits": (lambda _: quantize_saved(8, stochastic=True), 0.03),
    "cpu": (lambda _: save_on_cpu(), 1e-5),
    "disk": (save_on_disk, 1e-5),
    "limit": (lambda _: recompute_saved(limit=0), 1e-5),
    "by name": (lambda _: by_name({"sin": cast_saved(), ...: quantize_saved(8)}), 0.03),
    "host": (lambda _: of_host(), 1e-5),
}


@contextlib.contextmanager
def debug_nans_and_disable_jit():
    with jax.debug_nans(True), jax.disable_jit():
        yield


FLAGS = {
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "disable_jit": jax.disable_jit,
    "debug_nans and disable_jit": debug_nans_and_disable_jit,
    "x64": lambda: jax.enable_x64(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "checking_leaks": jax.checking_leaks,
}
RUNS = {name: MODES[name] for name in ("grad", "jit-grad", "grad-jit", "vmap", "scan")}


def met(flags):
    """Return pairs of hooks with each flag: all in eager mode and with jit inside, and two in each way to run."""
    return [
        pytest.param(flag, packer, run, marks=[] if "disable_jit" in flag and run == "grad-jit" else pytest.mark.slow)
        for flag in flags
        for packer in PACKERS
        for run in RUNS
        if run in ("grad", "grad-jit") or packer in ("8 bits", "host")
    ]


def loss(x):
    chosen = jnp.where(x > 0, jnp.tanh(x) * jnp.sin(x), jnp.sin(x))
    return jnp.sum(Tanh.apply(chosen) * jnp.exp(-(chosen * chosen)))


@pytest.mark.parametrize(("flag", "packer", "run"), met(FLAGS))
def test_a_packer_under_a_flag(flag, packer, run, tmp_path):
    make, tolerance = PACKERS[packer]
    expected = RUNS[run](loss)(X)
    with FLAGS[flag]():
        found = RUNS[run](make(tmp_path)(loss))(X)
    assert_close(found, expected, tolerance)


def without_layer(x):
    return jnp.tanh(x) * jnp.sin(x) * jnp.where(x > 0, x, 2)


@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize(
    "stage", [lambda f: f, STAGED["jit"], jax.vmap, STAGED["scan"]], ids=["eager", "jit", "vmap", "scan"]
)
def test_backward_where_x64_is_another(forward, packer, stage, tmp_path):
    saves_sine = lambda ctx, x: ctx.save_for_backward(jnp.sin(x[jnp.arange(len(x))])) or x
    sine = jax.grad(lambda x: jnp.sum(layer(saves_sine, lambda ctx, _: ctx.saved_tensor()[0]).apply(x)))
    with jax.enable_x64(forward):
        x = jnp.asarray(np.linspace(-1, 1, 128).reshape(4, 32), jnp.float64 if forward else jnp.float32)
        with_layers = lambda x: Tanh.apply(x) * sine(x) * jnp.where(x > 0, x, 2)
        functions = PACKERS[packer][0](tmp_path)(without_layer), with_layers, without_layer
        (_, pull), (_, of_layers), (_, plain) = (jax.vjp(stage(f), x) for f in functions)
        _, push = jax.linearize(stage(functions[0]), x)
        (expected,) = plain(one := jnp.ones_like(x))
    with jax.enable_x64(not forward):
        (found,), (gradient,), pushed = pull(one), of_layers(one), push(one)
    for of_packed in found, pushed:
        assert_close(np.asarray(of_packed), np.asarray(expected), PACKERS[packer][1])
    assert_close(np.asarray(gradient), np.asarray(expected), 1e-6)


def makes_nan(x):
    return jnp.sum(jnp.tanh(jnp.where(x > 0, jnp.sqrt(x), 0.0)))


def makes_nan_in_backward(x):
    return jnp.sum(jnp.sqrt(jnp.abs(jnp.sin(0 * x))))


def where(f, x, function):
    """What JAX reports, and the lines of the function that it names."""
    with pytest.raises(FloatingPointError) as raised:
        f(x)
    lines, first = inspect.getsourcelines(function)
    frames = [frame.lineno for frame in traceback.extract_tb(raised.tb) if frame.filename == __file__]
    noted = [
        int(n) for note in getattr(raised.value, "__notes__", ()) for n in re.findall(r"test_modes.py:(\d+)", note)
    ]
    found = {n for n in (*frames, *noted) if first <= n < first + len(lines)}
    return str(raised.value).partition(".")[0], found


def makes_infinity(x):
    return jnp.sum(jnp.arctan(jnp.tanh(x) * 1e30 * 1e30))  # 8 bits pack the tanh, which is finite


REPORTED = [
    pytest.param(f, *row.values, marks=row.marks)
    for f in (makes_nan, makes_nan_in_backward)
    for row in met(("debug_nans", "debug_nans and disable_jit"))
]
REPORTED += [(makes_infinity, "debug_infs", packer, "grad-jit") for packer in PACKERS]


@pytest.mark.parametrize(("f", "flag", "packer", "run"), REPORTED)
def test_a_nan_or_infinity_of_the_user_is_reported_where_it_is_without_hooks(f, flag, packer, run, tmp_path):
    with FLAGS[flag]():
        text, lines = where(RUNS[run](PACKERS[packer][0](tmp_path)(f)), X, f)
        expected, least = where(RUNS[run](f), X, f)
    assert text == expected
    assert lines >= least


@pytest.mark.parametrize("packer", PACKERS)
def test_a_nan_within_a_function_of_jax_is_not_reported(packer, tmp_path):
    with jax.debug_nans(True):
        jax.grad(PACKERS[packer][0](tmp_path)(lambda x: jnp.sum(jnp.sin(x) * x.var())))(X)


def makes_nan_of_a_packed_infinity(x):
    large = jnp.exp(1e4 * (1 + 0 * jnp.sin(x[0])))  # 8 bits restore it as NaN, from which backward broadcasts it again
    return jnp.sum(jnp.outer(jnp.exp(jnp.sin(x[0])), large))


@pytest.mark.parametrize("run", [jax.grad, lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x[:, None])))])
def test_a_nan_is_not_reported_where_a_tensor_is_recomputed(run):
    f = makes_nan_of_a_packed_infinity
    with jax.debug_nans(True):
        assert where(run(quantize_saved(8)(f)), X, f)[0] == where(run(f), X, f)[0]


def test_a_block_of_nan_is_packed_without_infinity():
    x = X.at[0].set(jnp.nan)
    with jax.debug_infs(True):
        found = jax.grad(jax.jit(quantize_saved(8)(lambda x: jnp.sum(jnp.sin(2 * x)))))(x)
    assert np.isnan(found[0]).all()
    np.testing.assert_allclose(found[1:], 2 * np.cos(2 * X[1:]), atol=0.02)


@pytest.mark.parametrize("run", RUNS)
def test_a_host_hook_owns_its_array(run):
    given = np.array(X)
    total = lambda x: jnp.sum(without_layer(x))
    assert_close(RUNS[run](of_host()(total))(given), RUNS[run](total)(X), 1e-5)
    np.testing.assert_array_equal(given, X)  # the hook did not write into the caller's array

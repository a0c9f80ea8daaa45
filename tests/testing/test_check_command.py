"""`python -m pylayer_jax check`: the report, the exit status, and errors about arguments that cannot be used."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from pylayer_jax import __main__

pytestmark = pytest.mark.once

LAYERS = """
import jax, jax.numpy as jnp
from pylayer_jax import PyLayer

class Scale(PyLayer):
    @staticmethod
    def forward(ctx, x, factor, how=None):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.factor

class Wrong(Scale):
    @staticmethod
    def backward(ctx, dy):
        return -dy * ctx.factor

class Round(PyLayer):
    @staticmethod
    def forward(ctx, x):
        return jnp.round(x)

    @staticmethod
    def backward(ctx, dy):
        return dy

def straight_through(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)

def narrow(x):
    return Scale.apply(x.astype(jnp.bfloat16), 2.0).astype(x.dtype)

def statics(x, *values):
    assert values == (-1, "sum", None, (2, [3]), jnp.tanh), values
    return Scale.apply(x, 2.0)

def integers(x, index, mask, key):
    assert index.dtype == jnp.int32 and mask.dtype == bool and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jnp.where(mask, Scale.apply(x, 2.0)[index], 0)

def refuse(x):
    raise RuntimeError(f"it is {x}")

class Inside:
    Scale = Scale

NUMBER = 3
"""
MOST = ["vmap", "remat", "shard_map", "second order", "forward mode", "forward over reverse", "linear"]
MOST += ["repeatable", "leaks"]
FAST = [f"--skip={name}" for name in MOST]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "checked_layers.py").write_text(LAYERS)
    (tmp_path / "broken_layers.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as `python -m` does
    yield tmp_path
    sys.modules.pop("checked_layers", None)


def check(*arguments):
    return __main__.main(["check", *arguments])


def test_a_right_layer_has_a_tick_per_property(capsys):
    assert check("checked_layers:Scale", "f32[2,3]", "0.5") == 0
    name, *lines = capsys.readouterr().out.splitlines()
    assert name == "Scale"
    assert all(line.startswith("✓ ") for line in lines)
    assert {"jit", "vmap", "gradients", "second order"} <= {line[2:].split("  ")[0] for line in lines}


def test_a_wrong_layer_has_the_reason(capsys):
    assert check("checked_layers:Wrong", "f32[3]", "0.5", *FAST) == 1
    out, err = capsys.readouterr()
    (wrong,) = [line for line in out.splitlines() if line.startswith("✗")]
    assert "✗ gradients " in wrong
    assert "args[0]" in wrong
    assert err == ""
    assert check("checked_layers:Wrong", "f32[3]", "0.5", *FAST, "--skip", "gradients") == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_ticks(encoding, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", written)
    assert check("checked_layers.py:Wrong", "f32[3]", "0.5", *FAST) == 1
    written.flush()
    starts = [line[:7] for line in written.buffer.getvalue().decode(encoding).splitlines()]
    assert starts.count("FAILED ") == 1
    assert starts.count("ok     ") >= 2


def test_a_layer_that_rounds_is_measured_in_its_dtype():
    for options, status in ([], 1), (["--no-float64"], 0), (["--rtol=9", "--atol=9"], 0):
        assert check("checked_layers:narrow", "bf16[2]", *options, *FAST) == status


def test_the_seed_chooses_the_numbers(capsys):
    reports = []
    for seed in "003":
        assert check("checked_layers:refuse", "f32[3]", "--seed", seed) == 1
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1] != reports[2]


def test_a_reference_says_what_the_gradient_is_meant_to_be():
    assert check("checked_layers:Round", "f32[3]", *FAST) == 1
    assert check("checked_layers:Round", "f32[3]", "--reference", "checked_layers:straight_through", *FAST) == 0


def test_a_call_that_does_not_fit_is_a_failed_property(capsys):
    assert check("checked_layers:Scale", "f32[3]") == 1
    assert "missing a required argument: 'factor'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [("f32[]", "float32[]"), ("bf16[2]", "bfloat16[2]"), ("f64[ 2, 3 ]", "float64"), ("c64[2]", "complex")],
)
def test_dtypes_and_shapes(spec, dtype, capsys):
    assert check("checked_layers:Inside.Scale", spec, "2", *FAST) == 0
    assert dtype in capsys.readouterr().out


def test_integers_flags_and_keys():
    assert check("checked_layers:integers", "f32[4]", "i32[2]", "bool[2]", "key[]", *FAST) == 0


def test_literals_and_dotted_names():
    assert check("checked_layers:statics", "f32[2]", "-1", "'sum'", "None", "(2, [3])", "jax.numpy.tanh", *FAST) == 0


@pytest.mark.parametrize(
    "spec", ["__import__('os').abort()", "f()", "{**{}}", "x=3", "{'w': f32[8]}", "f32[8][8]", "f32[2", "f32[n]"]
)
def test_nothing_is_evaluated(spec, capsys):
    with pytest.raises(SystemExit):
        check("checked_layers:Scale", spec, "0.5")
    assert f"error: {spec}: expected an array such as" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checked_layers"], "checked_layers: Expected MODULE:NAME, such as mypackage.layers:Tanh"),
        (["missing_module:Scale"], "missing_module: cannot be imported (ModuleNotFoundError: No module named"),
        (["missing.py:Scale"], "missing.py: no such file. Expected MODULE:NAME"),
        (["broken_layers:Scale"], "broken_layers: cannot be imported (ZeroDivisionError: division by zero)"),
        (["checked_layers:Scales"], "checked_layers has no Scales. It has"),
        (["checked_layers:NUMBER"], "expected a layer class or a function, got 3"),
        (["checked_layers:Inside"], "expected a layer class or a function, got <class"),
        (["checked_layers:Scale", "float32[2]"], "float32[2]: expected one of f16"),
        (["checked_layers:Scale", "key[2]"], 'or "key[]"'),
        (["checked_layers:Scale", "text"], "For a string, quote it twice: \"'text'\""),
        (["checked_layers:Scale", "jax.numpy.tan_h"], "jax.numpy.tan_h: not found (AttributeError"),
        (["checked_layers:Scale", "missing.f"], "missing.f: not found (ModuleNotFoundError"),
        (["checked_layers:Scale", "3"], "none of the arguments holds an array"),
        (["checked_layers:Scale", "f32[2]", "1", "--skip=speed"], "expected names among jit"),
        (["checked_layers:Scale", "f32[2]", "1", "--reference", "x"], "x: Expected MODULE:NAME"),
        ([], "the following arguments are required: MODULE:LAYER"),
    ],
)
def test_an_argument_that_cannot_be_used(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        check(*arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m pylayer_jax check" in error
    assert message in error


def test_from_the_shell(folder):
    command = [sys.executable, "-m", "pylayer_jax", "check", "checked_layers.py:Wrong", "f32[2]", "2", *FAST]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "✗ gradients" in done.stdout


def test_help_says_how_arguments_are_written(capsys):
    with pytest.raises(SystemExit) as stop:
        check("--help")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert '"f32[8,8]"' in out
    assert "jax.numpy.tanh" in out

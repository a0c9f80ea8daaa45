"""`python -m pylayer_jax check`: what it prints, its exit status, and what it says of input that it cannot use."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest

from pylayer_jax import __main__
from pylayer_jax.testing._check_layer import PROPERTIES
from tests.kit import wrong_layers

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

def straight_through(x):
    return x + jax.lax.stop_gradient(jnp.round(x) - x)

def narrow(x):
    return Scale.apply(x.astype(jnp.bfloat16), 2.0).astype(x.dtype)

def linear(parameters, x, scale=1.0, how=None, *, axis=None, steps=()):
    assert (how, axis, steps) in (("b", None, ()), ("a[]", -1, (2, [3])))
    assert type(scale) is float or scale.shape == ()
    return Scale.apply(x @ parameters["w"] + parameters["b"][0], 2.0) * scale

class Applies(PyLayer):
    @staticmethod
    def forward(ctx, x, tree, function=None):
        assert function is jnp.cos
        ctx.save_for_backward(x)
        return tree["f"](x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(ctx.saved_tensor()[0])

class Inside:
    Scale = Scale

NUMBER = 3
"""


def only(*names):
    return [f"--skip={name}" for name in PROPERTIES if name not in names]


FAST = only("jit", "gradients", "arguments", "cotangents", "saved")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "checked_layers.py").write_text(LAYERS)
    (tmp_path / "broken_layers.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("checked_layers", None)


WRONG_LAYERS = wrong_layers.__name__


def check(*arguments):
    return __main__.main(["check", *arguments])


def test_a_right_layer_has_a_tick_per_property(capsys):
    assert check("checked_layers:Scale", "f32[2,3]", "0.5") == 0
    name, *lines = capsys.readouterr().out.splitlines()
    assert name == "Scale"
    assert all(line.startswith("✓ ") for line in lines)
    names = ["eager", "jit", "vmap", "scan", "cond", "remat", "shard_map", "gradients", "second order", "forward mode"]
    names += ["forward over reverse", "arguments", "cotangents", "linear", "not differentiated", "repeatable", "leaks"]
    assert [line[2:].split("  ")[0] for line in lines] == [*names, "saved"]


def test_a_wrong_layer_has_the_reason_and_says_how_a_meant_one_is_declared(capsys):
    assert check("checked_layers:Wrong", "f32[3]", "0.5", *FAST) == 1
    out, err = capsys.readouterr()
    (wrong,) = [line for line in out.splitlines() if line.startswith("✗")]
    assert "✗ gradients " in wrong
    assert "the gradient of args[0] at index (" in wrong
    assert err == ""
    first, second, third = out.splitlines()[-3:]
    assert first.endswith("Then pass --reference MODULE:FUNCTION: plain JAX with")
    assert second.endswith("or --skip gradients.")
    assert "Then pass --no-float64, or tolerances that allow for it, as in --rtol 0.03 --atol 0.03." in third
    assert check("checked_layers:Wrong", "f32[3]", "0.5", *only("jit"), "--skip", "gradients") == 0
    assert "Is backward meant" not in capsys.readouterr().out
    assert check(f"{WRONG_LAYERS}:WrongAtSecondOrder", "f32[2]", *only("second order")) == 1
    assert "or --skip 'second order'." in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_ticks(encoding, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", written)
    assert check("checked_layers.py:Wrong", "f32[3]", "0.5", *FAST) == 1
    written.flush()
    lines = written.buffer.getvalue().decode(encoding).splitlines()[1:-3]  # without the hints
    starts = [line[:7] for line in lines]
    assert starts.count("FAILED ") == 1
    assert starts.count("ok     ") == len(lines) - 1


def test_a_layer_that_rounds_is_measured_in_its_dtype():
    for options, status in ([], 1), (["--no-float64"], 0), (["--rtol=9", "--atol=9"], 0):
        assert check("checked_layers:narrow", "bf16[2]", *options, *only("gradients")) == status


def test_the_seed_chooses_the_numbers(capsys):
    found = []
    for seed in "003":
        check(f"{WRONG_LAYERS}:WrongSign", "f32[3]", "--seed", seed, *only("jit", "gradients"))
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != found[2]


def test_a_reference_says_what_the_gradient_is_meant_to_be(capsys):
    layer = "pylayer_jax._commands.demo:Round"
    assert check(layer, "f32[3]", *FAST) == 1
    assert check(layer, "f32[3]", "--reference", "checked_layers:straight_through", *FAST) == 0
    assert "as those of the reference" in capsys.readouterr().out


def test_a_call_that_does_not_fit_is_the_first_property(capsys):
    assert check("checked_layers:Scale", "f32[3]") == 1
    error = "✗ eager                 TypeError: Scale.apply: missing a required argument: 'factor'"
    assert error in capsys.readouterr().out


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [("f32[]", "float32[]"), ("bf16[2]", "bfloat16[2]"), ("f64[2]", "float64"), ("c64[2]", "complex")],
)
def test_dtypes_and_shapes(spec, dtype, capsys):
    assert check("checked_layers:Inside.Scale", spec, "2", *FAST) == 0
    assert f"returns {dtype}" in capsys.readouterr().out


def test_integers_flags_and_keys():
    assert check(f"{WRONG_LAYERS}:Picks", "f32[4]", "i32[ 2, ]", "bool[]", "key[]", *FAST) == 0


def test_trees_and_keywords(capsys):
    tree = "{'w': f32[4,2], 'b': [f32[2], (i32[3], 'text')]}"
    assert check("checked_layers:linear", tree, "f32[3, 4]", "1.5", "'b'", *FAST) == 0
    out = capsys.readouterr().out
    assert "returns float32[3,2]; gradients of args[0]['b'][0], args[0]['w'], args[1]\n" in out
    statics = ["how='a[]'", "axis=-1", "steps=(2, [3])"]
    assert check("checked_layers:linear", f"parameters={tree}", "scale=f32[]", "x = f32[3,4]", *statics, *FAST) == 0
    out = capsys.readouterr().out
    assert "gradients of parameters['b'][0], parameters['w'], scale, x" in out
    assert "3 of 6 are differentiable, with 4 arrays" in out
    assert check("checked_layers:Scale", "x={'a': f64[2]}", "-1", *only("vmap")) == 1  # a dict times a number


def test_functions_by_their_names():
    assert check("checked_layers:Applies", "f32[2]", "{'f': jnp.sin}", "function=jax.numpy.cos", *FAST) == 0


GENERAL = r"Expected an array such as \"f32\[8,8\]\" or \"f32\[\]\", a Python literal"


@pytest.mark.parametrize(
    "spec",
    ["__import__('os').abort()", "f()", "{**{}}", "x=", "{w: f32[8]}", "f32[8][8]", "{[1]: 2}", "{1: 2, 'a': 3}"],
)
def test_only_literals_and_arrays_are_read(spec, capsys):
    with pytest.raises(SystemExit):
        check("checked_layers:Scale", spec, "0.5")
    error = capsys.readouterr().err
    assert f"error: {spec}: Expected an array such as" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checked_layers"], r"checked_layers: Expected MODULE:NAME, such as mypackage\.layers:Tanh"),
        ([":Scale"], r":Scale: Expected MODULE:NAME"),
        (["missing_module:Scale"], r"missing_module: cannot be imported \(ModuleNotFoundError: No module named"),
        (["missing.py:Scale"], r"missing\.py: no such file\. Expected MODULE:NAME"),
        (["broken_layers:Scale"], r"broken_layers: cannot be imported \(ZeroDivisionError: division by zero\)"),
        (["checked_layers:Scales"], r"checked_layers has no Scales\. It has PyLayer, Scale, Wrong"),
        (["checked_layers:NUMBER"], r"expected a layer class or a function, got 3"),
        (["checked_layers:Inside"], r"expected a layer class or a function, got <class"),
        (["checked_layers:Scale", "f32[2"], GENERAL),
        (["checked_layers:Scale", "float32[2]"], r"float32\[2\]: Unknown dtype 'float32'; expected one of f16"),
        (["checked_layers:Scale", "text"], r"text: Expected .* For a string, quote it twice: '\"text\"'"),
        (
            ["checked_layers:Scale", "jnp.tan_h"],
            r"jnp\.tan_h: jnp\.tan_h cannot be found: module 'jax\.numpy'",
        ),
        (["checked_layers:Scale", "missing.f"], r"missing\.f: missing\.f cannot be found: No module named 'missing'"),
        (["checked_layers:Scale", "jnp.pi"], r"jnp\.pi: Expected the name of a function, got jnp\.pi, which is 3\.14"),
        (["checked_layers:Scale", "f32[n]"], r"f32\[n\]: Expected whole numbers as sizes, as in f32\[8,8\]"),
        (["checked_layers:Scale", "key[2]"], r"key\[2\]: Expected one PRNG key: key\[\]"),
        (["checked_layers:Scale", "x=f32[2]", "x=3"], r"x=3: the keyword x is given twice"),
        (["checked_layers:Scale", "3"], r"none of the arguments holds an array"),
        (["checked_layers:Scale", "f32[2]", "1", "--skip=speed"], r"skip=\['speed'\]: expected names among jit"),
        (["checked_layers:Scale", "f32[2]", "1", "--reference", "x"], r"x: Expected MODULE:NAME"),
        ([], r"the following arguments are required: MODULE:LAYER"),
    ],
)
def test_input_that_cannot_be_used(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        check(*arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m pylayer_jax check" in error
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def test_the_path_of_imports_is_left_as_it_was():
    before = list(sys.path)
    assert check("checked_layers:Scale", "f32[2]", "2", *only("jit")) == 0
    assert sys.path == before


def test_from_the_shell(folder):
    options = ["f32[2]", "2", *only("jit", "gradients")]
    command = [sys.executable, "-m", "pylayer_jax", "check", "checked_layers:Wrong", *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "✗ gradients" in done.stdout


def test_help_says_how_arrays_are_written(capsys):
    with pytest.raises(SystemExit) as stop:
        check("--help")
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert '"f32[8,8]"' in out
    assert "\"{'w': f32[8,8], 'b': f32[8]}\"" in out
    assert "scale=f32[] axis=-1" in out
    assert "forward over reverse" in out  # the names for --skip

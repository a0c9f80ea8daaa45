"""`python -m pylayer_jax check` prints a report, sets the exit status, and refuses arguments that it cannot use."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from pylayer_jax import __main__
from tests.checkers.wrong_layers import all_but

pytestmark = pytest.mark.once

FAST = [f"--skip={name}" for name in all_but("jit", "gradients", "arguments", "cotangents")]
FILE = Path(__file__).with_name("checked_layers.py")


def check(name, *arguments, module="tests.checkers.checked_layers"):
    return __main__.main(["check", f"{module}:{name}", *arguments])


def test_a_right_layer_has_a_tick_per_property(capsys):
    assert check("Scale", "f32[2,3]", "0.5") == 0
    name, *lines = capsys.readouterr().out.splitlines()
    assert name == "Scale"
    name_of = {mark: {line[2:].split("  ")[0] for line in lines if line[0] == mark} for mark in "✓–✗"}
    assert {"jit", "vmap", "gradients", "second order"} <= name_of["✓"]
    assert name_of["–"] == {"arguments", "cotangents", "forward mode"}  # there is nothing to check
    assert not name_of["✗"]


def test_a_wrong_layer_has_the_reason(capsys):
    assert check("Wrong", "f32[3]", "0.5", *FAST) == 1
    out, err = capsys.readouterr()
    (wrong,) = [line for line in out.splitlines() if line.startswith("✗")]
    assert "gradients" in wrong
    assert "args[0]" in wrong
    assert err == ""
    assert check("Wrong", "f32[3]", "0.5", *FAST, "--skip", "gradients") == 0


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_without_ticks(encoding, monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", written)
    assert check("Wrong", "f32[3]", "0.5", *FAST) == 1
    written.flush()
    text = written.buffer.getvalue().decode(encoding)
    assert text.count(r"\N{BALLOT X}") == 1
    assert text.count(r"\N{CHECK MARK}") >= 2


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["narrow", "bf16[2]"], 0),
        (["narrow", "bf16[2]", "--rtol=9", "--atol=9"], 0),
        (["Round", "f32[3]"], 1),
        (["Round", "f32[3]", "--reference", "tests.checkers.checked_layers:straight_through"], 0),
        (["Scale", "f32[3]", "2.0", "--reference", "tests.checkers.checked_layers:straight_through"], 1),
        (["integers", "f32[4]", "i32[2]", "bool[2]", "key[]"], 0),
        (["statics", "f32[2]", "-1", "'sum'", "None", "(2, [3])", "jax.numpy.tanh"], 0),
        (["Inside.Scale", "f64[ 2, 3 ]", "2"], 0),
        (["Inside.Scale", "c64[2]", "2"], 0),
    ],
)
def test_options_and_arguments(arguments, status):
    assert check(*arguments, *FAST) == status


def test_the_seed_chooses_the_numbers(capsys):
    reports = []
    for seed in "003":
        assert check("refuse", "f32[3]", "--seed", seed) == 1
        reports.append(capsys.readouterr().out)
    assert reports[0] == reports[1] != reports[2]


def test_a_call_that_does_not_fit_is_a_failed_property(capsys):
    assert check("Scale", "f32[3]") == 1
    assert "factor" in capsys.readouterr().out


SCALE = "tests.checkers.checked_layers:Scale"
# The arguments, and a word of the error. Nothing is evaluated.
SPECS = ["__import__('os').abort()", "{**{}}", "x=3", "f32[8][8]", "f32[n]"]
UNUSABLE = [
    *(([SCALE, spec, "0.5"], spec) for spec in SPECS),
    (["missing_module:Scale"], "ModuleNotFoundError"),
    (["missing.py:Scale"], "missing.py"),
    (["broken_layers:Scale"], "ZeroDivisionError"),
    (["tests.checkers.checked_layers"], "MODULE:NAME"),
    (["tests.checkers.checked_layers:Scales"], "Scales"),
    (["tests.checkers.checked_layers:NUMBER"], "3"),
    (["tests.checkers.checked_layers:Inside"], "class"),
    ([SCALE, "float32[2]"], "f32"),
    ([SCALE, "key[2]"], "key[]"),
    ([SCALE, "text"], "\"'text'\""),
    ([SCALE, "jax.numpy.tan_h"], "AttributeError"),
    ([SCALE, "missing.f"], "ModuleNotFoundError"),
    ([SCALE, "3"], "array"),
    ([SCALE, "f32[2]", "1", "--skip=speed"], "jit"),
    ([SCALE, "f32[2]", "1", "--reference", "x"], "MODULE:NAME"),
    ([], "MODULE:LAYER"),
]


@pytest.mark.parametrize(("arguments", "word"), UNUSABLE)
def test_an_argument_that_cannot_be_used(arguments, word, capsys, tmp_path, monkeypatch):
    (tmp_path / "broken_layers.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit) as stop:
        __main__.main(["check", *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m pylayer_jax check" in error
    assert word in error


def test_from_the_shell():
    command = [sys.executable, "-m", "pylayer_jax", "check", f"{FILE}:Wrong", "f32[2]", "2", *FAST]
    done = subprocess.run(command, cwd=FILE.parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "✗ gradients" in done.stdout

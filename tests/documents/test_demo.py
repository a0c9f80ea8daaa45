"""The main job and its command line."""

import sys

import jax
import pytest

from pylayer_jax import __main__


@pytest.fixture(autouse=True)
def standard_promotion():
    # optax counts its steps in integers and multiplies them with floats.
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_main_job_reports_accuracy_gradients_and_what_is_saved(capsys):
    status = __main__.main(["--epochs", "8", "--quiet"])
    out = capsys.readouterr().out
    accuracy = float(out.split("Test accuracy: ")[1].split("%")[0])
    assert accuracy > 85
    assert status == (0 if accuracy >= 95 else 1)
    assert "(at most 1e-04: yes)" in out
    # The first quantizer keeps its weight and its step, swish its input, scaling nothing.
    saved = [line.split() for line in out.split("Saved for backward")[1].splitlines()]
    assert ["Quantize", "saved[0]", "float32[64,128]", "1", "32,768", "32,768"] in [row[:6] for row in saved]
    assert ["Quantize", "saved[1]", "float32[]", "1", "4", "4"] in [row[:6] for row in saved]
    assert ["Swish", "saved[0]", "float32[64,64]", "1", "16,384", "16,384"] in [row[:6] for row in saved]
    assert all(row[6].startswith("demo.py:") for row in saved if row and row[0] in ("Swish", "Quantize"))
    assert not [row for row in saved if row and row[0] == "ScaleGradient"]


def test_wrong_gradients_fail_the_job(capsys, monkeypatch):
    swish = __main__.demo.Swish
    monkeypatch.setattr(swish, "backward", staticmethod(lambda ctx, dy: dy))
    assert __main__.main(["--epochs", "1", "--quiet"]) == 1
    assert "(at most 1e-04: NO)" in capsys.readouterr().out


def test_missing_extra_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    assert __main__.main(["--quiet"]) == 1
    assert 'optax is missing. The main job needs an extra: pip install "pylayer_jax[demo]"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["train"]])
def test_unknown_arguments_give_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m pylayer_jax" in capsys.readouterr().err

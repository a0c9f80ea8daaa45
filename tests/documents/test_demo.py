"""The demo and its command line."""

import re
import sys

import pytest

from pylayer_jax import __main__

# optax counts its steps in integers and multiplies them with floats.
pytestmark = pytest.mark.usefixtures("standard_promotion")


def test_the_demo_reports_accuracy_gradients_and_saved_tensors(capsys):
    assert __main__.main(["--epochs", "10"]) == 0
    out, errors = capsys.readouterr()
    assert "training" not in errors  # no progress bar in a file or a pipe
    accuracy = float(out.split("Test accuracy: ")[1].split("%")[0])
    assert accuracy >= 95
    assert "(at most 1e-05: yes)" in out
    saved = [line.split() for line in out.split("Saved for backward")[1].splitlines()]
    assert ["Swish", "loss/logits", "saved[0]", "float32[64,64]", "1", "16,384"] in [row[:6] for row in saved]
    assert ["Quantize", "saved[0]", "float32[64,128]", "1", "32,768"] in [row[:5] for row in saved]  # an input

    packed, kept, plain = re.search(r"8-bit.* accuracy (.*)%; (.*) bytes are kept instead of (.*)", out).groups()
    assert float(packed) > 85
    assert int(kept.replace(",", "")) < 0.6 * int(plain.replace(",", ""))


def test_wrong_gradients_fail_the_job(capsys, monkeypatch):
    swish = __main__._demo.Swish
    monkeypatch.setattr(swish, "backward", staticmethod(lambda ctx, dy: dy))
    assert __main__.main(["--epochs", "1", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "(at least 95%: NO)" in out
    assert "(at most 1e-05: NO)" in out


def test_missing_extra_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    assert __main__.main(["--quiet"]) == 1
    assert "optax is missing. The demo needs: pip install optax scikit-learn tqdm" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--epochs", "0"], ["train"]])
def test_unknown_arguments_give_usage(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m pylayer_jax" in capsys.readouterr().err

"""The demo and its command line."""

import os
import re
import signal
import subprocess
import sys

import jax
import pytest

from pylayer_jax import __main__


@pytest.fixture(autouse=True)
def standard_promotion():
    # optax counts its steps in integers and multiplies them with floats.
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_the_demo_reports_accuracy_gradients_and_saved_tensors(capsys):
    assert __main__.main(["--epochs", "8", "--quiet"]) == 0
    out = capsys.readouterr().out
    accuracy = float(out.split("Test accuracy: ")[1].split("%")[0])
    assert accuracy > 85
    assert "(at most 1e-05: yes)" in out
    saved = [line.split() for line in out.split("Saved for backward")[1].splitlines()]
    assert ["Swish", "loss/logits", "saved[0]", "float32[64,64]", "1", "16,384"] in [row[:6] for row in saved]
    assert ["Quantize", "saved[0]", "float32[64,128]", "1", "32,768"] in [row[:5] for row in saved]

    packed, kept, plain = re.search(r"8-bit.* accuracy (.*)%; (.*) bytes are kept instead of (.*)", out).groups()
    assert float(packed) > 85
    assert int(kept.replace(",", "")) < 0.6 * int(plain.replace(",", ""))


@pytest.mark.slow
def test_too_few_epochs_are_no_failure(capsys, monkeypatch):
    assert __main__.main(["--epochs", "1", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "4-bit weights (too few epochs to judge: 95% needs about 10)" in out
    assert "NO" not in out
    monkeypatch.setattr(__main__._demo, "ENOUGH_EPOCHS", 1)
    assert __main__.main(["--epochs", "1", "--quiet"]) == 1
    assert "(at least 95%: NO)" in capsys.readouterr().out


def test_wrong_gradients_fail_the_job(capsys, monkeypatch):
    swish = __main__._demo.Swish
    monkeypatch.setattr(swish, "backward", staticmethod(lambda ctx, dy: dy))
    assert __main__.main(["--epochs", "1", "--quiet"]) == 1
    assert "(at most 1e-05: NO)" in capsys.readouterr().out


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


ROOT = os.path.dirname(os.path.dirname(__main__.__file__))


def run(*arguments, **options):
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    environment.pop("PYTHONUNBUFFERED", None)
    command = [sys.executable, "-m", "pylayer_jax", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, **options)


@pytest.mark.parametrize("arguments", [pytest.param(["--epochs", "1"], marks=pytest.mark.slow), ["check", "--help"]])
def test_a_reader_that_leaves_gets_no_traceback(arguments):
    read, write = os.pipe()
    os.close(read)
    with run(*arguments, stdout=write) as job:
        os.close(write)
        errors = job.stderr.read()
    assert "Error" not in errors
    assert "Traceback" not in errors
    assert job.returncode == 141  # as a shell reports a command that SIGPIPE ended


@pytest.mark.slow
def test_ctrl_c_gives_no_traceback():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may ignore it
    try:
        job = run("--epochs", "100000", stdout=subprocess.DEVNULL)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        errors = ""
        while "training" not in errors:
            letter = job.stderr.read(1)
            assert letter, errors
            errors += letter
        job.send_signal(signal.SIGINT)
        errors += job.communicate(timeout=60)[1]
    finally:
        job.kill()
        job.wait()
        job.stderr.close()
    assert job.returncode == 130
    assert "Traceback" not in errors
    assert "KeyboardInterrupt" not in errors

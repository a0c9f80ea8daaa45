"""What pytest shows of a checker that fails: the error, and none of the frames of the checker."""

import os
import subprocess
import sys

TESTS = """
import jax.numpy as jnp
from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck
from pylayer_jax.testing._check_layer import PROPERTIES
from tests.kit.wrong_layers import WrongSign

X = jnp.ones(2)

def test_gradcheck():
    gradcheck(WrongSign, (X,))

def test_assert_equivalent():
    assert_equivalent(WrongSign, jnp.sin, (X,))

def test_check_layer():
    check_layer(WrongSign, X, skip=[name for name in PROPERTIES if name != "gradients"])
"""


def test_frames_of_the_checkers_are_hidden(tmp_path, pytestconfig):
    (tmp_path / "test_wrong.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(command, cwd=pytestconfig.rootpath, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "E           ✗ gradients " in done.stdout or "E       ✗ gradients " in done.stdout
    assert "pylayer_jax/testing" not in done.stdout
    assert "contextlib" not in done.stdout
    assert len(done.stdout.splitlines()) < 70

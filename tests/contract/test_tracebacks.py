"""Where errors point: to the lines of the user, and not to those of the library."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import jax
import pytest

import pylayer_jax
from pylayer_jax import Function, PyLayer, once_differentiable, saved_tensors_hooks
from tests.kit import failing
from tests.kit.layers import layer, loss
from tests.kit.modes import MODES, X

PACKAGE = str(Path(pylayer_jax.__file__).parent)


class BoomError(Exception):
    pass


def boom(*args, **kwargs):
    raise BoomError


def hooks():
    return saved_tensors_hooks(lambda x: x, lambda x: x)


def in_block(f):
    def blocked(x):
        with hooks():
            return f(x)

    return blocked


RUNS = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "container": lambda f: f({"x": [X]}),
}
REVERSE = {
    **{name: lambda f, mode=mode: mode(f)(X) for name, mode in MODES.items() if name != "cond"},
    "grad-vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(X),
    "second": lambda f: jax.jacrev(jax.grad(f))(X),
    "hessian": lambda f: jax.hessian(f)(X),
    "block": lambda f: jax.grad(in_block(f))(X),
    "jit-block": lambda f: jax.jit(jax.grad(in_block(f)))(X),
    "decorated": lambda f: jax.grad(hooks()(f))(X),
}
FORWARD = {"jvp": lambda f: jax.jvp(f, (X,), (X,)), "jit-jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X)}
IN_VMAP = {"vmap": RUNS["vmap"], "grad-vmap": REVERSE["grad-vmap"]}
OF_ARRAYS = {name: run for name, run in (RUNS | REVERSE).items() if name != "container"}
# Layers of which one method raises, and what runs it.
LAYERS = {
    "forward": (layer(boom), RUNS | REVERSE),
    "forward, forward mode": (layer(boom, forward_mode=True), RUNS | REVERSE),
    "setup_context": (layer(lambda x: x * 2, base=Function, setup_context=staticmethod(boom)), OF_ARRAYS),
    "backward": (layer(backward=boom), REVERSE),
    "backward, forward mode": (layer(backward=boom, forward_mode=True), REVERSE | FORWARD),
    # The error of the decorator comes before any other one of a second derivative.
    "backward, once": (layer(backward=once_differentiable(boom)), {k: v for k, v in REVERSE.items() if k != "hessian"}),
    "jvp": (layer(jvp=staticmethod(boom)), FORWARD),
    "vmap": (layer(vmap=staticmethod(boom)), IN_VMAP),
}
CASES = {f"{name}: {run}": (made, runs[run]) for name, (made, runs) in LAYERS.items() for run in runs}


@pytest.mark.parametrize(("made", "run"), CASES.values(), ids=CASES)
def test_frames_between_the_call_and_the_method_hide_themselves(made, run):
    with pytest.raises(BoomError) as caught:
        run(loss(made))
    shown = [
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(caught.value.__traceback__)
        if frame.f_code.co_filename.startswith(PACKAGE) and not frame.f_locals.get("__tracebackhide__")
    ]
    assert shown == []
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "boom"


def shown_by_pytest():
    """What pytest shows of each test of a file that fails; `--tb=short` shows each frame that is not hidden."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        failing.__file__,
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(PACKAGE).parent), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    _, *parts = re.split(r"^_+ (test_\w+) _+$", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_pytest_shows_the_lines_of_the_user_and_none_of_the_package():
    shown = shown_by_pytest()
    assert len(shown) == 5
    for name, line in (("test_an_attribute", "return dy * ctx.nothing"), ("test_a_key", '{}["key"]')):
        # Before it JAX shows where the operation was applied. These frames have no variables, by which they could hide.
        own = shown[name].rpartition("was the direct cause of")[2]
        assert line in own
        assert "jax.grad(lambda x: made.apply(x).sum())(X)" in own
        assert "pylayer_jax/_" not in own
    for name in ("test_gradcheck", "test_assert_equivalent", "test_check_layer"):
        assert "AssertionError" in shown[name]
        assert "pylayer_jax/testing" not in shown[name]


# -- JAX's errors about tracers -------------------------------------------------------------------


Branches = layer(forward=lambda ctx, x: x if x.sum() > 0 else -x, backward=lambda ctx, dy: dy, name="Branches")


FORWARD_LINE = inspect.getsourcelines(Branches.forward)[1]
WithForwardMode = type("Branches", (Branches,), {"forward_mode": True})
SetAfterwards = type("Branches", (PyLayer,), {})
for name in ("forward", "backward"):  # as cloudpickle does
    setattr(SetAfterwards, name, vars(Branches)[name])


@pytest.mark.parametrize("made", [Branches, WithForwardMode, SetAfterwards])
@pytest.mark.parametrize("mode", [jax.jit, MODES["jit-grad"], MODES["grad-jit"]])
def test_a_number_that_forward_asks_for(mode, made):
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        mode(loss(made))(X)
    assert f"tracing the function Branches at {__file__}:{FORWARD_LINE} for" in str(caught.value)


def test_a_value_that_becomes_a_tracer_is_traced_to_the_lines_of_the_user():
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        jax.lax.scan(lambda c, _: (c + loss(WithForwardMode)(X * c), None), 1.0, None, length=1)
    assert __file__ in str(caught.value)
    assert PACKAGE not in str(caught.value)


def test_a_value_that_leaves_forward_was_made_at_a_line_of_the_user():
    kept = []

    class Keeps(PyLayer):
        @staticmethod
        def forward(ctx, x):
            kept.append(x * 2)
            return x

    jax.jit(Keeps.apply)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        kept[0] + 1
    line = inspect.getsourcelines(Keeps.forward)[1]
    assert f"Keeps at {__file__}:{line} traced for" in str(caught.value)
    assert f"created on line {__file__}:{line + 2}" in str(caught.value)
    assert PACKAGE not in str(caught.value)


class Abs:
    def __call__(self, ctx, x):
        return abs(x)


def test_jaxprs_still_show_the_name_of_the_class():
    for method in (staticmethod(lambda ctx, x: x), Abs()):
        assert "name=Named" in str(jax.make_jaxpr(type("Named", (PyLayer,), {"forward": method}).apply)(X))

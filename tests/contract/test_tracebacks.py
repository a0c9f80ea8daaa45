"""Exceptions of the user name the method; tracebacks show the lines of the user, and hide those of the package."""

import inspect
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pylayer_jax
from pylayer_jax import Function, PyLayer, once_differentiable
from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck
from pylayer_jax.testing._checkers import PROPERTIES
from tests.hooks.spy import in_block, noting
from tests.kit.layers import layer, loss
from tests.kit.modes import MODES, X
from tests.kit.oracle import Mine, fail

PACKAGE = str(Path(pylayer_jax.__file__).parent)


RUNS = {
    "eager": lambda f: f(X),
    "jit": lambda f: jax.jit(f)(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "container": lambda f: f({"x": [X]}),
}
REVERSE = {
    **{name: lambda f, mode=MODES[name]: mode(f)(X) for name in ("grad", "jit-grad", "scan", "remat", "vmap")},
    "grad-vmap": lambda f: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(X),
    "second": lambda f: jax.jacrev(jax.grad(f))(X),
    "hessian": lambda f: jax.hessian(f)(X),
    "block": lambda f: jax.grad(in_block(noting([]), f))(X),
    "decorated": lambda f: jax.grad(noting([])(f))(X),
}
FORWARD = {"jvp": lambda f: jax.jvp(f, (X,), (X,)), "jit-jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X)}
IN_VMAP = {"vmap": RUNS["vmap"], "grad-vmap": REVERSE["grad-vmap"]}
OF_ARRAYS = {name: run for name, run in (RUNS | REVERSE).items() if name != "container"}
# Layers of which one method raises, and what runs it.
LAYERS = {
    "forward": (layer(fail), RUNS | REVERSE),
    "forward, forward mode": (layer(fail, forward_mode=True), RUNS),
    "setup_context": (layer(lambda x: x * 2, base=Function, setup_context=fail), OF_ARRAYS),
    "backward": (layer(backward=fail), REVERSE),
    "backward, forward mode": (layer(backward=fail, forward_mode=True), REVERSE | FORWARD),
    # The error of the decorator comes before any other one of a second derivative.
    "backward, once": (layer(backward=once_differentiable(fail)), {k: v for k, v in REVERSE.items() if k != "hessian"}),
    "jvp": (layer(jvp=fail), FORWARD),
    "vmap": (layer(vmap=fail), IN_VMAP),
}
CASES = {f"{name}: {run}": (name, made, runs[run]) for name, (made, runs) in LAYERS.items() for run in runs}


def shown_by_pytest(error):
    """Return the frames of the package that pytest shows of an error."""
    return [
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.startswith(PACKAGE)
        and not any(names.get("__tracebackhide__") for names in (frame.f_locals, frame.f_globals))
    ]


@pytest.mark.parametrize(("name", "made", "run"), CASES.values(), ids=CASES)
def test_an_exception_of_a_method_keeps_its_type_names_the_method_and_hides_the_frames_between(name, made, run):
    with pytest.raises(Mine) as caught:
        run(loss(made))
    method = name.partition(",")[0].replace("setup_context", "forward")
    assert any(f"Made.{method}" in note for note in caught.value.__notes__)
    assert shown_by_pytest(caught.value) == []
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "fail"


WrongSign = layer(jnp.sin, lambda x, dy: -dy * jnp.cos(x), plain=True)
CHECKS = {
    "gradcheck": lambda: gradcheck(WrongSign, (X,)),
    "assert_equivalent": lambda: assert_equivalent(WrongSign, jnp.sin, (X,)),
    "check_layer": lambda: check_layer(WrongSign, X, skip=[name for name in PROPERTIES if name != "gradients"]),
}


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_frames_of_a_checker_hide_themselves(check):
    with pytest.raises(AssertionError) as caught:
        check()
    assert shown_by_pytest(caught.value) == []


# -- JAX's errors about tracers -------------------------------------------------------------------


Branches = layer(lambda ctx, x: x if x.sum() > 0 else -x, name="Branches")
FORWARD_LINE = inspect.getsourcelines(Branches.forward)[1]
WithForwardMode = layer(base=Branches, name="Branches", forward_mode=True)
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
    keeps = layer(lambda ctx, x: kept.append(x * 2) or x, name="Keeps")
    jax.jit(keeps.apply)(X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        kept[0] + 1
    text, line = str(caught.value), inspect.getsourcelines(keeps.forward)[1]
    assert f"Keeps at {__file__}:{line} traced for" in text
    assert f"created on line {__file__}:{line}" in text
    assert PACKAGE not in text

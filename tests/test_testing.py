"""The checkers: what they accept, and that they reject wrong rules and say where."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable
from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck, gradgradcheck

from .layers import Multiply, Tanh
from .registry import CASES
from .registry.case import X

CASE = {case.name: case for case in CASES}
# Whose backward is the gradient of their forward.
TRUE = [
    "OneTuple",
    "FreshStatics",
    "MixedOutputs",
    "NoneForMissing",
    "MarkedOutput",
    "VariableArguments",
    "AskedLinear",
    "Trees",
]
# Whose backward is meant to be another one.
MEANT = ["Round", "InputReturned", "DoubledTanh", "Reversal", "RouterLoss"]

# -- layers that are wrong --------------------------------------------------------------------------


class Sine(PyLayer):
    """Right; what is wrong with the layers below is said in what they change."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(ctx.saved_tensors[0])


class WrongSign(Sine):
    @staticmethod
    def backward(ctx, dy):
        return -dy * jnp.cos(ctx.saved_tensors[0])


class WrongAtOneIndex(Sine):
    @staticmethod
    def backward(ctx, dy):
        return (dy * jnp.cos(ctx.saved_tensors[0])).at[1, 2].multiply(1.01)


class WrongAtSecondOrder(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(jax.lax.stop_gradient(x))
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(ctx.saved_tensors[0])


def sine_and_square(x):
    return jnp.sin(x), x * x


class DropsNone(PyLayer):
    """Forgets one output's gradient where the other's is missing."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return sine_and_square(x)

    @staticmethod
    def backward(ctx, ds, dq):
        (x,) = ctx.saved_tensors
        return None if ds is None or dq is None else ds * jnp.cos(x) + dq * 2 * x


class DropsAnArgument(PyLayer):
    """Takes an argument that needs no gradient for a reason to give none at all."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved_tensors
        return (dy * b, dy * a) if all(ctx.needs_input_grad) else (None, None)


LEAKED: list[jax.Array] = []


class Leaks(PyLayer):
    @staticmethod
    def forward(ctx, x):
        LEAKED[:] = [x]
        ctx.save_for_backward(x)
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(ctx.saved_tensors[0])


LAST = {}


class ReadsGlobal(PyLayer):
    """Keeps its input in a global in the place of ctx."""

    @staticmethod
    def forward(ctx, x):
        LAST["x"] = x
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(LAST["x"])


CALLS = [0]


class Counts(Sine):
    """Changes a global on each call of backward."""

    @staticmethod
    def backward(ctx, dy):
        CALLS[0] += 1
        return dy * jnp.cos(ctx.saved_tensors[0]) * (1 + 0.1 * CALLS[0])


class Forgets(Sine):
    """Its gradient cannot be differentiated."""

    @staticmethod
    def backward(ctx, dy):
        return jax.lax.stop_gradient(dy * jnp.cos(ctx.saved_tensors[0]))


class OtherUnderJit(Sine):
    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return dy * (x if isinstance(x, jax.core.Tracer) else jnp.cos(x))


class OtherUnderVmap(Sine):
    @staticmethod
    def vmap(info, in_dims, x):
        return jnp.cos(x), in_dims[0]


class OnHost(PyLayer):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return np.sin(np.asarray(x))

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.cos(ctx.saved_tensors[0])


class Conjugated(PyLayer):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z

    @staticmethod
    def backward(ctx, dy):
        return dy * jnp.conj(2 * ctx.saved_tensors[0])


# Layer, what it is meant to be, its arguments.
WRONG = {
    "sign": (WrongSign, jnp.sin, (X,)),
    "one index": (WrongAtOneIndex, jnp.sin, (X,)),
    "second order": (WrongAtSecondOrder, jnp.sin, (X,)),
    "no second order": (Forgets, jnp.sin, (X,)),
    "dropped None": (DropsNone, sine_and_square, (X,)),
    "dropped argument": (DropsAnArgument, jnp.multiply, (X, X)),
    "leak": (Leaks, jnp.sin, (X,)),
    "global": (ReadsGlobal, jnp.sin, (X,)),
    "counter": (Counts, jnp.sin, (X,)),
    "jit": (OtherUnderJit, jnp.sin, (X,)),
    "conjugate": (Conjugated, jnp.square, (jnp.array([1 + 2j, 0.5 - 1j]),)),
}
AT_SECOND_ORDER = ["second order", "no second order"]

# What an error says, whatever the checker.
SAYS = {
    "sign": r"first order: the gradient of args\[0\] (at index|when)",
    "one index": r"first order: the gradient of args\[0\] at index \(1, 2\) is .* wrong at 1 of 6 places",
    "second order": r"second order: .*args\[0\]",
    "no second order": r"second order: .*args\[0\]",
    "dropped None": r"args\[0\].* with a cotangent for output 0 alone",
    "dropped argument": r"args\[0\].* when args\[0\] alone is differentiated",
    "leak": r"a tracer is leaked: ",  # JAX tells by what, except in a large process
    "global": r"args\[0\].* when forward ran on other values before backward",
    "counter": r"args\[0\]",
    "jit": r"args\[0\].* under jit",
    "conjugate": r"args\[0\] at index",
}


@pytest.fixture(autouse=True)
def fresh_globals():
    LEAKED.clear()
    LAST.clear()
    CALLS[:] = [0]


on_host = pytest.mark.skipif(jax.config.jax_custom_vjp3, reason="forward has to be traceable")


# -- gradcheck and gradgradcheck --------------------------------------------------------------------


@pytest.mark.parametrize("name", TRUE)
def test_right_gradients_are_accepted(name):
    assert gradgradcheck(CASE[name].layer, CASE[name].args)


@pytest.mark.parametrize("layer", [Tanh, Multiply])
def test_classes_are_accepted(layer):
    assert gradcheck(layer, (X, X)[: 1 if layer is Tanh else 2])


@pytest.mark.parametrize("name", [k for k in WRONG if k not in AT_SECOND_ORDER])
def test_gradcheck_rejects(name):
    layer, _, args = WRONG[name]
    with pytest.raises(AssertionError, match=SAYS[name]) as caught:
        gradcheck(layer, args)
    assert str(caught.value).startswith(f"gradcheck of {layer.__name__}, ")


@pytest.mark.parametrize("name", ["leak", "global"])
def test_a_leak_that_jax_cannot_explain(name, monkeypatch):
    @contextlib.contextmanager
    def fails_to_explain():
        yield
        raise IndexError("list index out of range")

    monkeypatch.setattr(jax, "checking_leaks", fails_to_explain)
    layer, _, args = WRONG[name]
    with pytest.raises(AssertionError, match=r"a tracer is leaked: JAX cannot tell by what|before backward"):
        gradcheck(layer, args)


@pytest.mark.parametrize("name", AT_SECOND_ORDER)
def test_gradcheck_is_about_the_first_order_alone(name):
    layer, _, args = WRONG[name]
    assert gradcheck(layer, args)


@pytest.mark.parametrize("name", WRONG)
def test_gradgradcheck_rejects(name):
    layer, _, args = WRONG[name]
    with pytest.raises(AssertionError, match=SAYS[name]):
        gradgradcheck(layer.apply, args)


@pytest.mark.parametrize("name", MEANT)
def test_a_gradient_that_is_meant_to_be_another_is_not_the_numerical_one(name):
    with pytest.raises(AssertionError, match="numerically"):
        gradcheck(CASE[name].layer, CASE[name].args)


def test_an_error_tells_both_values_the_place_and_the_tolerance():
    def wrong(tree):
        return WrongAtOneIndex.apply(tree["w"]) * tree["scale"]

    with pytest.raises(AssertionError) as caught:
        gradcheck(wrong, ({"w": X, "scale": jnp.float32(2)},))
    found = str(caught.value)
    assert "the gradient of args[0]['w'] at index (1, 2) is " in found
    assert " by backward, but " in found
    assert " numerically (tolerance " in found


def test_one_wrong_entry_of_many_shows_along_a_random_direction():
    x = jnp.linspace(-1, 1, 3000).reshape(100, 30)
    assert gradcheck(jnp.sin, (x,), limit=20)
    with pytest.raises(AssertionError, match=r"along a random direction over all 3000 entries"):
        gradcheck(WrongAtOneIndex, (x,), limit=20)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_dtypes(dtype):
    x = jnp.asarray(X, dtype)
    assert gradcheck(Tanh, (x,), float64=False)
    assert gradcheck(Tanh, (x,))
    for float64 in (True, False):
        with pytest.raises(AssertionError, match=r"args\[0\]"):
            gradcheck(WrongSign, (x,), float64=float64)


def test_a_layer_that_refuses_float64_is_measured_as_it_is():
    class Narrow(PyLayer):
        @staticmethod
        def forward(ctx, x):
            assert x.dtype == jnp.float32
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, dy):
            return 2.5 * dy * ctx.saved_tensors[0]

    with pytest.raises(AssertionError, match="numerically") as caught:
        gradcheck(Narrow, (X,))
    assert "Narrow" in str(caught.value)
    Narrow.backward = staticmethod(lambda ctx, dy: 2 * dy * ctx.saved_tensors[0])
    assert gradgradcheck(Narrow, (X,))


@on_host
def test_host_code_is_checked_without_jit():
    assert gradcheck(OnHost, (X,))
    assert gradcheck(lambda x: Tanh.apply(x) if x.sum() > 0 else x, (X,))


def test_complex_arguments_and_outputs():
    z = jnp.array([1 + 2j, -0.5 + 0.3j])
    assert gradgradcheck(lambda z, x: (z * z * x.astype(z.dtype), jnp.abs(z)), (z, jnp.float32(0.7)))
    with pytest.raises(AssertionError, match=r"args\[0\] at index \(\d,\), (real|imaginary) part"):
        gradcheck(Conjugated, (z,))


def test_tolerances_and_step():
    assert gradcheck(WrongAtOneIndex, (X,), rtol=0.02)
    assert gradcheck(WrongAtOneIndex, (X,), atol=0.1)
    with pytest.raises(AssertionError):
        gradcheck(jnp.sin, (X,), step=0.5)


def test_nan_is_not_a_gradient():
    with pytest.raises(AssertionError, match="nan"):
        gradcheck(lambda x: jnp.where(x > 10, jnp.sqrt(x - 10), x), (X,))


def test_what_cannot_be_checked_is_an_error():
    with pytest.raises(TypeError, match=r"gradcheck: expected the arguments as a tuple, got \w+\. Pass \(x,\)"):
        gradcheck(Tanh, X)
    with pytest.raises(ValueError, match=r"none of the arguments holds an array.*jnp\.float32\(1\.5\)"):
        gradcheck(Tanh, (1.5, jnp.arange(3)))
    with pytest.raises(TypeError, match="expected a layer or a function, got 3"):
        gradcheck(3, (X,))
    with pytest.raises(ValueError, match="none of the outputs carries a gradient"):
        gradcheck(lambda x: jnp.argsort(x), (X,))


def test_an_assertion_that_fails_under_jit_alone_is_not_lost():
    def fails(x):
        assert not isinstance(jnp.zeros(()), jax.core.Tracer)
        return Tanh.apply(x)

    with pytest.raises(AssertionError) as caught:
        gradcheck(fails, (X,))
    assert caught.traceback[-1].name == "fails"


def test_errors_of_the_layer_keep_their_type():
    class Fails(PyLayer):
        @staticmethod
        def forward(ctx, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradcheck(Fails, (X,))


# -- assert_equivalent ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TRUE, *MEANT])
def test_layers_are_equivalent_to_their_references(name):
    assert_equivalent(CASE[name].layer, CASE[name].reference, CASE[name].args)


@pytest.mark.parametrize("name", WRONG)
def test_assert_equivalent_rejects(name):
    layer, reference, args = WRONG[name]
    with pytest.raises(AssertionError, match=SAYS[name]) as caught:
        assert_equivalent(layer, reference, args)
    assert str(caught.value).startswith(f"assert_equivalent of {layer.__name__}, ")
    first = (0,) if name not in AT_SECOND_ORDER else (0, 1)
    assert_equivalent(layer, reference, args, orders=first)


def test_assert_equivalent_compares_values():
    with pytest.raises(AssertionError, match=r"values: output 0 at index \(\d, \d\) is .* by the reference"):
        assert_equivalent(Tanh, jnp.sin, (X,))
    with pytest.raises(AssertionError, match=r"values: output 0 is float32\[2,3\], but float32\[3,2\]"):
        assert_equivalent(Tanh, lambda x: jnp.tanh(x).T, (X,), orders=[0])
    with pytest.raises(AssertionError, match="1 tensors are returned, but 2 by the reference"):
        assert_equivalent(Tanh, lambda x: (jnp.tanh(x), x), (X,))
    with pytest.raises(ValueError, match="expected orders from 0 to 3"):
        assert_equivalent(Tanh, jnp.tanh, (X,), orders=[4])


def test_the_third_order():
    assert_equivalent(Tanh, jnp.tanh, (X,), orders=[3])


# -- check_layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["FreshStatics", "NoneForMissing", "MixedOutputs", "AskedLinear"])
def test_right_layers_have_every_property(name):
    report = check_layer(CASE[name].layer, *CASE[name].args)
    assert report.passed
    assert len(list(report)) == 12


@pytest.mark.parametrize("name", ["Trees", "OneTuple", "MarkedOutput", "Round", "InputReturned", "RouterLoss"])
def test_layers_have_every_property_beside_a_reference(name):
    case = CASE[name]
    report = check_layer(case.layer, *case.args, reference=case.reference)
    assert report["gradients"].message == "as those of the reference"


def test_statics_and_trees_are_passed_through():
    class Scaled(Function):
        @staticmethod
        def forward(ctx, tree, factor, how):
            ctx.save_for_backward(tree["x"])
            ctx.factor = factor
            assert how == "square"
            return factor * tree["x"] ** 2, "text"

        @staticmethod
        def backward(ctx, dy, _):
            return {"x": 2 * ctx.factor * dy * ctx.saved_tensors[0], "n": None}, None, None

    check_layer(Scaled, {"x": X, "n": jnp.arange(3)}, 3.0, "square")


# Which properties fail, and what the first of them says.
FAILS = {
    "sign": (["gradients"], "numerically"),
    "one index": (["gradients"], r"at index \(1, 2\)"),
    "second order": (["second order"], "numerically"),
    "no second order": (["second order"], "numerically"),
    "dropped None": (["cotangents"], "with a cotangent for output 0 alone .* by backward of zeros for the others"),
    "dropped argument": (["arguments"], r"args\[0\] when it alone is differentiated"),
    "leak": (["leaks"], "a tracer is leaked: "),
    "global": (["repeatable"], "when the layer ran on other values before backward"),
    "counter": (["repeatable"], "by another run"),
    "jit": (["jit"], r"args\[0\] (of|under) jit"),
    "conjugate": (["gradients"], r"args\[0\] at index \(\d,\), (real|imaginary) part"),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_layer_rejects(name):
    layer, _, args = WRONG[name]
    expected, message = FAILS[name]
    report = check_layer(layer, *args, raises=False, skip=["vmap", "scan"])
    failed = [row.name for row in report if not row.passed]
    assert set(expected) <= set(failed)
    if name not in ("global", "counter", "jit"):  # which are wrong in several ways
        assert failed == expected
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report[expected[0]].message)


@pytest.mark.parametrize("name", ["sign", "second order"])
def test_check_layer_rejects_beside_a_reference(name):
    layer, reference, args = WRONG[name]
    with pytest.raises(AssertionError, match=f"✗ {FAILS[name][0][0]} .* by the reference"):
        check_layer(layer, *args, reference=reference, skip=["vmap", "scan", "remat"])


def test_a_vmap_of_its_own_is_checked():
    report = check_layer(OtherUnderVmap, X, raises=False)
    assert [row.name for row in report if not row.passed] == ["vmap"]
    assert "output 0 of vmap at index" in report["vmap"].message


@on_host
def test_what_cannot_be_tested_has_not_passed():
    report = check_layer(OnHost, X, raises=False)
    failed = [row.name for row in report if not row.passed]
    assert failed == STAGED
    assert "TracerArrayConversionError" in report["jit"].message
    assert "OnHost.forward" in report["vmap"].message
    assert check_layer(OnHost, X, skip=failed).passed


STAGED = ["jit", "vmap", "scan", "remat", "leaks"]


def test_once_differentiable_says_so():
    class Once(PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jnp.sin(x)

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            return dy * jnp.cos(ctx.saved_tensors[0])

    with pytest.raises(AssertionError, match=r"✗ second order +RuntimeError: .*once_differentiable"):
        check_layer(Once, X, skip=STAGED)
    assert check_layer(Once, X, skip=["second order", *STAGED]).passed


def test_a_layer_that_does_not_run_has_one_row():
    report = check_layer(Tanh, X, X, raises=False)
    assert [(row.name, row.passed) for row in report] == [("eager", False)]
    assert "TypeError: Tanh.apply: " in str(report)


def test_the_report_is_a_line_per_property():
    lines = str(check_layer(Multiply, X, 2 * X)).splitlines()
    assert lines[0] == "Multiply"
    assert lines[1].split() == ["✓", "eager", "returns", "float32[2,3];", "gradients", "of", "args[0],", "args[1]"]
    assert all(line.startswith("✓ ") for line in lines[1:])
    assert lines[-1].split() == ["✓", "saved", "2", "arrays,", "48", "bytes:", "float32[2,3],", "float32[2,3]"]
    with pytest.raises(AssertionError, match=r"check_layer of WrongSign\n✓ eager .*\n(.*\n)*✗ gradients "):
        check_layer(WrongSign, X, skip=STAGED)
    with pytest.raises(ValueError, match=r"skip=\['speed'\]: expected names among jit, vmap"):
        check_layer(Tanh, X, skip=["speed"])

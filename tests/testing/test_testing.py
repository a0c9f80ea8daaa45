"""The checkers: what they accept, and that they reject wrong rules and say where."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax import Function, PyLayer, once_differentiable
from pylayer_jax._properties import PROPERTIES
from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck, gradgradcheck
from tests.kit.case import X
from tests.kit.layers import Multiply, Tanh
from tests.kit.wrong_layers import (
    CALLS,
    INDEX,
    LAST,
    LEAKED,
    WRONG,
    WRONG_IN_ONE_WAY,
    Clips,
    Conjugated,
    OnHost,
    Picks,
    RefusesABatchOfIndices,
    SineBothWays,
    Takes,
    TanhBothWays,
    WrongAtOneIndex,
    WrongSign,
)
from tests.registry import CASES

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


def all_but(*names):
    """What to skip for a check of these properties alone."""
    return [name for name in PROPERTIES if name not in names]


@pytest.mark.parametrize("name", ["FreshStatics", "NoneForMissing", "MixedOutputs", "AskedLinear"])
def test_right_layers_have_every_property(name):
    report = check_layer(CASE[name].layer, *CASE[name].args)
    assert report.passed
    assert [row.name for row in report] == ["eager", *PROPERTIES]


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
    report = check_layer(layer, *args, raises=False, skip=["vmap", "scan", "shard_map", "forward over reverse"])
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


@pytest.mark.parametrize("name", WRONG_IN_ONE_WAY)
def test_check_layer_rejects_what_is_wrong_in_one_way(name):
    layer, args, expected, message = WRONG_IN_ONE_WAY[name]
    report = check_layer(layer, *args, raises=False, skip=all_but("jit", "gradients", *expected))
    assert {row.name for row in report if not row.passed} == set(expected)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(report[expected[0]].message)


@on_host
def test_what_cannot_be_tested_has_not_passed():
    report = check_layer(OnHost, X, raises=False)
    failed = [row.name for row in report if not row.passed]
    assert failed == STAGED
    assert "TracerArrayConversionError" in report["jit"].message
    assert "OnHost.forward" in report["vmap"].message
    assert check_layer(OnHost, X, skip=failed).passed


STAGED = ["jit", "vmap", "scan", "cond", "remat", "shard_map", "leaks"]


def test_arrays_that_are_not_differentiated_are_mapped_too():
    args = X[0], INDEX, jnp.array(True), jax.random.key(0)
    report = check_layer(Picks, *args, skip=all_but("vmap", "scan", "cond", "shard_map"))
    for name in ("vmap", "scan"):
        assert report[name].message.endswith("3 examples, with args[1], args[2], args[3] mapped too")
    report = check_layer(Picks, *args[:3], jax.random.key(0, impl="rbg"), skip=all_but("vmap"))
    assert report["vmap"].message.endswith("with args[1], args[2] mapped too")
    report = check_layer(Takes, X[0], jnp.int32(2), skip=all_but("vmap"))
    assert report["vmap"].message.endswith("with args[1] mapped too")


def test_a_layer_that_takes_no_mapped_integers_says_so():
    report = check_layer(RefusesABatchOfIndices, X[0], INDEX, skip=all_but("vmap", "scan"))
    assert report["vmap"].message.endswith("; none with args[1] mapped too (NotImplementedError: one index for all)")
    assert report["scan"].message.endswith("3 examples, with args[1] mapped too")
    report = check_layer(lambda x, n: Tanh.apply(x).sum(int(n)), X, jnp.int32(1), skip=all_but("vmap", "scan"))
    assert "; none with args[1] mapped too (ConcretizationTypeError: " in report["scan"].message


@pytest.mark.parametrize(
    ("layer", "reference"), [(SineBothWays, jnp.sin), (TanhBothWays, jnp.tanh), (CASE["Trees"].layer, None)]
)
def test_forward_mode_is_compared_where_there_is_one(layer, reference):
    args = CASE["Trees"].args if reference is None else (X,)
    report = check_layer(layer, *args, reference=reference, skip=all_but("forward mode", "forward over reverse"))
    if reference is None:
        assert report["forward mode"].message == "there is none: Trees defines backward alone"
        assert report["forward over reverse"].message.endswith(" places, under jit")
    else:
        assert (
            report["forward mode"].message == "as reverse mode at 6 places, under jit, of vmap, and as of the reference"
        )
        assert report["forward over reverse"].message.endswith("12 places, under jit; so is forward over forward")


def test_forward_mode_of_complex_numbers_and_of_large_arrays():
    class Square(PyLayer):
        forward_mode = True

        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z, jnp.abs(z)

        @staticmethod
        def backward(ctx, dy, da):
            (z,) = ctx.saved_tensors
            return dy * 2 * z + (da / jnp.abs(z)).astype(z.dtype) * jnp.conj(z)

    z = jnp.array([1 + 2j, -0.5 + 0.3j])
    report = check_layer(Square, z, skip=all_but("gradients", "forward mode", "forward over reverse"))
    assert report["forward mode"].message.startswith("as reverse mode at 2 places")
    report = check_layer(SineBothWays, jnp.ones((50, 10)), skip=all_but("forward mode"))
    assert report["forward mode"].message.startswith("as reverse mode at 200 places")


def test_forward_mode_beside_a_reference():
    report = check_layer(SineBothWays, X, reference=jnp.cos, skip=all_but("forward mode"), raises=False)
    assert "the tangent of output 0 by jax.jvp at index" in report["forward mode"].message
    assert "by the reference" in report["forward mode"].message
    ruled = jax.custom_vjp(jnp.sin)
    ruled.defvjp(lambda x: (jnp.sin(x), x), lambda x, dy: (dy * jnp.cos(x),))
    report = check_layer(SineBothWays, X, reference=ruled, skip=all_but("forward mode"))
    assert report["forward mode"].message == "as reverse mode at 6 places, under jit, of vmap"
    report = check_layer(ruled, X, skip=all_but("forward mode"))
    assert report["forward mode"].message == "there is none: a jax.custom_vjp function defines backward alone"


@pytest.mark.parametrize("name", ["ClippedReversal", "AppliesAnother", "BackwardApplies"])
def test_a_refusal_of_forward_over_reverse_is_told(name):
    case = CASE[name]
    report = check_layer(case.layer, *case.args, skip=all_but("forward over reverse"))
    assert report["forward over reverse"].message.startswith("there is none: ")
    report = check_layer(Clips, X, skip=all_but("forward over reverse"))
    assert "there is none: Clips.backward is not linear" in report["forward over reverse"].message


def test_shard_map_takes_the_mesh_that_is_set():
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        report = check_layer(Tanh, X, skip=all_but("shard_map"))
    assert "on each of 2 devices" in report["shard_map"].message
    report = check_layer(Multiply, jax.device_put(X, jax.devices()[1]), 2 * X, skip=all_but("shard_map"))
    assert "on each of 4 devices" in report["shard_map"].message


def test_numerical_gradients_in_the_dtypes_given():
    def narrow(x):  # within which float64 is lost
        return Tanh.apply(x.astype(jnp.float32)).astype(x.dtype)

    assert not check_layer(narrow, X, skip=all_but("gradients"), raises=False).passed
    assert check_layer(narrow, X, skip=all_but("gradients"), float64=False).passed


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

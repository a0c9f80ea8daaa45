"""`gradcheck`, `gradgradcheck` and `assert_equivalent` take functions of every kind; their errors name the place."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck, gradgradcheck
from tests.checkers.wrong_layers import (
    COMPLEX,
    RIGHT,
    WRONG,
    Conjugated,
    OnHost,
    RoundedAndClipped,
    Saturated,
    WrongAtOneIndex,
    WrongSign,
    all_but,
    rounded_and_clipped,
    sharded,
    whole,
)
from tests.kit.case import X
from tests.kit.layers import Tanh, layer
from tests.layers import CASES

CASE = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["Round", "DoubledTanh", "RouterLoss"])
def test_a_gradient_that_is_meant_to_be_another_is_that_of_its_reference(name):
    with pytest.raises(AssertionError, match="numerically"):
        gradcheck(CASE[name].layer, CASE[name].args)
    assert gradcheck(CASE[name].layer, CASE[name].args, CASE[name].reference)
    if CASE[name].second_order:
        assert gradgradcheck(CASE[name].layer, CASE[name].args, reference=CASE[name].reference)


def test_a_reference_rejects_wrong_gradients():
    assert gradgradcheck(RoundedAndClipped, (X,), reference=rounded_and_clipped)
    with pytest.raises(AssertionError, match=r"^gradcheck of Saturated, first order: .*args\[0\].*by the reference"):
        gradcheck(Saturated, (X,), reference=rounded_and_clipped)
    second = WRONG["second order"]
    assert gradcheck(second.layer, second.args, reference=second.meant)
    with pytest.raises(AssertionError, match=r"second order: .*by the reference"):
        gradgradcheck(second.layer, second.args, reference=second.meant)


def test_an_error_tells_both_values_the_place_and_the_tolerance():
    def wrong(tree):
        return WrongAtOneIndex.apply(tree["w"]) * tree["scale"]

    with pytest.raises(AssertionError, match=r"args\[0\]\['w'\] at index \(1, 2\).*1 of 6"):
        gradcheck(wrong, ({"w": X, "scale": jnp.float32(2)},))


def test_one_wrong_entry_of_many_is_named():
    x = jnp.linspace(-1, 1, 3000).reshape(100, 30)
    assert gradcheck(jnp.sin, (x,), limit=20)
    with pytest.raises(AssertionError, match=r"args\[0\] at index \(1, 2\)"):
        gradcheck(WrongAtOneIndex, (x,), limit=20)
    spread = layer(jnp.sin, lambda x, dy: dy * jnp.cos(x) * 1.0001, plain=True)  # no single entry is beyond its noise
    with pytest.raises(AssertionError, match=r"args\[0\]"):
        gradcheck(spread, (x,), limit=20, rtol=1e-5)


def test_a_reference_that_is_not_finite_is_named():
    swish, args = RIGHT["swish"]
    naive = lambda x: x / (1 + jnp.exp(-x))
    with pytest.raises(AssertionError, match=r"nan by the reference \(which is not finite"):
        assert_equivalent(swish, naive, args)
    assert gradgradcheck(swish, args, jax.nn.swish)


def test_narrow_dtypes():
    x = jnp.asarray(X, jnp.bfloat16)
    for float64 in (True, False):
        assert gradcheck(Tanh, (x,), float64=float64)
        with pytest.raises(AssertionError, match=r"args\[0\]"):
            gradcheck(WrongSign, (x,), float64=float64)


def test_a_layer_that_refuses_float64_is_measured_as_it_is():
    def narrow(layer):
        def run(x):
            assert x.dtype == jnp.float32
            return layer.apply(x)

        return run

    with pytest.raises(AssertionError, match="numerically"):
        gradcheck(narrow(WrongSign), (X,))
    assert gradgradcheck(narrow(Tanh), (X,))


def test_host_code_is_checked_without_jit():
    assert gradcheck(OnHost, (X,))
    assert gradcheck(lambda x: Tanh.apply(x) if x.sum() > 0 else x, (X,))


def test_complex_arguments_and_outputs():
    assert gradgradcheck(lambda z, x: (z * z * x.astype(z.dtype), jnp.abs(z)), (COMPLEX, jnp.float32(0.7)))
    with pytest.raises(AssertionError, match=r"args\[0\] at index \(\d,\) is .*j"):
        gradcheck(Conjugated, (COMPLEX,))


def test_tolerances_and_step():
    assert gradcheck(WrongAtOneIndex, (X,), rtol=0.02)
    assert gradcheck(WrongAtOneIndex, (X,), atol=0.1)
    with pytest.raises(AssertionError):
        gradcheck(jnp.sin, (X,), step=0.5)


def test_nan_is_not_a_gradient():
    with pytest.raises(AssertionError, match="nan"):
        gradcheck(lambda x: jnp.where(x > 10, jnp.sqrt(x - 10), x), (X,))


@pytest.mark.parametrize(
    ("layer", "args", "error", "message"),
    [
        (Tanh, X, TypeError, r"gradcheck: .* Pass \(x,\)"),
        (Tanh, (1.5, jnp.arange(3)), ValueError, r"gradcheck: .*jnp\.float32\(1\.5\)"),
        (3, (X,), TypeError, "gradcheck: .*got 3"),
        (jnp.argsort, (X,), ValueError, "none of the outputs"),
    ],
)
def test_what_cannot_be_checked_is_an_error(layer, args, error, message):
    with pytest.raises(error, match=message):
        gradcheck(layer, args)


@pytest.mark.parametrize("error", [KeyError, AssertionError])
def test_errors_of_the_layer_are_the_users_own(error):
    def fails(x):
        if isinstance(jnp.zeros(()), jax.core.Tracer):  # under jit alone
            raise error("mine")
        return Tanh.apply(x)

    with pytest.raises(error, match="mine") as caught:
        gradcheck(fails, (X,))
    assert caught.traceback[-1].name == "fails"


@pytest.mark.parametrize(
    "check",
    [
        gradcheck,
        gradgradcheck,
        lambda f, args: assert_equivalent(f, jnp.abs, args),
        lambda f, args: assert_equivalent(f, jnp.abs, args, orders=[0]),
        lambda f, args: assert_equivalent(f, jnp.abs, args, orders=[2]),
    ],
)
def test_one_warning_lists_the_branches_that_no_value_takes(check):
    wrong = layer(jnp.abs, lambda x, dy: dy, plain=True, name="Wrong")
    with pytest.warns(UserWarning, match=r"of Wrong.*branches.*abs at .*negative") as caught:
        check(wrong, (jnp.abs(X),))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (jnp.sin, r"output 0 at index \(\d, \d\)"),
        (lambda x: jnp.tanh(x).T, r"float32\[2,3\].*float32\[3,2\]"),
        (lambda x: (jnp.tanh(x), x), "1 .* 2 "),
    ],
)
def test_values_are_compared(reference, message):
    with pytest.raises(AssertionError, match=message):
        assert_equivalent(Tanh, reference, (X,), orders=[0])


def test_orders():
    assert_equivalent(Tanh, jnp.tanh, (X,), orders=[3])
    with pytest.raises(ValueError, match="0 to 3"):
        assert_equivalent(Tanh, jnp.tanh, (X,), orders=[4])


def test_statics_among_the_outputs_are_left_out():
    assert_equivalent(lambda x: (Tanh.apply(x), 3, None, "text", jnp.sin), jnp.tanh, (X,), orders=[0])


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_sharded_function_is_compared_with_a_whole_one(kind):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(8.0) / 8, NamedSharding(mesh, PartitionSpec("i")))
    assert_equivalent(sharded(lambda x: jax.lax.psum(whole(x), "i"), mesh), whole, (x,))


CHECKED = "jit", "vmap", "shard_map", "gradients", "linear"
CHECKERS = {
    "gradcheck": lambda f, x: gradcheck(f, (jnp.ones(()), {"w": [x]})),
    "gradgradcheck": lambda f, x: gradgradcheck(f, (jnp.ones(()), {"w": [x]})),
    "assert_equivalent": lambda f, x: assert_equivalent(f, f, (jnp.ones(()), {"w": [x]})),
    "check_layer": lambda f, x: check_layer(f, jnp.ones(()), {"w": [x]}, skip=all_but(*CHECKED)),
}


@pytest.mark.parametrize("name", CHECKERS)
def test_arrays_on_several_devices_are_checked(name):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.linspace(0.2, 1.0, 8).reshape(4, 2), NamedSharding(mesh, PartitionSpec("i")))
    CHECKERS[name](lambda factor, tree: (Tanh.apply(tree["w"][0]) * factor).sum(), x)

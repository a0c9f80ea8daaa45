"""gradcheck and gradgradcheck: which functions they take, and what their errors say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax.testing import gradcheck, gradgradcheck
from tests.kit.case import X
from tests.kit.layers import Tanh
from tests.kit.wrong_layers import COMPLEX, Conjugated, OnHost, WrongAtOneIndex, WrongSign
from tests.registry import CASES

CASE = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["MixedOutputs", "NoneForMissing", "MarkedOutput", "VariableArguments", "Trees"])
def test_right_gradients_are_accepted(name):
    assert gradgradcheck(CASE[name].layer, CASE[name].args)


@pytest.mark.parametrize("name", ["Round", "InputReturned", "DoubledTanh", "Reversal", "RouterLoss"])
def test_a_gradient_that_is_meant_to_be_another_is_not_the_numerical_one(name):
    with pytest.raises(AssertionError, match="numerically"):
        gradcheck(CASE[name].layer, CASE[name].args)


def test_an_error_tells_both_values_the_place_and_the_tolerance():
    def wrong(tree):
        return WrongAtOneIndex.apply(tree["w"]) * tree["scale"]

    with pytest.raises(AssertionError, match=r"args\[0\]\['w'\] at index \(1, 2\) is .*, but .* \(tolerance .*1 of 6"):
        gradcheck(wrong, ({"w": X, "scale": jnp.float32(2)},))
    with pytest.raises(AssertionError, match="-1 times the right value everywhere"):
        gradcheck(WrongSign, (X,))


def test_one_wrong_entry_of_many_shows_along_a_random_direction():
    x = jnp.linspace(-1, 1, 3000).reshape(100, 30)
    assert gradcheck(jnp.sin, (x,), limit=20)
    with pytest.raises(AssertionError, match="along a random direction"):
        gradcheck(WrongAtOneIndex, (x,), limit=20)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_dtypes(dtype):
    x = jnp.asarray(X, dtype)
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
    with pytest.raises(AssertionError, match=r"args\[0\] at index \(\d,\) is .*j, but .*j numerically"):
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

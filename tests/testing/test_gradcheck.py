"""gradcheck and gradgradcheck: what they accept, and that they reject wrong rules and say where."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax.testing import gradcheck, gradgradcheck
from tests.kit.case import X
from tests.kit.layers import Tanh
from tests.kit.wrong_layers import WRONG, Conjugated, OnHost, WrongAtOneIndex, WrongSign

from .cases import AT_SECOND_ORDER, CASE, MEANT, SAYS, TRUE, on_host


@pytest.mark.parametrize("name", TRUE)
def test_right_gradients_are_accepted(name):
    assert gradgradcheck(CASE[name].layer, CASE[name].args)


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


@pytest.mark.parametrize("name", [*AT_SECOND_ORDER, "sign", "global"])
def test_gradgradcheck_rejects(name):
    layer, _, args = WRONG[name]
    with pytest.raises(AssertionError, match=SAYS[name]):
        gradgradcheck(layer.apply, args)
    if name in AT_SECOND_ORDER:
        assert gradcheck(layer, args)


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
    def narrow(layer):
        def run(x):
            assert x.dtype == jnp.float32
            return layer.apply(x)

        return run

    with pytest.raises(AssertionError, match="numerically"):
        gradcheck(narrow(WrongSign), (X,))
    assert gradgradcheck(narrow(Tanh), (X,))


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


@pytest.mark.parametrize(
    ("layer", "args", "error", "message"),
    [
        (Tanh, X, TypeError, r"gradcheck: expected the arguments as a tuple, got \w+\. Pass \(x,\)"),
        (Tanh, (1.5, jnp.arange(3)), ValueError, r"none of the arguments holds an array.*jnp\.float32\(1\.5\)"),
        (3, (X,), TypeError, "expected a layer or a function, got 3"),
        (jnp.argsort, (X,), ValueError, "none of the outputs carries a gradient"),
    ],
)
def test_what_cannot_be_checked_is_an_error(layer, args, error, message):
    with pytest.raises(error, match=message):
        gradcheck(layer, args)


def test_an_assertion_that_fails_under_jit_alone_is_not_lost():
    def fails(x):
        assert not isinstance(jnp.zeros(()), jax.core.Tracer)
        return Tanh.apply(x)

    with pytest.raises(AssertionError) as caught:
        gradcheck(fails, (X,))
    assert caught.traceback[-1].name == "fails"


def test_errors_of_the_layer_keep_their_type():
    def fails(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradcheck(fails, (X,))

"""assert_equivalent: what it accepts, and that it rejects wrong rules and other values."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pylayer_jax.testing import assert_equivalent
from tests.kit.case import X
from tests.kit.layers import Tanh
from tests.kit.wrong_layers import WRONG

from .cases import AT_SECOND_ORDER, CASE, MEANT, SAYS, TRUE


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


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (jnp.sin, r"values: output 0 at index \(\d, \d\) is .* by the reference"),
        (lambda x: jnp.tanh(x).T, r"values: output 0 is float32\[2,3\], but float32\[3,2\]"),
        (lambda x: (jnp.tanh(x), x), "1 tensors are returned, but 2 by the reference"),
    ],
)
def test_assert_equivalent_compares_values(reference, message):
    with pytest.raises(AssertionError, match=message):
        assert_equivalent(Tanh, reference, (X,), orders=[0])


def test_orders():
    assert_equivalent(Tanh, jnp.tanh, (X,), orders=[3])
    with pytest.raises(ValueError, match="expected orders from 0 to 3"):
        assert_equivalent(Tanh, jnp.tanh, (X,), orders=[4])


def test_assert_equivalent_compares_statics():
    def layer(x):
        return Tanh.apply(x), 3, None, "text", jnp.sin, float("nan")

    assert_equivalent(layer, jnp.tanh, (X,), orders=[0])
    assert_equivalent(layer, lambda x: (3, (jnp.tanh(x), "text", jnp.cos, float("nan"))), (X,), orders=[0])
    with pytest.raises(AssertionError, match=r"values: the statics \[3, 'text', .*are returned, but \[4, 'text', "):
        assert_equivalent(layer, lambda x: (jnp.tanh(x), 4, None, "text", jnp.sin, float("nan")), (X,))

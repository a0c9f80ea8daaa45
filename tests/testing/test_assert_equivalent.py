"""assert_equivalent: what it compares, and of which functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pylayer_jax.testing import assert_equivalent
from tests.kit.case import X
from tests.kit.layers import Tanh
from tests.kit.wrong_layers import WRONG, sharded, whole
from tests.registry import CASES

CASE = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["Trees", "MarkedOutput", "AskedLinear", "Round", "InputReturned", "RouterLoss"])
def test_layers_are_equivalent_to_their_references(name):
    assert_equivalent(CASE[name].layer, CASE[name].reference, CASE[name].args)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (jnp.sin, r"values: output 0 at index \(\d, \d\) is .* by the reference"),
        (lambda x: jnp.tanh(x).T, r"values: output 0 is float32\[2,3\], but float32\[3,2\]"),
        (lambda x: (jnp.tanh(x), x), "1 tensor .* 2 by the reference"),
    ],
)
def test_values_are_compared(reference, message):
    with pytest.raises(AssertionError, match=message):
        assert_equivalent(Tanh, reference, (X,), orders=[0])


def test_orders():
    assert_equivalent(Tanh, jnp.tanh, (X,), orders=[3])
    with pytest.raises(ValueError, match="orders from 0 to 3"):
        assert_equivalent(Tanh, jnp.tanh, (X,), orders=[4])


def test_statics_are_compared_if_the_reference_has_any():
    def layer(x):
        return Tanh.apply(x), 3, None, "text", jnp.sin, float("nan")

    assert_equivalent(layer, jnp.tanh, (X,), orders=[0])
    assert_equivalent(layer, lambda x: (3, (jnp.tanh(x), "text", jnp.cos, float("nan"))), (X,), orders=[0])
    with pytest.raises(AssertionError, match=r"statics \[3, 'text', .* \[4, 'text', "):
        assert_equivalent(layer, lambda x: (jnp.tanh(x), 4, None, "text", jnp.sin, float("nan")), (X,))


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_a_sharded_function_is_compared_with_a_whole_one(kind):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(kind,))
    x = jax.device_put(jnp.arange(8.0) / 8, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i")))
    assert_equivalent(sharded(lambda x: jax.lax.psum(whole(x), "i"), mesh), whole, (x,))
    wrong = WRONG["sum of devices"]
    with pytest.raises(AssertionError, match="4 times the right value everywhere"):
        assert_equivalent(wrong.layer, wrong.meant, wrong.args)


def test_each_copy_that_devices_hold_is_compared():
    def first_is_right(x):
        return jnp.where(jax.lax.axis_index("i") == 0, 0.0, 1.0) + jax.lax.psum(whole(x), "i")

    with pytest.raises(AssertionError, match="copy"):
        assert_equivalent(sharded(first_is_right), whole, (jnp.arange(8.0) / 8,), orders=[0])

"""The checkers where arrays lie on several devices, and where other processes hold a part of one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck, gradgradcheck
from pylayer_jax.testing._check_layer import PROPERTIES
from tests.kit.layers import Multiply, Tanh

X = jnp.linspace(0.2, 1.0, 8).reshape(4, 2)

SKIPPED = [name for name in PROPERTIES if name not in ("jit", "vmap", "shard_map", "gradients", "linear")]
CHECKERS = {
    "gradcheck": lambda f, x: gradcheck(f, (jnp.ones(()), {"w": [x]})),
    "gradgradcheck": lambda f, x: gradgradcheck(f, (jnp.ones(()), {"w": [x]})),
    "assert_equivalent": lambda f, x: assert_equivalent(f, f, (jnp.ones(()), {"w": [x]})),
    "check_layer": lambda f, x: check_layer(f, jnp.ones(()), {"w": [x]}, skip=SKIPPED),
}


def model(factor, tree):
    return Multiply.apply(Tanh.apply(tree["w"][0]), factor * 2)


@pytest.fixture
def sharded():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(X, NamedSharding(mesh, PartitionSpec("i")))


@pytest.mark.parametrize("name", CHECKERS)
def test_arrays_on_several_devices_are_checked(name, sharded):
    CHECKERS[name](lambda factor, tree: (Tanh.apply(tree["w"][0]) * factor).sum(), sharded)


def held_elsewhere(array, monkeypatch):
    """As an array is whose mesh has devices of other processes."""
    monkeypatch.setattr(type(array), "is_fully_addressable", property(lambda self: self is not array))
    return array


@pytest.mark.parametrize("name", CHECKERS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32])
def test_what_other_processes_hold_cannot_be_checked(name, dtype, sharded, monkeypatch):
    with pytest.raises(ValueError, match=f"^{name}: args") as caught:
        CHECKERS[name](model, held_elsewhere(sharded.astype(dtype), monkeypatch))
    message = str(caught.value)
    where = f"args[1]['w'][0] lies on devices of other processes too ({jnp.dtype(dtype).name}[4,2] with NamedSharding("
    assert where in message
    assert f"{name} compares every entry in one process, and expects arrays of this process" in message
    assert message.endswith("Pass a small array on jax.local_devices(), or np.asarray(x) if x is fully replicated.")


def test_a_keyword_of_other_processes_is_named(sharded, monkeypatch):
    with pytest.raises(ValueError, match=r"^check_layer: x lies on devices of other processes too \(float32"):
        check_layer(Tanh, kwargs={"x": held_elsewhere(sharded, monkeypatch)})

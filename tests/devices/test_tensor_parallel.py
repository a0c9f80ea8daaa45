"""A transformer on a mesh of data and model parallelism has the loss and the derivatives of the one on one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.kit.transforms import assert_same

from . import tensor_parallel as network
from .ranks import VMA

pytestmark = pytest.mark.own_primitive


def mesh_of(data: int, model: int) -> Any:
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


MESHES = {
    "4": lambda: jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,)),
    "2x2": lambda: mesh_of(2, 2),
    "4x1": lambda: mesh_of(4, 1),
}
# With the sequence shared out, or not: both on the mesh of two axes, one on each other.
CASES = pytest.mark.parametrize(
    ("mesh", "sequence", "check_vma"),
    [("2x2", False, True), ("2x2", True, False), ("4", False, False), ("4x1", True, True)],
    ids=["2x2", "2x2-sequence", "4", "4x1-sequence"],
)


def ways(params: Any) -> Any:
    return jax.tree.map(lambda p: jnp.cos(jnp.arange(p.size, dtype=jnp.float32)).reshape(p.shape), params)


@functools.cache
def expected() -> Any:
    params, batch = network.params(), network.data()
    return jax.jit(lambda p, w: network.derivatives(lambda p: network.unsharded_loss(p, *batch), p, w))(
        params, ways(params)
    )


@CASES
def test_differentiated_outside(mesh, sequence, check_vma):
    params, batch = network.params(), network.data()
    loss = network.mapped_loss(MESHES[mesh](), sequence=sequence, check_vma=check_vma)
    ours = jax.jit(lambda p, w: network.derivatives(lambda p: loss(p, *batch), p, w))(params, ways(params))
    assert_same(ours, expected())


@CASES
def test_differentiated_on_each_device(mesh, sequence, check_vma):
    params, batch = network.params(), network.data()
    ours = network.derivatives_on_each_device(MESHES[mesh](), sequence=sequence, check_vma=not check_vma)
    assert_same(jax.jit(ours)(params, ways(params), *batch), expected())


@VMA
def test_shardings_of_gradients_on_an_explicit_mesh(check_vma):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(put, network.params(), network.param_specs())
    batch = [put(x, PartitionSpec("data")) for x in network.data()]
    loss = network.mapped_loss(mesh, check_vma=check_vma)
    slopes = jax.jit(jax.grad(lambda p: loss(p, *batch)))(params)
    assert_same(jax.device_get(slopes), jax.device_get(expected()[1]))
    jax.tree.map(lambda p, s: s.sharding.is_equivalent_to(p.sharding, p.ndim) or pytest.fail(str(s)), params, slopes)


def test_copy_to_may_be_left_out_where_types_say_what_varies(monkeypatch):
    monkeypatch.setattr(network.parallel, "copy_to", lambda x, axis_name: x)
    params, batch = network.params(), network.data()
    loss = network.mapped_loss(MESHES["2x2"]())
    assert_same(jax.jit(jax.grad(lambda p: loss(p, *batch)))(params), expected()[1])

"""A transformer on a mesh of data and model parallelism has the loss and the derivatives of the one on one device."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.kit.transforms import assert_same

from . import tensor_parallel as network
from .ranks import VMA, direction

pytestmark = pytest.mark.own_primitive


def mesh_of(kind: Any = AxisType.Auto, **sizes: int) -> Any:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


MESHES = {"1x4": {"data": 1, "model": 4}, "2x2": {"data": 2, "model": 2}, "4x1": {"data": 4, "model": 1}}
# With the sequence shared out, or not: both on the mesh of two axes, one on each other.
CASES = pytest.mark.parametrize(
    ("mesh", "sequence", "check_vma"),
    [("2x2", False, True), ("2x2", True, False), ("1x4", False, False), ("4x1", True, True)],
    ids=["2x2", "2x2-sequence", "1x4", "4x1-sequence"],
)


PARAMS, BATCH = network.params(), network.data()
WAYS = jax.tree.map(direction, PARAMS)


@functools.cache
def expected() -> Any:
    return jax.jit(lambda p, w: network.derivatives(lambda p: network.unsharded_loss(p, *BATCH), p, w))(PARAMS, WAYS)


@CASES
def test_differentiated_outside(mesh, sequence, check_vma):
    loss = network.mapped_loss(mesh_of(**MESHES[mesh]), sequence=sequence, check_vma=check_vma)
    assert_same(jax.jit(lambda p, w: network.derivatives(lambda p: loss(p, *BATCH), p, w))(PARAMS, WAYS), expected())


@CASES
def test_differentiated_on_each_device(mesh, sequence, check_vma):
    mesh = mesh_of(**MESHES[mesh])
    ours = network.derivatives_on_each_device(mesh, sequence=sequence, check_vma=not check_vma)
    assert_same(jax.jit(ours)(PARAMS, WAYS, *BATCH), expected())


@VMA
def test_shardings_of_gradients_on_an_explicit_mesh(check_vma):
    mesh = mesh_of(AxisType.Explicit, data=2, model=2)
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(put, PARAMS, network.param_specs())
    batch = [put(x, PartitionSpec("data")) for x in BATCH]
    loss = network.mapped_loss(mesh, check_vma=check_vma)
    slopes = jax.jit(jax.grad(lambda p: loss(p, *batch)))(params)
    assert_same(jax.device_get(slopes), jax.device_get(expected()[1]))
    for p, slope in zip(jax.tree.leaves(params), jax.tree.leaves(slopes), strict=True):
        assert slope.sharding.is_equivalent_to(p.sharding, p.ndim)


def test_copy_to_may_be_left_out_where_types_say_what_varies(monkeypatch):
    monkeypatch.setattr(network.parallel, "copy_to", lambda x, axis_name: x)
    loss = network.mapped_loss(mesh_of(**MESHES["2x2"]))
    assert_same(jax.jit(jax.grad(lambda p: loss(p, *BATCH)))(PARAMS), expected()[1])

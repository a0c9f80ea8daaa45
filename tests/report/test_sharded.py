"""saved_tensors_report where arrays lie on several devices: bytes of the whole arrays, and bytes on each device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pylayer_jax import saved_tensors_report
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Multiply, Tanh
from tests.kit.modes import EAGER_AND_JIT

X = jnp.ones((8, 4))
W = jnp.ones((1, 4))
SIZE = 8 * 4 * 4  # bytes of X


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("i", "j"), axis_types=(kind, kind))


def sharded(mesh, *names):
    return jax.device_put(X, NamedSharding(mesh, PartitionSpec(*names)))


def sizes(report):
    return [(row.bytes, row.bytes_per_device) for row in report.rows if row.layer]


def with_packed(row):
    return row.bytes, row.bytes_per_device, row.packed_bytes, row.packed_bytes_per_device


def negated(x):
    return Tanh.apply(-x).sum()


def scanned(f, end=jnp.sum):
    return lambda x: end(jax.lax.scan(lambda c, _: (jnp.sin(f(c)), None), x * 2, None, length=5)[0])


def test_explicit_axes_are_part_of_the_type():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = sharded(mesh, "i", "j")
        for model in (negated, jax.jit(negated), lambda x: jax.vmap(Tanh.apply)(-x).sum()):
            assert sizes(saved_tensors_report(model, x)) == [(SIZE, SIZE // 4)]
        assert sizes(saved_tensors_report(negated, sharded(mesh, "i"))) == [(SIZE, SIZE // 2)]
        assert sizes(saved_tensors_report(scanned(Tanh.apply), x)) == [(5 * SIZE, 5 * SIZE // 4)]


@pytest.mark.parametrize("around", [lambda f: f, jax.vmap], ids=["plain", "vmap"])
def test_packed_arrays_are_sharded_too(around):
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh), cast_saved():
        report = saved_tensors_report(lambda x: around(Tanh.apply)(-x).sum(), sharded(mesh, "i", "j"))
    (row,) = report.rows
    assert with_packed(row) == (SIZE, SIZE // 4, SIZE // 2, SIZE // 8)
    assert report.total_bytes_per_device == SIZE // 8
    header, line, total = str(report).splitlines()
    assert "bytes  per device  packed  packed per device  where" in header
    assert line.split()[-5:-1] == ["128", "32", "64", "16"]
    assert total == "64 bytes are kept for backward, 16 per device, 128 before packing"


@EAGER_AND_JIT
def test_with_automatic_axes_only_the_sharding_of_arguments_is_known(mode):
    x = sharded(mesh_of(AxisType.Auto), "i", "j")
    spec = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    for argument in (x, spec):
        report = saved_tensors_report(mode(lambda x: Multiply.apply(x, x + 1).sum()), argument)
        assert sizes(report) == [(SIZE, SIZE // 4), (SIZE, None)]
        assert report.total_bytes_per_device is None
        with cast_saved():
            assert with_packed(saved_tensors_report(mode(negated), argument).rows[0]) == (SIZE, None, SIZE // 2, None)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@EAGER_AND_JIT
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map_the_types_are_those_of_one_device(kind, mode, check_vma):
    mesh = mesh_of(kind)
    specs = PartitionSpec("i", "j"), PartitionSpec()

    def shard(x, w):
        return Multiply.apply(Tanh.apply(-x), w.sum() * 2)

    model = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma)
    with jax.set_mesh(mesh):
        report = saved_tensors_report(mode(lambda x, w: model(x, w).sum()), sharded(mesh, "i", "j"), W)
    tanh, factor = (row for row in report.rows if row.layer)
    assert tanh.shape == (4, 2)
    assert (tanh.bytes, tanh.bytes_per_device) == (SIZE, SIZE // 4)
    assert tanh.note == "also Multiply, saved[0]"
    # With check_vma, the type says that every device holds the same number.
    assert (factor.bytes, factor.bytes_per_device) == (4 if check_vma else 16, 4)


def test_a_scan_inside_shard_map():
    mesh = mesh_of(AxisType.Auto)
    spec = PartitionSpec("i", "j")
    model = jax.shard_map(scanned(Tanh.apply, lambda y: y), mesh=mesh, in_specs=spec, out_specs=spec)
    with cast_saved():
        report = saved_tensors_report(lambda x: model(x).sum(), sharded(mesh, "i", "j"))
    (row,) = (row for row in report.rows if row.layer)
    assert row.times == 5
    assert with_packed(row) == (5 * SIZE, 5 * SIZE // 4, 5 * SIZE // 2, 5 * SIZE // 8)


def test_axes_that_are_manual_only_in_part():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        spec = PartitionSpec("i")
        model = jax.shard_map(lambda x: Tanh.apply(-x), in_specs=spec, out_specs=spec, axis_names={"i"})
        (row,) = saved_tensors_report(jax.jit(lambda x: model(x).sum()), sharded(mesh, "i", "j")).rows
    assert (row.shape, row.bytes, row.bytes_per_device) == ((4, 4), SIZE, SIZE // 4)


def test_the_column_appears_where_something_is_sharded():
    def model(x):
        return Multiply.apply(x, x + 1).sum()

    mesh = mesh_of(AxisType.Auto)
    report = saved_tensors_report(model, sharded(mesh, "i", "j"))
    assert "  bytes  per device  where" in str(report)
    page = report._repr_html_()
    assert "<th>bytes</th><th>per device</th><th>where</th>" in page
    assert "256 bytes are kept for backward, not known per device, 128 of them in inputs of the function" in page
    for kind in (AxisType.Explicit, None):  # the former has a copy on each device
        report = saved_tensors_report(model, X if kind is None else sharded(mesh_of(kind)))
        assert "per device" not in str(report) + report._repr_html_()
        assert report.total_bytes_per_device == report.total_bytes == 2 * SIZE

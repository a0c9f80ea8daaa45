"""saved_tensors_report: the total is what `jax.vjp` holds, wherever layers, hooks and transformations stand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu, save_on_disk
from tests.hooks.spy import bytes_held
from tests.kit.layers import ForwardTanh, Multiply, Tanh
from tests.kit.modes import EAGER_AND_JIT

X, W = jnp.ones((128, 64)), jnp.ones((64, 64))


def step(x, w):
    return Multiply.apply(Tanh.apply(jnp.sin(x @ w)), ForwardTanh.apply(x) * 2.0)


def scanned(x, w):
    return jax.lax.scan(lambda x, _: (step(x, w), None), x, length=5)[0]


def scanned_over_rows(x, w):
    return jax.lax.scan(lambda c, row: (Multiply.apply(c, row + c @ w), c), x[0], x)[0]


def in_shard_map(x, w):
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("i")
    return jax.shard_map(step, mesh=mesh, in_specs=(rows, PartitionSpec()), out_specs=rows)(x, w)


FUNCTIONS = {
    "operations": lambda x, w: jnp.where(x > 0, jnp.exp(x @ w), 0) ** 2,
    "step": step,
    "steps": lambda x, w: step(step(step(x, w), w), w),
    "vmap": lambda x, w: jax.vmap(step, (0, None))(x, w),
    "scan": scanned,
    "scan over rows": scanned_over_rows,
    "loop": lambda x, w: jnp.sin(jax.lax.fori_loop(0, 3, lambda _, x: step(x, w), x)),
    "cond": lambda x, w: jax.lax.cond(x.sum() > 0, step, lambda x, w: jnp.sin(x), x, w),
    "checkpoint": lambda x, w: jnp.sin(jax.checkpoint(step)(x * 2, w)),
    "policy": lambda x, w: jax.checkpoint(step, policy=jax.checkpoint_policies.dots_saveable)(x * 2, w),
    "checkpoint in scan": lambda x, w: jax.lax.scan(jax.checkpoint(lambda x, _: (step(x, w), None)), x, length=5)[0],
    "shard_map": in_shard_map,
}
AROUND = {
    "": lambda f: f,
    "jit": jax.jit,
    "block": cast_saved(),
    "block of jit": lambda f: quantize_saved()(jax.jit(f)),
    "jit of block": lambda f: jax.jit(saved_tensors_hooks(lambda x: {"x": x}, lambda packed: packed["x"])(f)),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_total_is_what_vjp_holds(name, around):
    def loss(x, w):
        return AROUND[around](FUNCTIONS[name])(x, w).sum()

    report = saved_tensors_report(loss, X, W)
    # Hooks pack a scan in each iteration and a shard_map by shard in traced code, and as a whole in eager mode.
    traced = around.startswith("block") and name not in ("operations", "step", "steps", "vmap", "cond")
    vjp = jax.jit(lambda x, w: jax.vjp(loss, x, w)[1]) if traced else lambda x, w: jax.vjp(loss, x, w)[1]
    assert report.total_bytes + report.input_bytes == bytes_held(vjp(X, W)) > 0
    assert all(row.source.startswith("test_totals.py:") for row in report.rows if row.kind in ("layer", "operation"))
    kept_inputs = {row.name: row.bytes for row in report.rows if row.kind == "input" and not row.layer}
    assert kept_inputs.items() <= {"args[0]": X.nbytes, "args[1]": W.nbytes}.items()


@EAGER_AND_JIT
@pytest.mark.parametrize("name", ["steps", "scan", "vmap", "shard_map"])
def test_what_is_packed_on_the_host(name, mode, tmp_path):
    function = mode(FUNCTIONS[name])

    def loss(x, w):
        return function(x, w).sum()

    pairs = save_on_cpu(arguments=True), save_on_disk(tmp_path, arguments=True)
    plain, cpu, disk = (saved_tensors_report(f, X, W) for f in (loss, *(pair(loss) for pair in pairs)))
    for report in (cpu, disk):
        packed = [row for row in report.rows if row.note]
        assert {(row.layer, row.name) for row in packed} >= {("Tanh", "saved[0]"), ("ForwardTanh", "saved[0]")}
        assert report.input_bytes == 0
        assert "computed again" not in str(report)
    assert cpu.total_bytes == cpu.host_bytes == sum(row.bytes for row in cpu.rows)
    assert cpu.total_bytes <= plain.total_bytes + plain.input_bytes  # what follows from a packed tensor is not kept
    assert all("host" in row.note for row in disk.rows if row.dtype == "float32")
    assert disk.total_bytes < 200
    assert disk.total_unpacked_bytes == cpu.total_unpacked_bytes

"""Packing sharded tensors communicates nothing, and keeps the share of each device on that device."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax.packers import cast_saved, quantize_saved
from tests.kit.layers import Tanh

from .sharded_transformer import collectives, entered, mesh_of, random, transformer

# And how far the gradients move. Hooks on the host gather: test_host_shards.py.
PACKERS = {
    "cast": (cast_saved, 0.01),
    "8 bits": (quantize_saved, 0.02),
    "4 bits": (lambda: quantize_saved(4), 0.6),
}


@functools.cache
def without_hooks(kind):
    loss, weights, x = transformer(mesh_of(kind))
    return loss, weights, x, jax.jit(jax.grad(loss)).lower(weights, x).compile()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "packer"), [("automatic", "8 bits"), ("explicit", "cast"), ("explicit", "4 bits")])
def test_a_transformer_communicates_no_more_than_without_hooks(kind, packer):
    make, far = PACKERS[packer]
    with entered(mesh_of(kind)):
        loss, weights, x, plain = without_hooks(kind)
        packed = jax.jit(jax.grad(make()(loss))).lower(weights, x).compile()
        assert collectives(packed) == collectives(plain)
        expected, got = plain(weights, x), packed(weights, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding
        assert jnp.linalg.norm(a - b) / jnp.linalg.norm(b) < far


def scan_of_rows(function, x):
    return jax.lax.scan(lambda _, row: (None, function(row)), None, x)[1]


def held_by_a_device(pullback):
    device = jax.devices()[0]
    leaves = {id(leaf): leaf for leaf in jax.tree_util.tree_leaves(pullback)}.values()
    return sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device)


@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        *(("explicit", transform) for transform in ("eager", "jit", "vmap", "scan", "shard_map")),
        *(("automatic", transform) for transform in ("eager", "vmap", "shard_map")),
    ],
)
def test_each_device_keeps_its_share(kind, transform):
    mesh = mesh_of(kind)
    hooked = quantize_saved(8)(Tanh.apply)
    with entered(mesh):
        x = random(mesh, (64, 512), None, "model")
        if transform == "shard_map":
            hooked = jax.shard_map(hooked, in_specs=P(None, "model"), out_specs=P(None, "model"), mesh=mesh)
        if transform == "vmap":
            hooked = jax.vmap(hooked)
        if transform == "scan":
            hooked = functools.partial(scan_of_rows, hooked)
        run = (lambda x: jax.vjp(hooked, x)) if transform == "eager" else jax.jit(lambda x: jax.vjp(hooked, x))
        y, pullback = run(x)
        assert held_by_a_device(pullback) == 64 * 256 + 64 * 2 * 8  # a low and a high number for 128 values
        (gradient,) = pullback(jnp.ones_like(y))
    assert gradient.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_allclose(gradient, 1 - np.tanh(np.asarray(x)) ** 2, atol=0.02)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((64, 1), None), ((64, 1), "data"), ((8, 3, 5), "data"), ((7,), None), ((16, 130), None), ((2, 4, 1, 6), "data")],
)
def test_a_packed_tensor_is_never_larger(shape, spec):
    x = random(mesh_of("automatic"), shape, spec)
    for run in (jax.vjp, jax.jit(jax.vjp, static_argnums=0)):
        y, pullback = run(quantize_saved(8)(Tanh.apply), x)
        held = sum({id(leaf): leaf.nbytes for leaf in jax.tree_util.tree_leaves(pullback)}.values())
        assert held <= x.nbytes
        np.testing.assert_allclose(pullback(jnp.ones_like(y))[0], 1 - y**2, atol=0.02)


@pytest.mark.parametrize(
    ("kind", "spec", "shape"),
    [
        ("explicit", ("data",), (100, 10)),
        ("automatic", ("data",), (6, 7, 8)),
        ("explicit", ("data", None, "model"), (6, 7, 8)),
        ("automatic", ("data",), (4, 1018)),
        ("explicit", ("data", "model"), (4, 1018)),
        ("automatic", (None, "model"), (52, 6)),
        ("automatic", (None, "model"), (8, 2)),
    ],
    ids=str,
)
def test_odd_shapes_communicate_nothing(kind, spec, shape):
    mesh = mesh_of(kind)
    with entered(mesh):
        x = random(mesh, shape, *spec)
        step = jax.jit(jax.grad(quantize_saved(8, block_size=64)(lambda x: jnp.sum(jnp.sin(jnp.tanh(x) * 2.0)))))
        compiled = step.lower(x).compile()
        assert not collectives(compiled)
        got = compiled(x)
    assert got.sharding.is_equivalent_to(x.sharding, len(shape))
    y = np.tanh(np.asarray(x))
    np.testing.assert_allclose(got, 2 * np.cos(2 * y) * (1 - y**2), atol=0.05)


def test_values_of_another_shard_have_no_part_in_a_block():
    # Numbers a million times as large on the other devices.
    mesh = mesh_of("automatic")
    scales = jnp.repeat(jnp.array([1.0, 1e6]), 64)
    x = jax.device_put(jnp.linspace(-1, 1, 128) * scales, NamedSharding(mesh, P("model")))
    weights = jnp.ones(128)
    got = jax.grad(lambda w: jnp.sum(quantize_saved(8, arguments=True)(jnp.multiply)(w, x)))(weights)
    np.testing.assert_allclose(got[:64], x[:64], atol=0.005)

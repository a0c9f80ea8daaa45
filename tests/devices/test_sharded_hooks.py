"""Each device keeps its shard of what hooks pack. Only what XLA gathers in forward is communicated again."""

import contextlib
import functools
import re
import threading
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax.packers import cast_saved, quantize_saved, recompute_saved
from tests.hooks.spy import norm, noting
from tests.kit.layers import Multiply, Tanh
from tests.kit.modes import EAGER_AND_JIT

KINDS = {"automatic": AxisType.Auto, "explicit": AxisType.Explicit}


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(KINDS[kind],) * 2)


def entered(mesh):
    return jax.set_mesh(mesh) if AxisType.Explicit in mesh.axis_types else contextlib.nullcontext()


def random(mesh, shape, *spec, seed=0):
    values = jax.random.normal(jax.random.key(seed), shape) / shape[0] ** 0.5
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))


def collectives(compiled):
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return Counter(re.findall(rf" ({kinds})(?:-start)?\(", compiled.as_text()))


def network(mesh):
    """Return the loss of a tensor-parallel residual block, its weights and its input."""
    whole = NamedSharding(mesh, P("data")) if AxisType.Explicit in mesh.axis_types else None

    def total(weights, x):
        up, down = weights
        hidden = Tanh.apply(norm(x) @ up)
        return jnp.mean((x + jnp.matmul(jax.nn.gelu(hidden), down, out_sharding=whole)) ** 2)

    weights = random(mesh, (256, 1024), None, "model"), random(mesh, (1024, 256), "model", seed=1)
    return total, weights, random(mesh, (32, 256), "data")


@pytest.mark.parametrize(
    ("kind", "hooks", "far"),
    [("automatic", quantize_saved(8), 0.02), ("explicit", cast_saved(), 0.01), ("explicit", quantize_saved(4), 0.6)],
)
def test_a_block_communicates_no_more_than_without_hooks(kind, hooks, far):
    mesh = mesh_of(kind)
    with entered(mesh):
        f, weights, x = network(mesh)
        plain, packed = (jax.jit(jax.grad(g)).lower(weights, x).compile() for g in (f, hooks(f)))
        assert collectives(plain)
        assert collectives(packed) == collectives(plain)
        for got, expected in zip(packed(weights, x), plain(weights, x), strict=True):
            assert got.sharding == expected.sharding
            assert 1e-4 < jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected) < far


@pytest.mark.parametrize("hooks", [recompute_saved(), cast_saved(), quantize_saved(8)], ids=str)
def test_what_forward_gathers_is_gathered_once_more_at_most(hooks):  # as the guide says
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    by_columns = NamedSharding(mesh, P(None, "model"))

    def f(weights, x):
        for w in weights:
            x = jax.lax.with_sharding_constraint(jnp.tanh(x @ w), by_columns)
        return jnp.mean(x**2)

    weights = [random(mesh, (64, 64), None, "model", seed=i) for i in range(3)]
    x = random(mesh, (128, 64), None, "model", seed=9)
    plain, packed = (collectives(jax.jit(jax.grad(g)).lower(weights, x).compile()) for g in (f, hooks(f)))
    assert plain["all-gather"] == 3
    assert plain <= packed <= plain + Counter({"all-gather": 3})


def held_by_a_device(pullback):
    device = jax.devices()[0]
    leaves = {id(leaf): leaf for leaf in jax.tree_util.tree_leaves(pullback)}.values()
    return sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards if s.device == device)


@pytest.mark.parametrize(
    ("kind", "transform"),
    [
        *(("explicit", transform) for transform in ("eager", "jit", "vmap", "scan", "shard_map")),
        *(("automatic", transform) for transform in ("eager", "shard_map")),
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
            hooked = functools.partial(jax.lax.map, hooked)
        run = (lambda x: jax.vjp(hooked, x)) if transform == "eager" else jax.jit(lambda x: jax.vjp(hooked, x))
        y, pullback = run(x)
        assert held_by_a_device(pullback) == 64 * 256 + 64 * 2 * 12  # three numbers for 128 values
        (gradient,) = pullback(jnp.ones_like(y))
    assert gradient.sharding.is_equivalent_to(x.sharding, 2)
    np.testing.assert_allclose(gradient, 1 - np.tanh(np.asarray(x)) ** 2, atol=0.02)


@EAGER_AND_JIT
@pytest.mark.parametrize("order", [1, -1], ids=["inside", "around"])
def test_in_a_shard_map_weights_stay_as_they_are(mode, order):
    seen = []
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    pair = quantize_saved(8, only=lambda x: seen.append(x.shape) or True)
    w, x = random(mesh, (32, 32)), random(mesh, (16, 32), "data", seed=1)

    def loss_with(decorate):
        inside, around = (decorate, lambda f: f)[::order]
        loss = inside(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
        mapped = jax.shard_map(
            lambda w, x: jax.lax.pmean(loss(w, x), "data"), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        return mode(jax.grad(around(lambda w, x: mapped(jnp.swapaxes(w, 0, 1), x)), (0, 1)))(w, x)[0]

    got, expected = loss_with(pair), loss_with(lambda f: f)
    assert seen
    assert w.shape not in seen
    assert jnp.max(jnp.abs(got - expected)) < 0.02 * jnp.max(jnp.abs(expected))


@pytest.mark.parametrize(
    ("kind", "spec", "shape"),
    [
        ("explicit", ("data",), (100, 10)),
        ("automatic", ("data",), (6, 7, 8)),
        ("explicit", ("data", None, "model"), (6, 7, 8)),
        ("automatic", ("data", "model"), (4, 8, 32, 64)),
        ("explicit", ("data", "model"), (4, 1018)),
        ("automatic", (None, "model"), (52, 6)),
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


# -- hooks on the host: right numbers, in the shardings that they had ------------------------------


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        *(("explicit", spec) for spec in [("data", "model"), (None, None), (None, ("data", "model"))]),
        ("automatic", ("data", "model")),
    ],
    ids=str,
)
def test_gradients(kind, spec):
    mesh, shapes = mesh_of(kind), []
    with entered(mesh):
        x = random(mesh, (4, 4, 8), None, *spec)
        for transformed in (jnp.tanh, jax.vmap(Tanh.apply), lambda x: jax.lax.map(Tanh.apply, x)):
            hooked = noting(shapes, host=True)(transformed)
            for run in (jax.vjp, jax.jit(jax.vjp, static_argnums=0)):
                y, pullback = run(hooked, x)
                (gradient,) = pullback(jnp.ones_like(y))
                np.testing.assert_allclose(gradient, 1 - np.tanh(x) ** 2, rtol=1e-5, atol=1e-6)
                if kind == "explicit":
                    assert gradient.sharding.is_equivalent_to(x.sharding, 3)
    assert x.shape in shapes  # an eager gradient packs the whole tensor


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_as_many_large_tensors_at_once_as_there_are_threads(kind):
    # JAX's own callbacks stop for ever here: each waits for a copy that needs a thread, and they hold all of these.
    mesh, shapes = mesh_of(kind), []
    with entered(mesh):
        x = random(mesh, (512, 512), "data", "model")
        total = noting(shapes, host=True)(lambda x: sum(jnp.sum(jnp.tanh(x * i)) for i in range(1, 9)))
        gradient = []
        thread = threading.Thread(target=lambda: gradient.append(jax.jit(jax.grad(total))(x)), daemon=True)
        thread.start()
        thread.join(120)
    expected = sum(i * (1 - np.tanh(np.asarray(x) * i) ** 2) for i in range(1, 9))
    np.testing.assert_allclose(gradient[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["explicit", "automatic"])
def test_the_sign_of_a_zero_comes_back(kind):
    mesh, shapes = mesh_of(kind), []
    with entered(mesh):
        x = random(mesh, (4, 8), "data", "model")
        total = noting(shapes, host=True)(lambda x, w: jnp.sum(Multiply.apply(x, w)))
        gradient = jax.jit(jax.grad(total))(x, jnp.zeros_like(x) * -1)
    assert np.signbit(gradient).all()
    assert (4, 8) in shapes

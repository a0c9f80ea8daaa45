"""The layers of `pylayer_jax.parallel` on four devices, against the maths of the whole arrays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pylayer_jax import parallel
from tests.kit.case import grid
from tests.kit.transforms import assert_same

from .parallel_cases import (
    CASES,
    LAYOUTS,
    ON_ONE_AXIS,
    TWO_BATCHES,
    cross_entropy,
    expected,
    on_each_device,
    outside,
    parallel_cross_entropy,
)
from .ranks import VMA, loss, weights

pytestmark = pytest.mark.own_primitive

ONE_AXIS = LAYOUTS["one axis"]
SIDES = [(outside, True), (on_each_device, False)]
SLOW_SIDES = [(outside, False), (on_each_device, True)]


@pytest.mark.parametrize(
    ("case", "side", "check_vma"),
    [
        *((case, *side) for case in CASES for side in SIDES),
        *(pytest.param(case, *side, marks=pytest.mark.slow) for case in CASES for side in SLOW_SIDES),
        *(pytest.param(case, *side, marks=pytest.mark.slow) for case in ON_ONE_AXIS for side in SIDES),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_every_derivative(case, side, check_vma):
    assert_same(side(case, ONE_AXIS, check_vma), expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("layout", "side", "check_vma"),
    [("data and model", outside, True), ("two axes", outside, True), ("two axes", on_each_device, False)],
)
def test_every_derivative_on_a_mesh_of_two_axes(case, layout, side, check_vma):
    assert_same(side(case, LAYOUTS[layout], check_vma), expected(case))


@pytest.mark.parametrize(("side", "check_vma"), SIDES)
def test_batch_norm_of_two_batches_that_share_scale_and_bias(side, check_vma):
    assert_same(side(TWO_BATCHES, LAYOUTS["data and model"], check_vma), expected(TWO_BATCHES))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_eager(case):
    # Once without check_vma.
    y, pull = jax.vjp(case.mapped(ONE_AXIS, case is not CASES[0]), *case.args)
    pulled = jax.jit(lambda *args: jax.vjp(case.whole, *args)[1](jnp.cos(case.whole(*args))))(*case.args)
    assert_same((y, pull(jnp.cos(y))), (case.whole(*case.args), pulled))


def test_a_mesh_axis_that_jax_shares_out_itself():
    """shard_map over `model` only: the other axis stays automatic."""
    mesh, case = LAYOUTS["data and model"].mesh, CASES[0]
    mapped = jax.shard_map(
        lambda *args: case.local("model", *args),
        mesh=mesh,
        in_specs=(P(), P(None, "model"), P("model")),
        out_specs=P(),
        axis_names={"model"},
    )
    ours, plain = (jax.jit(jax.value_and_grad(loss(f), (0, 1, 2)))(*case.args) for f in (mapped, case.whole))
    assert_same(ours, plain)


def test_an_axis_that_vmap_names():
    def of_shard(x, a, b, z):
        y = parallel.reduce_from(jnp.tanh(parallel.copy_to(x, "ranks") @ a) @ b, "ranks")
        whole = parallel.gather_from(parallel.scatter_to(x, "ranks") * 2, "ranks")
        return jnp.sum(jnp.sin(y)) + jnp.sum(whole**2) + jnp.sum(parallel_cross_entropy("ranks", z))

    def of_whole(x, a, b, z):
        return jnp.sum(jnp.sin(jnp.tanh(x @ a) @ b)) + jnp.sum((x * 2) ** 2) + jnp.sum(cross_entropy(z))

    x, a, b, z = *CASES[0].args, grid(6, 8)
    cut = lambda w, axis: jnp.stack(jnp.split(w, 4, axis))  # noqa: E731
    shards = x, cut(a, 1), cut(b, 0), cut(z, 1)
    f = jax.vmap(jax.value_and_grad(of_shard, (0, 1, 2, 3)), (None, 0, 0, 0), axis_name="ranks")
    value, (dx, da, db, dz) = jax.value_and_grad(of_whole, (0, 1, 2, 3))(x, a, b, z)
    every = lambda v: jnp.stack([v] * 4)  # noqa: E731
    assert_same(jax.jit(f)(*shards), (every(value), (every(dx), cut(da, 1), cut(db, 0), cut(dz, 1))))


@VMA
def test_pytrees_and_integers(check_vma):
    def of_shards(tree):
        copied = parallel.copy_to(tree, "model")
        gathered = parallel.gather_from(copied["label"], "model", axis=0)
        return parallel.reduce_from(copied, "model"), gathered

    tree = {"w": (grid(2), grid(3)), "label": jnp.arange(2)}
    whole = {"w": (".", "."), "label": "."}
    mapped = ONE_AXIS.map(of_shards, (whole,), (whole, "."), check_vma)
    summed, gathered = jax.jit(mapped)(tree)
    assert_same(summed, jax.tree.map(lambda x: 4 * x, tree))
    assert_same(gathered, jnp.tile(tree["label"], 4))


# -- narrow dtypes and large numbers --------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@VMA
def test_bfloat16(case, check_vma):
    args = jax.tree.map(lambda a: a.astype(jnp.bfloat16), case.args)

    def both(f, args):
        y, pull = jax.vjp(f, *args)
        return y, pull(weights(y).astype(y.dtype))

    ours = jax.jit(lambda *args: both(case.mapped(ONE_AXIS, check_vma), args))(*args)
    plain = both(case.whole, [a.astype(jnp.float32) for a in args])
    assert ours[0].dtype == (jnp.float32 if case.name == "cross_entropy" else jnp.bfloat16)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert a is ours[0] or a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=0.03, atol=0.05)


def losses_of(logits, labels, check_vma=True):
    """The cross entropy of whole logits, and the gradient of its sum."""

    def of_shard(z):
        return parallel.replicated_output(parallel.vocab_parallel_cross_entropy(z, labels, "model"), "model")

    mapped = ONE_AXIS.map(of_shard, (".M",), ".", check_vma)
    return jax.jit(lambda z: (mapped(z), jax.grad(lambda z: jnp.sum(mapped(z)))(z)))(logits)


@VMA
def test_cross_entropy_of_large_logits(check_vma):
    logits = jnp.array([[60000.0, -60000, 0, 0], [-1, -60000, -60000, -2]], jnp.float16)
    losses, slopes = losses_of(logits, jnp.array([1, 0]), check_vma)
    assert_same(losses, jnp.array([120000.0, np.log1p(np.exp(-1))], jnp.float32))
    np.testing.assert_allclose(slopes[0], [1, -1, 0, 0])


@VMA
def test_cross_entropy_beside_log_softmax(check_vma):
    spread = jnp.asarray([1e-30, 1e-3, 1, 1e5, 1e7, 1e30, *[1] * 4])
    offset = jnp.asarray([*[0] * 6, 1e5, 1e7, -1e9, 1e30])
    logits = grid(10, 8) * 3 * spread[:, None] + offset[:, None]
    labels = jnp.arange(10) % 8

    def of_shard(z):
        return parallel.replicated_output(parallel.vocab_parallel_cross_entropy(z, labels, "model"), "model")

    def plain(z):
        return -jnp.take_along_axis(jax.nn.log_softmax(z), labels[:, None], 1)[:, 0]

    def derivatives(f, z):
        return jax.jvp(f, (z,), (jnp.cos(grid(10, 8)),)), jax.grad(lambda z: f(z).sum())(z)

    got = jax.jit(lambda z: derivatives(ONE_AXIS.map(of_shard, (".M",), ".", check_vma), z))(logits)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(derivatives(plain, logits)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_labels_outside_of_the_vocabulary_have_no_loss_and_no_gradient():
    losses, slopes = losses_of(grid(5, 8), jnp.array([-100, -1, 8, 2**31 - 1, 3]))
    assert losses[:4].tolist() == [0, 0, 0, 0]
    assert not slopes[:4].any()
    assert losses[4] > 0
    assert slopes[4].all()


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32, jnp.int16])
def test_cross_entropy_of_labels_of_narrow_dtypes(dtype):
    logits = grid(2, 160)  # more than an int8 holds
    labels = jnp.array([5, 126], dtype)
    assert_same(losses_of(logits, labels), losses_of(logits, labels.astype(jnp.int32)))


def test_cross_entropy_saves_logits_in_their_own_dtype():
    saved = []

    def of_shard(logits):
        _, pull = jax.vjp(lambda z: parallel.vocab_parallel_cross_entropy(z, jnp.arange(16), "model"), logits)
        saved.extend((x.dtype.name, x.shape) for x in jax.tree.leaves(pull) if x.size > 16)
        return logits

    jax.jit(ONE_AXIS.map(of_shard, (".M",), ".M", True))(grid(16, 160).astype(jnp.bfloat16))
    assert saved == [("bfloat16", (16, 40))]


@VMA
def test_statistics_of_batch_norm(check_vma):
    x = (grid(8, 2, 3) + 300).astype(jnp.float32)  # squares would cancel

    def of_shards(x):
        return parallel.sync_batch_norm(x, jnp.ones(2), jnp.zeros(2), "model", channel_axis=1, epsilon=0.1)

    y, mean, variance = jax.jit(ONE_AXIS.map(of_shards, ("M..",), ("M..", ".", "."), check_vma))(x)
    wide = np.asarray(x, np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 2)), rtol=1e-6)
    np.testing.assert_allclose(variance, wide.var((0, 2)), rtol=1e-4)
    centered = wide - wide.mean((0, 2))[:, None]
    np.testing.assert_allclose(y, centered / np.sqrt(wide.var((0, 2)) + 0.1)[:, None], rtol=1e-3, atol=1e-3)


def test_batch_norm_of_one_device_is_the_plain_one():
    mesh, case = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,)), CASES[-1]
    local = lambda *args: case.local("model", *args)  # noqa: E731
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(P("model"), P(), P()), out_specs=P("model"))
    assert_same(jax.jit(mapped)(*case.args), case.whole(*case.args))

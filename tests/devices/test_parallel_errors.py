"""What the layers of `pylayer_jax.parallel` refuse, and what the errors say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pylayer_jax import parallel

from .ranks import VMA

pytestmark = pytest.mark.own_primitive

LAYERS = {
    "copy_to": parallel.copy_to,
    "reduce_from": parallel.reduce_from,
    "scatter_to": parallel.scatter_to,
    "gather_from": parallel.gather_from,
    "all_gather": parallel.all_gather,
    "reduce_scatter": parallel.reduce_scatter,
    "all_to_all": parallel.all_to_all,
    "replicated_input": parallel.replicated_input,
    "replicated_output": parallel.replicated_output,
    "vocab_parallel_cross_entropy": lambda x, axis: parallel.vocab_parallel_cross_entropy(
        x, jnp.zeros(x.shape[:-1], jnp.int32), axis
    ),
    "sync_batch_norm": lambda x, axis: parallel.sync_batch_norm(x, x[0], x[0], axis),
}
EVERY = pytest.mark.parametrize("name", LAYERS)


OWN, ALL = P("model"), P()


def run(f, *args, in_specs=ALL, check_vma=True):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=P(("data", "model")), check_vma=check_vma)
    jax.jit(mapped)(*args)


@EVERY
@VMA
def test_a_name_that_is_no_mesh_axis(name, check_vma):
    with pytest.raises(ValueError, match=rf"^parallel\.{name}: axis_name: .*got 'modle'. .* 'data', 'model'\."):
        run(lambda x: LAYERS[name](x, "modle"), jnp.ones((4, 4)), check_vma=check_vma)


@EVERY
def test_outside_of_a_shard_map(name):
    with pytest.raises(ValueError, match=rf"^parallel\.{name}: axis_name: .*Call the layer in a function that jax.sha"):
        LAYERS[name](jnp.ones((4, 4)), "model")


@pytest.mark.parametrize(
    ("axis_name", "error", "message"),
    [
        (["model"], TypeError, r"expected the name of a mesh axis, or a tuple of names; got \['model'\]"),
        (0, TypeError, "got 0"),
        ((), TypeError, r"got \(\)"),
        (("model", "model"), ValueError, r"expected each name once; .* Drop \['model'\]"),
    ],
)
def test_a_name_that_is_none(axis_name, error, message):
    with pytest.raises(error, match=rf"parallel\.copy_to: axis_name: .*{message}"):
        run(lambda x: parallel.copy_to(x, axis_name), jnp.ones(4))


@pytest.mark.parametrize("name", ["copy_to", "scatter_to", "replicated_input", "replicated_output"])
def test_a_varying_value_where_a_replicated_one_is_needed(name):
    with pytest.raises(ValueError, match=rf"^parallel\.{name}: x: expected .* replicated .*varies over \['model'\]"):
        run(lambda x: LAYERS[name](x, ("data", "model")), jnp.ones((4, 4)), in_specs=OWN)


def test_labels_and_scales_that_vary():
    with pytest.raises(ValueError, match="cross_entropy: labels: expected a value that is replicated"):
        run(
            lambda z, t: parallel.vocab_parallel_cross_entropy(z, t, "model"),
            jnp.ones((4, 4)),
            jnp.zeros(4, jnp.int32),
            in_specs=OWN,
        )
    with pytest.raises(ValueError, match="sync_batch_norm: bias: expected a value that is replicated"):
        run(
            lambda x, b: parallel.sync_batch_norm(x, jnp.ones(4), b, "model"),
            jnp.ones((4, 4)),
            jnp.ones(8),
            in_specs=OWN,
        )


# One value, of which each device has a copy, would be counted once per device.
COUNTED_TWICE = {
    "reduce_from": (
        lambda x: parallel.reduce_from({"loss": x.sum()}, "model"),
        r"x\['loss'\]",
        "sum is 2 times",
        "leave",
    ),
    "reduced twice": (
        lambda x: parallel.reduce_from(parallel.reduce_from(parallel.copy_to(x, "model"), "model"), "model"),
        "x",
        "sum is 2 times as large",
        "leave out reduce_from",
    ),
    "gradient": (  # of replicated weights: JAX adds it up
        lambda x: parallel.reduce_from(jax.grad(lambda w: (parallel.copy_to(w, "model") ** 2).sum())(x), "model"),
        "x",
        "sum is 2 times as large",
        "a gradient that JAX added up",
    ),
    "one axis of two": (
        lambda x: parallel.reduce_from(parallel.copy_to(x, "data"), ("data", "model")),
        "x",
        "sum is 2 times as large",
        r"name only the axes over which it varies, \('data',\)",
    ),
    "reduce_scatter": (lambda x: parallel.reduce_scatter(x, "model"), "x", "sum is 2 times as large", "scatter_to"),
    "vocab_parallel_cross_entropy": (
        lambda x: parallel.vocab_parallel_cross_entropy(x, jnp.zeros(4, jnp.int32), "model"),
        "logits",
        "vocabulary counts 2 times",
        "scatter_to",
    ),
}


@pytest.mark.parametrize("name", COUNTED_TWICE)
def test_a_replicated_value_where_each_device_needs_its_own_part(name):
    f, argument, wrong, instead = COUNTED_TWICE[name]
    message = rf"{argument}: expected each device's own part.*replicated over \['model'\].*{wrong}.*{instead}.*parts"
    with pytest.raises(
        ValueError, match=rf"^parallel\.\w+: {message} are meant, pass parallel\.copy_to\(.*, 'model'\)"
    ):
        run(f, jnp.ones((4, 4)))


def test_what_is_replicated_and_counts_once_per_device():
    """Constants of each device's own, equal parts that are meant, and equal parts that are joined."""

    def of_shard(x):
        equal = parallel.reduce_from(parallel.copy_to(jnp.ones(()), ("data", "model")), ("data", "model"))
        counts = parallel.reduce_from([2, np.float32(2)], "model")
        zeros = parallel.all_gather(jnp.zeros(2), "model"), parallel.all_to_all(jnp.zeros(2), "model")
        joined = parallel.gather_from(x[:1], "model", 0)
        assert [z.shape for z in zeros] == [(4,), (2,)]
        return jnp.stack([equal, *(c.astype(jnp.float32) for c in counts), joined.sum()])

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(of_shard, mesh=mesh, in_specs=ALL, out_specs=ALL)
    assert jax.jit(mapped)(jnp.ones(4)).tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize("name", ["scatter_to", "reduce_scatter", "all_to_all"])
@VMA
def test_an_axis_that_cannot_be_cut(name, check_vma):
    parameter = "split_axis" if name == "all_to_all" else "axis"
    message = rf"parallel\.{name}: x: expected a multiple of 4 .* along {parameter}=.; .*\(7, 6\).*Pad x .* to 8 along"
    with pytest.raises(ValueError, match=message):
        run(lambda x: getattr(parallel, name)(x, ("data", "model"), 0), jnp.ones((7, 6)), check_vma=check_vma)


@pytest.mark.parametrize("name", ["scatter_to", "gather_from", "all_gather", "reduce_scatter", "all_to_all"])
def test_an_axis_that_the_array_lacks(name):
    layer = getattr(parallel, name)
    with pytest.raises(ValueError, match=rf"parallel\.{name}: .*axis: expected an axis of x, .*got 2. Give one"):
        run(lambda x: layer(x, "model", 2), jnp.ones((4, 4)))
    with pytest.raises(ValueError, match=rf"parallel\.{name}: x: expected an array with an axis .* got a scalar"):
        run(lambda x: layer(x, "model", 0), jnp.ones(()))


@pytest.mark.parametrize("axis", ["data", True, 1.0])
def test_an_axis_that_is_no_number(axis):
    with pytest.raises(TypeError, match=r"parallel\.all_gather: axis: expected the number of an axis of x, such as 0"):
        run(lambda x: parallel.all_gather(x, "model", axis), jnp.ones((4, 4)))


@EVERY
def test_what_is_no_array(name):
    layer = parallel.__dict__[name]
    args = {"vocab_parallel_cross_entropy": ("x", 0), "sync_batch_norm": ("x", 0.0, 0.0)}.get(name, ("x",))
    with pytest.raises(TypeError, match=rf"parallel\.{name}: (x|logits): expected an array; got 'x' of type str"):
        run(lambda _: layer(*args, "model"), jnp.ones(4))


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (jnp.ones((4, 4), jnp.int32), jnp.zeros(4, jnp.int32), TypeError, "logits: expected a floating-point dtype"),
        (jnp.ones((4, 4)), jnp.zeros((4, 4)), TypeError, "labels: expected integers; got float32"),
        (jnp.ones((4, 4)), jnp.zeros(3, jnp.int32), ValueError, r"labels: expected the shape .*\(4, 4\).*got \(3,\)"),
        (jnp.ones(()), jnp.zeros((), jnp.int32), ValueError, "labels: expected the shape"),
    ],
)
def test_logits_and_labels_that_do_not_fit(logits, labels, error, message):
    with pytest.raises(error, match=rf"parallel\.vocab_parallel_cross_entropy: {message}"):
        run(lambda z, t: parallel.vocab_parallel_cross_entropy(z, t, "model"), logits, labels)


@pytest.mark.parametrize(
    ("x", "scale", "options", "error", "message"),
    [
        (jnp.ones((4, 3)), jnp.ones(4), {}, ValueError, r"scale: expected shape \(3,\).*got \(4,\). Give channel_axis"),
        (jnp.ones((4, 3)), jnp.ones(3), {"channel_axis": 2}, ValueError, "channel_axis: expected an axis of x"),
        (jnp.ones((4, 3), jnp.int32), jnp.ones(3), {}, TypeError, "x: expected a floating-point dtype; got int32"),
    ],
)
def test_a_batch_that_does_not_fit(x, scale, options, error, message):
    with pytest.raises(error, match=rf"parallel\.sync_batch_norm: {message}"):
        run(lambda x, s: parallel.sync_batch_norm(x, s, s, "model", **options), x, scale)

"""What the layers of `pylayer_jax.parallel` refuse, and what the errors say."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pylayer_jax import parallel

from .ranks import VMA

pytestmark = pytest.mark.own_primitive

PLAIN = ["copy_to", "reduce_from", "scatter_to", "gather_from", "all_gather", "reduce_scatter", "all_to_all"]
PLAIN += ["replicated_input", "replicated_output"]
LAYERS = {name: getattr(parallel, name) for name in PLAIN} | {
    "vocab_parallel_cross_entropy": lambda x, axis: parallel.vocab_parallel_cross_entropy(
        x, jnp.zeros(x.shape[:-1], jnp.int32), axis
    ),
    "sync_batch_norm": lambda x, axis: parallel.sync_batch_norm(x, x[0], x[0], axis),
}
EVERY = pytest.mark.parametrize("name", LAYERS)
OWN, ALL = P("model"), P()
ONES, LABELS = jnp.ones((4, 4)), jnp.zeros(4, jnp.int32)


def run(f, *args, in_specs=ALL, out_specs=P(("data", "model")), check_vma=True):  # noqa: B008
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    return jax.jit(mapped)(*args)


@EVERY
def test_a_name_that_is_no_mesh_axis(name):
    for check_vma in (True, False):
        with pytest.raises(ValueError, match=rf"^parallel\.{name}: axis_name: .*got 'modle'. .* 'data', 'model'\."):
            run(lambda x: LAYERS[name](x, "modle"), ONES, check_vma=check_vma)
    with pytest.raises(ValueError, match=rf"^parallel\.{name}: axis_name: .*Call the layer in a function that jax.sha"):
        LAYERS[name](ONES, "model")  # outside of a shard_map


@EVERY
def test_what_is_no_array(name):
    layer = getattr(parallel, name)
    args = {"vocab_parallel_cross_entropy": ("x", 0), "sync_batch_norm": ("x", 0.0, 0.0)}.get(name, ("x",))
    with pytest.raises(TypeError, match=rf"parallel\.{name}: (x|logits): expected an array; got 'x' of type str"):
        run(lambda _: layer(*args, "model"), jnp.ones(4))


@pytest.mark.parametrize("name", ["copy_to", "scatter_to", "replicated_input", "replicated_output"])
def test_a_varying_value_where_a_replicated_one_is_needed(name):
    with pytest.raises(ValueError, match=rf"^parallel\.{name}: x: expected .* replicated .*varies over \['model'\]"):
        run(lambda x: LAYERS[name](x, ("data", "model")), ONES, in_specs=OWN)


def over_model(name):
    layer = getattr(parallel, name)
    return lambda *args, **options: layer(*args, "model", **options)


entropy, norm = over_model("vocab_parallel_cross_entropy"), over_model("sync_batch_norm")
copied_to = lambda axis_name: lambda x: parallel.copy_to(x, axis_name)  # noqa: E731
gathered = lambda axis: lambda x: parallel.all_gather(x, "model", axis)  # noqa: E731
NO_AXIS = r"parallel\.all_gather: axis: expected the number of an axis of x, such as 0"
NARROW = jnp.ones((4, 3))


@pytest.mark.parametrize(
    ("f", "args", "error", "message"),
    [
        (copied_to(["model"]), [ONES], TypeError, r"copy_to: axis_name: .* a tuple of names; got \['model'\]"),
        (copied_to(0), [ONES], TypeError, "copy_to: axis_name: .*got 0"),
        (copied_to(()), [ONES], TypeError, r"copy_to: axis_name: .*got \(\)"),
        (copied_to(("model",) * 2), [ONES], ValueError, r"copy_to: axis_name: .* each name once; .* Drop \['model'\]"),
        *((gathered(axis), [ONES], TypeError, NO_AXIS) for axis in ("data", True, 1.0)),
        (entropy, [ONES.astype(int), LABELS], TypeError, "cross_entropy: logits: expected a floating-point dtype"),
        (entropy, [ONES, ONES], TypeError, "cross_entropy: labels: expected integers; got float32"),
        (entropy, [ONES, LABELS[:3]], ValueError, r"entropy: labels: expected the shape .*\(4, 4\).*got \(3,\)"),
        (entropy, [ONES[0, 0], LABELS[0]], ValueError, "cross_entropy: labels: expected the shape"),
        (norm, [NARROW, ONES[0], ONES[0]], ValueError, r"norm: scale: .* \(3,\).*got \(4,\). Give channel_axis"),
        (norm, [NARROW.astype(int), *NARROW[:2]], TypeError, "norm: x: expected a floating-point dtype; got int32"),
        (
            functools.partial(norm, channel_axis=2),
            [NARROW, *NARROW[:2]],
            ValueError,
            "sync_batch_norm: channel_axis: expected an axis of x",
        ),
    ],
)
def test_arguments_that_do_not_fit(f, args, error, message):
    with pytest.raises(error, match=message):
        run(f, *args)


def test_labels_and_scales_that_vary():
    with pytest.raises(ValueError, match="cross_entropy: labels: expected a value that is replicated"):
        run(entropy, ONES, LABELS, in_specs=OWN)
    with pytest.raises(ValueError, match="sync_batch_norm: bias: expected a value that is replicated"):
        run(lambda x, b: norm(x, jnp.ones(4), b), ONES, jnp.ones(8), in_specs=OWN)


# One value, of which each device has a copy, would be counted once per device.
reduced, copied = over_model("reduce_from"), over_model("copy_to")
LARGE = "sum is 2 times as large"
COUNTED_TWICE = {
    "reduce_from": (lambda x: reduced({"loss": x.sum()}), r"x\['loss'\]", "sum is 2 times", "leave"),
    "reduced twice": (lambda x: reduced(reduced(copied(x))), "x", LARGE, "leave out reduce_from"),
    # The gradient of replicated weights: JAX adds it up.
    "gradient": (
        lambda x: reduced(jax.grad(lambda w: (copied(w) ** 2).sum())(x)),
        "x",
        LARGE,
        "a gradient that JAX added up",
    ),
    "one axis of two": (
        lambda x: parallel.reduce_from(parallel.copy_to(x, "data"), ("data", "model")),
        "x",
        LARGE,
        r"name only the axes over which it varies, \('data',\)",
    ),
    "reduce_scatter": (over_model("reduce_scatter"), "x", LARGE, "scatter_to"),
    "cross_entropy": (lambda x: entropy(x, LABELS), "logits", "vocabulary counts 2 times", "scatter_to"),
}


@pytest.mark.parametrize("name", COUNTED_TWICE)
def test_a_replicated_value_where_each_device_needs_its_own_part(name):
    f, argument, wrong, instead = COUNTED_TWICE[name]
    message = rf"{argument}: expected each device's own part.*replicated over \['model'\].*{wrong}.*{instead}.*parts"
    with pytest.raises(
        ValueError, match=rf"^parallel\.\w+: {message} are meant, pass parallel\.copy_to\(.*, 'model'\)"
    ):
        run(f, ONES)


def test_what_is_replicated_and_counts_once_per_device():
    """Constants of each device's own, equal parts that are meant, and equal parts that are joined."""

    def of_shard(x):
        equal = parallel.reduce_from(parallel.copy_to(jnp.ones(()), ("data", "model")), ("data", "model"))
        counts = parallel.reduce_from([2, np.float32(2)], "model")
        zeros = parallel.all_gather(jnp.zeros(2), "model"), parallel.all_to_all(jnp.zeros(2), "model")
        joined = parallel.gather_from(x[:1], "model", 0)
        assert [z.shape for z in zeros] == [(4,), (2,)]
        return jnp.stack([equal, *(c.astype(jnp.float32) for c in counts), joined.sum()])

    assert run(of_shard, jnp.ones(4), out_specs=ALL).tolist() == [4, 4, 4, 2]


@pytest.mark.parametrize("name", ["scatter_to", "reduce_scatter", "all_to_all"])
@VMA
def test_an_axis_that_cannot_be_cut(name, check_vma):
    parameter = "split_axis" if name == "all_to_all" else "axis"
    message = rf"parallel\.{name}: x: expected a multiple of 4 .* along {parameter}=.; .*\(7, 6\).*Pad x .* to 8 along"
    with pytest.raises(ValueError, match=message):
        run(lambda x: LAYERS[name](x, ("data", "model"), 0), jnp.ones((7, 6)), check_vma=check_vma)


@pytest.mark.parametrize("name", ["scatter_to", "gather_from", "all_gather", "reduce_scatter", "all_to_all"])
def test_an_axis_that_the_array_lacks(name):
    with pytest.raises(ValueError, match=rf"parallel\.{name}: .*axis: expected an axis of x, .*got 2. Give one"):
        run(lambda x: LAYERS[name](x, "model", 2), ONES)
    with pytest.raises(ValueError, match=rf"parallel\.{name}: x: expected an array with an axis .* got a scalar"):
        run(lambda x: LAYERS[name](x, "model", 0), jnp.ones(()))

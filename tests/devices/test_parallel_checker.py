"""check_parallel: it accepts every layer of `pylayer_jax.parallel`, and names what is wrong in wrong functions."""

from __future__ import annotations

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pylayer_jax import PyLayer, parallel
from pylayer_jax.testing import check_parallel
from tests.kit.case import grid

from .parallel_cases import CASES, LAYOUTS, A, B, X, network
from .ranks import VMA, same

pytestmark = pytest.mark.own_primitive

ONE_AXIS = LAYOUTS["one axis"]
MESH = ONE_AXIS.mesh
COLUMNS, ROWS, ALL = P(None, "model"), P("model"), P()
IN_SPECS = ALL, COLUMNS, ROWS
ARGS = X, A, B


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_accepts_the_layers(case):
    check_parallel(case.mapped(ONE_AXIS, True), case.whole, case.args)
    ins, out = jax.tree.map(ONE_AXIS.spec, (case.ins, case.out))
    specs = {"mesh": MESH, "in_specs": ins, "out_specs": out, "check_vma": False}
    check_parallel(lambda *args: case.shards(ONE_AXIS, *args), case.whole, case.args, **specs)


@pytest.mark.parametrize(("check_vma", "layout"), [(True, "data and model"), (False, "two axes")])
def test_accepts_them_at_second_order(check_vma, layout):
    check(("inside", check_vma), mlp(copy, reduce), orders=[2])
    case = CASES[0]
    check_parallel(case.mapped(LAYOUTS[layout], check_vma), case.whole, case.args, orders=[2])


# -- wrong functions ------------------------------------------------------------------------------


def mlp(enter, leave, border_in=same, border_out=same):
    return lambda x, a, b: border_out(leave(jnp.tanh(enter(border_in(x)) @ a) @ b))


def over_model(layer):
    return lambda x: layer(x, "model")


class AddsUpBackward(PyLayer):
    """Right without check_vma at first order: at the second, JAX takes psum for its own transpose there."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return jax.lax.psum(dy, "model")


copy, reduce, enters, leaves, psum = map(
    over_model,
    (parallel.copy_to, parallel.reduce_from, parallel.replicated_input, parallel.replicated_output, jax.lax.psum),
)

BOTH, OF_X = "values: output 0 at", r"first order: the gradient of args\[0\]"
INSIDE, OUTSIDE = ("inside", False), ("outside", False)
ADDED_UP = "4 times the right value everywhere. Does it add up a value that each device has already"
SUMMED_ALREADY = (
    "4 times the right value everywhere. Is a layer an identity whose backward is a psum. .*JAX sums the cotangent of "
    "a shared value already: use pylayer_jax.parallel.copy_to, or jax.lax.pcast in forward"
)
twice, biased = lambda y: reduce(reduce(y)), lambda y: reduce(y + 1)

# Where jax.grad is and check_vma, the function, how the message begins after the name, and how it ends.
WRONG = {
    "reduces twice": (OUTSIDE, mlp(copy, twice, enters, leaves), BOTH, ADDED_UP),
    "adds a bias to each part": (("inside", True), mlp(copy, biased), BOTH, "places."),
    "forgets replicated_input": (OUTSIDE, mlp(copy, reduce, same, leaves), OF_X, "4 times .*replicated_input missing"),
    "forgets replicated_output": (OUTSIDE, mlp(copy, reduce, enters), OF_X, "1/4 of .*replicated_output missing"),
    "forgets copy_to": (OUTSIDE, mlp(same, reduce, enters, leaves), OF_X, "1/4 .* parallel.copy_to where"),
    "forgets copy_to, inside": (
        INSIDE,
        mlp(same, reduce),
        OF_X + " on .*cpu:0 at",
        "copies .* differ. Is parallel.copy_to missing",
    ),
    "replicated_input, inside": (INSIDE, mlp(copy, reduce, enters), OF_X, "1/4 .* parallel.replicated_input is for"),
    "replicated_output, inside": (INSIDE, mlp(copy, reduce, same, leaves), OF_X, "4 times .*replicated_output is for"),
    "forgets reduce_from": (
        INSIDE,
        mlp(copy, same),
        "values: output 0 on .*cpu:0 at",
        "copies .* differ. Is parallel.reduce_from or",
    ),
    "psum, inside": (INSIDE, mlp(copy, psum), OF_X, "4 times .* its own transpose"),
    "own layer, with types": (("outside", True), mlp(AddsUpBackward.apply, reduce), OF_X, SUMMED_ALREADY),
    "own layer, with types, inside": (("inside", True), mlp(AddsUpBackward.apply, reduce), OF_X, SUMMED_ALREADY),
}


def check(where, f, **options):
    side, check_vma = where
    specs = {"mesh": MESH, "in_specs": IN_SPECS, "out_specs": ALL, "check_vma": check_vma}
    if side == "outside":
        f, specs = jax.shard_map(f, **specs), {}
    return check_parallel(f, network, ARGS, **specs, **options)


@pytest.mark.filterwarnings("ignore:.* adds up over the mesh axis:UserWarning")  # which tells the same of one of them
@pytest.mark.parametrize("name", WRONG)
def test_rejects(name):
    where, f, begin, end = WRONG[name]
    with pytest.raises(AssertionError) as caught:
        check(where, f)
    assert re.match(rf"check_parallel of \S+, {begin}.*by the reference.* {end}", str(caught.value)), caught.value


def test_rejects_what_is_wrong_at_second_order():
    wrong = mlp(AddsUpBackward.apply, reduce)
    check(INSIDE, wrong)
    with pytest.raises(AssertionError, match=r", second order: the gradient of args\[0\] at"):
        check(INSIDE, wrong, orders=(0, 1, 2))


def test_rejects_other_outputs():
    put = lambda x, spec: jax.device_put(x, NamedSharding(MESH, spec))  # noqa: E731
    for f, message in [
        (lambda *args: 2 * network(*args), "values: output 0 at index"),
        (lambda *args: network(*args).T, r"values: output 0 is float32\[8,4\], but float32\[4,8\] by the reference"),
        (lambda *args: (network(*args),) * 2, "values: 2 tensors are returned, but 1 by the reference"),
    ]:
        with pytest.raises(AssertionError, match=f"check_parallel of .*, {message}"):
            check_parallel(f, network, tuple(map(put, ARGS, IN_SPECS)))


def test_a_small_entry_is_compared_by_its_own_size():
    """It may be rounding errors of large terms that cancel: then it is not."""
    specs = {"mesh": MESH, "in_specs": (ALL, ROWS), "out_specs": (ROWS, ALL)}
    x = jnp.array([1.0, 1e-6] * 4)

    def compare(small, tiny, orders):
        check_parallel(
            lambda s, x: (x * jnp.array([1.0, small]), jnp.stack([s, psum((x - 0.5).sum() * tiny)])),
            lambda s, x: (x, jnp.stack([s, (x - 0.5).sum()])),
            (jnp.float32(1), x),
            **specs,
            orders=orders,
        )

    compare(1, 1, [1])
    for orders in [0], [1]:
        with pytest.raises(AssertionError, match=r"at index \(\d,\) is "):
            compare(2, 1, orders)


# -- functions as users have them -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "entered"), [(AxisType.Auto, False), (AxisType.Explicit, False), (AxisType.Explicit, True)], ids=str
)
def test_a_jitted_function_of_sharded_arrays(kind, entered):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(kind,))

    def layer(params, labels, key, scale):
        hidden = scale * jnp.tanh(params["x"] @ params["w"])
        return {"loss": jnp.sum(hidden**2), "hidden": hidden, "labels": labels, "key": key}

    params = {"x": jax.device_put(X, NamedSharding(mesh, ROWS)), "w": jax.device_put(A, NamedSharding(mesh, ALL))}
    args = params, jax.device_put(jnp.arange(8), NamedSharding(mesh, ROWS)), jax.random.key(0), jnp.float32(3)
    with jax.set_mesh(mesh) if entered else contextlib.nullcontext():
        check_parallel(jax.jit(layer), layer, args)
        wrong = jax.jit(lambda p, *args: layer(p | {"w": jax.lax.stop_gradient(p["w"])}, *args))
        with pytest.raises(AssertionError, match=r"first order: the gradient of args\[0\]\['w'\] at"):
            check_parallel(wrong, layer, args)


@VMA
def test_trees_integers_and_outputs_that_the_specs_cut(check_vma):
    def of_shard(params, places, scale):
        total = reduce(jnp.sum(copy(params["w"]) * params["x"] * scale, keepdims=True))
        return {"total": total if check_vma else copy(total), "places": (places + 1, total[0])}

    def whole(params, places, scale):
        total = jnp.sum(params["w"] * params["x"] * scale, keepdims=True)
        return {"total": jnp.tile(total, 4), "places": (places + 1, total[0])}

    check_parallel(
        of_shard,
        whole,
        ({"w": grid(1), "x": grid(8)}, jnp.arange(4), 3.0),
        mesh=MESH,
        in_specs=({"w": ALL, "x": ROWS}, ROWS, ALL),
        out_specs={"total": ROWS, "places": (ROWS, ALL)},
        check_vma=check_vma,
        orders=(0, 1, 2),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_narrow_dtypes_and_specs_that_are_none(dtype):
    def of_shard(scale, x):
        total = psum(jnp.sum(scale.astype(jnp.float32) * x.astype(jnp.float32)))
        return total.astype(dtype), x

    def whole(scale, x):
        return jnp.sum(scale.astype(jnp.float32) * x.astype(jnp.float32)).astype(dtype), x

    args = jnp.asarray(0.5, dtype), jnp.arange(4.0).astype(jnp.bfloat16)
    specs = {"mesh": MESH, "in_specs": (None, ROWS), "out_specs": (ALL, ROWS)}
    check_parallel(of_shard, whole, args, **specs)


def test_a_gradient_that_cancels():
    """The gradient of the shift is 0, but for rounding errors, which differ with the order of the sums."""
    rows = {"mesh": MESH, "in_specs": (ROWS, ALL), "out_specs": ROWS}

    def centre(x, shift):
        x = x + copy(shift)
        return (x - copy(reduce(x.sum(0))) / 16) ** 3

    check_parallel(centre, lambda x, shift: (x + shift - (x + shift).mean(0)) ** 3, (grid(16, 3) * 7, grid(3)), **rows)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"out_specs": None}, TypeError, "expected in_specs and out_specs, for a function of the shards"),
        ({"in_specs": None, "out_specs": None}, TypeError, ".*or none of mesh, in_specs and out_specs"),
        ({"orders": [4]}, ValueError, r"expected orders from 0 to 3, got \(4,\)"),
        ({"mesh": jax.make_mesh((1,), ("model",))}, ValueError, "it ran on one device, where no mistake .* XLA_FLAGS"),
    ],
)
def test_what_it_refuses(options, error, message):
    specs = {"mesh": MESH, "in_specs": IN_SPECS, "out_specs": ALL} | options
    with pytest.raises(error, match=f"check_parallel.*: {message}"):
        check_parallel(mlp(copy, reduce), network, ARGS, **specs)

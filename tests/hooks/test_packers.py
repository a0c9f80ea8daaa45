"""The ready pairs: how close they come, how much they keep, what they leave alone, and where they fail."""

import errno
import gc
import os
import pathlib
import subprocess
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, recompute_saved, save_on_cpu, save_on_disk
from tests.hooks.spy import (
    TRANSFORMS,
    Spy,
    assert_close,
    bytes_held,
    in_block,
    tanh_slope,
    tanh_sum,
    temporary_bytes,
    without_hooks,
)
from tests.kit.case import grid, numpy_grid
from tests.kit.layers import Multiply, Square, Tanh, layer, text_of
from tests.kit.modes import EAGER_AND_JIT
from tests.kit.transforms import batched

ROOT = pathlib.Path(__file__).parents[2]
X = grid(8, 64)
W = grid(64, 64, low=-0.2, high=0.3)


def model(x, w):
    return jnp.sum(jnp.sin(Multiply.apply(jnp.tanh(x @ w), x)))


# The largest error of a gradient next to its largest entry.
PACKERS = {
    "save_on_cpu": (lambda folder, **options: save_on_cpu(**options), 1e-6),
    "save_on_cpu pinned": (lambda folder, **options: save_on_cpu(pin_memory=True, **options), 1e-6),
    "save_on_disk": (save_on_disk, 1e-6),
    "cast_saved": (lambda folder, **options: cast_saved(**options), 0.02),
    "cast_saved float16": (lambda folder, **options: cast_saved(jnp.float16, **options), 0.002),
    "quantize_saved 8": (lambda folder, **options: quantize_saved(8, **options), 0.03),
    "quantize_saved 4": (lambda folder, **options: quantize_saved(4, block_size=16, **options), 0.4),
}


def doubled():
    def pack(x):
        return {"half": (x * 2, "a static"), "shape": x.shape}

    def unpack(packed):
        assert packed["half"][1] == "a static"
        return packed["half"][0].reshape(packed["shape"]) / 2

    return saved_tensors_hooks(pack, unpack)


def reversed_on_host():
    return saved_tensors_hooks(lambda x: [x[::-1].copy()], lambda packed: packed[0][::-1], host=True)


CHAINS = {
    "quantized, on CPU": (lambda folder: chain(quantize_saved(8), save_on_cpu()), 0.03),
    "cast, on disk": (lambda folder: chain(cast_saved(), save_on_disk(folder)), 0.02),
    "of a user, on the host": (lambda folder: chain(doubled(), reversed_on_host()), 1e-5),
    "of chains": (lambda folder: chain(chain(doubled(), Spy().hooks), doubled()), 1e-5),
}


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("i",), axis_types=(kind,))


def unchecked_shard_map(f, args):
    spec = PartitionSpec("i")
    mapped = jax.shard_map(
        lambda *args: f(*(x[0] for x in args))[None], mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(jax.grad(lambda *args: mapped(*args).sum(), (0, 1)))(*batched(args, 4))


def explicit_sharding(f, args):
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = [jax.device_put(x, PartitionSpec(axis)) for x, axis in zip(args, ("i", None), strict=True)]
        return jax.jit(jax.grad(f, (0, 1)))(*placed)


# Each with the transform of the kit that gives the same numbers.
SHARDED = {
    "unchecked_shard_map": (unchecked_shard_map, "vmap_of_grad"),
    "explicit_sharding": (explicit_sharding, "jit_of_grad"),
}
RUNS = SHARDED | {name: (transform, name) for name, transform in TRANSFORMS.items()}

# save_on_disk has host=True as in test_host.py, and cast_saved is plain JAX, so that a few transforms are enough.
FEW = ("grad", "jit_of_grad", "shard_map")
MOST = (*FEW, *SHARDED, "vmap_of_grad", "jit_of_scan", "remat", "named_sharding", "jit_of_grad_of_grad")
MORE = ("grad_of_jit", "grad_of_vmap_of_the_first", "scan", "cond", "grad_of_grad")
MET = [(name, "quantize_saved 8") for name in MOST + MORE] + [(name, "save_on_cpu") for name in MOST]
MET += [(name, packer) for packer in ("save_on_disk", "cast_saved", "quantize_saved 4") for name in FEW]
MET += [("grad", chained) for chained in CHAINS]  # which are one pair to JAX
MET += [
    (name, "of a user, on the host") for name in ("jit_of_grad", "jit_of_scan", "vmap_of_grad", "jit_of_grad_of_grad")
]

expected_of_model = without_hooks(model, (X, W))


@pytest.mark.parametrize(("name", "packer"), MET)
def test_gradients(name, packer, tmp_path):
    (transform, like), (make, tolerance) = RUNS[name], (PACKERS | CHAINS)[packer]
    hooks = make(tmp_path)
    for hooked in [hooks(model), in_block(hooks, model)] if name == "grad" else [hooks(model)]:
        for got, expected in zip(transform(hooked, (X, W)), expected_of_model(like), strict=True):
            assert_close(got, expected, tolerance)
            if tolerance > 1e-3:
                assert np.abs(got - expected).max() > 1e-6 * np.abs(expected).max()  # it really was packed


@pytest.mark.parametrize("packer", PACKERS)
def test_a_constant_of_forward_is_saved_in_eager_vmap(packer, tmp_path):
    def forward(ctx, x):
        ctx.save_for_backward(jnp.float32(2.0))  # which JAX holds as an array of its own kind under vmap
        return 2 * x

    made = layer(forward, lambda ctx, dy: dy * ctx.saved_tensor()[0])
    hooked = PACKERS[packer][0](tmp_path)(made.apply)
    np.testing.assert_allclose(jax.vmap(jax.grad(hooked))(jnp.ones(2)), 2, rtol=0.01)


def as_it_is(f, *args):
    return f(*args)


def restored(hooks, *tensors, run=as_it_is):
    seen = []

    def backward(x, *rest):
        seen.extend(rest[:-1])
        return (rest[-1], *(None for _ in tensors))

    keep = layer(lambda x, *rest: x * 1, backward, plain=True)
    with hooks:
        run(jax.grad(lambda x, *tensors: keep.apply(x, *tensors).sum()), jnp.ones(3), *tensors)
    return seen


def lose_weak_types(folder, **options):
    return saved_tensors_hooks(lambda x: x if isinstance(x, jax.core.Tracer) else np.asarray(x), jnp.asarray)


@pytest.mark.parametrize("packer", [*PACKERS, "of a user"])
def test_dtypes_and_shapes_come_back_and_what_is_no_float_is_untouched(packer, tmp_path):
    make, _ = PACKERS.get(packer, (lose_weak_types, 0))
    floats = [grid(*shape) for shape in [(), (0,), (1,), (7,), (3, 0, 2), (1000,), (5, 13, 3)]]
    floats += [grid(5, 130).astype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn)]
    floats.append(jnp.asarray(2.0))  # of a weak type
    others = [jnp.arange(300), jnp.arange(300) % 2 == 0, jnp.arange(200, dtype=jnp.uint8), jax.random.key(7)]
    others.append(jax.lax.complex(jnp.arange(300.0), jnp.ones(300)))
    given = floats + others
    found, traced = (restored(make(tmp_path, arguments=True), *given, run=run) for run in (as_it_is, jax.eval_shape))
    assert [jax.typeof(x) for x in found] == [jax.typeof(x) for x in traced] == [jax.typeof(x) for x in given]
    tolerance = {"quantize_saved 8": 0.02, "quantize_saved 4": 0.25, "cast_saved": 0.01}.get(packer, 2e-3)
    for got, wanted in zip(found, floats, strict=False):
        np.testing.assert_allclose(got.astype("float32"), wanted.astype("float32"), atol=tolerance * 1.7, rtol=0)
    assert all(bool(jnp.all(got == wanted)) for got, wanted in zip(found[len(floats) :], others, strict=True))


@pytest.mark.parametrize("shape", [(8, 4, 3), (4, 8, 3), (3, 4, 16)])
def test_bits_keep_the_explicit_sharding_of_other_axes(shape):
    values = jax.random.bernoulli(jax.random.key(0), shape=shape)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        x = jax.device_put(values, PartitionSpec(*("i" if n == 4 else None for n in shape)))
        (found,) = restored(cast_saved(arguments=True), x)
    assert jax.typeof(found) == jax.typeof(x)
    np.testing.assert_array_equal(found, values)


def test_a_scan_keeps_no_constant_of_the_quantizer():
    x = jnp.ones((256, 1024))
    f = quantize_saved(8)(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(2 * c), None), x, None, length=2)[0].sum())
    # A constant of 8 bits with the shape of x would add a quarter.
    assert temporary_bytes(f, x) < (2.9 if jax.__version_info__ >= (0, 11) else 2.65) * x.nbytes
    # The plan around the loop leaves what the loop has packed as it is: a copy in bfloat16 would add up to 4.
    g = cast_saved()(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(2 * c), None), x, None, length=8)[0].sum())
    assert "reduce_precision" not in str(jax.make_jaxpr(jax.grad(g))(x))


@pytest.mark.parametrize("packer", PACKERS)
def test_shardings_come_back(packer, tmp_path):
    sharding = NamedSharding(mesh(), PartitionSpec("i"))
    placed = [jax.device_put(X, sharding), jax.device_put(X, jax.devices()[2]), X]
    sharded, on_one, anywhere = restored(PACKERS[packer][0](tmp_path, arguments=True), *placed)
    assert sharded.sharding == sharding
    assert on_one.devices() == {jax.devices()[2]}
    assert not anywhere.committed


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantization_is_as_close_as_its_docstring_says(bits, stochastic):
    x = grid(4096, low=-3.0, high=5.0) ** 3
    (got,) = restored(quantize_saved(bits, stochastic=stochastic, arguments=True), x)
    blocks, errors = np.asarray(x).reshape(-1, 128), np.abs(np.asarray(got - x).reshape(-1, 128))
    second = np.sort(blocks)[:, 1:2]
    steps = (blocks.max(axis=1, keepdims=True) - second) / (2**bits - 3)
    assert np.all(errors <= steps * (1.001 if stochastic else 0.501))
    assert np.all(errors[blocks < second] == 0)
    assert np.mean(errors / steps) > 0.1  # and uses all of its steps


EXTREME = [2e38, -2e38, 3.4028235e38, -3.4028235e38, 65504.0, 1e-40, 0.0]


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True)
@hypothesis.given(
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    st.sampled_from([8, 4]),
    st.lists(st.floats(width=32) | st.sampled_from(EXTREME), min_size=1, max_size=4),
)
@hypothesis.example(jnp.float32, 8, [1.0, 1.0, np.nan, np.inf, 1.0, -np.inf])
@hypothesis.example(jnp.float32, 4, [1e-3, 50.0])  # what is divided by (a sum, a variance) must not become zero
@hypothesis.example(jnp.float32, 8, [-3.4e38, -2e38])
@hypothesis.example(jnp.float32, 8, [1 - k * 2.0**-24 for k in range(1, 50)])  # log(1 - x) stays finite
def test_finite_values_stay_finite_and_within_their_block(dtype, bits, values):
    x = jnp.asarray(np.resize(np.float32(values), 128)).astype(dtype)
    (got,) = restored(quantize_saved(bits, arguments=True), x)
    x, got = (np.asarray(a).astype(np.float64) for a in (x, got))
    eps, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)  # a smaller number may become 0
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x) | np.isposinf(x))
    x, got = x[~np.isnan(got)], got[~np.isnan(got)]
    smallest = x.min(initial=np.inf)
    np.testing.assert_allclose(got[x == smallest], smallest, rtol=0, atol=tiny)
    x, got = x[x > smallest], got[x > smallest]
    if x.size:
        step = (x.max() - x.min()) / (2**bits - 3)
        assert np.abs(got - x).max() <= step / (1 if bits == 4 else 2) + 4 * eps * np.abs(x).max() + 2**bits * tiny
        assert smallest - tiny <= got.min()
        assert got.max() <= x.max() + tiny


MASKS = [-np.inf, -3.4028235e38, -1e9, -1e4]


@pytest.mark.parametrize(
    ("bits", "stochastic", "dtype"),
    [(8, False, "float32"), (4, True, "float32"), (8, True, "bfloat16"), (4, False, "bfloat16"), (8, False, "float64")],
)
def test_the_number_that_masks_does_not_harm_the_others(bits, stochastic, dtype):
    with jax.enable_x64(True):
        values = grid(256, 130, low=-3.0, high=2.0)[:, jnp.arange(130) * 37 % 130].astype(dtype)
        mask = jnp.tri(256, 130, 5, dtype=bool)  # of two blocks a row; some have no unmasked value
        atol = 5.0 / (2**bits - 4) + 2 * float(jnp.finfo(dtype).eps)
        for number in MASKS:
            x = jnp.where(mask, values, jnp.asarray(number, dtype))
            (got,) = restored(quantize_saved(bits, 70, stochastic, arguments=True), x)
            np.testing.assert_array_equal(got[~mask], x[~mask])
            np.testing.assert_allclose(got[mask].astype(float), x[mask].astype(float), atol=atol, rtol=0)


@pytest.mark.parametrize("number", MASKS)
@EAGER_AND_JIT
def test_a_block_of_which_one_value_is_a_number(mode, number):
    x = jnp.full((4, 128), number).at[0, 5].set(2.0).at[1].set(jnp.nan).at[1, 7].set(number).at[2, 9].set(jnp.inf)
    got = mode(jax.grad(quantize_saved(8, arguments=True)(lambda y, x: jnp.sum(x * y))))(jnp.ones_like(x), x)
    np.testing.assert_array_equal(got, jnp.where(x == jnp.inf, jnp.nan, x))


@EAGER_AND_JIT
def test_masked_scores_that_an_operation_keeps(mode):
    def attention(x, w, temperature):
        scores = jnp.where(jnp.tri(64, dtype=bool), jnp.tanh(x @ w) @ x.T, -1e9)
        return jnp.sum(jnp.sin(jax.nn.softmax(scores * temperature) @ x))

    arguments = grid(64, 64, low=-2.0, high=1.5)[:, jnp.arange(64) * 23 % 64], W, 0.1
    expected = jax.grad(attention, 1)(*arguments)
    got = mode(jax.grad(quantize_saved(8)(attention), 1))(*arguments)
    assert 0 < float(jnp.linalg.norm(got - expected)) < 0.02 * float(jnp.linalg.norm(expected))


def test_stochastic_rounding_has_no_bias():
    # A value between two steps comes back as their mean, on the average over many blocks.
    x = np.linspace(0, 14, 128, dtype=np.float32) * np.linspace(1, 2, 4000, dtype=np.float32)[:, None]
    (nearest,), (got,) = (
        restored(quantize_saved(4, stochastic=s, arguments=True), jnp.asarray(x)) for s in (False, True)
    )
    bias = [np.abs(np.mean((y - x) / x[:, -1:], axis=0)).max() for y in (nearest, got)]
    assert bias[0] > 0.03
    assert bias[1] < 0.003
    (again,) = restored(quantize_saved(4, arguments=True), jnp.asarray(x))
    np.testing.assert_array_equal(again, got)


@pytest.mark.parametrize(
    "of",
    [
        lambda x, w: Multiply.apply(x, w),
        lambda x, w: Multiply.apply(x[1:], w[:-1]),
        lambda x, w: Multiply.apply(x.reshape(-1), w.reshape(-1)),
        lambda x, w: Multiply.apply(x.astype(jnp.float16).astype(jnp.float32), w.T.T),
        lambda x, w: x * w,
        lambda x, w: Multiply.apply(*[jax.lax.dynamic_slice_in_dim(v, jnp.argmax(x[0] * 2) % 2, 7) for v in (x, w)]),
        lambda x, w: jnp.multiply(*jax.jit(lambda x, w: (x, w, x * w))(x, w)[:2]),
    ],
    ids=["as it is", "sliced", "reshaped", "cast", "operation", "sliced at what is computed", "passed on"],
)
@EAGER_AND_JIT
def test_what_came_into_the_block_from_outside_is_packed_with_arguments_alone(mode, of):
    def slope(around):
        return mode(jax.grad(around(lambda x, w: jnp.sum(of(x, w))), (0, 1)))(X, W[:8])

    expected = slope(lambda f: f)
    found = *slope(cast_saved()), *slope(lambda f: in_block(cast_saved(), f))
    for got, exact in zip(found, expected * 2, strict=True):
        np.testing.assert_array_equal(got, exact)
    packed = slope(cast_saved(arguments=True))
    assert all(0 < float(jnp.abs(g - e).max()) < 0.03 for g, e in zip(packed, expected, strict=True))


@pytest.mark.parametrize("packer", ["cast_saved", "quantize_saved 8"])
def test_bools_are_kept_as_bits(packer):
    def masked(x):
        return jnp.sum(jnp.where(jnp.sin(x) > 0, x, 0.0))

    value, pullback = jax.vjp(PACKERS[packer][0]("")(masked), X)
    assert bytes_held(pullback) <= X.size // 8 + 16
    np.testing.assert_array_equal(pullback(jnp.ones_like(value))[0], jnp.sin(X) > 0)


def deep(x, ws):
    for w in ws:
        x = Tanh.apply(x @ w)
    return jnp.sum(x**2)


FORMS = pytest.mark.parametrize("form", [lambda pair, f: pair(f), in_block], ids=["plan", "block"])


def of_labels(x, labels):
    return jnp.sum(jnp.sin(jax.nn.one_hot(labels, 64) * x[0, 0]) ** 2)


def with_a_literal_key(x, _):
    return jnp.sum(jnp.sin(jax.random.normal(jax.random.key(0), (64, 64)) * x[0, 0]) ** 2)


@FORMS
@pytest.mark.parametrize("f", [of_labels, with_a_literal_key])
def test_what_the_block_computes_from_integers_alone_is_packed(f, form):
    _, pullback = jax.vjp(form(quantize_saved(8), lambda x: f(x, jnp.arange(64) % 7)), X)
    assert bytes_held(pullback) < 0.4 * bytes_held(jax.vjp(lambda x: f(x, jnp.arange(64) % 7), X)[1])


DEEP = (grid(512, 64), [grid(64, 64, low=-0.2, high=0.2 + 0.01 * i) for i in range(2)])


@pytest.mark.parametrize(
    ("packer", "expected"),
    [("cast_saved", 0.5), ("quantize_saved 8", 0.27), ("quantize_saved 4", 0.27), ("save_on_cpu", 0)],
)
def test_bytes_that_are_kept_for_backward(packer, expected, tmp_path):
    plain = bytes_held(jax.vjp(deep, *DEEP)[1])
    hooked = PACKERS[packer][0](tmp_path, arguments=True)(deep)
    pullbacks = [jax.vjp(hooked, *DEEP)[1]]
    if packer != "save_on_cpu":  # which moves arrays to the host memory space here
        pullbacks += [jax.vjp(jax.jit(hooked), *DEEP)[1], jax.jit(lambda *args: jax.vjp(hooked, *args)[1])(*DEEP)]
    assert all(bytes_held(pullback) <= expected * plain * 1.01 for pullback in pullbacks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_a_short_row_is_not_quantized_to_more_bytes(dtype, length):
    with jax.enable_x64(True):
        x = jnp.ones((8, length), dtype)
        plain = bytes_held(jax.vjp(jnp.sin, x)[1])
        assert bytes_held(jax.vjp(quantize_saved(8, arguments=True)(jnp.sin), x)[1]) <= plain


def test_what_packing_leaves_is_not_made_from_what_it_rounds():
    def loss(x, v):
        y = x @ x.T  # rows of 8 values: packed in float32, left in bfloat16
        return jnp.sum(y**3) + jnp.sum((y.astype("bfloat16") @ v).astype("float32"))

    x, v = jnp.exp(jnp.arange(8.0))[:, None], jnp.ones((8, 4), "bfloat16")
    (_, found), (_, expected) = (jax.grad(f, (0, 1))(x, v) for f in (quantize_saved(8)(loss), loss))
    np.testing.assert_array_equal(found, expected)


def files(directory):
    return [path for path in pathlib.Path(directory).rglob("*") if path.is_file()]


def test_files_go_when_nothing_can_ask_for_them(tmp_path):
    hooks = save_on_disk(tmp_path)
    value, pullback = jax.vjp(hooks(tanh_sum), X)
    hooks.close()  # which leaves what an eager vjp function holds
    for _ in range(2):  # a use of the function does not release them either
        assert [path.stat().st_size for path in files(tmp_path)] == [X.nbytes]
        np.testing.assert_allclose(pullback(jnp.ones(()))[0], tanh_slope(X), rtol=1e-5)
    del pullback
    gc.collect()
    assert files(tmp_path) == []


@pytest.mark.parametrize("end", ["close", "collect"])
def test_one_of_two_equal_packers_leaves_the_files_of_the_other(tmp_path, end):
    first, second = save_on_disk(tmp_path), save_on_disk(tmp_path)
    pullbacks = []
    for hooks in (first, second):
        with hooks:
            pullbacks.append(jax.jit(jax.jit(lambda x: jax.vjp(tanh_sum, x)[1])(X)))
        pullbacks[-1](1.0)
    if end == "close":
        second.close()
    del second, hooks
    gc.collect()
    for pullback in pullbacks:
        np.testing.assert_allclose(pullback(1.0)[0], tanh_slope(X), rtol=1e-5)
    first.close()
    gc.collect()
    assert files(tmp_path) == []


def test_files_are_removed_when_the_process_ends(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.hooks.on_disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines() == ["[1.0, 1.0]", "1 [0.0, 0.0, 0.0]"]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    hooked = save_on_disk(tmp_path)(tanh_sum)
    _, pullback = jax.vjp(hooked, X)
    before = files(tmp_path)

    def full(descriptor, mode):
        os.write(descriptor, b"the beginning")
        os.close(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fdopen", full)
    for differentiate in (jax.grad(hooked), jax.jit(jax.grad(hooked))):
        with pytest.raises(Exception, match="No space left on device"):
            jax.block_until_ready(differentiate(X + 1))
    monkeypatch.undo()
    gc.collect()
    assert files(tmp_path) == before  # no half-written file is left
    np.testing.assert_allclose(pullback(jnp.ones(()))[0], tanh_slope(X), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(hooked)(X + 1), tanh_slope(X + 1), rtol=1e-5)


def change_one_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {"changed": change_one_byte, "deleted": pathlib.Path.unlink}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_an_error_and_is_not_remembered(damage, tmp_path):
    with save_on_disk(tmp_path, arguments=True):
        eager, compiled = (jax.vjp(f, X)[1] for f in (Square.apply, jax.jit(Square.apply)))
    jax.effects_barrier()
    for path in files(tmp_path):
        DAMAGE[damage](path)
    with pytest.raises(OSError, match="save_on_disk") as caught:
        eager(X)
    assert str(tmp_path) in caught.value.filename
    assert any("Square" in note for note in caught.value.__notes__)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Square(?s:.*)save_on_disk"):
        jax.block_until_ready(compiled(X))
    # The same array is written again.
    with save_on_disk(tmp_path, arguments=True):
        np.testing.assert_allclose(jax.vjp(Square.apply, X)[1](X)[0], 2 * X * X, rtol=1e-6)


def test_integers_that_a_pair_made_go_to_disk(tmp_path):
    _, pullback = jax.vjp(chain(quantize_saved(8), save_on_disk(tmp_path))(tanh_sum), X)
    assert max(path.stat().st_size for path in files(tmp_path)) == 512
    del pullback
    assert not files(tmp_path)


def test_a_pair_packs_what_its_predicate_chooses():
    hooks = chain(quantize_saved(8), save_on_cpu(only=lambda x: x.dtype == jnp.uint8), only=lambda x: x.ndim == 2)
    report = saved_tensors_report(hooks(lambda x: tanh_sum(x) + tanh_sum(x[0])), X)
    two, one = report.rows
    assert two.packed_bytes < 0.3 * two.bytes
    assert "host" in two.note
    assert one.packed_bytes == one.bytes
    np.testing.assert_allclose(jax.grad(hooks(tanh_sum))(X), tanh_slope(X), atol=0.02)


class Fresh:
    def __init__(self, x):
        self.x = x


jax.tree_util.register_pytree_node(Fresh, lambda node: ((node.x + 0,), None), lambda _, children: Fresh(*children))


def of_numpy(packed):
    assert isinstance(packed, np.ndarray)
    return packed


@pytest.mark.parametrize(("pack", "unpack"), [(Fresh, lambda packed: packed.x), (np.asarray, of_numpy)])
def test_a_chain_packs_arrays_that_a_pytree_makes_anew_and_numpy_arrays(pack, unpack):
    hooks = chain(saved_tensors_hooks(pack, unpack), cast_saved())
    assert 1e-4 < jnp.max(jnp.abs(jax.grad(hooks(tanh_sum))(X) - tanh_slope(X))) < 0.02


def fails(x):
    raise OSError("no room")


@pytest.mark.parametrize(
    ("pair", "kind", "text"),
    [
        (saved_tensors_hooks(fails, abs), OSError, "pack_hook"),
        (saved_tensors_hooks(abs, fails), OSError, "unpack_hook"),
        (saved_tensors_hooks(abs, lambda x: x[:1]), ValueError, "unpack_hook"),
        (saved_tensors_hooks(lambda x: float(x[0, 0]), abs), TypeError, "pack_hook"),
        (saved_tensors_hooks(fails, abs, host=True), Exception, "pack_hook"),
        (cast_saved(only=lambda x: x.sum() > 0), TypeError, "only"),
    ],
)
def test_an_error_names_the_pair(pair, kind, text):
    jitted = jax.jit(jax.grad(chain(cast_saved(), pair)(tanh_sum)))
    with pytest.raises(kind) as caught:
        jax.block_until_ready(jitted(X))
    assert all(word in text_of(caught.value) for word in (text, type(pair).__name__, "Tanh"))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda folder: quantize_saved(3), ValueError, "bits"),
        (lambda folder: quantize_saved(block_size=7), ValueError, "block_size"),
        (lambda folder: cast_saved(jnp.int8), TypeError, "int8"),
        (lambda folder: cast_saved(None), TypeError, "None"),
        (lambda folder: cast_saved("bf16"), TypeError, "bf16"),
        (lambda folder: cast_saved(jnp.float8_e4m3fn), TypeError, "float8"),
        (lambda folder: cast_saved(only=3), TypeError, "only"),
        (lambda folder: save_on_disk(f"{__file__}/folder"), OSError, "save_on_disk"),  # a file is in the way
        (lambda folder: save_on_cpu(model), TypeError, r"save_on_cpu\(\)"),
        (lambda folder: recompute_saved(limit="64 megabytes"), ValueError, "MiB"),
        (lambda folder: recompute_saved(limit=-1), ValueError, "MiB"),
        (lambda folder: recompute_saved(limit=True), ValueError, "MiB"),
        (lambda folder: chain(recompute_saved(limit=np.int64(4)), cast_saved()), ValueError, "limit"),
        (lambda folder: chain(recompute_saved(limit=0), cast_saved()), ValueError, "limit"),
        (lambda folder: by_name({"tanh": recompute_saved(limit=4)}), TypeError, "limit"),
        (lambda folder: recompute_saved(limit="MiB"), ValueError, "MiB"),
        (lambda folder: chain(), TypeError, "chain"),
        (lambda folder: chain(cast_saved(), 3), TypeError, "3"),
        (lambda folder: chain(cast_saved, save_on_cpu()), TypeError, "parentheses"),
        (lambda folder: chain(save_on_disk(folder), cast_saved()), ValueError, "last"),
        (lambda folder: chain(save_on_cpu(), cast_saved()), ValueError, "last"),
        (lambda folder: chain(cast_saved(), cast_saved(), only=3), TypeError, "only"),
        (lambda folder: chain(chain(cast_saved(), cast_saved(), only=bool), save_on_cpu()), ValueError, "only"),
        (lambda folder: chain(by_name({...: cast_saved()}), save_on_cpu()), ValueError, "by_name"),
        (lambda folder: by_name({}), TypeError, "by_name"),
        (lambda folder: by_name([("y", None)]), TypeError, "by_name"),
        (lambda folder: by_name({3: None}), TypeError, "by_name"),
        (lambda folder: by_name({"y": jnp.sin}), TypeError, "by_name"),
        (lambda folder: by_name({"y": cast_saved}), TypeError, "by_name"),
        (lambda folder: by_name({"y": by_name({...: None})}), TypeError, "by_name"),
    ],
)
def test_wrong_parameters(make, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        make(tmp_path)


@pytest.mark.parametrize(
    ("shape", "bits", "lengths"), [("b, 64", 8, [1]), ("2, b, 4", 8, [150]), ("b, c", 4, [1, 150])]
)
def test_quantization_of_symbolic_shapes(shape, bits, lengths):
    hooked = jax.jit(jax.grad(quantize_saved(bits)(lambda x: jnp.sum(jnp.sin(x) * x[:1]))))
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), jnp.float32)
    call = jax.export.export(hooked)(symbolic).call
    for length in lengths:
        x = numpy_grid(*(n if isinstance(n, int) else length for n in symbolic.shape))
        expected = np.cos(x) * x[:1]
        expected[0] += np.sin(x).sum(axis=0)
        np.testing.assert_allclose(call(x), expected, atol=(0.06 if bits == 8 else 1.0) * length)


@FORMS
@pytest.mark.parametrize("pair", [recompute_saved(), save_on_cpu(), cast_saved(), quantize_saved(8)], ids=repr)
def test_a_branch_that_returns_a_constant(form, pair):
    branches = [lambda a: jnp.sin(a) @ W[:4, :4], lambda a: jnp.where(a > 0, a * a, jnp.cos(a)), lambda a: W[:4, :4]]

    def loss(x):
        return jnp.sum(jax.lax.switch(jnp.argmax(x[0]) % 3, branches, jnp.sin(x)) ** 2)

    x = W[4:8, 4:8]
    np.testing.assert_allclose(jax.grad(form(pair, loss))(x), jax.grad(loss)(x), atol=1e-3)
    mapped = jax.vmap(jax.grad(form(pair, loss)))(jnp.stack([x, -x]))
    np.testing.assert_allclose(mapped, jax.vmap(jax.grad(loss))(jnp.stack([x, -x])), atol=1e-3)


@FORMS
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_factors_of_a_matrix_are_not_rounded(form, scale):
    """L has entries up to 1 and U those of the matrix, in the same rows."""

    def loss(a):
        return jnp.sum((scale * jnp.linalg.solve(scale * jnp.tanh(a), jnp.ones(64))) ** 2)

    a = jnp.sin(jnp.arange(64.0 * 64)).reshape(64, 64) / 8 + 2 * jnp.eye(64)
    expected = jax.grad(loss)(a)
    found = jax.grad(form(quantize_saved(8), loss))(a)
    assert jnp.linalg.norm(found - expected) < 0.02 * jnp.linalg.norm(expected)

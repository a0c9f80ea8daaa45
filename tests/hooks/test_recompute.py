"""What follows from a kept tensor is computed again, as far as the error of a pair allows; gradients stay right."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_report
from pylayer_jax.packers import (
    by_name,
    cast_saved,
    chain,
    products_and_decisions,
    quantize_saved,
    recompute_saved,
    save_on_cpu,
    save_on_disk,
)
from tests.kit.layers import Matmul, Multiply, Tanh, bits, layer
from tests.kit.modes import NEEDS_BARRIERS

from .spy import TRANSFORMS, norm, noting, relative_error, temporary_bytes, without_hooks

X = jax.random.normal(jax.random.key(0), (32, 64))
W = jax.random.normal(jax.random.key(1), (64, 64)) / 8
V = jax.random.normal(jax.random.key(2), (64, 64)) / 8
ROUNDING = {"cast": cast_saved, "8 bits": quantize_saved, "4 bits": lambda **flags: quantize_saved(4, **flags)}
EXACT = {"recompute": recompute_saved, "cpu": save_on_cpu}
Y = jax.random.normal(jax.random.key(0), (64, 128)) + 0.3
WEIGHTS = jnp.arange(128.0)


ACTIVATIONS = {
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "silu": jax.nn.silu,
    "softplus": jax.nn.softplus,
    "elu": jax.nn.elu,
    "norm": norm,
    "norm and silu": lambda x: jax.nn.silu(norm(x)),
    "dropout": lambda x: jnp.where(jnp.arange(64) % 3 > 0, jnp.tanh(x) / 0.7, 0.0),
    "in bfloat16": lambda x: jax.nn.gelu(x.astype(jnp.bfloat16)).astype(jnp.float32),
    "in a jitted function": jax.jit(lambda x: jnp.sin(x) * jnp.exp(-jnp.square(x)) + jnp.abs(x) ** 1.5 + WEIGHTS[:64]),
}


def loss_of(activation):
    return lambda w, x: jnp.sum(jnp.sin(activation(x @ w) @ V))


def gradient(f):
    return jax.jit(jax.grad(f, (0, 1)))


FUNCTIONS = {
    "square": lambda x: jnp.sum((x * 3.0) ** 2),
    "one input, three uses": lambda x: jnp.sum(jnp.sin(norm(x)) + norm(x) ** 2 * 0.5),
    "masked": lambda x: jnp.sum(jnp.where(jnp.tri(64, 128, dtype=bool), x, -1.0) * WEIGHTS),
    "one hot": lambda x: jnp.sum(x * jax.nn.one_hot(jnp.arange(64) % 7, 128)),
    "chosen by a mask": lambda x: jnp.sum(jnp.sin(x[0][jnp.flatnonzero(x[0] > 0, size=2)])),
    "layer of what follows": lambda x: jnp.sum(Multiply.apply(norm(x), jnp.ones(128))),
    "softmax": lambda x: jnp.sum(jax.nn.softmax(x) ** 2 * WEIGHTS),
    "scan": lambda x: jnp.sum(jax.lax.scan(lambda c, k: (jnp.tanh(c) * k, None), x, WEIGHTS[1:4])[0] ** 2),
    "iota in a jitted function": jax.jit(lambda x: jnp.sum(x * jnp.arange(128.0) * jnp.sin(x))),
    "200 sums": lambda x: jnp.sum(jnp.sin(functools.reduce(lambda h, i: h + float(i % 3 - 1), range(200), x))),
    "of two": lambda x: jnp.sum(jnp.tanh(x).T @ jnp.sin(x)),
}

PROGRAMS = {name: (loss_of(activation), (W, X)) for name, activation in ACTIVATIONS.items()}
PROGRAMS |= {name: (function, (Y,)) for name, function in FUNCTIONS.items()}
PAIRS = EXACT | {"of a user": lambda: noting([], differentiable=True)}  # for which only moves are computed again

MET = [(name, pair, "jit_of_grad") for name in ACTIVATIONS for pair in EXACT]
MET += [(name, pair, "jit_of_grad_of_grad") for name in FUNCTIONS for pair in ("cpu", "of a user")]
MET += [
    pytest.param(name, "recompute", transform, marks=pytest.mark.slow)
    for name in PROGRAMS
    for transform in ("grad", "vmap_of_grad", "jit_of_grad_of_grad", "jvp_of_grad")
]


@functools.cache
def expected_of(name):
    return without_hooks(*PROGRAMS[name])


@pytest.mark.parametrize(("name", "pair", "transform"), MET)
def test_exact_pairs_keep_the_gradient(name, pair, transform):
    function, arguments = PROGRAMS[name]
    found = TRANSFORMS[transform](PAIRS[pair]()(function), arguments)
    # Some second derivatives of FUNCTIONS are zero.
    at_least, tolerance = (1.0, 1e-4) if name in FUNCTIONS else (0.0, 1e-2 if name == "in bfloat16" else 2e-5)
    assert relative_error(found, expected_of(name)(transform), at_least) < tolerance


@pytest.mark.parametrize("name", ["gelu", "silu", "norm", "norm and silu", "in a jitted function"])
def test_one_array_is_kept_for_an_activation(name):
    report = saved_tensors_report(recompute_saved()(lambda x, w: jnp.sum(ACTIVATIONS[name](x @ w))), X, W)
    statistics = 6 * 32 * 4 + 64 + X.nbytes // 4  # a mask
    assert X.nbytes <= report.total_bytes <= X.nbytes + statistics
    assert report.total_unpacked_bytes >= 2 * X.nbytes


def test_the_report_says_from_what_a_tensor_is_computed_again():
    for pair in (recompute_saved(), cast_saved(), quantize_saved()):
        report = saved_tensors_report(pair(lambda w, x: jnp.sum(jax.nn.gelu(x @ w) + jax.nn.silu(x @ w))), W, X)
        assert {row.note for row in report.rows if row.is_recomputed} == {"computed again from dot_general"}


def test_recompute_false_keeps_each_tensor():
    f = lambda w, x: jnp.sum(jnp.sin(jax.nn.gelu(x @ w)))
    kept = {flag: saved_tensors_report(cast_saved(recompute=flag)(f), W, X).total_bytes for flag in (True, False)}
    assert kept[False] > 1.9 * kept[True]
    assert cast_saved(recompute=True) == cast_saved() != cast_saved(recompute=False)
    assert recompute_saved() == recompute_saved() != save_on_cpu()


def test_only_selects_what_is_computed_again():
    pair = recompute_saved(only=lambda x, info: info.operation != "tanh")
    more, fewer = (
        saved_tensors_report(pair(lambda x, w: jnp.sum(jax.nn.gelu(x @ w))), X, W) for pair in (pair, recompute_saved())
    )
    assert more.total_bytes >= fewer.total_bytes + X.nbytes
    kept, kept_of_fewer = ({r.name for r in x.rows if r.kind == "operation" and r.packed_bytes} for x in (more, fewer))
    assert kept == kept_of_fewer | {"tanh"}  # in jax 0.10, two tensors have this name


def values(x):
    return x.max(-1, keepdims=True)


def slopes(saved, dy):
    x, y = saved
    return dy * (x == y).astype(dy.dtype)


def keep(ctx, x):
    y = values(x)
    ctx.save_for_backward(x, y)
    return y


RowMax = layer(keep, lambda ctx, dy: slopes(ctx.saved_tensors, dy))
row_max = jax.custom_vjp(values)
row_max.defvjp(lambda x: (values(x), (x, values(x))), lambda saved, dy: (slopes(saved, dy),))

COMPARING = {
    "layer": RowMax.apply,
    "custom_vjp": row_max,
    "jitted custom_vjp": jax.jit(lambda x: row_max(x) * 2.0),
    "in a cond": lambda x: jax.lax.cond(x[0, 0] > -9.0, row_max, lambda x: x[:, :1], x),
    "in a checkpoint": jax.checkpoint(row_max),
    "in a scan": lambda x: jax.lax.scan(lambda c, _: (c + row_max(x), None), jnp.zeros((32, 1)), None, length=2)[0],
    "in a vmap": jax.vmap(lambda x: row_max(x[None])[0]),
}


@pytest.mark.parametrize("kind", COMPARING)
def test_rules_that_compare_what_they_saved(kind):
    f = lambda w, x: jnp.sum(COMPARING[kind](ACTIVATIONS["norm and silu"](x @ w)) ** 2)
    hooked, expected = recompute_saved()(f), gradient(f)(W, X)
    for run in (gradient(hooked), jax.grad(hooked, (0, 1))):
        assert relative_error(run(W, X), expected) < 1e-5


def test_the_forward_pass_reads_what_is_kept():
    def f(w, x):
        h = norm(jax.nn.gelu(x @ w).astype(jnp.float32))
        return jnp.sum(jax.nn.softmax((h.astype(x.dtype) @ w).astype(jnp.float32)) ** 2)

    errors = []
    for seed in range(20):
        w, x = jax.random.normal(jax.random.key(seed), (2, 5, 5), jnp.bfloat16)
        expected = jax.grad(f)(w.astype(jnp.float32), x.astype(jnp.float32))
        errors.append([relative_error(jax.jit(jax.grad(g))(w, x), expected) for g in (f, recompute_saved()(f))])
    plain, hooked = np.exp(np.mean(np.log(np.asarray(errors)), 0))
    assert hooked < 1.3 * plain


# -- pairs that round ----------------------------------------------------------------------------------

massive = jnp.ones(64).at[7].set(300.0)


@jax.jit
def long_log(x):
    for _ in range(20):
        x = x * 1.01 + 0.0
    return jnp.log(jnp.abs(x) + 1e-3) ** 2


# Programs in which an operation would multiply the error if it were computed from what is packed.
MULTIPLYING = {
    "norm of values near 1,000": lambda w, x: jnp.sum(jnp.sin(norm(x @ w + 1000.0) @ w)),
    "sigmoid gate, a massive channel": lambda w, x: jnp.sum(jnp.sin(jax.nn.sigmoid((x @ w) * massive) * (x @ V))),
    "sigmoid of a quotient": lambda w, x: jnp.sum(jnp.sin(jax.nn.sigmoid((h := x @ w) / 0.01 + 0.5) * (x @ V)) + h**2),
    "sin(50 h)": lambda w, x: jnp.sum(jnp.sin(50 * (x @ w)) * (x @ V)),
    "log near 0": lambda w, x: jnp.sum(jnp.log(jnp.abs(jnp.tanh(x @ w)) + 1e-4) ** 2),
    "log in a long jitted function": lambda w, x: jnp.sum(long_log(jnp.tanh(x @ w)) * (x @ V)),
    "a difference of near values": lambda w, x: jnp.sum(jnp.tanh(100 * ((x @ w + 50.0) - (x @ w * 0.999 + 50.0)))),
    "in a branch": lambda w, x: jnp.sum(
        jax.lax.cond(x[0, 0] > 9, jnp.tanh, lambda h: jnp.sin(50 * h), x @ w) * (x @ V)
    ),
    "in a loop": lambda w, x: jnp.sum(jax.lax.scan(lambda c, h: (c * jnp.sin(50 * h), c), x @ V, (x @ w)[None])[0]),
    "squares of squares": lambda w, x: jnp.sum(jnp.square(jnp.square((h := x @ w) * h)) * (x @ V)),
    "powers of powers": lambda w, x: jnp.sum(((x @ w) ** 2) ** 5 * (x @ V)),
    "h * h - h near 1": lambda w, x: jnp.sum(jnp.square((h := 1 - 1e-3 * jnp.exp(x @ w)) * h - h)),
    "exp(h) - 1": lambda w, x: jnp.sum(jnp.square(jnp.exp(1e-3 * (x @ w)) - 1)),
    "powers of a product": lambda w, x: jnp.sum((p := (x @ w) * (x @ V)) * p * p * p),
    "saturated tanh": lambda w, x: jnp.sum((y := jnp.tanh(4 * (x @ w))) * V[0] + 1e-6 * y * y),
    "x * int(x)": lambda w, x: jnp.sum(jnp.sin((h := 4 * (x @ w)) * h.astype(jnp.int32).astype(h.dtype) @ V)),
    "a difference of two products": lambda w, x: jnp.sum(
        ((a := x @ w) ** 2 + (b := x @ (w + 0.01 * V)) ** 2) * 1e-3 + 100 * (a - b) ** 2 * (a - b)
    ),
}
MET_BY_ROUNDING = [(name, pair) for name in MULTIPLYING for pair in ("cast", "8 bits")]


@pytest.mark.parametrize(("name", "pair"), [*MET_BY_ROUNDING, ("a difference of two products", "4 bits")])
def test_the_error_is_at_most_twice_that_without_recomputation(name, pair):
    f, make = MULTIPLYING[name], ROUNDING[pair]
    expected = gradient(f)(W, X)
    found, plain = (relative_error(gradient(make(recompute=flag)(f))(W, X), expected) for flag in (True, False))
    assert found <= max(2 * plain, 2e-3)


@pytest.mark.parametrize("pair", ["cast", "8 bits"])
def test_the_second_derivative_of_a_bound(pair):
    f = lambda w: jnp.sum(jnp.clip(h := jnp.tanh(X @ w), -0.5, 0.5) * h + jnp.abs(h) * h)
    of = lambda f: jax.jvp(jax.grad(f), (W,), (V,))[1]
    found, plain = (relative_error(of(ROUNDING[pair](recompute=flag)(f)), of(f)) for flag in (True, False))
    assert found <= 2 * plain


@pytest.mark.parametrize(
    "pair",
    [
        quantize_saved(only=lambda x, info: info.operation != "logistic"),
        by_name({"logistic": None, ...: quantize_saved()}),
        by_name({"logistic": cast_saved(), ...: quantize_saved()}),
    ],
    ids=["only", "by_name None", "by_name cast"],
)
def test_a_tensor_is_not_computed_from_coarser_ones(pair):
    f = lambda w, x: jnp.sum(jnp.sin(jax.nn.sigmoid(h := x @ w) * (x @ V)) + h**2)
    shown = [row for row in saved_tensors_report(pair(f), W, X).rows if row.name == "logistic"]
    assert any(row.packed_bytes >= row.bytes // 2 for row in shown)


def test_what_a_layer_in_an_inner_decorated_function_saves_is_packed():
    inner = cast_saved()(lambda h: Multiply.apply(h, h))
    assert saved_tensors_report(cast_saved()(lambda w, x: jnp.sum(inner(x @ w))), W, X).total_bytes == X.nbytes / 2


def test_what_an_inner_decorated_function_computes_from_again_is_not_rounded():
    inner = recompute_saved()(lambda h: jnp.sin(50 * h))
    in_a_loop = lambda h: jax.lax.scan(lambda c, _: (inner(h) + jnp.sum(c), None), h, None, length=2)[0]
    for g in (inner, in_a_loop):
        f = lambda w, x, g=g: jnp.sum(g(x @ w))
        assert relative_error(gradient(quantize_saved()(f))(W, X), gradient(f)(W, X)) < 1e-5


@pytest.mark.parametrize(("pair", "error"), [("cast", 0.02), ("8 bits", 0.005), ("4 bits", 0.1)])
def test_what_a_max_pooling_compares_is_not_rounded(pair, error):
    def pooled(w, x):
        h = jax.nn.gelu(x @ w)
        return jnp.sum(jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, (1, 4), (1, 4), "VALID") ** 3)

    # The windows are chosen by exact values: what is left is the error of the other tensors.
    in_cond = lambda w, x: jax.lax.cond(x[0, 0] > -9.0, pooled, lambda w, x: 0.0, w, x)
    for hooked in (ROUNDING[pair]()(pooled), chain(ROUNDING[pair](), save_on_cpu())(in_cond)):
        assert relative_error(gradient(hooked)(W, X), gradient(pooled)(W, X)) < error
    rows = saved_tensors_report(ROUNDING[pair]()(pooled), W, X).rows
    assert [row for row in rows if row.kind == "operation" and row.packed_bytes == X.nbytes]


@pytest.mark.parametrize(
    "decide",
    [
        jax.nn.relu,
        lambda h: h * jnp.sign(h - 0.3),
        lambda h: h * jnp.round(h),
        lambda h: h * (jnp.argmax(h, -1, keepdims=True) == jnp.arange(64)).astype(h.dtype),
        lambda h: h * h.astype(jnp.int32).astype(h.dtype),
    ],
    ids=["relu", "sign", "round", "argmax", "int"],
)
def test_a_policy_saves_what_decides(decide):
    def loss(policy):
        layer = jax.checkpoint(lambda w, x: decide(x @ w), policy=policy)
        return quantize_saved(8)(lambda w, x: jnp.sum(jnp.sin(layer(w, layer(w, x)) @ V)))

    expected = gradient(lambda w, x: jnp.sum(jnp.sin(decide(decide(x @ w) @ w) @ V)))(W, X)
    products, decisions = (
        relative_error(gradient(loss(policy))(W, X), expected)
        for policy in (jax.checkpoint_policies.dots_saveable, products_and_decisions)
    )
    assert decisions < 0.02
    assert decisions < products
    assert not products_and_decisions(jax.lax.sin_p, jax.typeof(X))


def test_chains_take_the_stricter_part():
    f = loss_of(lambda h: jax.nn.gelu(norm(h)))
    pairs = {"8 bits": quantize_saved(), "chain": chain(quantize_saved(), save_on_cpu()), "cast": cast_saved()}
    pairs["none"] = chain(quantize_saved(), cast_saved(recompute=False))
    kept = {}
    for name, pair in pairs.items():
        rows = saved_tensors_report(pair(f), W, X).rows
        kept[name] = sum(1 for row in rows if row.packed_bytes and row.kind != "input" and row.bytes >= X.nbytes)
    assert kept["8 bits"] == kept["chain"] < kept["none"]


def test_a_mean_that_the_rest_is_computed_from_is_not_rounded():
    f = lambda w, x: jnp.sum(jnp.square(jnp.square((h := x @ w) * h.mean()) @ V))
    (mean,) = [row for row in saved_tensors_report(cast_saved()(f), W, X).rows if not row.shape]
    assert mean.packed_bytes == mean.bytes


def test_weakly_typed_arrays_in_eager_mode():
    x = jnp.ones_like(jnp.full((4,), 2.0))
    for pair in (recompute_saved(), cast_saved(), quantize_saved()):
        np.testing.assert_array_equal(jax.grad(pair(jnp.sum))(x), np.ones(4))


def stream(n_layers):
    def f(w, x):
        for _ in range(n_layers):
            x = x + 0.1 * jax.nn.silu(x @ w)
        return jnp.sum(x**2)

    return f


@pytest.mark.parametrize("pair", [recompute_saved(), cast_saved(), quantize_saved()], ids=["exact", "cast", "8 bits"])
def test_a_residual_stream_is_not_summed_again_from_the_first_layer(pair):
    operations = [jax.jit(jax.grad(pair(stream(n)))).lower(W, X).compile().cost_analysis()["flops"] for n in (12, 24)]
    assert operations[1] <= 2.15 * operations[0]


def test_an_eager_gradient_holds_no_more_arrays_than_without_a_block():
    def peak(f):
        most = 0

        def watched(w, x):
            nonlocal most
            for _ in range(24):
                x = x + jnp.tanh(x @ w)
                most = max(most, sum(a.nbytes for a in jax.live_arrays() if a.shape == X.shape))
            return jnp.sum(x**2)

        jax.grad(f(watched))(W, X)
        return most

    assert peak(recompute_saved()) <= peak(lambda f: f)


def scanned(x, ws):
    def layer(x, w):
        h = norm(x)
        return x + jax.nn.gelu(h @ w) + Tanh.apply(h @ w.T), None

    return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)


def network(x, ws):
    for w in ws:
        x = Tanh.apply(jax.nn.gelu(norm(x @ w)))
    return jnp.sum(x**2)


WS = jax.random.normal(jax.random.key(1), (6, 128, 128)) / 11
# How much of the memory of a compiled gradient is left of a Python loop and of a scan.
SHARES = {
    "recompute": (lambda _: recompute_saved(), 0.55, 1.0),
    "cpu": (lambda _: save_on_cpu(), 0.55, 1.0),
    "disk": (save_on_disk, 0.3, 1.0),
    "cast": (lambda _: cast_saved(), 0.4, 0.55),
    "8 bits": (lambda _: quantize_saved(8), 0.3, 0.4),
    "8 bits on disk": (lambda folder: chain(quantize_saved(8), save_on_disk(folder)), 0.3, 0.4),
}


@pytest.mark.parametrize("pair", SHARES)
def test_memory_of_a_compiled_gradient(pair, tmp_path):
    make, of_a_loop, of_a_scan = SHARES[pair]
    for f, share in ((network, of_a_loop), (scanned, of_a_scan)):
        hooked = make(tmp_path)(f)
        for differentiated in (0, (0, 1)):
            expected, found = (jax.jit(jax.grad(g, differentiated))(Y, WS) for g in (f, hooked))
            assert relative_error(found, expected) < 0.03
        if jax.__version_info__ >= (0, 11):  # XLA of jax 0.10 removes optimization barriers on CPU
            packed, plain = (temporary_bytes(g, jnp.ones((2048, 128)), WS) for g in (hooked, f))
            assert packed < share * plain, packed / plain


@NEEDS_BARRIERS
def test_the_cotangent_of_a_sum_or_a_mean_is_not_written_out():
    def of_sum(x, w):
        return jnp.sum(0.5 * jnp.sin(x @ w) ** 2)

    def of_mean(x, w):
        return -jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])

    x, w = jnp.ones((512, 64)), jnp.ones((64, 1024))
    for f in (of_sum, of_mean):
        assert temporary_bytes(recompute_saved()(f), x, w) <= 1.01 * temporary_bytes(f, x, w)


@pytest.mark.parametrize("differentiate", [jax.vjp, lambda f, *args: jax.grad(f)(*args)], ids=["vjp", "grad"])
@pytest.mark.parametrize(
    "hooks", [cast_saved(), noting([], differentiable=True)], ids=lambda hooks: type(hooks).__name__
)
def test_arrays_go_with_the_vjp_function_and_do_not_wait_for_the_garbage_collector(differentiate, hooks):
    def loss(x, w):
        return jnp.sum(jax.nn.gelu(norm(x) @ w) + Tanh.apply(x @ w))

    def held():
        return sum(x.nbytes for x in jax.live_arrays())

    f, w = hooks(loss), WS[0]
    differentiate(f, Y, w)
    gc.collect()
    gc.disable()
    try:
        before = held()
        for _ in range(3):
            differentiate(f, Y, w)
        assert held() == before
    finally:
        gc.enable()


SIZE = 64


def layers(h, w):
    return Tanh.apply(Matmul.apply(h, w))


def operations(h, w):
    return jnp.tanh(h @ w)


def recurrent(step, length):
    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, _: (step(h, w), None), x, None, length=length)[0] ** 2)

    return loss


@pytest.mark.parametrize(
    ("step", "hooks"),
    [(layers, bits()), (layers, quantize_saved()), (operations, save_on_cpu()), (operations, cast_saved())],
)
def test_a_weight_that_all_steps_share_is_not_stacked(step, hooks):
    w, x = jnp.eye(SIZE) * 0.9, jnp.ones((2, SIZE))

    short, long = (temporary_bytes(hooks(recurrent(step, length)), w, x) for length in (8, 16))
    assert long - short <= 8 * 3 * x.nbytes  # stacked, eight more would be 8 * w.nbytes / 4 or more
    slopes = (jax.jit(jax.grad(f(recurrent(step, 8)), (0, 1)))(w, x) for f in (hooks, lambda f: f))
    for got, expected in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.05)


def test_a_plan_of_the_body_of_a_scan_keeps_as_little_as_one_around_it():
    def step(h, w):  # several operations keep the same tensor
        return jnp.tanh(h @ w) * jnp.sin(h) + jax.nn.gelu(h)

    hooks, w, x = cast_saved(arguments=True), jnp.eye(SIZE) * 0.9, jnp.ones((SIZE, SIZE))
    around, within = hooks(recurrent(step, 16)), recurrent(hooks(step), 16)
    assert temporary_bytes(within, w, x) <= temporary_bytes(around, w, x) * 1.02

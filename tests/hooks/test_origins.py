"""Tensors are chosen by a predicate or by where they come from; and a choice of nothing warns."""

import copy
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax import saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, chain, quantize_saved, recompute_saved, save_on_cpu, save_on_disk
from tests.kit.layers import Multiply, Square, Tanh, layer
from tests.kit.modes import EAGER_AND_JIT, STAGED

from .spy import GRADIENTS, bytes_held, in_block, is_matrix, noting

T, W = 32, 64
X = jnp.linspace(-1.0, 1.0, T * W).reshape(T, W)
PARAMETERS = {name: jnp.eye(W) * 0.3 + 0.01 for name in ("q", "k", "v", "o", "m")}


class Attention:
    def __call__(self, p, x):
        q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
        o = (jax.nn.softmax(q @ k.T) @ v).reshape(T, 2, -1)
        return checkpoint_name(o, "attended").reshape(T, W) @ p["o"]


class Block:
    def __call__(self, p, x):
        x = x + Attention()(p, x)
        with jax.named_scope("feed_forward"):
            return x + Tanh.apply(x @ p["m"]) * 2.0


def loss_of_blocks(p, x):
    return jnp.sum(Block()(p, Block()(p, x)) ** 2)


# -- each kind of name in each transform ------------------------------------------------------------


def save_cosine(ctx, x):
    y = jnp.cos(x)
    ctx.save_for_backward(y)
    return y * x


Cosine = layer(save_cosine, lambda ctx, dy: dy * ctx.saved_tensors[0], name="Cosine")
NamedCosine = layer(base=Cosine, saved_names=("cosine",))


class Module:
    def __call__(self, x):
        return jnp.exp(x) * jnp.sinh(x)


def in_scope(x):
    with jax.named_scope("feed_forward"):
        return jnp.exp(x) * jnp.sinh(x)


def product(x):
    return checkpoint_name(x @ (jnp.eye(3) + 0.1), "product")


def sine_times(y):
    return jnp.sin(y) * y


# name -> the key that names a tensor, and a function of f32[3] or f32[4,3]
NAMED = {
    "layer": ("Cosine", lambda x: Cosine.apply(jnp.sin(x))),
    "saved_names": ("cosine", lambda x: NamedCosine.apply(jnp.sin(x))),
    "entry": ("saved[0]", lambda x: Cosine.apply(jnp.sin(x))),
    "checkpoint_name": ("product", lambda x: sine_times(product(x))),
    "what moves a named tensor": ("product", lambda x: sine_times(product(x).T).T),
    "primitive": ("sin", lambda x: jnp.exp(jax.lax.sin(jax.lax.sin(x) * 2.0))),
    "function of jax.numpy": ("sinh", lambda x: jnp.exp(jnp.sinh(x))),
    "class": ("Module", lambda x: jnp.sin(Module()(x))),
    "named_scope": ("feed_forward", lambda x: jnp.sin(in_scope(x))),
}


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, row: (f(c) + row, None), x[0], x)[0]


def sharded(f):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("i",))
    spec = jax.sharding.PartitionSpec("i")
    return jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec)


SAVE_NAMES = jax.checkpoint_policies.save_only_these_names("product", "cosine")
PLACES = {
    "plain": lambda f: f,
    "vmap": jax.vmap,
    "scan": scanned,
    "jit": lambda f: jax.jit(lambda x: f(x)),
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > -100.0, f, lambda x: x, x),
    "shard_map": sharded,
    "cond in vmap": lambda f: jax.vmap(lambda x: jax.lax.cond(x.sum() > -100.0, f, lambda x: x, x)),
    "jit in scan": lambda f: scanned(jax.jit(lambda x: f(x))),
    "checkpoint that saves all": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable),
    "checkpoint that saves names": lambda f: jax.checkpoint(f, policy=SAVE_NAMES),
    "checkpoint": jax.checkpoint,
}
ROWS = jnp.linspace(0.1, 0.9, 12).reshape(4, 3)


@EAGER_AND_JIT
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", NAMED)
def test_a_name_is_the_same_in_each_transform(kind, place, mode):
    key, f = NAMED[kind]
    kept, rest = [], []
    g = lambda x: jnp.sum(PLACES[place](f)(x) ** 2)
    run = mode(jax.grad(by_name({key: noting(kept, differentiable=True), ...: noting(rest, differentiable=True)})(g)))
    dropped = place == "checkpoint" or (place == "checkpoint that saves names" and key not in ("product", "cosine"))
    if not dropped:
        got = run(ROWS)
        assert kept
    else:
        with pytest.warns(UserWarning, match=rf"'{re.escape(key)}'.*jax\.checkpoint"):
            got = run(ROWS)
    np.testing.assert_allclose(got, jax.grad(g)(ROWS), rtol=1e-5)


def sine(x):
    y = checkpoint_name(-jax.lax.sin(x), "sine")
    return y * y


def cosine(x):
    y = -jax.lax.cos(x)
    return y * y


@EAGER_AND_JIT
@pytest.mark.parametrize("branches", [(sine, cosine), (cosine, sine)])
def test_each_branch_of_a_cond_has_a_say(branches, mode):
    loss = lambda x: jnp.sum(jax.lax.switch(jnp.int32(x[0] > 0), branches, jax.lax.neg(x)))
    for pairs, is_packed in (({"sine": True}, True), ({"sine": None}, False), ({"sine": None, "cos": True}, True)):
        kept, rest = [], []
        spy = noting(kept, lambda x: x.shape == X.shape, differentiable=True)
        by = {key: spy if value else None for key, value in pairs.items()}
        mode(jax.grad(by_name({**by, ...: noting(rest, differentiable=True) if not is_packed else None})(loss)))(X[0])
        assert bool(kept) == is_packed


def test_a_shard_map_leaks_no_tracer():
    with jax.checking_leaks():
        jax.grad(cast_saved()(lambda x: jnp.sum(sharded(jnp.sin)(x) ** 2)))(ROWS)


@EAGER_AND_JIT
@pytest.mark.parametrize("place", ["jit", "checkpoint", "shard_map", "cond"])
def test_a_result_keeps_the_origin_that_it_has_inside(place, mode):
    seen = set()

    def only(x, info):
        seen.add((info.operation, info.inside))
        return True

    g = lambda x: jnp.sum(PLACES[place](lambda x: Module()(jnp.sin(x)))(x) ** 2)
    mode(jax.grad(noting([], only=only)(g)))(ROWS)
    assert ("mul", ("Module",)) in seen


@pytest.mark.parametrize("use", [lambda f, x: f(x), lambda f, x: jax.device_put((jnp.cosh(x), f(x)))[1]])
def test_one_line_that_applies_several_functions(use):
    loss = lambda x: sum(jnp.sum(x * use(f, x)) for f in (jnp.tanh, jnp.sin, jnp.arctan))
    report = saved_tensors_report(by_name({"sin": cast_saved(recompute=False)})(loss), X)
    assert {row.name: row.times for row in report.rows if row.packed_bytes < row.bytes} == {"sin": 2}


@EAGER_AND_JIT
@pytest.mark.parametrize("place", ["plain", "scan", "checkpoint that saves all"])
def test_a_predicate_gets_the_functions_around(place, mode):
    seen = set()

    def only(x, info):
        seen.update([(info.operation, info.layer, info.name, info.inside), (x.shape, info.operation)])
        return True

    def loss(p, x):
        block = Block()
        step = lambda c, _: (block(p, c), None)
        step = step if place == "scan" else PLACES[place](step)
        return jnp.sum((jax.lax.scan(step, x, None, length=3) if place == "scan" else step(x, None))[0] ** 2)

    mode(jax.grad(noting([], only=only, differentiable=True)(loss)))(PARAMETERS, X)
    assert place != "plain" or ("dot_general", "", "attended", ("loss", "Block", "Attention")) in seen
    assert ("exp", "", "", ("loss", "Block", "Attention")) in seen
    assert ("", "Tanh", "saved[0]", ("loss", "Block", "feed_forward")) in seen
    assert not {(w.shape, "scan") for w in jax.tree.leaves(PARAMETERS)} & seen  # the scan computes what it carries


INLINED = {  # functions that JAX inlines in a scan, but not in a decorated function
    "two products": lambda x: (x @ x.T) @ x,
    "softmax": lambda x: jax.nn.softmax(jnp.sin(x)),
    "a function with a rule": lambda x: jnp.logaddexp2(jnp.sin(x), x),
}


@EAGER_AND_JIT
@pytest.mark.parametrize("name", INLINED)
def test_names_are_the_same_in_a_scan(name, mode):
    def names(f):
        seen = set()
        pair = noting([], differentiable=True, only=lambda x, info: seen.add(info.operation) or True)
        mode(jax.grad(pair(f)))(X)
        return seen - {""}

    f = lambda x: jnp.sum(jnp.exp(INLINED[name](jnp.cos(x))))
    in_a_scan = names(lambda x: jax.lax.scan(lambda c, _: (c + f(x * c), None), 1.0, None, length=2)[0])
    assert {"exp"} <= names(f) <= in_a_scan <= names(f) | {"mul", "scan"}


@EAGER_AND_JIT
def test_a_tensor_is_decided_once(mode):
    # Both the exponential and the product keep the result of the exponential.
    f = lambda x: jnp.sum(jnp.exp(x) * x)
    for key, other, n in (("exp", "mul", 1), ("mul", "exp", 0)):
        kept = []
        with pytest.warns(UserWarning, match="'mul'"):  # the product keeps nothing of its own
            mode(jax.grad(by_name({key: noting(kept), other: None})(f)))(X)
        assert len(kept) == n
    plain = saved_tensors_report(f, X)
    cast = saved_tensors_report(by_name({"exp": cast_saved(recompute=False), ...: None})(f), X)
    assert (plain.total_bytes, cast.total_bytes) == (X.nbytes, X.nbytes // 2)


COPIED = {
    "rounded": lambda x: jnp.exp(x) * jax.lax.reduce_precision(x, 5, 3),
    "rounded, beside the input": lambda x: x * x * jax.lax.reduce_precision(x, 5, 3),
    "copy, beside the input": lambda x: x * x * jax.lax.optimization_barrier(x),
    "packed, beside the input": lambda x: cast_saved(arguments=True)(lambda x: x * x)(x) + x * x * x,
}


@pytest.mark.parametrize("name", COPIED)
def test_the_report_distinguishes_an_input_from_values_computed_from_it(name):
    def loss(x):
        return jnp.sum(COPIED[name](x))

    report = saved_tensors_report(loss, X)
    _, pullback = jax.vjp(loss, X)
    is_held = any(x is X for x in jax.tree.leaves(pullback))
    assert report.input_bytes == X.nbytes * is_held
    assert report.total_bytes == bytes_held(pullback) - report.input_bytes > 0


def twice(run):
    run()
    run()


# -- what warns -----------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_key_that_names_nothing_warns_once_and_lists_names(gradient):
    f = by_name({"Tahn": save_on_cpu(), "div": save_on_cpu(), ...: None})(loss_of_blocks)
    with pytest.warns(UserWarning, match="'Tahn'.*mean 'Tanh'") as caught:
        twice(lambda: gradient(f)(PARAMETERS, X))
    (warning,) = caught
    text = str(warning.message)
    assert all(name in text for name in ("Attention", "attended", "Tanh", "feed_forward"))
    assert "'div' (backward computes such tensors again" in text
    assert "tests" in warning.filename


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_a_predicate_that_is_never_true_warns_once(gradient):
    pair = quantize_saved(8, only=lambda x, info: info.layer == "Tahn")
    with pytest.warns(UserWarning, match="only") as caught:
        twice(lambda: gradient(pair(loss_of_blocks))(PARAMETERS, X))
    assert len(caught) == 1
    assert "Tanh" in str(caught[0].message)


def test_an_unknown_attribute_of_an_origin_lists_those_that_it_has():
    pair = saved_tensors_hooks(lambda x: x, lambda x: x, only=lambda x, info: info.op == "sin")
    with pytest.raises(AttributeError, match=r"info\.op .*name, layer, operation.*inside"):
        jax.grad(pair(lambda x: jnp.sum(jnp.sin(x))))(X)


def plain_loss(x):
    return jnp.sum(jnp.sin(x) ** 2)


WRONG_PLACES = {
    "with": lambda pair: in_block(pair, jax.jit(jax.grad(plain_loss))),
    "jitted step": lambda pair: pair(jax.jit(jax.grad(plain_loss))),
    "within a jitted step": lambda pair: jax.jit(pair(jax.grad(plain_loss))),
    "a block in a jitted step": lambda pair: jax.jit(in_block(pair, jax.grad(plain_loss))),
    "nested jit": lambda pair: pair(jax.jit(lambda x: jax.jit(jax.grad(plain_loss))(x) * 2)),
    "eager grad": lambda pair: pair(jax.grad(plain_loss)),
    "grad of jit": lambda pair: pair(jax.grad(jax.jit(plain_loss))),
    "a pair that needs a plan": lambda _: recompute_saved(limit=1e9)(jax.grad(plain_loss)),
}


@pytest.mark.parametrize("place", WRONG_PLACES)
def test_a_block_in_the_wrong_place_warns_although_an_equal_pair_packed_in_the_right_one(place):
    jax.jit(jax.grad(quantize_saved(8, block_size=40)(plain_loss)))(X)
    jax.grad(quantize_saved(8, block_size=40)(plain_loss))(X)
    run = WRONG_PLACES[place](quantize_saved(8, block_size=40))
    with pytest.warns(UserWarning, match=r"jax\.grad") as caught:
        twice(lambda: run(X))
    assert len(caught) == 1


def test_an_equal_pair_that_packed_at_top_level_silences_the_warning():
    loss = quantize_saved(8, block_size=56)(lambda x: jnp.sum((jax.grad(plain_loss)(x) - x) ** 2))
    jax.grad(loss)(X)
    loss(X)
    quantize_saved(8, block_size=56)(lambda x: jnp.sum(jnp.linalg.solve(jnp.eye(T), x)))(X)
    step = jax.jit(jax.grad(quantize_saved(8, block_size=48)(lambda x: jnp.sum(Tanh.apply(x)))))
    for pair in (quantize_saved(8, block_size=48), quantize_saved(8, block_size=48)):
        evaluated = pair(jax.jit(plain_loss))
        twice(lambda evaluated=evaluated: evaluated(X))
        twice(lambda: step(X))


def test_what_does_not_warn():
    layers = jax.jit(jax.grad(lambda x: jnp.sum(Tanh.apply(x))))
    with cast_saved():
        layers(X)
    with cast_saved():  # an equal pair: JAX does not call its hooks again
        layers(X)
    twice(lambda: cast_saved(jnp.float16)(layers)(X))
    cast_saved()(lambda x: jnp.sum(jnp.sin(x)))(X)  # a loss without its gradient
    by_name({"sin": cast_saved()})(lambda x: jnp.sum(x))(X)  # nothing is kept
    penalized = cast_saved(only=lambda x: True)(lambda x: jnp.sum(jax.grad(plain_loss)(x) ** 2))
    jax.grad(jax.jit(penalized))(X)
    pair = quantize_saved(only=lambda x, info: True)
    twice(lambda: pair(lambda x: jax.jit(jax.grad(pair(plain_loss)))(x))(X))
    with pytest.raises(KeyError), cast_saved():
        raise KeyError


def test_a_checkpoint_of_all_that_is_decorated_is_told_once():
    step = jax.jit(jax.grad(cast_saved()(jax.checkpoint(lambda x: jnp.sum(jnp.sin(jnp.cos(x)))))))
    with pytest.warns(UserWarning, match=r"jax\.checkpoint") as caught:
        list(map(step, (X, X[:1])))
    assert len(caught) == 1
    assert caught[0].filename == __file__
    jax.grad(cast_saved()(lambda x: jnp.sum(jnp.sin(jax.checkpoint(jnp.cos)(x)))))(X)  # of a part: silent


# -- a predicate, and pairs by name --------------------------------------------------------------------


SQUARE, ROW = jnp.linspace(-1.0, 1.0, 64 * 64).reshape(64, 64), jnp.linspace(0.5, 1.0, 64)


def loss(w, x):
    return jnp.sum(jnp.sin(Multiply.apply(Tanh.apply(x), w * jnp.ones((64, 1)))) * w)


@EAGER_AND_JIT
@pytest.mark.parametrize("host", [False, True], ids=["traced", "host"])
def test_what_the_predicate_is_false_for_is_not_packed(host, mode):
    seen = []
    found = mode(jax.grad(noting(seen, host=host, only=is_matrix)(loss)))(ROW, SQUARE)
    np.testing.assert_allclose(found, jax.grad(loss)(ROW, SQUARE), rtol=1e-5, atol=1e-4)
    assert seen
    assert all(len(shape) > 1 for shape in seen)


@pytest.mark.parametrize("packer", [save_on_cpu, cast_saved, quantize_saved, save_on_disk])
def test_every_ready_pair_takes_it(packer, tmp_path):
    arguments = (tmp_path,) if packer is save_on_disk else ()
    nothing, wide = (packer(*arguments, only=only) for only in (lambda x: False, is_matrix))
    expected = jax.grad(loss)(ROW, SQUARE)
    with pytest.warns(UserWarning, match="only"):
        np.testing.assert_allclose(jax.grad(nothing(loss))(ROW, SQUARE), expected, rtol=1e-3)
    np.testing.assert_allclose(jax.jit(jax.grad(wide(loss)))(ROW, SQUARE), expected, atol=0.2)


NamedTanh = layer(base=Tanh, name="NamedTanh", saved_names=("y",))


def test_each_eager_gradient_asks_the_predicate_again():
    packed, is_on = [], {"only": False}
    loss = noting(packed, only=lambda x: is_on["only"])(lambda x: jnp.sum(Square.apply(x)))
    with pytest.warns(UserWarning, match="only"):
        jax.grad(loss)(SQUARE)
    assert not packed
    is_on["only"] = True
    jax.grad(loss)(SQUARE)
    assert packed == [SQUARE.shape]


@EAGER_AND_JIT
def test_the_most_special_name_counts(mode):
    first, second, third = [], [], []
    hooks = by_name({"NamedTanh": noting(second), "y": noting(first), ...: noting(third)})
    mode(jax.grad(hooks(lambda x: jnp.sum(jnp.sin(NamedTanh.apply(x))))))(SQUARE)
    assert (len(first), len(second), len(third)) == (1, 0, 1)
    kept = []

    def named(x):
        return jnp.sum(jnp.sin(checkpoint_name(x * x, "squares"))) + jnp.sum(checkpoint_name(x, "squares") @ x)

    mode(jax.grad(by_name({"squares": noting(kept)})(named)))(SQUARE)
    assert kept == [SQUARE.shape]


def test_ready_pairs_by_name():
    f = lambda x: jnp.sum(NamedTanh.apply(x)[:1]) + jnp.sum(Tanh.apply(x)[:2]) + jnp.sum(jnp.exp(x))
    pairs = {"y": save_on_cpu(), "Tanh": chain(quantize_saved(8), save_on_cpu()), "exp": None, ...: cast_saved()}
    hooks = by_name(pairs)
    for run in (lambda f: f, jax.jit):
        np.testing.assert_allclose(run(jax.grad(hooks(f)))(SQUARE), jax.grad(f)(SQUARE), atol=0.02)
    assert "cast_saved" in repr(copy.copy(hooks))


# Each computes a tensor with a name. Backward could keep an unnamed one instead, and compute the named one again.
HIDDEN = {
    "product": lambda x: checkpoint_name(x @ x.T, "hidden"),
    "reshaped": lambda x: checkpoint_name((x @ x.T).reshape(-1), "hidden"),
    "sum": lambda x: checkpoint_name(x @ x.T + 1, "hidden"),
    "kept before": lambda x: checkpoint_name(jnp.tanh(x @ x.T), "hidden"),
    "computed again": lambda x: checkpoint_name(jax.nn.gelu(x @ x.T), "hidden"),
}


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize("place", [None, *STAGED])
def test_a_named_tensor_is_kept_by_its_own_hooks(place, name):
    def make_loss():
        inner = lambda x: x + jnp.sum(jax.nn.gelu(HIDDEN[name](x)))
        if place == "checkpoint":
            return jax.checkpoint(
                lambda x: jnp.sum(inner(x)), policy=jax.checkpoint_policies.save_only_these_names("hidden")
            )
        staged = STAGED[place](inner) if place else inner
        return lambda x: jnp.sum(staged(x))

    def make():
        return by_name({"hidden": save_on_cpu(recompute=name != "computed again"), ...: None})

    report = saved_tensors_report(make()(make_loss()), SQUARE)
    # A cond of jax 0.10 returns both, the tanh and the named tensor.
    assert report.host_bytes == SQUARE.nbytes or (place == "cond" and name == "kept before")
    for mode in (lambda f: f, jax.jit):
        pair = make()
        mode(jax.grad(pair(make_loss())))(SQUARE)
        assert ": 0 tensors packed" not in repr(pair)


@EAGER_AND_JIT
def test_a_key_whose_tensors_are_computed_again_warns(mode):
    loss = lambda x: jnp.sum((x @ x) * jnp.sin(x @ x))
    with pytest.warns(UserWarning, match="'sin'.*recompute=False"):
        mode(jax.grad(by_name({"sin": save_on_cpu(), ...: None})(loss)))(SQUARE)
    mode(jax.grad(by_name({"sin": save_on_cpu(recompute=False), ...: None})(loss)))(SQUARE)


@pytest.mark.parametrize("mode", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_what_is_excluded_is_not_computed_from_what_hooks_of_users_packed(mode):
    def loss(x):
        h = checkpoint_name(x @ x, "rounded")
        return jnp.sum(h * jnp.cos(x)) + jnp.sum(-h * jnp.sin(x))

    h, rounded = SQUARE @ SQUARE, lambda x: jnp.round(x * 4) / 4
    pair = by_name({"rounded": saved_tensors_hooks(rounded, lambda x: x), ...: None})
    expected = jax.grad(loss)(SQUARE) + (rounded(h) - h) * -jnp.sin(SQUARE)
    np.testing.assert_allclose(jax.grad(pair(mode(loss)))(SQUARE), expected, rtol=1e-5, atol=1e-5)

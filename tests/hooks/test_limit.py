"""`recompute_saved(limit=...)` plans a whole function: the gradient is exact, and what backward keeps fits."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_report
from pylayer_jax.packers import by_name, cast_saved, chain, recompute_saved, save_on_cpu
from tests.kit.layers import Matmul, Multiply, Tanh, layer
from tests.kit.modes import EAGER_AND_JIT, NEEDS_BARRIERS
from tests.tools.benchmarks.timing import python_calls

from .spy import AT_LEAST, norm, relative_error, temporary_bytes

KEYS = list(jax.random.split(jax.random.key(0), 4))
X = jax.random.normal(KEYS[0], (32, 64))
W = jax.random.normal(KEYS[1], (4, 64, 64)) / 8


def loop(ws, x):
    for w in ws:
        x = x + jax.nn.gelu(norm(x @ w))
    return jnp.mean(x**2)


def scan(ws, x):
    return jnp.mean(jax.lax.scan(lambda x, w: (x + jax.nn.gelu(norm(x @ w)), None), x, ws)[0] ** 2)


def attention(ws, x):
    for w in ws:
        q, k, v = jnp.split(x @ jnp.concatenate([w, w.T, w * 0.5], axis=1), 3, axis=-1)
        x = x + jax.nn.softmax(jnp.where(jnp.tri(len(x), dtype=bool), q @ k.T, -1e9)) @ v
    return jnp.mean(x**2)


def branches(ws, x):
    for w in ws:
        x = jax.lax.switch((x[0, 0] > 0.1).astype(int), [lambda x, w: jnp.tanh(x @ w), lambda x, w: x * x[:1]], x, w)
    return jnp.mean(x**2)


def dropout(ws, x):
    for key, w in zip(KEYS, ws, strict=False):
        x = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), jnp.tanh(x @ w), 0) / 0.8
    return jnp.mean(x**2)


def layers(ws, x):
    for w in ws:
        x = Tanh.apply(x @ w) + jnp.sin(x)
    return jnp.mean(x**2)


def updates(ws, x):
    jax.lax.after_all(jax.lax.create_token())  # a token has no dtype
    for w in ws:
        x = x.at[jnp.arange(32) % 5].add(jnp.sin(jnp.fft.irfft(jnp.fft.rfft(x @ w), n=64)))
        x = jax.lax.dynamic_update_slice(x, jnp.cos(x[:2]), (3, 0))
    return jnp.mean(x**2)


FUNCTIONS = [loop, scan, attention, branches, dropout, layers, updates]


def second(f):
    return lambda *args: jax.grad(lambda *a: jnp.sum(jnp.sin(jax.grad(f, 1)(*a))), (0, 1))(*args)


def bytes_held(f):
    _, pullback = jax.vjp(jax.jit(f), W, X)
    arrays = {id(x): x.nbytes for x in jax.tree.leaves(pullback) if x is not W and x is not X}
    return sum(arrays.values())


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("limit", [1e9, "24 KiB", 0])
@EAGER_AND_JIT
@AT_LEAST
def test_the_gradient_is_exact(function, limit, mode):
    f = recompute_saved(limit=limit)(function)
    assert relative_error(mode(jax.grad(f, (0, 1)))(W, X), mode(jax.grad(function, (0, 1)))(W, X)) < 1e-5
    np.testing.assert_array_equal(jax.jit(f)(W, X), jax.jit(function)(W, X))


@pytest.mark.parametrize("function", [loop, scan, layers])
@pytest.mark.parametrize("place", ["jit", "jit inside", "vmap"])
@AT_LEAST
def test_a_second_derivative_is_exact(function, place):
    f = recompute_saved(limit="8 KiB")(function)
    if place == "vmap":
        run = lambda f: jax.jit(jax.vmap(second(f), (None, 0)))(W, jnp.stack([X, 2 * X]))
    else:
        run = lambda f: second(jax.jit(f))(W, X) if place == "jit inside" else jax.jit(second(f))(W, X)
    assert relative_error(run(f), run(function)) < 1e-4


@pytest.mark.parametrize("function", [loop, attention, dropout])
def test_what_is_kept_fits_the_limit(function):
    plain = bytes_held(recompute_saved(limit=1e9)(function))
    kept = [bytes_held(recompute_saved(limit=plain * share)(function)) for share in (0.7, 0.4, 0.25)]
    keys = sum(key.nbytes for key in KEYS)  # come from outside
    assert all(size <= share * plain + keys for size, share in zip(kept, (0.7, 0.4, 0.25), strict=True))
    assert kept == sorted(kept, reverse=True)
    assert plain <= bytes_held(recompute_saved()(function))


@jax.jit
def twice(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None), x, ws)[0]


def calls(ws, x):
    for _ in range(3):  # the calls share the equations of one jaxpr
        x = twice(x, ws)
    return jnp.mean(x)


def nested(ws, x):
    def body(x, w):
        x, _ = jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=3)
        y, _ = jax.lax.scan(lambda x, _: (jnp.cos(x @ w), None), x, None, length=3)
        return x + y, None

    return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)


@pytest.mark.parametrize(
    ("function", "count"),
    [(scan, len(W) + 1), (calls, 5 * len(W)), (nested, 6 * len(W) + 1)],  # the carry of each iteration, and the result
)
def test_one_budget_for_the_iterations_of_all_loops(function, count):
    limit = count * X.nbytes
    assert bytes_held(recompute_saved(limit=limit)(function)) <= limit < bytes_held(recompute_saved()(function))


def switch(*functions):
    return lambda ws, x: jnp.mean(jax.lax.switch((x[0, 0] > 0).astype(int), functions, x, ws))


def carried(f):
    return lambda x, ws: jax.lax.scan(lambda x, w: (f(x @ w), None), x, ws)[0]


def sorted_slices(ws, x):
    y = jnp.tanh(jnp.sort(x, 0))
    return jnp.sum(jax.lax.scan(lambda c, t: (jnp.sin(c * t), None), x[0], y)[0])


def integers(ws, x):
    def body(carry, _):
        y, k = carry
        return (jnp.sin(y) * jnp.where(k % 3 == 0, y, 1), k * 5 + 1), None

    return jnp.sum(jax.lax.scan(body, (x[0], jnp.arange(64)), None, length=8)[0][0])


def other_hooks(ws, x):
    inner = recompute_saved()(lambda x, w: jnp.tanh(jnp.sin(x @ w) @ w))
    for w in ws[:2]:
        x = inner(x, w)
    return jnp.sum(jax.lax.scan(lambda x, w: (inner(x, w), None), x, ws[2:])[0])


def saved_by_layers(ws, x):
    y = jnp.tanh(x)
    z = jax.lax.cond(x[0, 0] > 0, Matmul.apply, lambda y, w: y, y, ws[0])
    return jnp.sum(jax.lax.scan(lambda c, w: (Multiply.apply(c @ w, y), None), z, ws)[0])


WITH_LOOPS = {
    "branches of one type": switch(carried(jnp.tanh), carried(jnp.sin)),
    "branches of two types": switch(carried(jnp.tanh), lambda x, ws: x + jnp.sum(carried(jnp.sin)(x[:9], ws))),
    "slices that the function computes": sorted_slices,
    "integers": integers,
    "nested loops": nested,
    "what a body reads": lambda ws, x: jnp.sum(jax.lax.map(lambda y: jnp.sin(jnp.sum(y)), jnp.sort(x, 0))),
    "layers": saved_by_layers,
    "other hooks": other_hooks,
}


@pytest.mark.parametrize("name", WITH_LOOPS)
def test_the_least_is_what_is_held(name):
    with pytest.warns(UserWarning, match="the least") as caught:
        held = bytes_held(recompute_saved(limit=1)(WITH_LOOPS[name]))
    assert f"keeps {held:,} bytes" in str(caught[0].message)
    assert held <= bytes_held(recompute_saved()(WITH_LOOPS[name]))


def products(ws, x):
    return jnp.sum(jax.lax.scan(lambda x, w: (Matmul.apply(x, w), None), x, ws[1:].mT)[0])


# The slices are kept once: the order, tanh, and what is carried. The products keep no copy of stacked weights.
@pytest.mark.parametrize("function", [sorted_slices, products])
def test_what_a_scan_takes_is_kept_once(function):
    assert bytes_held(recompute_saved()(function)) == 3 * X.nbytes


def test_slices_that_a_layer_saves_are_packed():
    f = lambda apply: lambda ws, x: jnp.sum(jax.lax.scan(lambda c, y: (apply(c, y), None), x, x @ ws)[0] ** 2)
    assert bytes_held(cast_saved()(f(Multiply.apply))) == bytes_held(cast_saved()(f(jnp.multiply)))


def operations_of(f):
    return jax.jit(jax.grad(f)).lower(W, X).cost_analysis()["flops"]  # XLA of jax 0.10 removes barriers on CPU


def test_products_are_computed_again_only_for_a_limit():
    assert operations_of(recompute_saved(limit="1 GiB")(loop)) < 1.1 * operations_of(loop)
    assert operations_of(recompute_saved(limit="8 KiB")(loop)) > 1.2 * operations_of(loop)
    assert bytes_held(recompute_saved(limit=X.nbytes)(updates)) <= X.nbytes < bytes_held(recompute_saved()(updates))
    masks = recompute_saved(limit=X.size // 4 + 16)(dropout)  # in bits, and keys: a mask costs more than a product
    report = saved_tensors_report(masks, W[:2], X)
    assert {row.dtype for row in report.rows if row.packed_bytes and row.kind not in ("input", "constant")} == {"bool"}
    rectified = lambda ws, x: jnp.mean(jax.nn.relu(jax.nn.relu(x @ ws[0]) @ ws[1]))
    assert bytes_held(recompute_saved(limit=X.nbytes // 16)(rectified)) == X.nbytes // 16  # two masks in bits


def test_an_eager_call_finds_the_plan_of_the_call_before():
    limited, unlimited = (jax.grad(recompute_saved(limit=limit)(loop)) for limit in ("24 KiB", None))
    assert python_calls(lambda: limited(W, X)) < 1.5 * python_calls(lambda: unlimited(W, X))


@NEEDS_BARRIERS
@pytest.mark.parametrize("activation", [jax.nn.gelu, jax.nn.relu])
def test_what_is_made_again_is_not_held(activation):
    block = lambda x, w: x + activation(activation(x @ w) @ w.T)
    loss = lambda block: lambda x: jnp.mean(functools.reduce(block, [*W, *W], x) ** 2)
    x = jnp.tile(X, (16, 1))
    limited, checkpoints = recompute_saved(limit=8 * x.nbytes)(loss(block)), loss(jax.checkpoint(block))
    assert temporary_bytes(limited, x) < temporary_bytes(checkpoints, x) < temporary_bytes(loss(block), x)


@AT_LEAST
def test_a_comparison_of_floats_is_never_made_again():
    step = layer(lambda x: jnp.where(x > 0, x, 0), lambda x, dy: jnp.where(x > 0, dy, 0), plain=True)
    report = saved_tensors_report(recompute_saved(limit=0)(lambda ws, x: jnp.sum(step.apply(jnp.sin(x @ ws[0])))), W, X)
    assert report.total_bytes == X.nbytes  # what the rule saves, which it may compare
    assert bytes_held(recompute_saved(limit=0)(lambda ws, x: jnp.sum(jax.nn.softplus(x @ ws[0]) ** 2))) >= X.nbytes


INFO = cast_saved(only=lambda x, info: False)


@pytest.mark.parametrize("pair", [recompute_saved(limit=1), by_name({"tanh": None}), INFO, chain(INFO, save_on_cpu())])
def test_a_block_of_what_needs_a_plan_says_to_decorate(pair):
    with pytest.raises(TypeError, match="decorate"), pair:
        pass


def test_concrete_values_are_an_error_with_a_way_out():
    with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
        jax.grad(recompute_saved(limit=0)(lambda x: x * float(x)))(2.0)
    assert "with" in "".join(raised.value.__notes__)


def test_a_function_that_changes_its_argument_is_refused():
    def loss(state, x):
        state["count"] = state["count"] + 1
        return jnp.sum(x)

    with pytest.raises(TypeError, match=r"argument 0 in place.*split_inputs"):
        jax.grad(recompute_saved(limit=0)(loss), 1)({"count": jnp.zeros(())}, X)


def test_state_that_the_function_reads_is_never_stale():
    scale = 1.0
    f = recompute_saved(limit=0)(lambda x: jnp.sum(x**2) * scale)
    first = jax.grad(f)(X)
    scale = 2.0
    np.testing.assert_array_equal(jax.grad(f)(X), 2 * first)


def test_closed_over_values_are_differentiated():
    def outer(f):
        return jax.grad(lambda ws: f(functools.partial(loop, ws))(X))(W)

    assert relative_error(outer(recompute_saved(limit="8 KiB")), outer(lambda f: f)) < 1e-5


def test_without_differentiation_the_function_runs_as_it_is():
    seen = []
    with warnings.catch_warnings(action="error"):
        recompute_saved(limit=0)(lambda x: seen.append(float(x.sum())))(X)
    assert seen == [float(X.sum())]


@AT_LEAST
@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_around_and_within_a_checkpoint(policy):
    pair, checkpoint = recompute_saved(limit="4 KiB"), functools.partial(jax.checkpoint, policy=policy)
    expected = jax.jit(jax.grad(loop))(W, X)
    assert relative_error(jax.jit(jax.grad(pair(checkpoint(loop))))(W, X), expected) < 1e-5
    assert relative_error(jax.jit(jax.grad(checkpoint(pair(loop))))(W, X), expected) < 1e-5

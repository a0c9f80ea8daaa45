"""A layer with a `jax.Ref` argument has the derivatives of a plain `jax.custom_vjp` function with the same rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pylayer_jax import Function, once_differentiable, saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import recompute_saved
from pylayer_jax.testing import check_layer, gradcheck
from tests.kit.case import ruled
from tests.kit.layers import bits, layer
from tests.kit.modes import SECOND

X = jnp.arange(6.0).reshape(2, 3) / 6
W = jnp.arange(6.0).reshape(3, 2) / 5
XS = jnp.stack([X, X + 1, X - 1])


def product(main_grad, x, w):
    """Linear layer that adds the gradient of its weight to a buffer, as Paddle's layers do with `main_grad`."""
    return jnp.sin(x) @ w


def slopes(main_grad, x, w, dy):
    dw = jnp.sin(x).T @ dy
    main_grad[...] += dw
    return dy @ w.T * jnp.cos(x), dw


def keep(ctx, main_grad, x, w):
    ctx.save_for_backward(x, w)
    ctx.main_grad = main_grad
    return product(main_grad, x, w)


AddsWeightGradient = layer(
    keep, lambda ctx, dy: slopes(ctx.main_grad, *ctx.saved_tensor(), dy), name="AddsWeightGradient"
)
adds_weight_gradient = ruled(product, lambda args, dy: (None, *slopes(*args, dy)))


def gradient(f, *transforms):
    def total(ref, x, w):
        return jnp.sum(f(ref, x, w) ** 2)

    for transform in transforms:
        total = transform(total)
    return jax.grad(total, argnums=(1, 2))


def loop(run):
    return lambda f, ref: jax.grad(lambda w: run(lambda x: jnp.sum(f(ref, x, w) ** 2)))(W)


def scanned(step):
    return jax.lax.scan(lambda total, x: (total + step(x), None), 0.0, XS)[0]


def sharded(f, ref):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    d, everywhere = PartitionSpec("d"), PartitionSpec()
    buffers = jax.new_ref(jax.device_put(jnp.zeros((6, 2)), jax.NamedSharding(mesh, d)))

    def one(buffer, x, w):
        return gradient(f)(buffer, x, jax.lax.pcast(w, "d", to="varying"))[0]

    found = jax.jit(jax.shard_map(one, mesh=mesh, in_specs=(d, d, everywhere), out_specs=d))(buffers, X, W)
    ref[...] = sum(np.split(np.asarray(buffers[...]), 2))
    return found


def made_under_jit(f, ref):
    def step(x, w):
        made = jax.new_ref(jnp.zeros_like(W))
        return gradient(f)(made, x, w), jax.freeze(made)

    found, ref[...] = jax.jit(step)(X, W)
    return found


def batched(outer):
    def run(f, ref):
        stacked = jax.new_ref(jnp.zeros((3, *W.shape)))
        found = outer(f)(stacked, XS, W)
        ref[...] = stacked[...].sum(0)
        return found, stacked[...]

    return run


TRANSFORMS = {
    "forward": lambda f, ref: f(ref, X, W),
    "grad": lambda f, ref: gradient(f)(ref, X, W),
    "jit(grad)": lambda f, ref: jax.jit(gradient(f))(ref, X, W),
    "grad(jit)": lambda f, ref: gradient(f, jax.jit)(ref, X, W),
    "vjp": lambda f, ref: jax.vjp(lambda x: f(ref, x, W), X)[1](X @ W),
    "made under jit": made_under_jit,
    "scan": loop(scanned),
    "scan(grad)": lambda f, ref: jax.lax.scan(lambda c, x: (c, gradient(f)(ref, x, W)), 0.0, XS),
    "fori_loop": loop(lambda step: jax.lax.fori_loop(0, 3, lambda i, total: total + step(XS[i]), 0.0)),
    "cond": loop(lambda step: jax.lax.cond(step(X) > 0, lambda: 2 * step(X), lambda: 0.0)),
    "checkpoint": lambda f, ref: gradient(f, jax.checkpoint)(ref, X, W),
    "scan of checkpoint": loop(lambda step: scanned(jax.checkpoint(step))),
    "vmap(grad)": batched(lambda f: jax.vmap(gradient(f), (0, 0, None))),
    "grad(vmap)": batched(lambda f: gradient(jax.vmap(f, (0, 0, None)))),
    "shard_map": sharded,
}


pytestmark = pytest.mark.filterwarnings("ignore:.*runs as in a .with. block:UserWarning")

HOOKS = saved_tensors_hooks(lambda x: (x + 1, 0), lambda packed: packed[0] - 1)
# Where a block of hooks is: the last two decorate a function that closes over the Ref.
BLOCKS = {
    "no block": lambda run, f, ref: run(f, ref),
    "around": lambda run, f, ref: HOOKS(run)(f, ref),
    "within": lambda run, f, ref: run(lambda ref, x, w: HOOKS(lambda x, w: f(ref, x, w))(x, w), ref),
    "around jit": lambda run, f, ref: run(lambda ref, x, w: HOOKS(jax.jit(lambda x, w: f(ref, x, w)))(x, w), ref),
}


SOME = ("grad", "jit(grad)", "grad(jit)", "scan", "checkpoint", "grad(vmap)")
MET = [(run, "no block") for run in TRANSFORMS] + [(run, block) for run in SOME for block in [*BLOCKS][1:]]


@pytest.mark.parametrize(("run", "block"), MET)
def test_a_ref_is_written_as_in_plain_custom_vjp(run, block):
    def result(f, block):
        ref = jax.new_ref(jnp.zeros_like(W))
        return BLOCKS[block](TRANSFORMS[run], f, ref), ref[...]

    try:
        expected = result(adds_weight_gradient, "no block")
    except KeyError:
        pytest.skip("jax 0.10 cannot differentiate a cond that writes to a Ref")
    for f in (AddsWeightGradient.apply, adds_weight_gradient):
        found = result(f, block)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("stage", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_decorated_function_makes_a_ref_that_a_loop_reads(stage):
    def f(x):
        total = jax.new_ref(jnp.zeros_like(x))

        def body(c, _):
            total[...] += c
            return jnp.sin(c) * jnp.tanh(x), None

        return jnp.sum(jax.lax.scan(body, x, None, length=2)[0] + total[...])

    np.testing.assert_allclose(stage(jax.grad(recompute_saved()(f)))(X), jax.grad(f)(X), rtol=1e-5)


def counted(ctx, x, state):
    state["forward"][...] += 1
    ctx.save_for_backward(x)
    ctx.state = state
    return jnp.sin(x)


def counted_backward(ctx, dy):
    ctx.state["backward"][...] += 1
    return dy * jnp.cos(ctx.saved_tensors[0]), None


# Counts its runs in a dict of Refs: in torch's style a Ref has a gradient, which is None.
Counts = layer(counted, counted_backward, Function, "Counts")


def counts():
    return {"forward": jax.new_ref(jnp.int32(0)), "backward": jax.new_ref(jnp.int32(0))}


RUNS = {
    "eager": (Counts.apply, (1, 0)),
    "grad": (jax.grad(Counts.apply), (1, 1)),
    "jit(grad)": (jax.jit(jax.grad(Counts.apply)), (1, 1)),
    "grad(jit)": (jax.grad(jax.jit(Counts.apply)), (1, 1)),
    "checkpoint": (jax.grad(jax.checkpoint(Counts.apply)), (2, 1)),  # JAX computes the forward pass again
}


@pytest.mark.parametrize(("run", "expected"), RUNS.values(), ids=RUNS)
def test_each_method_runs_once(run, expected):
    state = counts()
    run(jnp.float32(0.5), state)
    assert (int(state["forward"][...]), int(state["backward"][...])) == expected


def scaled(ctx, scale, x):
    ctx.save_for_backward(x)
    ctx.scale = scale[...]
    return ctx.scale * x**3


# Reads a Ref in `forward` alone.
Scaled = layer(scaled, lambda ctx, dy: 4.5 * dy * ctx.scale * ctx.saved_tensor()[0] ** 2, name="Scaled")


@pytest.mark.parametrize("way", [way for way in SECOND if "of vmap" not in way])  # a batch may not write to one Ref
def test_a_second_derivative_is_an_error_that_names_the_layer(way):
    scale, state, x = jax.new_ref(jnp.float32(2.0)), counts(), jnp.float32(1.5)
    with pytest.raises(TypeError, match="Scaled"):
        SECOND[way](lambda x: Scaled.apply(scale, x))(x)
    with pytest.raises(TypeError, match="Counts"):
        SECOND[way](lambda x: Counts.apply(x, state))(x)


def refused():
    f, ref = AddsWeightGradient.apply, jax.new_ref(jnp.zeros_like(W))
    batched = layer(base=AddsWeightGradient, name="Batched", vmap=lambda *_: None)
    returned = layer(lambda ctx, ref, x, w: (x, ref), name="Returned")

    def made_inside(w):
        return f(jax.new_ref(jnp.zeros_like(w)), X, w).sum()

    yield TypeError, r"Batched.*main_grad", lambda: jax.jit(batched.apply)(ref, X, W)
    yield TypeError, "main_grad", lambda: jax.grad(made_inside)(W)
    yield TypeError, "main_grad", lambda: jax.grad(jax.jit(made_inside))(W)
    yield TypeError, "main_grad", lambda: jax.grad(jax.checkpoint(bits()(made_inside)))(W)
    yield ValueError, r"Returned\.forward.*Ref", lambda: returned.apply(ref, X, W)
    once, scale = layer(base=Scaled, backward=once_differentiable(Scaled.backward)), jax.new_ref(jnp.float32(2.0))
    second = jax.grad(jax.grad(lambda x: once.apply(scale, x)))
    yield RuntimeError, "once_differentiable", lambda: second(jnp.float32(1.5))
    yield TypeError, "AddsWeightGradient", lambda: jax.jvp(lambda x: f(ref, x, W), (X,), (X,))


def test_refusals():
    for error, match, run in refused():
        with pytest.raises(error, match=match):
            run()


def test_the_checkers_and_the_report_take_a_ref():
    state, x = counts(), jnp.linspace(0.1, 0.7, 3)
    report = saved_tensors_report(lambda x: Counts.apply(jnp.sin(x), state), x)
    assert report.total_bytes == 24  # the cosine and the sine
    gradcheck(lambda x: Counts.apply(x, state), (x,))
    with pytest.raises(TypeError, match=r"jax\.Ref"):
        check_layer(Counts, x, state)

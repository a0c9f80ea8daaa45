"""Which tensors saved_tensors_hooks reach, when and how often the hooks run, and that tensors come back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Multiply, Square, Tanh, bits, layer, loss
from tests.kit.modes import EAGER_AND_JIT

from .spy import GRADIENTS, IDLE, A, B, Spy, X, in_block, noting, tanh_slope, tanh_sum

OPERATIONS = {
    "plain operation": (jnp.multiply, 2),
    "layer": (Multiply.apply, 2),
    "jitted operation": (jax.jit(jnp.multiply), 2),
    "jitted layer": (jax.jit(Multiply.apply), 2),
    "custom_jvp": (lambda a, b: jax.nn.relu(a) * b, 4),  # the mask and the zeros of relu, and what is multiplied
    "checkpoint": (jax.checkpoint(Multiply.apply), 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_numpy_arrays_stay_on_the_host(name):
    # The first example of Paddle's document, and its second.
    operation, packs = OPERATIONS[name]
    log = []

    def pack(x):
        log.append(x)
        return np.asarray(x)

    def unpack(x):
        assert type(x) is np.ndarray
        return jnp.asarray(x)

    value, pullback = jax.vjp(lambda a, b: in_block(saved_tensors_hooks(pack, unpack), operation)(a, b).sum(), A, B)
    np.testing.assert_allclose(value, (A * B).sum(), rtol=1e-6)
    assert len(log) == packs
    assert all(isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) for x in log)
    da, db = pullback(jnp.ones(()))
    np.testing.assert_allclose(da, B)
    np.testing.assert_allclose(db, A)


def test_only_what_is_needed_is_packed():
    spy = Spy()
    jax.grad(in_block(spy.hooks, lambda a: jnp.sum(a * B)))(A)  # the gradient of a needs B alone
    assert spy.counts() == (1, 1)


def test_a_tensor_that_several_operations_keep_is_packed_once():
    for jit in (lambda f: f, jax.jit):
        spy = Spy()
        total = spy.hooks(lambda a, b: jnp.sum(Multiply.apply(a, b) + a * b + Multiply.apply(a, a)))
        jit(jax.grad(total, (0, 1)))(A, B)
        assert spy.log.count("pack") == 2


def test_attributes_and_statics_are_not_packed():
    def forward(ctx, x, factor):
        ctx.attribute = x
        ctx.save_for_backward(None, "text", {"x": x}, factor)
        return x * factor

    def backward(ctx, dy):
        nothing, text, tree, factor = ctx.saved_tensor()
        assert (nothing, text, tree["x"].tolist()) == (None, "text", ctx.attribute.tolist())
        return dy * factor

    spy = Spy()
    with spy.hooks:
        np.testing.assert_array_equal(jax.grad(loss(layer(forward, backward), 3.0))(X), [3, 3, 3])
    assert spy.counts() == (1, 1)


@pytest.mark.parametrize("differentiate", GRADIENTS)
def test_a_block_around_the_differentiation_reaches_layers_and_a_decorator_the_whole_function(differentiate):
    around, decorator = Spy(), Spy()
    with around.hooks:
        np.testing.assert_allclose(differentiate(tanh_sum)(X), tanh_slope(X), rtol=1e-6)
    assert around.counts() == (1, 1)

    @decorator.hooks
    def decorated(x, scale=1.0):
        """Doc."""
        return jnp.sum(jnp.sin(Tanh.apply(x)) * scale), "tag"

    def first(x):
        value, tag = decorated(x, 2.0)
        assert tag == "tag"
        return value

    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Doc.")
    np.testing.assert_allclose(differentiate(first)(X), 2 * jnp.cos(jnp.tanh(X)) * tanh_slope(X), rtol=1e-5)
    assert decorator.counts()[0] == decorator.counts()[1] >= 2


def test_effects_in_a_block_still_happen():
    seen = []
    sine = jax.jit(lambda x: (jax.debug.callback(seen.append, x), jnp.sin(x))[1])
    summed = in_block(bits(), lambda x: sine(x).sum())
    for differentiate in (jax.grad, lambda f: jax.grad(jax.jit(f))):
        np.testing.assert_allclose(differentiate(summed)(X), jnp.cos(X), rtol=1e-6)
        jax.effects_barrier()
    assert len(seen) == 2


NUMERIC = {
    "layer": Square.apply,
    "operation": lambda x: jnp.sin(x) * x,
    "layer, then operation": lambda x: Square.apply(x) / x,
    "layers": lambda x: Square.apply(Square.apply(x)) * x,
}


@pytest.mark.parametrize("f", NUMERIC.values(), ids=NUMERIC)
@pytest.mark.parametrize("order", [jax.grad, lambda f: jax.grad(jax.grad(f)), jax.hessian], ids=["1", "2", "hessian"])
def test_python_numbers_as_arguments_and_cotangents(f, order):
    seen = []
    hooks = noting(seen, lambda x: x.dtype)
    np.testing.assert_allclose(order(hooks(f))(2.0), order(f)(2.0), rtol=1e-6)
    assert set(seen) == {jnp.dtype("float32")}
    np.testing.assert_allclose(jax.vjp(hooks(f), 2.0)[1](1.0), jax.vjp(f, 2.0)[1](1.0), rtol=1e-6)


DATA = jnp.linspace(-1.0, 1.0, 20).reshape(5, 4)


def of_data(w):
    return jnp.sum(jnp.tanh(DATA @ w))


def of_numbers(w):
    return jnp.sum(jnp.tanh((jnp.arange(20.0).reshape(5, 4) * 0.1 - 1) @ w))


@pytest.mark.parametrize("decorate", [False, True])
@pytest.mark.parametrize("differentiate", GRADIENTS)
def test_constants_are_not_packed(differentiate, decorate):
    def shapes(make, f):
        seen, w = set(), jnp.ones((4, 3))
        hooks = make(lambda x: bool(seen.add(x.shape)) or True)
        got = differentiate(hooks(f) if decorate else in_block(hooks, f))(w)
        np.testing.assert_allclose(got, jax.grad(f)(w), atol=0.02, rtol=1e-5)
        return seen

    def plain(only):
        return noting([], only=only)

    # An array that eager code closes over is no constant of a trace: torch packs it, and so does a plain pair.
    of_plain = {(5, 3), (5, 4)} if differentiate is GRADIENTS[0] else {(5, 3)}
    assert shapes(plain, of_data) == of_plain
    assert shapes(lambda only: cast_saved(only=only), of_data) == {(5, 3)}
    for make in (plain, lambda only: cast_saved(only=only)):
        assert shapes(make, of_numbers) == {(5, 3)}


@pytest.mark.parametrize("kept", [lambda x: x, lambda x: (x, jnp.asarray(2.0))], ids=["itself", "with a constant"])
@pytest.mark.parametrize("f", [lambda x: 1.7 * jnp.sum(x**2), lambda x: Multiply.apply(x, jnp.full(3, 1.7)).sum()])
def test_unpack_gets_arrays_where_checkpoint_has_numbers(f, kept):
    def unpack(packed):
        x, scale = packed if isinstance(packed, tuple) else (packed, jnp.ones(()))
        return x + 0 * scale.astype(x.dtype) if x.ndim else x

    hooked = jax.checkpoint(in_block(saved_tensors_hooks(kept, unpack, differentiable=True), f))
    np.testing.assert_allclose(jax.grad(hooked)(X), jax.grad(f)(X), rtol=1e-6)


@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="backward logs are new in jax 0.12")
@EAGER_AND_JIT
def test_backward_logs_are_an_error_in_a_block_and_arrive_outside_of_it(mode):
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp_with_logs(lambda x: (jnp.sin(x), jnp.cos(x)), lambda c, dy: ((dy * c,), {"norm": jnp.sum(dy)}))
    summed = mode(lambda x: jnp.sum(sine(x)))
    with pytest.raises(TypeError, match=r"norm(?s:.*)defvjp_with_logs"):
        jax.vjp(in_block(bits(), summed), X)[1].with_logs(1.0)
    _, pullback = jax.vjp(lambda x: summed(x) + in_block(bits(), tanh_sum)(x), X)
    np.testing.assert_allclose(pullback.with_logs(1.0)[1]["norm"], 3.0)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="saveable_args are new in jax 0.12")
def test_arguments_that_may_not_be_saved():
    for hooks in (bits(), cast_saved()):
        _, pullback = jax.vjp(hooks(jnp.multiply), A, B, saveable_args=(False, True))
        assert not isinstance(pullback.args_res[0], jax.Array)
        pullback.args_res[0] = A
        np.testing.assert_allclose(pullback(B)[1], A * B, rtol=1e-6)


@EAGER_AND_JIT
@pytest.mark.parametrize(
    "form", [lambda f: cast_saved()(f), lambda f: in_block(bits(), jax.jit(f))], ids=["plan", "block"]
)
def test_an_output_without_a_cotangent(form, mode):
    missing = []

    def backward(ctx, *cotangents):
        missing.append([c is None for c in cotangents])
        return cotangents[0]

    forward = lambda ctx, x: ctx.set_materialize_grads(False) or (x * 1.0, jnp.cos(x))  # noqa: E731
    split = layer(forward, backward).apply

    def loss_and_more(x):
        a, b = split(x)
        return jnp.sum(a**2), {"the derivative is infinite": jnp.sqrt(jax.nn.relu(b * 0.0)), "other": b}

    gradient, _ = mode(jax.grad(form(loss_and_more), has_aux=True))(X)
    np.testing.assert_allclose(gradient, 2 * X, rtol=1e-2)
    assert missing[-1] == [False, True]


# -- when hooks run, and how often ----------------------------------------------------------------


@IDLE
def test_nothing_happens_without_differentiation():
    spy = Spy()
    f = in_block(spy.hooks, lambda a, b: Multiply.apply(a, b) * a)
    for run in (f, jax.jit(f), jax.jit(jax.vmap(f))):
        np.testing.assert_allclose(run(A, B), A * B * A, rtol=1e-6)
    assert spy.log == []


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_unpack_waits_for_backward_to_ask_and_asking_twice_unpacks_once(asked, forward_mode):
    def asks(ctx, dy):
        seen = [ctx.saved_tensor()[0] for _ in range(asked)]
        assert all(x is seen[0] for x in seen)
        return dy, dy

    apply = layer(base=Multiply, backward=asks, forward_mode=forward_mode).apply
    spy = Spy()
    with spy.hooks:
        np.testing.assert_array_equal(jax.grad(lambda x: apply(x, x).sum())(X), [2, 2, 2])
    assert spy.counts() == (1, min(asked, 1))  # one tensor in two places


@pytest.mark.parametrize("forward_mode", [False, True])
def test_an_output_that_a_layer_and_the_next_operation_keep_is_packed_once(forward_mode, monkeypatch):
    monkeypatch.setattr(Tanh, "forward_mode", forward_mode)
    for jit in (lambda f: f, jax.jit):
        spy = Spy()
        run = jit(jax.grad(spy.hooks(lambda x: (Tanh.apply(x) * (2 * x)).sum())))
        np.testing.assert_allclose(run(X), 2 * jnp.tanh(X) + 2 * X * (1 - jnp.tanh(X) ** 2), rtol=1e-6)
        assert spy.counts()[0] == 2  # the output, and 2 x


@IDLE
def test_the_pair_at_the_call_counts_not_the_one_at_the_differentiation():
    inner, outer = Spy(), Spy()
    f = jax.jit(in_block(inner.hooks, tanh_sum))
    with outer.hooks:
        jax.grad(f)(X)
    assert inner.counts() == (1, 1)
    assert outer.counts() == (0, 0)

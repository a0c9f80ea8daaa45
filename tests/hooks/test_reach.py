"""Which tensors saved_tensors_hooks reach, when and how often the hooks run, and that tensors come back."""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import cast_saved, recompute_saved
from tests.kit.case import ruled
from tests.kit.layers import ForwardTanh, Multiples, Multiply, Square, Tanh, bits, layer, loss
from tests.kit.modes import EAGER_AND_JIT

from .spy import AT_LEAST, GRADIENTS, IDLE, A, B, Spy, X, in_block, noting, tanh_slope, tanh_sum

product = ruled(jnp.multiply, lambda args, dy: (dy * args[1], dy * args[0]))
ForwardMultiply = layer(base=Multiply, forward_mode=True)

# A function, how many tensors a `with` block packs of it, and how many a decorator does.
PACKED = {
    "operation": (jnp.multiply, 2, 2),
    "jitted operation": (jax.jit(jnp.multiply), 2, 2),
    "layer": (Multiply.apply, 2, 2),
    "layer with forward mode": (ForwardMultiply.apply, 2, 2),
    "jitted layer": (jax.jit(Multiply.apply), 2, 2),
    "layer in a checkpoint": (jax.checkpoint(Multiply.apply), 2, 2),
    "custom_vjp": (product, 2, 2),
    "one tensor in two places": (lambda a, b: Multiply.apply(a, a) + b, 1, 1),
    "what is needed alone": (lambda a, b: a * jax.lax.stop_gradient(b), 1, 1),
    "number": (lambda a, b: a * 3.0 + b, 0, 0),
    "several that keep the same": (lambda a, b: Multiply.apply(a, b) + a * b + Multiply.apply(a, a), 5, 2),
    "an output and an operand": (lambda a, b: Tanh.apply(a) * (2 * b), 3, 2),
    "the same with forward mode": (lambda a, b: ForwardTanh.apply(a) * (2 * b), 3, 2),
}


@pytest.mark.parametrize("differentiate", GRADIENTS)
@pytest.mark.parametrize("name", PACKED)
def test_how_many_tensors_are_packed_and_unpacked(name, differentiate):
    function, by_block, by_decorator = PACKED[name]

    def total(arguments):
        return jnp.sum(function(*arguments))

    expected = jax.grad(total)((A, B))
    for hook, count in ((in_block, by_block), (lambda hooks, f: hooks(f), by_decorator)):
        spy = Spy()
        got = differentiate(hook(spy.hooks, total))((A, B))
        for slope, wanted in zip(got, expected, strict=True):
            np.testing.assert_allclose(slope, wanted, rtol=1e-6)
        assert spy.counts() == (count, count)


@pytest.mark.parametrize("operation", [jnp.multiply, Multiply.apply], ids=["operation", "layer"])
def test_numpy_arrays_stay_on_the_host(operation):
    # The first example of Paddle's document, and its second.
    def pack(x):
        assert isinstance(x, jax.Array)
        assert not isinstance(x, jax.core.Tracer)
        return np.asarray(x)

    def unpack(x):
        assert type(x) is np.ndarray
        return jnp.asarray(x)

    hooked = in_block(saved_tensors_hooks(pack, unpack), lambda a: operation(a, B).sum())
    np.testing.assert_allclose(jax.grad(hooked)(A), B)


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
def test_a_block_around_the_differentiation_reaches_layers(differentiate):
    spy = Spy()
    with spy.hooks:
        np.testing.assert_allclose(
            differentiate(lambda x: tanh_sum(jnp.sin(x)))(X), tanh_slope(jnp.sin(X)) * jnp.cos(X), rtol=1e-6
        )
    assert spy.counts() == (1, 1)


@pytest.mark.parametrize("hooks", [bits(), recompute_saved(limit="1 KiB")], ids=repr)
def test_a_decorated_function_is_called_as_it_was(hooks):
    @hooks
    def decorated(params, name, *, scale=1.0):
        assert name == "text"
        return jnp.sum(jnp.sin(params["x"]) * scale), {"name": name}

    gradient, aux = jax.grad(decorated, has_aux=True)({"x": X, "static": None}, "text", scale=2.0)
    np.testing.assert_allclose(gradient["x"], 2 * jnp.cos(X), rtol=1e-6)
    assert aux == decorated({"x": X}, "text")[1] == {"name": "text"}


@EAGER_AND_JIT
@pytest.mark.parametrize("hook", [in_block, lambda hooks, f: hooks(f)], ids=["block", "decorator"])
def test_effects_happen_once(hook, mode):
    seen = []

    def loss(x):
        jax.debug.callback(seen.append, x[0])
        return jnp.sum(jnp.sin(x))

    np.testing.assert_allclose(mode(jax.grad(hook(bits(), mode(loss))))(X), jnp.cos(X), rtol=1e-6)
    jax.effects_barrier()
    assert len(seen) == 1


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

    forward = lambda ctx, x: ctx.set_materialize_grads(False) or (x * 1.0, jnp.cos(x))
    split = layer(forward, backward).apply

    def loss_and_more(x):
        a, b = split(x)
        return jnp.sum(a**2), {"the derivative is infinite": jnp.sqrt(jax.nn.relu(b * 0.0)), "other": b}

    gradient, _ = mode(jax.grad(form(loss_and_more), has_aux=True))(X)
    np.testing.assert_allclose(gradient, 2 * X, rtol=1e-2)
    assert missing[-1] == [False, True]


@EAGER_AND_JIT
@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize(
    "pair", [recompute_saved(), recompute_saved(limit=1e9), recompute_saved(limit=0), cast_saved()]
)
@AT_LEAST
def test_a_layer_that_reads_more_if_a_cotangent_is_missing(pair, used, mode):
    f = pair(lambda x: Multiples.apply(jnp.cumsum(x)))
    gradient = mode(jax.grad(lambda x: jnp.sum(f(x)[used])))(X)
    np.testing.assert_allclose(gradient, (2 + used) * jnp.arange(X.size, 0, -1), rtol=1e-6)


def test_what_backward_cannot_read_is_not_kept_for_several_outputs():
    f = recompute_saved()(lambda x: (y := Multiply.apply(jnp.cumsum(x), X), y + 1))
    _, pullback = jax.vjp(f, X)
    assert not any(np.array_equal(kept, jnp.cumsum(X)) for kept in jax.tree.leaves(pullback))
    np.testing.assert_allclose(pullback((jnp.ones(3), jnp.zeros(3)))[0], jnp.cumsum(X[::-1])[::-1], rtol=1e-6)


# -- when hooks run, and how often ----------------------------------------------------------------


@IDLE
def test_nothing_happens_without_differentiation():
    spy = Spy()
    f = in_block(spy.hooks, lambda a, b: Multiply.apply(a, b) * a)
    for run in (f, jax.jit(f), jax.jit(jax.vmap(f))):
        np.testing.assert_allclose(run(A, B), A * B * A, rtol=1e-6)
    assert spy.log == []


@pytest.mark.parametrize("asked", [0, 1, 2])
def test_unpack_waits_for_backward_to_ask_and_asking_twice_unpacks_once(asked):
    def asks(ctx, dy):
        seen = [ctx.saved_tensor()[0] for _ in range(asked)]
        assert all(x is seen[0] for x in seen)
        return dy, dy

    spy, asking = Spy(), layer(base=ForwardMultiply, backward=asks)
    with spy.hooks:
        np.testing.assert_array_equal(jax.grad(lambda x: asking.apply(x, x).sum())(X), [2, 2, 2])
    assert spy.counts() == (1, min(asked, 1))


@IDLE
def test_the_pair_at_the_call_counts_not_the_one_at_the_differentiation():
    inner, outer = Spy(), Spy()
    f = jax.jit(in_block(inner.hooks, tanh_sum))
    with outer.hooks:
        jax.grad(f)(X)
    assert inner.counts() == (1, 1)
    assert outer.counts() == (0, 0)


def test_eager_code_holds_no_intermediates():
    def peak(hooked):
        held = []
        note = lambda x: held.append(sum(a.nbytes for a in jax.live_arrays())) or x
        hooks = saved_tensors_hooks(lambda x: note(x).astype(jnp.bfloat16), lambda x: note(x).astype(jnp.float32))
        jax.grad(hooked(hooks, lambda x: jnp.sum(functools.reduce(lambda x, _: jnp.sin(x), range(20), x))))(A)
        return max(held) - held[0]

    gc.collect()
    assert peak(lambda hooks, f: hooks(f)) <= peak(in_block) + A.nbytes

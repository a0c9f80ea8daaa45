"""What follows from a kept tensor is computed again, and not packed; in a loop, a constant is packed once."""

from __future__ import annotations

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import cast_saved, quantize_saved, save_on_cpu
from tests.kit.layers import Matmul, Multiply, Tanh, bits

from .spy import Held, bytes_held, in_block, noting, temporary_bytes

X = jax.random.normal(jax.random.key(0), (64, 128)) + 0.3
WEIGHTS = jnp.arange(128.0)


def normalize(x):
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + 1e-6)


# The function, and how many of its tensors have to be kept at full size.
FUNCTIONS = {
    "square": (lambda x: jnp.sum((x * 3.0) ** 2), 1),
    "cube": (lambda x: jnp.sum(x**3), 1),
    "tanh": (lambda x: jnp.sum(jnp.tanh(x)), 1),
    "gelu": (lambda x: jnp.sum(jax.nn.gelu(x)), 1),  # in eager mode also a tanh, whose operand is gone
    "normalize": (lambda x: jnp.sum(jnp.square(normalize(x))), 1),
    "one input, three uses": (lambda x: jnp.sum(jnp.sin(normalize(x)) + normalize(x) ** 2 * 0.5), None),
    "masked": (lambda x: jnp.sum(jnp.where(jnp.tri(64, 128, dtype=bool), x, -1.0) * WEIGHTS), 0),
    "one hot": (lambda x: jnp.sum(x * jax.nn.one_hot(jnp.arange(64) % 7, 128)), None),  # a constant, as without hooks
    "chosen by a mask": (lambda x: jnp.sum(jnp.sin(x[0][jnp.flatnonzero(x[0] > 0, size=2)])), None),
    "layer of what follows": (lambda x: jnp.sum(Multiply.apply(normalize(x), jnp.ones(128))), None),
    "softmax": (lambda x: jnp.sum(jax.nn.softmax(x) ** 2 * WEIGHTS), None),
    "scan": (lambda x: jnp.sum(jax.lax.scan(lambda c, k: (jnp.tanh(c) * k, None), x, WEIGHTS[1:4])[0] ** 2), None),
    "of two": (lambda x: jnp.sum(jnp.tanh(x).T @ jnp.sin(x)), None),
}


def exact():
    return noting([], differentiable=True)


def largest(x):
    return max(1.0, float(jnp.abs(x).max()))


def derivatives(hooked):
    """The first derivative, and the second in reverse mode and forward over reverse."""
    first = jax.grad(hooked)
    return first, jax.grad(lambda x: jnp.sum(jnp.sin(first(x)))), lambda x: jax.jvp(first, (x,), (x,))[1]


@functools.cache
def without_hooks(function):
    return jax.jit(lambda x: [derivative(x) for derivative in derivatives(function)])(X)


@pytest.mark.parametrize("mode", [pytest.param(lambda f: f, marks=pytest.mark.slow, id="eager"), jax.jit])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_two_orders_are_those_without_hooks(name, mode):
    function, _ = FUNCTIONS[name]
    for hooks in (exact(), save_on_cpu()):
        for derivative, expected in zip(derivatives(hooks(function)), without_hooks(function), strict=True):
            np.testing.assert_allclose(mode(derivative)(X), expected, rtol=2e-4, atol=2e-5 * largest(expected))


@pytest.mark.parametrize("name", [name for name, (_, count) in FUNCTIONS.items() if count is not None])
def test_only_what_does_not_follow_is_kept(name):
    function, count = FUNCTIONS[name]
    hooked = quantize_saved(8, arguments=True)(function)
    eager = bytes_held(jax.vjp(hooked, X)[1])
    compiled = bytes_held(jax.jit(lambda x: jax.vjp(hooked, x)[1])(X))
    few = 5 * 64 * 8 / X.nbytes + 0.27 * (count == 0)  # statistics of rows, numbers; masks and labels
    assert count * 0.265 <= compiled / X.nbytes <= count * 0.266 + few
    assert eager <= compiled + 0.27 * X.nbytes * (2 if name == "gelu" else 1)


def test_a_pair_with_a_relative_error_keeps_differences():
    # The difference 1 - x is near to 0, and would be 0 if it were computed from x, which is kept, after a cast.
    x = jnp.full((8, 64), 1 - 1e-4)

    def loss(x):
        return jnp.sum(x * x + jnp.log(1 - x))

    np.testing.assert_allclose(jax.grad(cast_saved(arguments=True)(loss))(x), jax.grad(loss)(x), rtol=5e-3)


@pytest.mark.parametrize("transform", [jax.vmap, jax.checkpoint], ids=["vmap", "remat"])
def test_under_other_transforms(transform):
    def slope(hooked):
        loss = hooked(lambda x: jnp.sum(jax.nn.gelu(normalize(x)) * WEIGHTS))
        return jax.jit(jax.grad(lambda x: jnp.sum(transform(loss)(x))))(X.reshape(2, 32, 128))

    expected = slope(lambda f: f)
    for hooks in (save_on_cpu(), quantize_saved(8)):
        np.testing.assert_allclose(slope(hooks), expected, atol=0.02 * float(jnp.abs(expected).max()))


# -- in a scan ------------------------------------------------------------------------------------


def scanned(x, ws):
    def layer(x, w):
        h = normalize(x)
        return x + jax.nn.gelu(h @ w) + Tanh.apply(h @ w.T), None

    return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)


WS = jax.random.normal(jax.random.key(1), (6, 128, 128)) / 11


# XLA of jax 0.10 removes optimization barriers on CPU, so that the memory is not less there.
@pytest.mark.parametrize(
    ("hooks", "share", "atol"), [(save_on_cpu(), 1.0, 1e-5), (cast_saved(), 0.55, 0.02), (quantize_saved(8), 0.4, 0.02)]
)
def test_memory_of_a_compiled_scan(hooks, share, atol):
    for differentiated in (1, (0, 1)):
        expected, found = (jax.jit(jax.grad(f, differentiated))(X, WS) for f in (scanned, hooks(scanned)))
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, atol=atol * float(jnp.abs(b).max()), rtol=1e-5)
    if jax.__version_info__ >= (0, 11):
        packed, plain = (temporary_bytes(f, jnp.ones((2048, 128)), WS) for f in (hooks(scanned), scanned))
        assert packed < share * plain


# -- what is held ---------------------------------------------------------------------------------


@pytest.mark.parametrize("differentiate", [jax.vjp, lambda f, *args: jax.grad(f)(*args)], ids=["vjp", "grad"])
@pytest.mark.parametrize("hooks", [cast_saved(), quantize_saved(8), exact()], ids=lambda hooks: type(hooks).__name__)
def test_arrays_go_with_the_vjp_function_and_do_not_wait_for_the_garbage_collector(differentiate, hooks):
    def loss(x, w):
        return jnp.sum(jax.nn.gelu(normalize(x) @ w) + Tanh.apply(x @ w))

    def held():
        return sum(x.nbytes for x in jax.live_arrays())

    f, w = hooks(loss), WS[0]
    differentiate(f, X, w)
    gc.collect()
    gc.disable()
    try:
        before = held()
        for _ in range(3):
            differentiate(f, X, w)
        assert held() == before
    finally:
        gc.enable()


def test_objects_of_the_host_go_with_the_vjp_function_though_an_output_follows_from_them():
    held = weakref.WeakSet()

    def pack(x):
        held.add(packed := Held(x))
        return packed

    f = saved_tensors_hooks(pack, lambda packed: jnp.asarray(packed.x))(lambda x: 2.0 * jnp.square(x))
    y, pullback = jax.vjp(f, X)
    assert held
    del pullback
    assert not held
    np.testing.assert_allclose(y, 2 * X**2, rtol=1e-6)


# -- a value that stays the same in a loop is packed once, and not stacked -------------------------


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
    "hooks", [bits(), save_on_cpu(), cast_saved(), quantize_saved()], ids=lambda hooks: type(hooks).__name__
)
@pytest.mark.parametrize("step", [layers, operations])
def test_a_weight_that_all_steps_share_is_not_stacked(step, hooks):
    w, x = jnp.eye(SIZE) * 0.9, jnp.ones((2, SIZE))

    short, long = (temporary_bytes(hooks(recurrent(step, length)), w, x) for length in (8, 16))
    assert long - short <= 8 * 3 * x.nbytes  # stacked, eight more would be 8 * w.nbytes / 4 or more
    slopes = (jax.jit(jax.grad(f(recurrent(step, 8)), (0, 1)))(w, x) for f in (hooks, lambda f: f))
    for got, expected in zip(*slopes, strict=True):
        np.testing.assert_allclose(got, expected, rtol=0.05, atol=0.05)


def test_a_block_in_the_body_of_a_scan_keeps_as_little_as_one_around_it():
    def step(h, w):  # several operations keep the same tensor
        return jnp.tanh(h @ w) * jnp.sin(h) + jax.nn.gelu(h)

    hooks, w, x = cast_saved(arguments=True), jnp.eye(SIZE) * 0.9, jnp.ones((SIZE, SIZE))
    around, within = hooks(recurrent(step, 16)), recurrent(in_block(hooks, step), 16)
    assert temporary_bytes(within, w, x) <= temporary_bytes(around, w, x) * 1.02

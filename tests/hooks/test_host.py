"""Hooks with host=True: NumPy at run time, wherever the program runs, and how long what they keep lives."""

import contextlib
import gc
import logging
import os
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from pylayer_jax.packers import save_on_disk
from tests.kit.layers import Tanh, layer
from tests.kit.modes import EAGER_AND_JIT

from .spy import GRADIENTS, IDLE, TRANSFORMS, Held, in_block, tanh_slope, tanh_sum, without_hooks

X = jnp.array([[0.2, -0.4, 0.9], [0.5, 0.1, -0.7]])


class Host:
    """A pair that keeps objects, and counts those that are alive."""

    def __init__(self):
        self.alive, self.types = alive, types = weakref.WeakSet(), set()

        def pack(x):
            types.add(type(x))
            alive.add(held := Held(x))
            return held

        self.pack, self.unpack = pack, lambda held: held.x
        self.hooks = saved_tensors_hooks(self.pack, self.unpack, host=True)

    def __len__(self):
        jax.effects_barrier()
        gc.collect()
        return len(self.alive)


def plain(x):
    return jnp.sum(Tanh.apply(x) * jnp.sin(x))


def scanned(f):
    return lambda x: jax.lax.scan(lambda c, _: (c * 0.9 + 0.1 * f(c), None), x, None, length=5)[0].sum()


# A block around the differentiation reaches the layer alone; one inside, the operations too.
PLACES = [(name, place) for place in ("around", "block") for name in ("grad", "jit_of_grad", "vmap_of_grad")]
PLACES += [("grad", "decorator"), ("grad_of_grad", "around"), ("jit_of_grad_of_grad", "block")]
PLACES += [(name, "block") for name in ("grad_of_jit", "eager_vmap", "grad_of_vmap", "jit_of_scan", "scan", "cond")]
PLACES += [(name, "block") for name in ("shard_map", "named_sharding", "ahead_of_time")]
PLACES += [pytest.param("eager_shard_map", "around", marks=pytest.mark.slow)]
expected_of_plain = without_hooks(plain, (X,))


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_gradients(name, place):
    host = Host()
    function = {"around": plain, "block": in_block(host.hooks, plain), "decorator": host.hooks(plain)}[place]
    for _ in range(2):
        with host.hooks if place == "around" else contextlib.nullcontext():
            (got,) = TRANSFORMS[name](function, (X,))
        np.testing.assert_allclose(got, expected_of_plain(name)[0], rtol=1e-5, atol=1e-6)
    assert host.types == {np.ndarray}


def test_a_tensor_that_does_not_change_in_a_loop_may_be_packed_once_and_unpacked_often():
    def slopes(step):
        return jax.grad(lambda w, x: jax.lax.scan(lambda c, _: (step(c, w), None), x, length=6)[0].sum(), (0, 1))

    hooked = slopes(in_block(Host().hooks, lambda c, w: Tanh.apply(c * w)))
    expected = jax.jit(slopes(lambda c, w: jnp.tanh(c * w)))(X + 1, X)
    for run in (hooked, jax.jit(hooked)):
        for _ in range(2):
            for got, wanted in zip(run(X + 1, X), expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-5)


Scaled = layer(
    lambda x, scale: x * scale.astype(x.dtype), lambda x, scale, dy: (dy * scale.astype(dy.dtype), None), plain=True
)


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint4", "float4_e2m1fn"])
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
def test_numbers_of_less_than_a_byte(dtype, transform, tmp_path):
    scale = (jnp.arange(2 * 515).reshape(2, 515) % 3 % 2).astype(dtype)
    for hooks in (Host().hooks, save_on_disk(tmp_path, arguments=True)):
        got = transform(jax.grad(hooks(lambda x, scale: Scaled.apply(x, scale).sum())))(jnp.ones(scale.shape), scale)
        np.testing.assert_array_equal(got, jnp.broadcast_to(scale.astype(got.dtype), got.shape))


# What is made of the function, and how many objects are held after one step.
STEPS = {
    "jit of grad": (lambda f: jax.jit(jax.grad(f)), 3),
    "grad of jit": (lambda f: jax.grad(jax.jit(f)), 3),
    "jit of grad of scan": (lambda f: jax.jit(jax.grad(scanned(f))), 15),
    "jit of scan of grad": (
        lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (c - jax.grad(f)(c), None), x, None, length=5)[0]),
        3,
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_training_loop_does_not_grow(name):
    host, (transform, count) = Host(), STEPS[name]
    step = transform(host.hooks(plain))
    for _ in range(20):
        x = step(X)
    assert len(host) == count
    np.testing.assert_allclose(x, transform(plain)(X), rtol=1e-5, atol=1e-6)
    host.hooks.close()
    assert len(host) == 0


def test_what_was_used_goes_with_the_hooks_object_and_what_may_be_needed_stays():
    host = Host()
    with host.hooks:
        value, pullback = jax.vjp(jax.jit(plain), X)
    assert len(host) == 1  # the layer's; the block is not around the operations of a jitted function that it calls
    host.hooks = None
    assert len(host) == 1
    np.testing.assert_allclose(pullback(value)[0], jax.grad(plain)(X) * value, rtol=1e-5)


def test_a_backward_after_close_fails_and_says_why():
    host = Host()
    value, pullback = jax.vjp(jax.jit(host.hooks(plain)), X)
    assert len(host) > 0
    host.hooks.close()
    assert len(host) == 0
    with pytest.raises(Exception, match="no longer held"):
        jax.block_until_ready(pullback(value))


def test_more_tensors_than_ten_thousand_wait_for_one_backward():
    def loss(tanh):
        return lambda x: jax.lax.scan(lambda c, _: (tanh(c), None), x, None, length=10_050)[0]

    host, step = Host(), jax.jit(jax.grad(loss(Tanh.apply)))
    with host.hooks:
        got = step(0.3)
    np.testing.assert_allclose(got, jax.grad(loss(jnp.tanh))(0.3), rtol=1e-4)
    assert len(host) == 10_050


@pytest.fixture
def nothing_is_logged():
    # pytest would keep the exceptions that JAX logs, and with them what they were raised for.
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("hook", ["pack", "unpack"])
def test_a_step_that_raised_in_a_hook_leaks_nothing(hook, nothing_is_logged):
    host, calls = Host(), []
    works = getattr(host, hook)

    def fails_at_times(x):
        calls.append(None)
        if len(calls) % 4 == 3:
            raise OSError("disk full")
        return works(x)

    setattr(host, hook, fails_at_times)
    host.hooks = saved_tensors_hooks(host.pack, host.unpack, host=True)
    step = jax.jit(jax.grad(scanned(in_block(host.hooks, tanh_sum))))
    messages, sizes = [], []
    for _ in range(40):
        try:
            step(X).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            messages.append(str(error))
        sizes.append(len(host))
    assert len(messages) > 10
    assert all(re.search(rf"(?s){hook}_hook.*Tanh.*disk full", m) for m in messages)
    assert max(sizes) <= 10


@EAGER_AND_JIT
def test_branches_of_a_batch(mode):
    # The gradient of a branch that an example did not take gets zeros as tokens.
    def loss(tanh):
        return lambda x: jax.lax.cond(x[0] > 0.3, lambda x: tanh(x).sum(), lambda x: (x**2).sum(), x)

    ours = mode(jax.vmap(jax.grad(Host().hooks(loss(Tanh.apply)))))(X)
    np.testing.assert_allclose(ours, jax.vmap(jax.grad(loss(jnp.tanh)))(X), rtol=1e-5)


def test_several_forward_passes_may_wait_for_their_backward_and_each_may_run_twice():
    f = jax.jit(Host().hooks(tanh_sum))
    waiting = [(x, jax.vjp(f, x)[1]) for x in (X, X + 1, X - 1)]
    for x, pullback in waiting * 2:
        np.testing.assert_allclose(pullback(1.0)[0], tanh_slope(x), rtol=1e-5)


@pytest.mark.clears_caches
def test_what_a_collected_program_held_is_dropped():
    host = Host()
    step = jax.jit(jax.grad(host.hooks(plain)))
    step(X).block_until_ready()
    assert len(host) > 0
    del step
    jax.clear_caches()
    assert len(host) == 0


def test_checkpoint_inside_is_refused_and_around_works():
    host = Host()
    for differentiate in GRADIENTS[:2]:
        with pytest.raises(NotImplementedError, match=r"jax\.checkpoint"):
            differentiate(jax.checkpoint(host.hooks(plain)))(X)
        np.testing.assert_allclose(differentiate(host.hooks(jax.checkpoint(plain)))(X), jax.grad(plain)(X), rtol=1e-5)


@pytest.mark.parametrize(
    ("unpack", "got"), [(lambda held: held.x[:1], r"\(1, 3\)"), (lambda held: held.x.astype(np.float64), "float64")]
)
def test_errors_come_out_of_a_compiled_program(unpack, got):
    hooks = saved_tensors_hooks(Held, unpack, host=True)
    for differentiate in GRADIENTS[:2]:
        with pytest.raises(Exception, match=rf"(?s)unpack_hook.*{got}.*Tanh"):
            jax.block_until_ready(differentiate(hooks(tanh_sum))(X))


@IDLE
def test_a_pair_on_disk_that_is_collected_leaves_no_folder(tmp_path):
    with save_on_disk(tmp_path):
        assert len(os.listdir(tmp_path)) == 1
    gc.collect()
    assert os.listdir(tmp_path) == []

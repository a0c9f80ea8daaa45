"""saved_tensors_hooks within one another, after exceptions, in threads, and disabled."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import disable_saved_tensors_hooks, saved_tensors_hooks
from tests.kit.layers import Multiply, Square, Tanh, bits

from .spy import A, B, Spy, X


def test_the_innermost_pair_alone_applies():
    outer, inner = Spy(), Spy()

    def loss(a, b):
        with outer.hooks:
            with inner.hooks:
                y = a * b
            with inner.hooks:
                y = Multiply.apply(y, b)
            return jnp.sum(y * a)

    jax.grad(loss, (0, 1))(A, B)
    assert inner.counts() == (3, 4)  # b is kept twice, and packed once
    assert outer.counts() == (2, 2)


STAGED = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "map": lambda f: lambda x: jax.lax.map(f, x[None])[0],
}


@pytest.mark.parametrize("stage", STAGED)
@pytest.mark.parametrize("decorate", [False, True])
@pytest.mark.parametrize("differentiate", [jax.grad, lambda f: jax.jit(jax.grad(f)), lambda f: jax.grad(jax.jit(f))])
def test_the_innermost_pair_alone_applies_within_staged_code(stage, decorate, differentiate):
    outer, inner = Spy(), Spy()

    def f(x):
        with inner.hooks:
            return jnp.sin(Tanh.apply(x))

    def block(x):
        with outer.hooks:
            return STAGED[stage](f)(x).sum()

    loss = outer.hooks(lambda x: STAGED[stage](f)(x).sum()) if decorate else block
    np.testing.assert_allclose(differentiate(loss)(X), jnp.cos(jnp.tanh(X)) * (1 - jnp.tanh(X) ** 2), rtol=1e-5)
    assert inner.log.count("unpack") == 2
    assert outer.log == []


def test_the_same_pair_may_be_entered_twice():
    spy = Spy()

    def loss(x):
        with spy.hooks, spy.hooks:
            return jnp.sum(x * x)

    jax.grad(loss)(X)
    assert spy.counts() == (1, 1)


@pytest.mark.parametrize("where", ["block", "decorated", "pack", "unpack"])
def test_the_previous_pair_is_restored_after_an_exception(where):
    spy = Spy()

    def fail(x):
        raise KeyError("mine")

    def broken(x):
        if where == "block":
            with saved_tensors_hooks(jnp.asarray, jnp.asarray):
                fail(x)
        if where == "decorated":
            saved_tensors_hooks(jnp.asarray, jnp.asarray)(fail)(x)
        pair = {"pack": (fail, jnp.asarray), "unpack": (jnp.asarray, fail)}[where]
        return jax.grad(lambda x: saved_tensors_hooks(*pair)(jnp.sin)(x).sum())(X)

    def loss(x):
        with spy.hooks:
            with pytest.raises(KeyError, match="mine"):
                broken(x)
            y = x * x
        return jnp.sum(jnp.sin(y))

    np.testing.assert_allclose(jax.grad(loss)(X), jnp.cos(X**2) * 2 * X, rtol=1e-6)
    assert spy.counts() == (1, 1)


def test_threads_do_not_see_each_others_hooks():
    spy, inside, done = Spy(), threading.Event(), threading.Event()
    results = []

    def other():
        inside.wait(60)
        results.append(jax.grad(lambda x: Tanh.apply(jnp.sin(x)).sum())(X))
        with pytest.raises(RuntimeError, match="not here"), disable_saved_tensors_hooks("not here"), spy.hooks:
            pass
        done.set()

    thread = threading.Thread(target=other)
    thread.start()

    def loss(x):
        with spy.hooks:
            inside.set()
            assert done.wait(60)
            return x.sum()

    jax.grad(loss)(X)
    thread.join()
    assert len(results) == 1
    assert spy.log == []


def test_one_hooks_object_in_many_threads():
    spy = Spy()

    def loss(x):
        with spy.hooks:
            return jnp.sum(jnp.sin(x))

    results = [None] * 8

    def run(i):
        results[i] = jax.grad(loss)(X + i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, result in enumerate(results):
        np.testing.assert_allclose(result, jnp.cos(X + i), rtol=1e-5)
    assert spy.counts() == (8, 8)


def test_disabled_hooks():
    hooks = bits()
    with disable_saved_tensors_hooks("no hooks here"), pytest.raises(RuntimeError, match=r"^no hooks here$"), hooks:
        pass
    with hooks, pytest.raises(RuntimeError, match=r"^inside$"), disable_saved_tensors_hooks("inside"):
        pass

    @disable_saved_tensors_hooks("decorated")
    def f(x):
        return hooks(jnp.sin)(x)

    for run in (f, jax.jit(f)):
        with pytest.raises(RuntimeError, match="decorated"):
            run(X)
    with hooks:  # enabled again
        pass


@pytest.mark.frameworks
def test_disabled_hooks_as_torch_has_them(framework):
    graph = framework("torch").autograd.graph
    for ours, theirs in (
        (saved_tensors_hooks, graph.saved_tensors_hooks),
        (graph.saved_tensors_hooks, saved_tensors_hooks),
    ):
        del theirs
        disable = disable_saved_tensors_hooks if ours is saved_tensors_hooks else graph.disable_saved_tensors_hooks
        pair = (lambda x: x, lambda x: x)
        with disable("outer"), disable("inner"), pytest.raises(RuntimeError, match=r"^inner$"), ours(*pair):
            pass
        with ours(*pair), pytest.raises(RuntimeError, match=r"^late$"), disable("late"):
            pass


def test_blocks_that_end_in_another_order():
    packed = []

    def block(name):
        with saved_tensors_hooks(lambda x: packed.append(name) or x, lambda x: x):
            yield
            yield

    first, second = block("first"), block("second")
    next(first), next(second)
    first.close()
    jax.grad(Square.apply)(1.0)
    assert packed == ["second"]
    second.close()
    jax.grad(Square.apply)(1.0)
    assert packed == ["second"]
    with disable_saved_tensors_hooks("none is active"):
        pass

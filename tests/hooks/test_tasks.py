"""Blocks of saved_tensors_hooks that are not left where, or in the order in which, they were entered."""

from __future__ import annotations

import asyncio
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import disable_saved_tensors_hooks, saved_tensors_hooks
from tests.kit.layers import Square, bits

from .spy import Spy, X, tanh_sum


def layer_gradient(x=1.0):
    return jax.grad(Square.apply)(x)


def assert_no_block_is_open():
    with disable_saved_tensors_hooks("a block is open"):
        pass
    spy = Spy()
    jax.grad(spy.hooks(lambda x: jnp.sum(jnp.sin(x))))(X)
    assert spy.counts() == (1, 1)


# -- asyncio --------------------------------------------------------------------------------------


def run_tasks(**tasks):
    """Runs the tasks one step after another, from one `await step()` to the next; returns their exceptions."""

    async def main():
        made = [asyncio.create_task(function(), name=name) for name, function in tasks.items()]
        return await asyncio.gather(*made, return_exceptions=True)

    return asyncio.run(main())


def step():
    return asyncio.sleep(0)


async def waits_in_a_block():
    with bits():
        await step()
        await step()


USES = {
    "layer": lambda x: layer_gradient(),
    "layer within jit": lambda x: jax.jit(jax.grad(tanh_sum))(X),
    "plain operation": jnp.sin,
    "disabling": lambda x: disable_saved_tensors_hooks("none").__enter__(),
}


@pytest.mark.parametrize("use", USES)
def test_a_block_of_another_task_is_an_error(use):
    def loss(x):
        async def uses():
            USES[use](x)

        first, second = run_tasks(writer=waits_in_a_block, reader=uses)
        assert first is None
        assert isinstance(second, RuntimeError)
        for text in ("the asyncio task 'writer' entered", "the asyncio task 'reader' runs", "before each await"):
            assert text in str(second)
        return jnp.sum(x * x)

    np.testing.assert_allclose(jax.grad(loss)(X), 2 * X, rtol=1e-6)
    assert_no_block_is_open()


def test_blocks_of_two_tasks_that_end_in_another_order():
    spies = Spy(), Spy()

    async def first():
        with spies[0].hooks:
            layer_gradient()
            await step()

    async def second():
        with spies[1].hooks:
            layer_gradient()
            await step()
            layer_gradient(2.0)

    error, nothing = run_tasks(first=first, second=second)
    assert isinstance(error, RuntimeError)
    assert "'second' entered" in str(error)
    assert nothing is None
    assert [spy.counts() for spy in spies] == [(1, 1), (2, 2)]
    assert_no_block_is_open()


def test_a_block_of_its_own_while_another_task_waits_in_one():
    spy = Spy()

    async def uses():
        with spy.hooks:
            layer_gradient()
        await step()
        with spy.hooks:
            layer_gradient()

    assert run_tasks(writer=waits_in_a_block, first=uses, second=uses) == [None, None, None]
    assert spy.counts() == (4, 4)
    assert_no_block_is_open()


def test_a_block_around_tasks_is_theirs():
    spy = Spy()

    async def task():
        await step()
        layer_gradient()

    with spy.hooks:
        assert run_tasks(first=task, second=task) == [None, None]

    async def parent():
        with spy.hooks:
            await asyncio.gather(task(), asyncio.create_task(task()))
            layer_gradient()

    assert run_tasks(parent=parent) == [None]
    assert spy.counts() == (5, 5)
    assert_no_block_is_open()


# -- generators and threads -----------------------------------------------------------------------


def holding(hooks):
    with hooks:
        yield


def test_generators_that_end_in_another_order():
    first, second = Spy(), Spy()
    held = [holding(spy.hooks) for spy in (first, second)]
    for each in held:
        next(each)
    held[0].close()
    layer_gradient()
    held[1].close()
    layer_gradient()
    assert (first.counts(), second.counts()) == ((0, 0), (1, 1))
    assert_no_block_is_open()


def test_a_generator_that_outlives_its_trace():
    spy = Spy()
    held = holding(spy.hooks)
    jax.grad(lambda x: (next(held), jnp.sum(x * x))[1])(X)
    assert spy.counts() == (1, 1)
    layer_gradient()
    held.close()
    layer_gradient()
    assert spy.counts() == (2, 2)
    assert_no_block_is_open()


def test_a_generator_that_is_closed_within_a_trace_of_its_own():
    spy = Spy()
    held = holding(spy.hooks)

    def loss(x):
        next(held)
        y = jax.jit(lambda y: (held.close(), y * y)[1])(jnp.sin(x))
        return jnp.sum(jnp.cos(y))

    np.testing.assert_allclose(jax.grad(loss)(X), -jnp.sin(jnp.sin(X) ** 2) * jnp.sin(2 * X), rtol=1e-5)
    assert spy.counts() == (1, 1)
    assert_no_block_is_open()


def close_in_thread(held):
    thread = threading.Thread(target=held.close, name="other")
    thread.start()
    thread.join()


@pytest.mark.parametrize("around", [bits, lambda: disable_saved_tensors_hooks("none")], ids=["block", "disabled"])
def test_a_generator_that_is_closed_in_another_thread(around):
    for use in (assert_no_block_is_open, layer_gradient):
        held = holding(around())
        next(held)
        close_in_thread(held)
        use()
        assert_no_block_is_open()


def test_staged_code_after_a_block_was_left_in_another_thread():
    spy = Spy()
    held = holding(spy.hooks)
    step = jax.jit(jax.grad(tanh_sum))
    next(held)
    close_in_thread(held)
    with pytest.raises(RuntimeError, match=r"was left in the thread 'other'.*Leave a block where it was entered"):
        step(X)
    step(X)
    assert spy.counts() == (0, 0)
    with spy.hooks:
        step(X)
    assert spy.counts() == (1, 1)


def test_exit_without_enter():
    for hooks in (bits(), saved_tensors_hooks(lambda x: x, lambda x: x)):
        with pytest.raises(RuntimeError, match="saved_tensors_hooks: __exit__ without __enter__"):
            hooks.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="without __enter__"), hooks:
        hooks.__exit__(None, None, None)
    assert_no_block_is_open()

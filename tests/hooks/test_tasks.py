"""Blocks of saved_tensors_hooks in tasks of asyncio."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import disable_saved_tensors_hooks
from tests.kit.layers import Square, bits

from .spy import IDLE, Spy, X, tanh_sum


def layer_gradient():
    return jax.grad(Square.apply)(1.0)


def assert_no_block_is_open():
    with disable_saved_tensors_hooks("a block is open"):
        pass
    spy = Spy()
    jax.grad(spy.hooks(lambda x: jnp.sum(jnp.sin(x))))(X)
    assert spy.counts() == (1, 1)


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
        assert "asyncio task" in str(second)
        return jnp.sum(x * x)

    np.testing.assert_allclose(jax.grad(loss)(X), 2 * X, rtol=1e-6)
    assert_no_block_is_open()


@IDLE
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

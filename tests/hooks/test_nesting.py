"""saved_tensors_hooks within one another, after exceptions, in threads, in tasks of asyncio, and disabled."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec, SingleDeviceSharding

from pylayer_jax import disable_saved_tensors_hooks, saved_tensors_hooks, saved_tensors_report
from pylayer_jax.packers import cast_saved, recompute_saved
from tests.kit.layers import Multiply, Square, bits, layer
from tests.kit.modes import STAGED
from tests.kit.oracle import Mine, fail

from .spy import GRADIENTS, IDLE, A, B, Spy, X, in_block


def test_the_innermost_pair_alone_applies():
    outer, inner = Spy(), Spy()

    def loss(a, b):
        with outer.hooks:
            with inner.hooks:
                y = Multiply.apply(a * b, b)
            return jnp.sum(y * a)

    jax.grad(loss, (0, 1))(A, B)
    assert inner.counts() == (4, 4)  # a, b; and a * b, b
    assert outer.counts() == (2, 2)


def test_a_block_packs_what_a_decorated_function_in_it_computed():
    def total_bytes(f):
        loss = in_block(cast_saved(), lambda x, w: jnp.sum(f(x) @ w))
        return saved_tensors_report(loss, A, B.T).total_bytes

    assert total_bytes(recompute_saved()(jnp.tanh)) == total_bytes(jnp.tanh)


def adding(number):
    """A pair whose unpacked tensor tells which pairs have packed it."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    return saved_tensors_hooks(lambda x: x + number, lambda x: x, only=is_float)


Saved = layer(lambda x: x * x / 2, lambda x, dy: dy * x, plain=True)  # its gradient is the saved tensor
SAVED = {
    "layer": Saved.apply,
    "forward mode": layer(base=Saved, forward_mode=True).apply,
    "operation": lambda x: x * x / 2,
}


def in_shard_map(f):
    mesh = jax.make_mesh((1,), ("device",), axis_types=(AxisType.Auto,))
    return lambda x: jax.shard_map(f, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(x)


BETWEEN = {
    "nothing": lambda f: f,
    **{name: STAGED[name] for name in ("jit", "scan", "cond", "checkpoint")},
    "jit with shardings": lambda f: jax.jit(f, out_shardings=SingleDeviceSharding(jax.devices()[0])),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
    "shard_map": in_shard_map,
}
PLACES = [("block", between) for between in BETWEEN]
# Around a checkpoint, a decorator packs what that keeps, and a pair inside packs what is computed again.
PLACES += [("decorator", between) for between in BETWEEN if between != "checkpoint"]


@pytest.mark.parametrize("inner", [0.0, 10.0, 100.0], ids=["none", "the same", "another"])
@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize(("form", "between"), PLACES)
def test_a_tensor_is_packed_once_by_the_innermost_pair(form, between, saved, inner):
    hook = in_block if form == "block" else lambda hooks, f: hooks(f)
    f = BETWEEN[between](hook(adding(inner), SAVED[saved]) if inner else SAVED[saved])
    for differentiate in GRADIENTS:
        np.testing.assert_allclose(differentiate(hook(adding(10.0), f))(jnp.ones(())), 1 + (inner or 10))


def test_a_plan_leaves_what_a_scan_packs_once():
    step = adding(10.0)(jnp.multiply)
    scan = adding(10.0)(lambda x, w: jax.lax.scan(lambda c, _: (step(c, w), None), x, length=2)[0])
    for differentiate in (jax.grad, lambda *args: jax.jit(jax.grad(*args))):
        np.testing.assert_allclose(differentiate(scan, (0, 1))(jnp.ones(()), jnp.ones(())), (121, 121 + 11))


BROKEN = {
    "block": in_block(bits(), fail),
    "decorated": bits()(fail),
    "pack": jax.grad(saved_tensors_hooks(fail, jnp.asarray)(lambda x: jnp.sin(x).sum())),
    "unpack": jax.grad(saved_tensors_hooks(jnp.asarray, fail)(lambda x: jnp.sin(x).sum())),
}


@pytest.mark.parametrize("where", BROKEN)
def test_the_previous_pair_is_restored_after_an_exception(where):
    spy = Spy()

    def loss(x):
        with spy.hooks:
            with pytest.raises(Mine, match="on purpose"):
                BROKEN[where](X if where in ("pack", "unpack") else x)
            y = x * x
        return jnp.sum(jnp.sin(y))

    np.testing.assert_allclose(jax.grad(loss)(X), jnp.cos(X**2) * 2 * X, rtol=1e-6)
    assert spy.counts() == (1, 1)


@IDLE
def test_disabled_hooks():
    hooks = bits()
    with disable_saved_tensors_hooks("outer"):
        with disable_saved_tensors_hooks("inner"), pytest.raises(RuntimeError, match=r"^inner$"), hooks:
            pass
        with pytest.raises(RuntimeError, match=r"^outer$"), hooks:
            pass
    with hooks, pytest.raises(RuntimeError, match=r"^inside$"), disable_saved_tensors_hooks("inside"):
        pass

    with pytest.raises(RuntimeError, match=r"^inside"):
        jax.grad(hooks(lambda x: disable_saved_tensors_hooks("inside").__enter__() or x))(1.0)

    @disable_saved_tensors_hooks("decorated")
    def f(x):
        return hooks(jnp.sin)(x)

    for run in (f, jax.jit(f)):
        with pytest.raises(RuntimeError, match="decorated"):
            run(X)
    with hooks:  # enabled again
        pass


def layer_gradient():
    return jax.grad(Square.apply)(1.0)


def run_tasks(**tasks):
    """Run the tasks one step after another, from one `await step()` to the next. Return their exceptions."""

    async def main():
        made = [asyncio.create_task(function(), name=name) for name, function in tasks.items()]
        return await asyncio.gather(*made, return_exceptions=True)

    return asyncio.run(main())


def assert_no_block_is_open():
    with disable_saved_tensors_hooks("a block is open"):
        pass


def step():
    return asyncio.sleep(0)


async def waits_in_a_block():
    with bits():
        await step()
        await step()


USES = {
    "layer": lambda x: layer_gradient(),
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
        for _ in range(2):
            with spy.hooks:
                layer_gradient()
            await step()

    assert run_tasks(writer=waits_in_a_block, first=uses, second=uses) == [None, None, None]
    assert spy.counts() == (4, 4)
    assert_no_block_is_open()


def test_a_block_around_tasks_is_theirs():
    spy = Spy()

    async def task():
        await step()
        layer_gradient()

    async def parent():
        with spy.hooks:
            await asyncio.gather(task(), asyncio.create_task(task()))
            layer_gradient()

    with spy.hooks:
        assert run_tasks(first=task, second=task) == [None, None]
    assert run_tasks(parent=parent) == [None]
    assert spy.counts() == (5, 5)
    assert_no_block_is_open()

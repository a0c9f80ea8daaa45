"""One text of a layer, run by real Paddle, by real torch and here: what each side returns, sees and raises."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pylayer_jax

X = np.array([0.3, -0.7], np.float32)
Y = np.array([1.1, 0.4], np.float32)
Z = np.array([1 + 2j, 0.5 - 1j], np.complex64)
HALVES = [v.astype(np.float16).astype(np.float32) for v in (Y, X)]  # the gradients of a product, through 16 bits


class Mine(Exception):
    """Of the user's own."""


def fail(*args: Any) -> Any:
    raise Mine("on purpose")


# -- the sides --------------------------------------------------------------------------------------


class Traced(NamedTuple):
    """All that is known of a tensor under jit."""

    dtype: Any
    shape: tuple[int, ...]


class Found(NamedTuple):
    outputs: Any
    gradients: list[np.ndarray]
    cotangents: list[Any]  # of each call of backward
    calls: tuple[int, int]  # of the hooks: packs and unpacks


class Side:
    """A framework as a layer sees it. Operations go by the names that all three have (`of.sin`, `of.stack`)."""

    module: Any
    base: type
    hooks: type

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.packs = self.unpacks = 0

    def calls(self) -> tuple[int, int]:
        return self.packs, self.unpacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def layer(self, forward: Any, backward: Any, /, **members: Any) -> Any:
        def logged(ctx: Any, *cotangents: Any) -> Any:
            self.note(cotangents)
            return backward(ctx, *cotangents)

        methods = {"forward": staticmethod(forward), "backward": staticmethod(logged)}
        return type("Layer", (self.base,), {**methods, **members})

    def saving(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that saves its tensors, and returns `f` of them."""

        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return f(*tensors)

        return forward

    def note(self, value: Any) -> None:
        self.log.append(self.plain(value))

    def plain(self, value: Any) -> Any:
        return mapped(lambda x: self.numpy(x) if hasattr(x, "dtype") else x, value)

    def hooked(self, call: Any, pack: Any = lambda x: {"hidden": x}, unpack: Any = lambda kept: kept["hidden"]) -> Any:
        """`call` in a block of saved-tensor hooks, of which each call is counted."""

        def packing(x: Any) -> Any:
            self.packs += 1
            return pack(x)

        def unpacking(kept: Any) -> Any:
            self.unpacks += 1
            return unpack(kept)

        def inside(*args: Any) -> Any:
            with self.hooks(packing, unpacking):
                return call(*args)

        return inside

    def total(self, outputs: Any, case: Row) -> Any:
        """A scalar of the outputs: their sum, or one in which each element has a cotangent of its own."""
        floats = [x for x in leaves(outputs) if hasattr(x, "dtype") and self.is_float(x)]
        chosen = [(i, y) for i, y in enumerate(floats) if case.used is None or i in case.used]
        parts = [y.sum() if case.summed else (i + 1.0) * self.sin(self.real(y)).sum() for i, y in chosen]
        return sum(parts[1:], parts[0])

    def real(self, x: Any) -> Any:
        return self.abs(x) if "complex" in str(x.dtype) else self.cast(x, "float32")

    def is_float(self, x: Any) -> bool:
        return "float" in str(x.dtype) or "complex" in str(x.dtype)


class Ours(Side):
    module = jnp
    base = pylayer_jax.PyLayer
    hooks = pylayer_jax.saved_tensors_hooks

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = {"eager": lambda f: f, "jit": jax.jit}[mode]

    def saved(self, ctx: Any) -> Any:
        return ctx.saved_tensors

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    def numpy(self, x: Any) -> Any:
        return Traced(np.dtype(x.dtype), x.shape) if isinstance(x, jax.core.Tracer) else np.asarray(x)

    def run(self, case: Row, order: int = 1) -> Found:
        call, kept = case.build(self), []

        def loss(*args: Any) -> Any:
            kept[:] = [call(*args)]
            return self.total(kept[0], case), [x for x in leaves(kept[0]) if hasattr(x, "dtype")]

        def slope_of(f: Any) -> Any:
            def slope(*args: Any) -> Any:
                gradients, tensors = jax.grad(f, case.wrt, has_aux=True)(*args)
                return self.total(gradients, dataclasses.replace(case, used=None)), tensors

            return slope

        for _ in range(order - 1):
            loss = slope_of(loss)
        gradients, tensors = self.mode(jax.grad(loss, case.wrt, has_aux=True))(*map(jnp.asarray, case.args))
        found = iter(tensors)
        outputs = mapped(lambda x: np.asarray(next(found)) if hasattr(x, "dtype") else x, kept[0])
        conjugates = [np.asarray(np.conj(g)) for g in gradients]  # as Paddle and torch have them
        return Found(outputs, conjugates, self.log, self.calls())


class Theirs(Side):
    def run(self, case: Row, order: int = 1) -> Found:
        args = self.tensors(case)
        wrt = [args[i] for i in case.wrt]
        outputs = case.build(self)(*args)
        found, then = self.total(outputs, case), dataclasses.replace(case, used=None)
        for left in reversed(range(order)):
            # Where nothing leads to the inputs, both frameworks would raise.
            slopes = self.slope(found, wrt, left > 0) if self.differentiable(found) else [None] * len(wrt)
            slopes = [self.zeros_like(x) if g is None else g for x, g in zip(wrt, slopes, strict=True)]
            found = self.total(slopes, then) if left else None
        return Found(self.plain(outputs), [self.numpy(g) for g in slopes], self.log, self.calls())

    def tensors(self, case: Row) -> list[Any]:
        return [self.leaf(v, i in case.wrt) for i, v in enumerate(case.args)]

    def numpy(self, x: Any) -> Any:
        return x.detach().numpy() if hasattr(x, "detach") else x


class Paddle(Theirs):
    def __init__(self, paddle: Any) -> None:
        super().__init__()
        self.module = paddle
        self.base, self.hooks = paddle.autograd.PyLayer, paddle.autograd.saved_tensors_hooks

    def saved(self, ctx: Any) -> Any:
        return ctx.saved_tensor()

    def cast(self, x: Any, dtype: str) -> Any:
        return x.astype(dtype)

    def leaf(self, value: np.ndarray, needs: bool = True) -> Any:
        return self.module.to_tensor(value, stop_gradient=not needs)

    def differentiable(self, x: Any) -> bool:
        return not x.stop_gradient

    def slope(self, y: Any, wrt: list[Any], create_graph: bool) -> Any:
        return self.module.grad(y, wrt, create_graph=create_graph, allow_unused=True)


class Torch(Theirs):
    def __init__(self, torch: Any) -> None:
        super().__init__()
        self.module = torch
        self.base, self.hooks = torch.autograd.Function, torch.autograd.graph.saved_tensors_hooks

    def saved(self, ctx: Any) -> Any:
        return ctx.saved_tensors

    def cast(self, x: Any, dtype: str) -> Any:
        return x.to(getattr(self.module, dtype))

    def leaf(self, value: np.ndarray, needs: bool = True) -> Any:
        return self.module.tensor(value, requires_grad=needs)

    def differentiable(self, x: Any) -> bool:
        return x.requires_grad

    def slope(self, y: Any, wrt: list[Any], create_graph: bool) -> Any:
        return self.module.autograd.grad(y, wrt, create_graph=create_graph, allow_unused=True)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list, dict)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    else:
        yield value


def mapped(f: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: mapped(f, part) for key, part in value.items()}
    return type(value)(mapped(f, part) for part in value) if type(value) in (tuple, list) else f(value)


# -- cases and their comparison ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    name: str
    build: Callable[[Any], Callable[..., Any]]  # from a side to a function of tensors
    args: tuple[np.ndarray, ...]
    wrt: tuple[int, ...]  # the arguments that are differentiated
    used: tuple[int, ...] | None = None  # the float outputs that enter the loss
    orders: int = 2
    summed: bool = False  # whether the loss is the plain sum, so that each cotangent is 1
    # In a table: what the gradients are, or which exception is raised, or the calls of hooks.
    theirs: Any = None
    ours: Any = None
    match: str = "Layer"  # in the message of our exception


class Table(list[Row]):
    """A table, filled by a decorator of the function that builds the layer."""

    def add(self, *args: np.ndarray, label: str = "", **options: Any) -> Callable[[Any], Any]:
        args = args or (X,)
        options.setdefault("wrt", tuple(i for i, a in enumerate(args) if a.dtype.kind in "fc"))

        def register(build: Any) -> Any:
            self.append(Row(f"{build.__name__}-{label}" if label else build.__name__, build, args, **options))
            return build

        return register

    def differ(self, *args: np.ndarray, theirs: Any, ours: Any, orders: int = 1, **options: Any) -> Any:
        return self.add(*args, theirs=theirs, ours=ours, orders=orders, summed=True, **options)

    def every(self, higher: bool = False) -> pytest.MarkDecorator:
        chosen = [one for one in self if one.orders > 1 or not higher]
        return pytest.mark.parametrize("one", chosen, ids=[one.name for one in chosen])


MODES = pytest.mark.parametrize("mode", ["eager", "jit"])


@functools.cache
def run_ours(mode: str, case: Row, order: int = 1) -> Found:
    """Kept, since Paddle and torch share many cases."""
    return Ours(mode).run(case, order)


def compare(theirs: Theirs, mode: str, one: Row) -> None:
    """Outputs, gradients, and the cotangents of every call of backward."""
    ours, other = run_ours(mode, one), theirs.run(one)
    assert_same(ours.outputs, other.outputs)
    assert_same(ours.gradients, other.gradients)
    assert_same(ours.cotangents, other.cotangents)


def compare_higher_orders(theirs: Theirs, mode: str, one: Row) -> None:
    for order in range(2, one.orders + 1):
        assert_same(run_ours(mode, one, order).gradients, theirs.run(one, order).gradients)


def compare_with_table(theirs: Theirs, mode: str, one: Row) -> None:
    sides = (theirs.run, one.theirs, None), (functools.partial(run_ours, mode), one.ours, one.match)
    for run, expected, match in sides:
        if isinstance(expected, type):
            with pytest.raises(expected, match=match):
                run(one, one.orders)
        else:
            for gradient, value, i in zip(run(one, one.orders).gradients, expected, one.wrt, strict=True):
                assert_same(gradient, value if isinstance(value, np.ndarray) else np.full_like(one.args[i], value))


def compare_hooks(theirs: Theirs, mode: str, one: Row) -> None:
    """Outputs and gradients, and how many times each side packed and unpacked."""
    ours, other = run_ours(mode, one), theirs.run(one)
    assert_same(ours.outputs, other.outputs)
    assert_same(ours.gradients, other.gradients)
    assert_same({"ours": ours.calls, "theirs": other.calls}, {"ours": one.ours, "theirs": one.theirs})


def compare_undifferentiated(theirs: Theirs, one: Row) -> None:
    ours = Ours("eager")
    mine = ours.plain(one.build(ours)(*map(jnp.asarray, one.args)))
    with theirs.no_grad():
        assert_same(mine, theirs.plain(one.build(theirs)(*theirs.tensors(one))))


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, Traced):
        assert hasattr(theirs, "dtype"), (ours, theirs)
        assert ours == (theirs.dtype, theirs.shape), (ours, theirs)
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), (ours, theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), (ours, theirs)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    elif isinstance(theirs, (tuple, list, dict)):
        assert type(ours) is type(theirs), (ours, theirs)
        assert len(ours) == len(theirs), (ours, theirs)
        if isinstance(theirs, dict):
            ours, theirs = list(ours.items()), list(theirs.items())
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    else:
        assert ours is theirs or ours == theirs, (ours, theirs)

"""Runs the same code of a layer by real Paddle, by real torch and by this package, and compares results and errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kit import names

X = np.array([0.3, -0.7], np.float32)
Y = np.array([1.1, 0.4], np.float32)
Z = np.array([1 + 2j, 0.5 - 1j], np.complex64)


class Mine(Exception):
    """An exception of the user."""


def fail(*args: Any) -> Any:
    raise Mine("on purpose")


# -- the sides --------------------------------------------------------------------------------------


class Traced(NamedTuple):
    """The type of a tensor under jit, where its numbers are not known."""

    dtype: Any
    shape: tuple[int, ...]


class Found(NamedTuple):
    outputs: Any
    gradients: list[list[np.ndarray]]  # of each order
    log: list[Any]  # what the methods noted, and the cotangents of each call of backward, at first order
    calls: tuple[int, int]  # of the hooks: packs and unpacks


class Side:
    """A framework, for the code of a layer. Operations have names that all frameworks share (`of.sin`)."""

    def __init__(self, named: names.Names) -> None:
        self.names = named
        self.log: list[Any] = []
        self.packs = self.unpacks = 0

    def calls(self) -> tuple[int, int]:
        return self.packs, self.unpacks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.names, name)

    def text(self, define: Callable[[Any], Any]) -> Any:
        return names.text(define, self.names)

    def layer(self, forward: Any, backward: Any, /, **members: Any) -> Any:
        methods = {"forward": staticmethod(forward), "backward": staticmethod(self._logged(backward))}
        return type("Layer", (self.PyLayer,), {**methods, **members})

    def function(self, forward: Any, backward: Any = None, /, **members: Any) -> Any:
        """Make a layer from functions with the signatures of torch; all methods are static."""
        methods = {"forward": forward, **members} | ({} if backward is None else {"backward": self._logged(backward)})
        methods = {name: staticmethod(m) if callable(m) else m for name, m in methods.items()}
        return type("Layer", (self.Function,), methods)

    def _logged(self, backward: Any) -> Any:
        def logged(ctx: Any, *cotangents: Any) -> Any:
            self.note(cotangents)
            return backward(ctx, *cotangents)

        return logged

    def saving(self, f: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `forward` that saves its tensors and returns `f` of them."""

        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return f(*tensors)

        return forward

    def note(self, value: Any) -> None:
        self.log.append(self.plain(value))

    def plain(self, value: Any) -> Any:
        return mapped(lambda x: self.numpy(x) if hasattr(x, "dtype") else x, value)

    def hooked(self, call: Any, pack: Any = lambda x: {"hidden": x}, unpack: Any = lambda kept: kept["hidden"]) -> Any:
        """Run `call` in a block of saved-tensor hooks, and count the calls of the hooks."""

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
        """Return a scalar loss of the outputs: their sum, or a sum in which each entry has another cotangent."""
        floats = [x for x in leaves(outputs) if hasattr(x, "dtype") and self.is_float(x)]
        chosen = [(i, y) for i, y in enumerate(floats) if case.used is None or i in case.used]
        parts = [y.sum() if case.summed else self.bent(y, i) for i, y in chosen]
        return sum(parts[1:], parts[0])

    def bent(self, y: Any, place: int = 0) -> Any:
        y = self.abs(y) if "complex" in str(y.dtype) else self.cast(y, "float32")
        shape = tuple(y.shape)
        weights = place + 1 + 0.5 * np.sin(np.arange(np.prod(shape)))
        return (self.sin(y) * self.tensor(weights.reshape(shape).astype(np.float32))).sum()

    def is_float(self, x: Any) -> bool:
        return "float" in str(x.dtype) or "complex" in str(x.dtype)


class Ours(Side):
    def __init__(self, mode: str) -> None:
        super().__init__(names.JAX)
        self.scanned = mode == "scan"
        self.mode = {"eager": lambda f: f, "jit": jax.jit, "scan": jax.jit}[mode]

    def numpy(self, x: Any) -> Any:
        return Traced(np.dtype(x.dtype), x.shape) if isinstance(x, jax.core.Tracer) else np.asarray(x)

    def run(self, case: Row) -> Found:
        call, places = case.build(self), [i for i, a in enumerate(case.args) if isinstance(a, np.ndarray)]
        call = in_a_scan(call) if self.scanned else call
        wrt, first = tuple(places.index(i) for i in case.wrt), []

        def loss(*tensors: Any) -> Any:
            args = list(case.args)
            for i, tensor in zip(places, tensors, strict=True):
                args[i] = tensor
            outputs = call(*args)
            first[:] = first or [outputs]
            return self.total(outputs, case) if case.orders else None, [
                x for x in leaves(outputs) if hasattr(x, "dtype")
            ]

        def slope_of(f: Any) -> Any:
            def slope(*tensors: Any) -> Any:
                gradients, found = jax.grad(f, wrt, has_aux=True)(*tensors)
                return self.total(gradients, dataclasses.replace(case, used=None)), found

            return slope

        def everything(*tensors: Any) -> Any:
            every, f = [], loss
            for order in range(case.orders):
                gradients, found = jax.grad(f, wrt, has_aux=True)(*tensors)
                log[:] = log if order else self.log
                every.append(gradients)
                f = slope_of(f)
            return found if case.orders else loss(*tensors)[1], every

        log: list[Any] = []
        tensors, gradients = self.mode(everything)(*(jnp.asarray(case.args[i]) for i in places))
        found = iter(tensors)
        outputs = mapped(lambda x: np.asarray(next(found)) if hasattr(x, "dtype") else x, first[0])
        # Complex gradients as Paddle and torch have them.
        gradients = [[np.asarray(np.conj(g)) for g in of_order] for of_order in gradients]
        return Found(outputs, gradients, log if case.orders else self.log, self.calls())


def in_a_scan(f: Callable[..., Any]) -> Callable[..., Any]:
    def scanned(*args: Any) -> Any:
        _, outputs = jax.lax.scan(lambda carry, _: (carry, f(*args)), None, None, length=1)
        return jax.tree.map(lambda y: y[0], outputs)

    return scanned


class Theirs(Side):
    name: str

    def run(self, case: Row) -> Found:
        args = self.tensors(case)
        wrt = [args[i] for i in case.wrt]
        outputs = case.build(self)(*args)
        shown, log, gradients = self.plain(outputs), self.log, []
        found = self.total(outputs, case) if case.orders else None
        for left in reversed(range(case.orders)):
            # Where nothing leads to the inputs, both frameworks would raise.
            slopes = self.slope(found, wrt, left > 0) if self.differentiable(found) else [None] * len(wrt)
            slopes = [self.zeros_like(x) if g is None else g for x, g in zip(wrt, slopes, strict=True)]
            log = log if gradients else list(self.log)
            gradients.append([self.numpy(g) for g in slopes])
            found = self.total(slopes, dataclasses.replace(case, used=None)) if left else None
        return Found(shown, gradients, log, self.calls())

    def tensors(self, case: Row) -> list[Any]:
        return [self.leaf(v, i in case.wrt) if isinstance(v, np.ndarray) else v for i, v in enumerate(case.args)]

    def numpy(self, x: Any) -> Any:
        return x.detach().numpy() if hasattr(x, "detach") else x


class Paddle(Theirs):
    name = "paddle"

    def __init__(self, paddle: Any) -> None:
        super().__init__(names.named(names.Paddle, paddle))

    def leaf(self, value: np.ndarray, needs: bool = True) -> Any:
        return self.to_tensor(value, stop_gradient=not needs)

    def differentiable(self, x: Any) -> bool:
        return not x.stop_gradient

    def slope(self, y: Any, wrt: list[Any], create_graph: bool) -> Any:
        return self.grad(y, wrt, create_graph=create_graph, allow_unused=True)


class Torch(Theirs):
    name = "torch"

    def __init__(self, torch: Any) -> None:
        super().__init__(names.named(names.Torch, torch))

    def leaf(self, value: np.ndarray, needs: bool = True) -> Any:
        # It takes 64 bits alone for an index.
        return self.tensor(value.astype(np.int64) if value.dtype == np.int32 else value, requires_grad=needs)

    def numpy(self, x: Any) -> Any:
        x = super().numpy(x)
        return x.astype(np.int32) if getattr(x, "dtype", None) == np.int64 else x

    def differentiable(self, x: Any) -> bool:
        return x.requires_grad

    def slope(self, y: Any, wrt: list[Any], create_graph: bool) -> Any:
        return self.autograd.grad(y, wrt, create_graph=create_graph, allow_unused=True)


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
    build: Callable[[Any], Callable[..., Any]]  # from a side to a function of the arguments
    args: tuple[Any, ...]  # NumPy arrays, which become tensors, and statics
    wrt: tuple[int, ...]  # the arguments that are differentiated
    used: tuple[int, ...] | None = None  # the float outputs that enter the loss
    orders: int = 2  # of derivatives; 0 for what is compared as it comes out
    summed: bool = False  # whether the loss is the plain sum, so that each cotangent is 1
    # What the last gradients are, or which exception is raised, or the calls of hooks; by framework where they differ.
    theirs: Any = None
    ours: Any = None
    match: str = "Layer"  # in the message of our exception
    modes: tuple[str, ...] = ("eager", "jit")


class Table(list[Row]):
    """A table of rows, to which decorators of functions that build layers add rows."""

    def add(self, *args: Any, label: str = "", **options: Any) -> Callable[[Any], Any]:
        args = tuple(np.asarray(a) if isinstance(a, jax.Array) else a for a in args or (X,))
        floats = (i for i, a in enumerate(args) if isinstance(a, np.ndarray) and a.dtype.kind in "fc")
        options.setdefault("wrt", tuple(floats))

        def register(build: Any) -> Any:
            self.append(Row(f"{build.__name__}-{label}" if label else build.__name__, build, args, **options))
            return build

        return register

    def differ(self, *args: Any, theirs: Any, ours: Any, orders: int = 1, **options: Any) -> Any:
        return self.add(*args, theirs=theirs, ours=ours, orders=orders, summed=True, **options)

    def port(
        self, define: Any, name: str, *args: Any, call: Any = None, label: str = "", plain: bool = False, **options: Any
    ) -> None:
        """Add a row for a layer of a module: `apply` with these arguments, or `call(module, *args)`.

        With `plain` only the first derivatives are compared: our second ones are those of forward, theirs are not.
        """

        def build(of: Any) -> Any:
            module = of.text(define)
            return functools.partial(call, module) if call else getattr(module, name).apply

        build.__name__ = name
        self.add(*args, label=label, **options, **({"orders": 1} if plain else {}))(build)

    def count(self, *args: Any, theirs: Any, ours: tuple[int, int], **options: Any) -> Any:
        """Add a row for a layer or operation in a block of hooks, with the number of calls of pack and of unpack."""
        return self.add(*args, **{"theirs": theirs, "ours": ours, "orders": 1, **options})

    def every(self) -> pytest.MarkDecorator:
        pairs = [pytest.param(mode, one, id=f"{mode}-{one.name}") for one in self for mode in one.modes]
        return pytest.mark.parametrize(("mode", "one"), pairs)


MODES = pytest.mark.parametrize("mode", ["eager", "jit"])


@functools.cache
def run_ours(mode: str, case: Row) -> Found:
    """Run a row by this package. The result is cached, because Paddle and torch share many rows."""
    return Ours(mode).run(case)


def compare(theirs: Theirs, mode: str, one: Row) -> None:
    """Compare outputs, gradients of each order and logs; or, if frameworks differ, check what the row says of each."""
    expected = one.theirs[theirs.name] if isinstance(one.theirs, dict) else one.theirs
    if one.ours is not None and not isinstance(one.ours, tuple):
        assert_does(theirs.run, one, expected)
        assert_does(functools.partial(run_ours, mode), one, one.ours, one.match)
        return
    ours, other = run_ours(mode, one), theirs.run(one)
    assert_same(ours.outputs, other.outputs)
    assert_same(ours.gradients, other.gradients)
    if one.ours is not None:  # counts of calls, which may differ
        assert_same({"ours": ours.calls, "theirs": other.calls}, {"ours": one.ours, "theirs": expected})
        return
    # Transforms of JAX may trace a method more than once.
    assert_same(*(log if one.orders else log[-1:] for log in (ours.log, other.log)))
    if mode == "eager" and one.orders:
        compare_undifferentiated(theirs, one)


def assert_does(run: Callable[[Row], Found], one: Row, expected: Any, match: str | None = None) -> None:
    if isinstance(expected, type):
        with pytest.raises(expected, match=match):
            run(one)
    else:
        found = run(one)
        values = found.gradients[-1] if one.orders else list(leaves(found.outputs))
        likes = [one.args[i] for i in one.wrt] if one.orders else values
        for got, value, like in zip(values, expected, likes, strict=True):
            assert_same(got, value if isinstance(value, np.ndarray) else np.full_like(like, value))


def compare_undifferentiated(theirs: Theirs, one: Row) -> None:
    ours = Ours("eager")
    args = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in one.args]
    mine = ours.plain(one.build(ours)(*args))
    with theirs.names.modules[0].no_grad():
        assert_same(mine, theirs.plain(one.build(theirs)(*theirs.tensors(one))))


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(ours, Traced):
        assert hasattr(theirs, "dtype"), (ours, theirs)
        assert ours == (theirs.dtype, theirs.shape), (ours, theirs)
    elif isinstance(theirs, np.ndarray):
        assert isinstance(ours, np.ndarray), (ours, theirs)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), (ours, theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    elif isinstance(theirs, (tuple, list, dict)):
        assert type(ours) is type(theirs), (ours, theirs)
        assert len(ours) == len(theirs), (ours, theirs)
        if isinstance(theirs, dict):
            ours, theirs = list(ours.items()), list(theirs.items())
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)
    else:
        assert ours is theirs or ours == theirs, (ours, theirs)

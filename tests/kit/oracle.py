"""Runs the same code of a layer in real Paddle, in real torch and in this package, and compares results and errors.

    @TABLE.add(X, summed=True)
    def doubled_sine(of):
        return of.layer(of.saving(of.sin), lambda ctx, dy: 2 * dy * of.cos(of.saved(ctx)[0])).apply

`of` is a side: the object `Paddle`, `Torch` or `Ours`, which has the operations of its framework. The decorator adds
a row to a table. `compare(Torch(torch), "jit", row)` calls `doubled_sine` with torch and with this package as `of`. It
applies the two functions that this returns to X, that of this package under `jax.jit`, and compares:

    outputs     sin(X)
    gradients   [[2 cos(X)], [-2 sin(X)]], the first and the second derivative of the sum of the outputs
    log         [([1, 1],)], the cotangents of each call of `backward` in the first derivative

`TABLE.differ` adds a row whose results differ between the sides, and `TABLE.count` a row of hooks that are counted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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


class Result(NamedTuple):
    outputs: Any
    gradients: list[list[np.ndarray]]  # of each order, with respect to each argument in `wrt`
    log: list[Any]  # values passed to `note`, and the cotangents of each call of `backward`, in the first derivative
    hook_calls: tuple[int, int]  # how many times hooks packed, and unpacked


class Side:
    """One framework in which the code of a layer runs.

    The code gets this object as `of`, and calls `of.sin(x)` in all frameworks: see `names.py`.
    """

    def __init__(self, framework_names: names.Names) -> None:
        self.names = framework_names
        self.log: list[Any] = []
        self.packs = self.unpacks = 0

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

    def total(self, values: Any, summed: bool, used: tuple[int, ...] | None = None) -> Any:
        """Return a scalar loss of tensors: the sum, if `summed`, or weighted sines, so that all cotangents differ.

        `used` are the positions, among the floating-point tensors, of those that enter the loss; None means all.
        """
        floats = [x for x in jax.tree.leaves(values) if hasattr(x, "dtype") and self.is_float(x)]
        parts = [x.sum() if summed else self.bent(x, i) for i, x in enumerate(floats) if used is None or i in used]
        return sum(parts[1:], parts[0])

    def bent(self, x: Any, place: int = 0) -> Any:
        """Return a sum of the sines of a tensor, with weights that differ for each entry and each `place`."""
        x = self.abs(x) if "complex" in str(x.dtype) else self.cast(x, "float32")
        shape = tuple(x.shape)
        weights = place + 1 + 0.5 * np.sin(np.arange(np.prod(shape)))
        return (self.sin(x) * self.tensor(weights.reshape(shape).astype(np.float32))).sum()

    def is_float(self, x: Any) -> bool:
        return "float" in str(x.dtype) or "complex" in str(x.dtype)


@jax.tree_util.register_static
class Static:
    """A value that is no array: a traced function returns it as a part of the structure of its result."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Ours(Side):
    """This package."""

    def __init__(self, mode: str) -> None:
        super().__init__(names.JAX)
        self.mode = {"eager": lambda f: f, "jit": jax.jit}[mode]

    def numpy(self, x: Any) -> Any:
        return Traced(np.dtype(x.dtype), x.shape) if isinstance(x, jax.core.Tracer) else np.asarray(x)

    def run(self, row: Row) -> Result:
        call = row.build(self)
        positions = [i for i, a in enumerate(row.args) if isinstance(a, np.ndarray)]  # of the tensors
        wrt = tuple(positions.index(i) for i in row.wrt)

        def outputs_of(*tensors: Any) -> Any:
            args = dict(enumerate(row.args)) | dict(zip(positions, tensors, strict=True))
            return call(*args.values())

        def loss(*tensors: Any) -> Any:
            outputs = outputs_of(*tensors)
            return self.total(outputs, row.summed, row.used), with_statics(outputs)

        def loss_of_gradients(f: Any) -> Any:
            def next_loss(*tensors: Any) -> Any:
                gradients, outputs = jax.grad(f, wrt, has_aux=True)(*tensors)
                return self.total(gradients, row.summed), outputs

            return next_loss

        def outputs_and_derivatives(*tensors: Any) -> Any:
            """Return the outputs, the gradients of each order, and the log so far after each order."""
            if row.orders == 0:
                return with_statics(outputs_of(*tensors)), [], []
            gradients, logs, f = [], [], loss
            for _ in range(row.orders):
                gradients_of_order, outputs = jax.grad(f, wrt, has_aux=True)(*tensors)
                gradients.append(gradients_of_order)
                logs.append(Static(list(self.log)))
                f = loss_of_gradients(f)
            return outputs, gradients, logs

        tensors = [jnp.asarray(row.args[i]) for i in positions]
        outputs, gradients, logs = self.mode(outputs_and_derivatives)(*tensors)
        outputs = mapped(lambda x: x.value if isinstance(x, Static) else np.asarray(x), outputs)
        # Paddle and torch define a complex gradient as the conjugate of that of JAX.
        gradients = [[np.asarray(np.conj(g)) for g in of_order] for of_order in gradients]
        return Result(outputs, gradients, logs[0].value if logs else self.log, (self.packs, self.unpacks))


def with_statics(outputs: Any) -> Any:
    """Return outputs in which each value that is no tensor is a `Static`."""
    return mapped(lambda x: x if hasattr(x, "dtype") else Static(x), outputs)


class Theirs(Side):
    """Real Paddle or torch."""

    name: str

    def run(self, row: Row) -> Result:
        args = self.tensors(row)
        wrt = [args[i] for i in row.wrt]
        outputs = row.build(self)(*args)
        shown = self.plain(outputs)
        gradients, logs = [], []
        loss = self.total(outputs, row.summed, row.used) if row.orders else None
        for order in range(1, row.orders + 1):
            gradients_of_order = self.gradients_of(loss, wrt, create_graph=order < row.orders)
            gradients.append([self.numpy(g) for g in gradients_of_order])
            logs.append(list(self.log))
            loss = self.total(gradients_of_order, row.summed) if order < row.orders else None
        return Result(shown, gradients, logs[0] if logs else self.log, (self.packs, self.unpacks))

    def gradients_of(self, loss: Any, wrt: list[Any], create_graph: bool) -> list[Any]:
        """Return the gradients of a loss: zeros for a tensor on which it does not depend."""
        if not self.differentiable(loss):  # then both frameworks raise an error
            return [self.zeros_like(x) for x in wrt]
        gradients = self.slope(loss, wrt, create_graph)
        return [self.zeros_like(x) if g is None else g for x, g in zip(wrt, gradients, strict=True)]

    def tensors(self, row: Row) -> list[Any]:
        return [self.leaf(v, i in row.wrt) if isinstance(v, np.ndarray) else v for i, v in enumerate(row.args)]

    def numpy(self, x: Any) -> Any:
        return x.detach().numpy() if hasattr(x, "detach") else x


class Paddle(Theirs):
    name = "paddle"

    def __init__(self, paddle: Any) -> None:
        super().__init__(names.of_framework(names.Paddle, paddle))

    def leaf(self, value: np.ndarray, needs: bool = True) -> Any:
        return self.to_tensor(value, stop_gradient=not needs)

    def differentiable(self, x: Any) -> bool:
        return not x.stop_gradient

    def slope(self, y: Any, wrt: list[Any], create_graph: bool) -> Any:
        return self.grad(y, wrt, create_graph=create_graph, allow_unused=True)


class Torch(Theirs):
    name = "torch"

    def __init__(self, torch: Any) -> None:
        super().__init__(names.of_framework(names.Torch, torch))

    def leaf(self, value: np.ndarray, needs: bool = True) -> Any:
        # torch accepts only int64 arrays as an index.
        return self.tensor(value.astype(np.int64) if value.dtype == np.int32 else value, requires_grad=needs)

    def numpy(self, x: Any) -> Any:
        x = super().numpy(x)
        return x.astype(np.int32) if getattr(x, "dtype", None) == np.int64 else x

    def differentiable(self, x: Any) -> bool:
        return x.requires_grad

    def slope(self, y: Any, wrt: list[Any], create_graph: bool) -> Any:
        return self.autograd.grad(y, wrt, create_graph=create_graph, allow_unused=True)


def mapped(f: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: mapped(f, part) for key, part in value.items()}
    return type(value)(mapped(f, part) for part in value) if type(value) in (tuple, list) else f(value)


# -- cases and their comparison ---------------------------------------------------------------------


class Difference(NamedTuple):
    """The results of both libraries for a row in which they differ: an exception class or values.

    The values are one array or number per gradient of the last order; if the row has no orders, one per output.
    """

    theirs: dict[str, Any]  # by name of the framework
    ours: Any
    match: str  # a pattern in the message of our exception


class HookCalls(NamedTuple):
    """How many times each side calls pack, and unpack."""

    theirs: dict[str, tuple[int, int]]  # by name of the framework
    ours: tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """A function of tensors, whose code all sides share, with its arguments and what to compare."""

    name: str
    build: Callable[[Any], Callable[..., Any]]  # from a side to a function of the arguments
    args: tuple[Any, ...]  # NumPy arrays, which become tensors, and statics
    wrt: tuple[int, ...]  # positions of the arguments with respect to which the loss is differentiated
    used: tuple[int, ...] | None = None  # positions of the float outputs that enter the loss; None means all
    orders: int = 2  # number of orders of derivatives to compare; 0 compares the outputs only
    summed: bool = False  # whether the loss is the plain sum, so that each cotangent is 1
    difference: Difference | None = None
    hook_calls: HookCalls | None = None
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

    def differ(self, *args: Any, theirs: Any, ours: Any, match: str = "Layer", orders: int = 1, **options: Any) -> Any:
        """Add a row whose results differ. `theirs` is a dict by framework if Paddle and torch differ, too."""
        difference = Difference(by_framework(theirs), ours, match)
        return self.add(*args, **{"difference": difference, "orders": orders, "summed": True, **options})

    def port(
        self, define: Any, name: str, *args: Any, call: Any = None, label: str = "", plain: bool = False, **options: Any
    ) -> None:
        """Add a row for a layer of a module: `apply` with these arguments, or `call(module, *args)`.

        With `theirs` and `ours` among the options, the row is one of `differ`.
        `plain=True` compares first derivatives only, because the second ones differ: this package differentiates
        `forward`, the frameworks do not.
        """

        def build(of: Any) -> Any:
            module = of.text(define)
            return functools.partial(call, module) if call else getattr(module, name).apply

        build.__name__ = name
        add = self.differ if "theirs" in options else self.add
        add(*args, label=label, **options, **({"orders": 1} if plain else {}))(build)

    def count(self, *args: Any, theirs: Any, ours: tuple[int, int], **options: Any) -> Any:
        """Add a row for a layer or operation in a block of hooks, with the number of calls of pack and of unpack."""
        return self.add(*args, **{"hook_calls": HookCalls(by_framework(theirs), ours), "orders": 1, **options})

    def every(self) -> pytest.MarkDecorator:
        """Run a test for each row in each of its modes."""
        params = [pytest.param(mode, row, id=f"{mode}-{row.name}") for row in self for mode in row.modes]
        return pytest.mark.parametrize(("mode", "one"), params)


def by_framework(expected: Any) -> dict[str, Any]:
    return expected if isinstance(expected, dict) else {"paddle": expected, "torch": expected}


@functools.cache
def run_ours(mode: str, row: Row) -> Result:
    """Run a row in this package. The result is cached, because Paddle and torch share many rows."""
    return Ours(mode).run(row)


def compare(theirs: Theirs, mode: str, row: Row) -> None:
    """Compare outputs, gradients and logs of both sides. If they differ, check each against what the row expects."""
    if row.difference is not None:
        check(theirs.run, row, row.difference.theirs[theirs.name])
        check(functools.partial(run_ours, mode), row, row.difference.ours, row.difference.match)
        return
    ours, other = run_ours(mode, row), theirs.run(row)
    assert_same(ours.outputs, other.outputs)
    assert_same(ours.gradients, other.gradients)
    if row.hook_calls is not None:
        assert (ours.hook_calls, other.hook_calls) == (row.hook_calls.ours, row.hook_calls.theirs[theirs.name])
        return
    # Transforms of JAX may trace a method more than once.
    assert_same(*(log if row.orders else log[-1:] for log in (ours.log, other.log)))
    if mode == "eager" and row.orders:  # the outputs of a call that is not differentiated
        side = Ours("eager")
        args = [jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in row.args]
        outputs = side.plain(row.build(side)(*args))
        with theirs.names.modules[0].no_grad():
            assert_same(outputs, theirs.plain(row.build(theirs)(*theirs.tensors(row))))


def check(run: Callable[[Row], Result], row: Row, expected: Any, match: str | None = None) -> None:
    """Check that a side raises the exception, or has the values, that a row expects of it."""
    if isinstance(expected, type):
        with pytest.raises(expected, match=match):
            run(row)
        return
    result = run(row)
    values = result.gradients[-1] if row.orders else jax.tree.leaves(result.outputs)
    likes = [row.args[i] for i in row.wrt] if row.orders else values
    for got, value, like in zip(values, expected, likes, strict=True):
        assert_same(got, value if isinstance(value, np.ndarray) else np.full_like(like, value))


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

"""A port and its original, called alike: what either side returns, and its gradients of two orders."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kit.case import numpy_grid as grid

from .layers import ported


@dataclasses.dataclass(frozen=True)
class Own:
    """An argument that each side has as its own object, by its name in the module."""

    name: str


def apply(name: str) -> Callable[..., Any]:
    return lambda module, *args: getattr(module, name).apply(*args)


@dataclasses.dataclass(frozen=True)
class Port:
    name: str
    args: tuple[Any, ...]  # NumPy arrays, statics, and `Own`
    wrt: tuple[int, ...]  # the arguments that are differentiated
    call: Callable[..., Any]  # of the module and the arguments
    pick: tuple[int, ...] | None  # the outputs that enter the loss; None for all that are floats
    second: bool


X = grid(2, 3)
UNEVEN = np.sin(2 * X)
Y = grid(2, 3, low=-0.9, high=1.1) + np.float32(0.05)
TARGET = np.array([2, 0], np.int32)
Q, K, V = grid(1, 2, 3, 4), grid(1, 2, 5, 4, low=-1, high=1.2), grid(1, 2, 5, 4, low=-2, high=1.5)
MASK = np.array([[True, True, False, True, False]])
HALF = [grid(2, 2, low=low, high=0.9) for low in (-0.8, -0.7, -0.6, -0.5)]
CODEBOOK = grid(4, 3)
IMAGES = grid(4, 3, 2)
STATS = np.zeros(3, np.float32), np.ones(3, np.float32)
NORM = (1e-5, 0.1, Own("ONE_RANK"), 1)
CLIP = np.array([0.9375], np.float32)  # one step is exact

# Above one step of the quantization: below it the changed input of the original says zero, as another test shows.
UNCLIPPED = np.array([-0.4, 0.31, 0.47, 0.83, 1.5], np.float32)
ACTS = grid(4, 3, 4)
LABELS = np.array([[1, 1], [2, 3], [3, 1]], np.int32)
LENGTHS = np.array([4, 3, 2], np.int32), np.array([2, 2, 1], np.int32)
ROW, COLUMN = grid(1, 3, low=0.3, high=0.6), grid(2, 1, low=0.3, high=0.6)
WEIGHT, BIAS = grid(4, 3), grid(4)


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return (1 + 0.5 * np.sin(np.arange(np.prod(shape)))).reshape(shape).astype(np.float32)


def direction(shape: tuple[int, ...]) -> np.ndarray:
    return np.cos(np.arange(np.prod(shape))).reshape(shape).astype(np.float32)


def picked(outputs: Any, pick: tuple[int, ...] | None) -> list[Any]:
    every = outputs if isinstance(outputs, tuple) else (outputs,)
    return [o for i, o in enumerate(every) if (pick is None or i in pick) and hasattr(o, "dtype")]


class Ours:
    def __init__(self, one: Port, module: Any = ported) -> None:
        self.one, self.module = one, module
        self.places = [i for i, a in enumerate(one.args) if isinstance(a, np.ndarray)]
        self.values = [jnp.asarray(one.args[i]) for i in self.places]
        self.wrt = tuple(self.places.index(i) for i in one.wrt)

    def call(self, *values: Any) -> Any:
        args = [getattr(self.module, a.name) if isinstance(a, Own) else a for a in self.one.args]
        for i, value in zip(self.places, values, strict=True):
            args[i] = value
        return self.one.call(self.module, *args)

    def loss(self, *values: Any) -> Any:
        total = jnp.zeros(())
        for y in picked(self.call(*values), self.one.pick):
            if jnp.issubdtype(y.dtype, jnp.floating):
                total += jnp.sum(weights(y.shape) * jnp.sin(y))
        return total

    def slope(self, *values: Any) -> Any:
        gradients = jax.grad(self.loss, self.wrt)(*values)
        return sum(jnp.sum(g * direction(g.shape)) for g in gradients)

    def everything(self, mode: Callable[..., Any]) -> list[Any]:
        """The outputs, and the gradients of one or two orders."""
        functions = [jax.grad(f, self.wrt) for f in (self.loss, self.slope)[: 1 + self.one.second]]
        rest: list[Any] = []

        def arrays(*values: Any) -> Any:
            leaves, treedef = jax.tree_util.tree_flatten(self.call(*values), is_leaf=lambda x: x is None)
            rest[:] = [treedef, leaves]
            return [x for x in leaves if isinstance(x, jax.Array)], [f(*values) for f in functions]

        outputs, gradients = mode(arrays)(*self.values)
        (treedef, leaves), found = rest, iter(outputs)
        return [treedef.unflatten([next(found) if isinstance(x, jax.Array) else x for x in leaves]), *gradients]

    def first(self, mode: Callable[..., Any]) -> Any:
        return mode(jax.grad(self.loss, self.wrt))(*self.values)

    def second(self, mode: Callable[..., Any]) -> Any:
        return mode(jax.grad(self.slope, self.wrt))(*self.values)


class Theirs:
    def __init__(self, torch: Any, one: Port, module: Any) -> None:
        self.torch, self.one, self.module = torch, one, module
        self.args = [getattr(module, a.name) if isinstance(a, Own) else a for a in one.args]
        for i, value in enumerate(one.args):
            if isinstance(value, np.ndarray):
                self.args[i] = torch.tensor(value.astype(np.int64) if value.dtype == np.int32 else value)
        self.wrt = [self.args[i].requires_grad_() for i in one.wrt]
        self.result = one.call(module, *self.args)

    def first(self, create_graph: bool = False) -> Any:
        torch, total = self.torch, self.torch.zeros(())
        for y in picked(self.result, self.one.pick):
            if y.dtype.is_floating_point:
                total = total + (torch.tensor(weights(tuple(y.shape))) * torch.sin(y)).sum()
        return self.gradient(total, create_graph)

    def second(self) -> Any:
        gradients = self.first(create_graph=True)
        return self.gradient(sum((g * self.torch.tensor(direction(tuple(g.shape)))).sum() for g in gradients))

    def everything(self) -> list[Any]:
        found = [self.result, self.first()]
        return [*found, Theirs(self.torch, self.one, self.module).second()] if self.one.second else found

    def gradient(self, total: Any, create_graph: bool = False) -> Any:
        return self.torch.autograd.grad(
            total, self.wrt, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )


@dataclasses.dataclass(frozen=True)
class Side:
    """What a function of both frameworks is written with."""

    layers: Any
    xp: Any
    func: Any  # has grad, vmap, jacrev and jvp
    tensor: Callable[[Any], Any]
    mode: Callable[..., Any] = lambda f: f

    def sine(self, layer: str, *statics: Any) -> Callable[..., Any]:
        """The weighted sine of the first output of a layer, a scalar."""

        def loss(*args: Any) -> Any:
            y = getattr(self.layers, layer).apply(*args, *statics)
            y = self.xp.sin(y[0] if isinstance(y, tuple) else y)
            return (y * self.tensor(weights(tuple(y.shape)))).sum()

        return loss


def one_of(of: Side, forward: Any, backward: Any = lambda ctx, dy: dy * 2, **members: Any) -> Any:
    """A Function of either framework, with static methods."""
    methods = {"forward": forward, "backward": backward, **members}
    methods = {name: staticmethod(m) if callable(m) else m for name, m in methods.items() if m is not None}
    return type("OneOf", (of.layers.xp.Function,), methods)


def no_setup(ctx: Any, inputs: Any, output: Any) -> None:
    """A context that keeps nothing, where forward takes none."""


Both = tuple[Side, Side]  # torch's, ours


def compare(both: Both, run: Callable[[Side], Any], mode: Callable[..., Any] = lambda f: f) -> None:
    theirs, ours = both
    assert_equal(run(dataclasses.replace(ours, mode=mode)), run(theirs))


def set_on_both(monkeypatch: Any, both: Both, layer: str, **members: Any) -> None:
    for side in both:
        for name, value in members.items():
            monkeypatch.setattr(getattr(side.layers, layer), name, list(value) if value == [] else value)


def seen(both: Both, layer: str) -> tuple[list[Any], Any]:
    """All that torch's class noted, and the last that ours did, which may be traced more than once."""
    theirs, ours = (getattr(side.layers, layer).seen for side in both)
    return theirs, ours[-1]


def assert_equal(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, (tuple, list)):
        assert type(ours) is type(theirs)
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            assert_equal(a, b)
    elif hasattr(theirs, "detach"):
        assert isinstance(ours, jax.Array)
        # JAX has 32 bits for integers unless asked.
        assert str(ours.dtype) == str(theirs.dtype).removeprefix("torch.").replace("int64", "int32")
        assert ours.shape == tuple(theirs.shape)
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=2e-4, atol=2e-5)
    else:
        assert ours is theirs or ours == theirs

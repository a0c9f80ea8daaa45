"""A function at given arguments, as one of the tensors among them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.names import differentiable, is_differentiated
from pylayer_jax._trees.partition import split


class Flat:
    """A function at its arguments, as one of the tensors among them that JAX differentiates."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], names: Sequence[str] | None = None) -> None:
        tensors, self.skeleton = split(args)
        self.function = function
        self.tensors: list[Any] = [jnp.asarray(x) for x in tensors]
        self.chosen = [i for i, x in enumerate(self.tensors) if differentiable(x)]
        self.paths = names or [f"args{path}" for path in self.skeleton.tensor_paths()]
        self.names = [self.paths[i] for i in self.chosen]
        owners = [owner for owner, _ in self.skeleton.tensor_entries()]
        self.owners = [owners[i] for i in self.chosen]  # the argument that each of them belongs to

    @property
    def values(self) -> list[Any]:
        return [self.tensors[i] for i in self.chosen]

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """All tensors that the function returns, for `values` in the place of those that are differentiated."""
        return self.at(values).run()

    def run(self) -> list[Any]:
        return [jnp.asarray(y) for y in split(self.function(*self.skeleton.fill(self.tensors)))[0]]

    def carrying(self) -> list[int]:
        """The positions of the outputs through which JAX differentiates: neither integers nor marked ones."""
        found: list[int] = []

        def noted(*values: Any) -> list[Any]:
            outputs = self.outputs(values)
            found[:] = [i for i, y in enumerate(outputs) if differentiable(y) and is_differentiated(y)]
            return outputs

        jax.vjp(noted, *self.values)
        return found

    def weights(self, outputs: Sequence[Any], rng: np.random.Generator) -> dict[int, Any]:
        """Per floating-point output a cotangent whose entries are about 1 in size, of either sign."""
        return {i: random_like(y, rng) for i, y in enumerate(outputs) if differentiable(y)}

    def vjp(self, weights: dict[int, Any], wanted: Sequence[int] | None = None) -> Callable[[], list[Any]]:
        """The gradients of `wanted` (all, if None) when called; outputs without a weight have no cotangent."""
        pull = self.pullback(weights, wanted)
        return lambda: list(pull(list(weights.values())))

    def pullback(self, outputs: Collection[int], wanted: Sequence[int] | None = None) -> Callable[..., Any]:
        """What `jax.vjp` returns for some of the outputs and of the differentiated values."""
        values = self.values
        wanted = range(len(values)) if wanted is None else wanted

        def of_wanted(*some: Any) -> list[Any]:
            filled = list(values)
            for j, value in zip(wanted, some, strict=True):
                filled[j] = value
            returned = self.outputs(filled)
            return [returned[k] for k in outputs]

        return jax.vjp(of_wanted, *(values[j] for j in wanted))[1]

    def gradient(self, weights: dict[int, Any], wanted: Sequence[int] | None = None) -> list[Any]:
        return self.vjp(weights, wanted)()

    def derivative(self, weights: dict[int, Any]) -> Flat:
        """The function from the differentiated values and the cotangents, at `weights`, to the gradients."""

        def gradients(values: list[Any], cotangents: list[Any]) -> list[Any]:
            return self.at(values).gradient(dict(zip(weights, cotangents, strict=True)))

        names = [*self.names, *(f"cotangent[{k}]" for k in weights)]
        return Flat(gradients, (self.values, list(weights.values())), names)

    def at(self, values: Sequence[Any], tensors: Sequence[Any] | None = None) -> Flat:
        """The same function at other values."""
        other = self.of(self.tensors if tensors is None else tensors)
        for i, value in zip(self.chosen, values, strict=True):
            other.tensors[i] = value
        return other

    def of(self, tensors: Sequence[Any]) -> Flat:
        """The same function of other tensors, those included that are not differentiated."""
        other = object.__new__(Flat)
        vars(other).update(vars(self))
        other.tensors = list(tensors)
        return other

    def elsewhere(self) -> list[Any]:
        """Values of the same signs, on which a layer can run in between."""
        return [x * jnp.asarray(0.75, x.dtype) for x in self.values]

    def on_others(self) -> Iterator[None]:
        """Runs on other numbers, flags and shapes, one of these after the other, as far as the function takes them."""
        whole = self.skeleton.fill(self.tensors)
        changes: list[tuple[Callable[[Any], bool], Callable[[Any], Any]]] = [
            (lambda x: type(x) is float, lambda x: 0.75 * x),
            (lambda x: type(x) is int, lambda x: x + 1),
            (lambda x: type(x) is bool, lambda x: not x),
            (lambda x: isinstance(x, jax.Array) and x.ndim > 0, lambda x: jnp.concatenate([x, x])),
        ]
        for applies, change in changes:
            if any(map(applies, [*self.tensors, *self.skeleton.statics()])):
                with contextlib.suppress(Exception):
                    self.function(*jax.tree_util.tree_map(_where(applies, change), whole))
                yield

    def epsilon(self, outputs: Sequence[Any]) -> float:
        """The largest machine epsilon among the values and the outputs."""
        return max(float(jnp.finfo(x.dtype).eps) for x in [*self.values, *outputs] if differentiable(x))

    def widened(self) -> Flat:
        """The same in float64 and complex128; needs `jax.enable_x64`."""
        wide = [x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64) for x in self.values]
        return self.at(wide)


def _where(applies: Callable[[Any], bool], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: change(x) if applies(x) else x


def flat_of(name: str, function: Any, args: Any) -> tuple[str, Flat]:
    """What a checker was given, as a name for its messages and a function of tensors.

    Raises:
        TypeError: unless `function` is a layer or a function, and `args` a tuple or list.
        ValueError: if nothing among the arguments can be differentiated.
    """
    call = getattr(function, "apply", None) if isinstance(function, type) else function
    if not callable(call):
        raise TypeError(f"{name}: expected a layer or a function, got {function!r}.")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{name}: expected the arguments as a tuple, got {type(args).__name__}. Pass (x,) for one x.")
    flat = Flat(call, tuple(args))
    if not flat.chosen:
        raise ValueError(
            f"{name}: none of the arguments holds an array of floating-point or complex numbers, so that there is no "
            "gradient to check. Python numbers are statics: pass jnp.float32(1.5) for 1.5."
        )
    return f"{name} of {name_of(function)}", flat


def name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    named = owner if isinstance(owner, type) else function
    return getattr(named, "__qualname__", type(named).__name__)


def random_like(like: Any, rng: np.random.Generator) -> Any:
    size = rng.uniform(0.5, 1.5, like.shape) * rng.choice([-1.0, 1.0], like.shape)
    if jnp.iscomplexobj(like):
        size = size * np.exp(1j * rng.uniform(0, 2 * np.pi, like.shape))
    return jnp.asarray(size, like.dtype)

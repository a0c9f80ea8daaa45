"""A function at its arguments, as a function of a list of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.tracers import is_differentiated, is_tracer
from pylayer_jax._jax.types import has_tangent
from pylayer_jax._trees.partition import split

from ._comparison import type_of

__tracebackhide__ = True  # pytest hides the frames of this module


class FlatFunction:
    """A function at its arguments, as a function of the tensors in them.

    JAX differentiates some of the tensors; `values` are these. Cotangents are a dict from the position of an output to
    its cotangent: outputs that are not in the dict have none.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], names: Sequence[str] | None = None) -> None:
        tensors, self.skeleton = split(args)
        self.function = function
        self.tensors: list[Any] = [jnp.asarray(x) for x in tensors]
        self.differentiated = [i for i, x in enumerate(self.tensors) if has_tangent(x)]
        entries = self.skeleton.tensor_entries()
        self.paths = names or [f"args[{owner}]{path}" for owner, path in entries]
        self.names = [self.paths[i] for i in self.differentiated]
        self.owners = [entries[i][0] for i in self.differentiated]  # the argument that holds each of them
        self.argument_count = len(args)

    @property
    def values(self) -> list[Any]:
        return [self.tensors[i] for i in self.differentiated]

    def outputs(self, values: Sequence[Any]) -> list[Any]:
        """The tensors that the function returns for other values of the differentiated tensors."""
        return self.with_values(values).run()

    def run(self) -> list[Any]:
        """The tensors that the function returns."""
        return self.run_with_statics()[0]

    def run_with_statics(self) -> tuple[list[Any], list[Any]]:
        """The tensors that the function returns, and its other outputs."""
        tensors, skeleton = split(self.function(*self.skeleton.fill(self.tensors)))
        return [jnp.asarray(y) for y in tensors], skeleton.statics()

    def differentiable_outputs(self) -> list[int]:
        """The positions of the outputs with a gradient: not integers, and not outputs marked as not differentiable."""

        def run(*values: Any) -> tuple[list[Any], list[int]]:
            outputs = self.outputs(values)
            return outputs, [i for i, y in enumerate(outputs) if has_tangent(y) and is_differentiated(y)]

        return jax.vjp(run, *self.values, has_aux=True)[2]

    def random_cotangents(self, outputs: Sequence[Any], rng: np.random.Generator) -> dict[int, Any]:
        """A cotangent per floating-point or complex output, with entries of size 0.5 to 1.5 and either sign."""
        return {i: random_like(y, rng) for i, y in enumerate(outputs) if has_tangent(y)}

    def vjp(self, outputs: Collection[int], wanted: Sequence[int] | None = None) -> Callable[..., Any]:
        """The function that `jax.vjp` returns: from a cotangent per position in `outputs` to gradients.

        The gradients are those of the differentiated values at the positions `wanted`, by default of all.
        """
        values = self.values
        wanted = range(len(values)) if wanted is None else wanted

        def run(*perturbed: Any) -> dict[int, Any]:
            filled = list(values)
            for j, value in zip(wanted, perturbed, strict=True):
                filled[j] = value
            returned = self.outputs(filled)
            return {k: returned[k] for k in outputs}

        return jax.vjp(run, *(values[j] for j in wanted))[1]

    def grads(self, cotangents: dict[int, Any], wanted: Sequence[int] | None = None) -> list[Any]:
        """The gradients of the values at the positions `wanted`, by default of all."""
        return list(self.vjp(cotangents, wanted)(cotangents))

    def grad_function(self, cotangents: dict[int, Any]) -> FlatFunction:
        """The function that maps the differentiated values and the cotangents to the gradients."""

        def gradients(values: list[Any], cotangents: dict[int, Any]) -> list[Any]:
            return self.with_values(values).grads(cotangents)

        names = [*self.names, *(f"cotangent[{k}]" for k in cotangents)]
        return FlatFunction(gradients, (self.values, cotangents), names)

    def with_values(self, values: Sequence[Any]) -> FlatFunction:
        """The same function, with other values of the differentiated tensors."""
        other = self.with_tensors(self.tensors)
        for i, value in zip(self.differentiated, values, strict=True):
            other.tensors[i] = value
        return other

    def with_tensors(self, tensors: Sequence[Any]) -> FlatFunction:
        """The same function, with other tensors."""
        other = object.__new__(FlatFunction)
        vars(other).update(vars(self))
        other.tensors = list(tensors)
        return other

    def scaled_values(self) -> list[Any]:
        return [x * jnp.asarray(0.75, x.dtype) for x in self.values]

    def run_with_other_inputs(self) -> Iterator[None]:
        """Run on other numbers, flags and shapes, and yield after each run. Errors are ignored."""
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
        return max(float(jnp.finfo(x.dtype).eps) for x in [*self.values, *outputs] if has_tangent(x))

    def in_double_precision(self) -> FlatFunction:
        """The same function at values in float64 and complex128; needs `jax.enable_x64`."""
        return self.with_values([in_double_precision(x) for x in self.values])


def in_double_precision(x: Any) -> Any:
    return x.astype(jnp.complex128 if jnp.iscomplexobj(x) else jnp.float64)


def _where(applies: Callable[[Any], bool], change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: change(x) if applies(x) else x


def flat_function(
    name: str, function: Any, args: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[str, FlatFunction]:
    """A name for the messages of a checker, and the flat function of the arguments of the checker.

    Raises:
        TypeError: if `function` is not a layer or a function, or `args` not a tuple or list.
        ValueError: if no argument can be differentiated, or an array lies on devices of other processes too.
    """
    call = getattr(function, "apply", None) if isinstance(function, type) else function
    if not callable(call):
        raise TypeError(f"{name}: expected a layer or a function, got {function!r}.")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"{name}: expected the arguments as a tuple, got {type(args).__name__}. Pass (x,) for one x.")
    flat = FlatFunction(call, tuple(args)) if not kwargs else _with_keywords(call, tuple(args), kwargs)
    if not flat.differentiated:
        raise ValueError(
            f"{name}: none of the arguments holds an array of floating-point or complex numbers, so that there is no "
            "gradient to check. Python numbers are statics: pass jnp.float32(1.5) for 1.5."
        )
    for path, x in zip(flat.paths, flat.tensors, strict=True):
        if not is_tracer(x) and not x.is_fully_addressable:
            raise ValueError(
                f"{name}: {path} lies on devices of other processes too ({type_of(x)} with {x.sharding}); but {name} "
                "compares every entry in one process, and expects arrays of this process. Pass a small array on "
                "jax.local_devices(), or np.asarray(x) if x is fully replicated."
            )
    return f"{name} of {name_of(function)}", flat


def _with_keywords(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FlatFunction:
    count, keywords = len(args), list(kwargs)

    def run(*values: Any) -> Any:
        return call(*values[:count], **dict(zip(keywords, values[count:], strict=True)))

    values = (*args, *kwargs.values())
    names = [*(f"args[{i}]" for i in range(count)), *keywords]
    return FlatFunction(run, values, [names[owner] + path for owner, path in split(values)[1].tensor_entries()])


def name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    named = owner if isinstance(owner, type) else function
    return getattr(named, "__qualname__", type(named).__name__)


def random_like(like: Any, rng: np.random.Generator) -> Any:
    size = rng.uniform(0.5, 1.5, like.shape) * rng.choice([-1.0, 1.0], like.shape)
    if jnp.iscomplexobj(like):
        size = size * np.exp(1j * rng.uniform(0, 2 * np.pi, like.shape))
    return jnp.asarray(size, like.dtype)

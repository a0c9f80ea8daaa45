"""One call of `forward`: its arguments by name and in parameter order, arrays apart from statics."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compat import differentiable, typeof
from ._partition import Skeleton, is_tensor, split


class Argument:
    """One argument that was passed; a *slot* if it holds a tensor."""

    __slots__ = ("first", "name", "skeleton")

    def __init__(self, name: str, skeleton: Skeleton, first: int) -> None:
        self.name = name
        self.skeleton = skeleton
        self.first = first  # index of its first tensor among those of the call

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + self.skeleton.size)


class Arguments:
    """The arguments of one call, bound to the signature of `forward`.

    `tensors` are not kept here: an instance lives in a treedef, where an array would be a leak.
    """

    __slots__ = ("arguments", "avals", "keywords", "layer", "positional")

    def __init__(self, layer: str, positional: list[tuple[str, Any]], keywords: list[tuple[str, Any]]) -> None:
        self.layer = layer
        self.positional = len(positional)
        self.keywords = [name for name, _ in keywords]
        self.arguments: list[Argument] = []
        self.avals: list[Any] = []
        for name, value in positional + [(f"{k}", v) for k, v in keywords]:
            tensors, skeleton = split(value)
            self.arguments.append(Argument(name, skeleton, len(self.avals)))
            self.avals.extend(tensors)

    def take_tensors(self) -> list[Any]:
        """The tensors as JAX arrays; from then on only their types are kept."""
        tensors = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in self.avals]
        self.avals = [typeof(x) for x in tensors]
        return tensors

    @property
    def slots(self) -> list[Argument]:
        return [a for a in self.arguments if a.skeleton.size]

    def call(self, function: Callable[..., Any], ctx: Any, tensors: Sequence[Any]) -> Any:
        values = [a.skeleton.fill(tensors[a.span]) for a in self.arguments]
        return function(
            ctx, *values[: self.positional], **dict(zip(self.keywords, values[self.positional :], strict=True))
        )

    def needs(self, perturbed: Sequence[bool]) -> tuple[bool, ...]:
        """One bool per argument, from one per tensor."""
        return tuple(any(perturbed[a.span]) for a in self.arguments)

    def perturbable(self, perturbed: Sequence[bool]) -> list[bool]:
        """`perturbed` without the tensors that can have no gradient (integers, bools, PRNG keys)."""
        return [p and differentiable(aval) for p, aval in zip(perturbed, self.avals, strict=True)]


def bind(layer: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Bind a call to the signature of `forward(ctx, ...)`.

    Raises:
        TypeError: for an unknown keyword, a missing or surplus argument, or a `jax.Ref`.
    """
    refuse_refs(layer, (args, kwargs))
    signature, takes_ctx_by_name = _signature(forward)
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{layer}.apply: {error}. forward is declared as forward{signature}; "
            "apply takes its arguments without the context."
        ) from None
    parameters = signature.parameters
    positional: list[tuple[str, Any]] = []
    keywords: list[tuple[str, Any]] = []
    seen_keywords = set(bound.kwargs)
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            positional += [(f"{name}[{i}]", x) for i, x in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keywords += value.items()
        elif name in seen_keywords:
            keywords.append((name, value))
        else:
            positional.append((name, value))
    if not takes_ctx_by_name:  # forward(*args): the context is its first value
        first, *rest = positional
        positional = [(f"{first[0][:-3]}[{i}]", x) for i, (_, x) in enumerate(rest)]
    else:
        positional = positional[1:]
    return Arguments(layer, positional, keywords)


@functools.lru_cache(maxsize=1024)
def _signature(forward: Callable[..., Any]) -> tuple[inspect.Signature, bool]:
    signature = inspect.signature(forward)
    first = next(iter(signature.parameters.values()), None)
    return signature, first is not None and first.kind is not inspect.Parameter.VAR_POSITIONAL


def as_jax(tree: Any) -> Any:
    """The tree with its NumPy arrays and scalars as JAX arrays, as they are under jit."""
    return jax.tree_util.tree_map(
        lambda x: jnp.asarray(x) if isinstance(x, (np.ndarray, np.generic)) and is_tensor(x) else x, tree
    )


def refuse_refs(layer: str, tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if isinstance(leaf, jax.Ref):
            raise TypeError(
                f"{layer}.apply: the argument at {jax.tree_util.keystr(path)} is a jax.Ref, whose gradient would "
                "be lost. Pass its value: ref[...]."
            )

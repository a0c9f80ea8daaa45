"""`once_differentiable`: a `backward` that must not be differentiated."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from pylayer_jax._jax.identity_primitives import forbid_derivative
from pylayer_jax._jax.masks import merge, select
from pylayer_jax._jax.tracers import is_tracer
from pylayer_jax._jax.types import has_tangent
from pylayer_jax._trees.partition import split

from .context import PyLayerContext

Method = TypeVar("Method", bound=Callable[..., Any])


class OnceDifferentiableError(RuntimeError):
    """A second derivative goes through a decorated `backward`."""


def once_differentiable(backward: Method) -> Method:
    """Decorate `backward` to say that its own derivative is not defined.

    For a `backward` in host code, or one whose derivative would be wrong. Put it below `@staticmethod`.

    Raises:
        RuntimeError: if a second derivative goes through the decorated `backward`.
    """
    if isinstance(backward, (staticmethod, classmethod)):
        found: Any = type(backward)(once_differentiable(backward.__func__))
        return found

    def second_derivative_error() -> OnceDifferentiableError:
        return OnceDifferentiableError(
            f"{backward.__qualname__} is marked @once_differentiable, but a second derivative goes through it. "
            "Remove the decorator if backward is made of differentiable operations."
        )

    def forbid(*trees: Any) -> list[Any]:
        # One operation for all of them. Apart, since a tuple of tensors, as nearly each is, needs no flattening.
        parts = [split(tree) for tree in trees]
        tensors = [x for found, _ in parts for x in found]
        may_move = [is_tracer(x) and has_tangent(x) for x in tensors]
        if not any(may_move):
            return list(trees)
        forbidden = forbid_derivative(select(tensors, may_move), second_derivative_error)
        rest = iter(merge(may_move, forbidden, tensors))
        return [skeleton.fill(list(itertools.islice(rest, len(found)))) for found, skeleton in parts]

    @functools.wraps(backward)
    def guarded(*args: Any) -> Any:
        __tracebackhide__ = True
        first = next(i for i, value in enumerate(args) if isinstance(value, PyLayerContext))  # a class may come before
        # Check the inputs first, so that the error comes before host code runs; and the outputs, for values that
        # `backward` closes over.
        saved, attributes, cotangents = forbid(*args[first]._contents(), args[first + 1 :])
        ctx = args[first]._with_contents(saved, attributes)
        (gradients,) = forbid(backward(*args[:first], ctx, *cotangents))
        return gradients

    decorated: Any = guarded
    decorated.second_derivative_error = second_derivative_error
    return decorated


def second_derivative_error_of(backward: Callable[..., Any]) -> Callable[[], OnceDifferentiableError] | None:
    """Makes the error for a second derivative through a decorated `backward`; None for any other `backward`."""
    return getattr(backward, "second_derivative_error", None)

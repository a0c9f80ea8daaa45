"""The decorator `once_differentiable`, for a `backward` that must not be differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from ._context import PyLayerContext, backward_context
from ._errors import OnceDifferentiableError
from ._jax.identities import forbid_derivative
from ._jax.masks import merge, select
from ._jax.tracers import is_tracer
from ._jax.types import has_tangent
from ._trees import split

Method = TypeVar("Method", bound=Callable[..., Any])


def once_differentiable(backward: Method) -> Method:
    """Mark a `backward` that has no derivative: then a second derivative raises an error.

        >>> class Once(Tanh):
        ...     @staticmethod
        ...     @once_differentiable
        ...     def backward(ctx, dy):
        ...         return Tanh.backward(ctx, dy)
        >>> try:
        ...     jax.grad(jax.grad(Once.apply))(0.0)
        ... except RuntimeError:
        ...     print("no second derivative")
        no second derivative

    Use the decorator for a `backward` in host code, or for a `backward` whose derivative would be wrong.

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

    def forbid(tree: Any) -> Any:
        tensors, skeleton = split(tree)
        may_move = [is_tracer(x) and has_tangent(x) for x in tensors]
        forbidden = forbid_derivative(select(tensors, may_move), second_derivative_error)
        return skeleton.fill(merge(may_move, forbidden, tensors)) if forbidden else tree

    @functools.wraps(backward)
    def guarded(*args: Any) -> Any:
        __tracebackhide__ = True
        first = next(i for i, value in enumerate(args) if isinstance(value, PyLayerContext))  # cls may precede ctx
        # Forbid differentiation of the inputs, not of the outputs: JAX raises the error before any host code runs.
        ctx = args[first]
        state, attributes = ctx._state, dict(vars(ctx))
        saved, attributes, cotangents = forbid((state.read_saved(), attributes, args[first + 1 :]))
        ctx = backward_context(type(ctx), state.layer, state.needs, lambda: saved, attributes)
        return backward(*args[:first], ctx, *cotangents)

    decorated: Any = guarded
    decorated.undecorated = backward
    decorated.second_derivative_error = second_derivative_error
    return decorated

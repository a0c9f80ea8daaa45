"""Checks that forward mode agrees with reverse mode, for a layer and for its gradients.

Let J be the Jacobian of the outputs. Reverse mode computes J^T w for cotangents w, and forward mode computes J t for
tangents t. If both modes are right, w . (J t) equals (J^T w) . t for any w and t:

    w . (J t)  =  (J^T w) . t

If t is a unit vector, both sides are one entry of the gradient J^T w. For complex arrays the real parts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._errors import NoForwardModeError, NotLinearError, OnceDifferentiableError

from ._compare import Case, exact, first_line
from ._gradients import directional_cases
from ._subject import Cases, Subject
from ._tensor_function import TensorFunction, placed, scaled

__tracebackhide__ = True  # pytest hides the frames of this module


def forward_mode(subject: Subject) -> Cases:
    if refusal := _refusal(subject):
        return f"there is none: {refusal}"
    alone = lambda j, t: _jvp(subject, subject.function.only(j), [t])  # noqa: E731  (array j alone has a tangent)
    yield from _cases(subject, alone, 0, "by jax.jvp")
    yield from _under_jit(subject, "by jax.jvp, under jit")
    yield from _under_vmap(subject, "by jax.jvp of vmap")
    return "matches reverse mode, entry by entry, also under jit and vmap"


def forward_over_reverse(subject: Subject) -> Cases:
    second = subject.derivative
    if refusal := _refusal(second, NotLinearError, OnceDifferentiableError):
        return f"there is none: {refusal}"
    over_forward = ""
    if not _refusal(subject):
        yield from _over_forward(subject, "by jax.jvp of jax.jvp")
        over_forward = "; so does forward over forward"
    yield from _under_jit(second, "by jax.jvp of the gradients, under jit")
    return f"matches reverse over reverse, entry by entry, also under jit{over_forward}"


def _refusal(subject: Subject, *kinds: type[Exception]) -> str:
    """Return why the subject has no `jax.jvp`: the message of a NoForwardModeError or one of `kinds`; else empty."""
    try:
        _jvp(subject, subject.function, subject.function.values)
    except (TypeError, RuntimeError) as error:
        # For a `jax.custom_vjp` function, JAX raises a TypeError, which only its message identifies.
        if not isinstance(error, (NoForwardModeError, *kinds)) and "autodiff (jvp) to a custom_vjp" not in str(error):
            raise
        return first_line(error).split(". ")[0]
    return ""


def _jvp(subject: Subject, function: TensorFunction, tangents: Sequence[Any]) -> list[Any]:
    """Return J t, where J is the Jacobian of `function` at its values and t are the tangents."""
    outputs = function.selected(subject.cotangents)
    return list(jax.jvp(outputs, tuple(function.values), tuple(tangents))[1].values())


def _zeros_but(subject: Subject, j: int, tangent: Any) -> tuple[Any, ...]:
    return tuple(tangent if i == j else jnp.zeros_like(x) for i, x in enumerate(subject.function.values))


# -- cases with derivatives by forward mode -------------------------------------------------------


def _cases(
    subject: Subject, jvp: Callable[[int, Any], list[Any]], limit: int, how: str, weights: Sequence[Any] = ()
) -> Iterator[Case]:
    """Yield cases that compare gradients with w . (J t); `jvp` maps the position and the tangent of an array to J t."""
    weights = weights or list(subject.cotangents.values())

    def along(j: int, direction: np.ndarray) -> tuple[float, float, np.ndarray]:
        tangent = placed(subject.function.values[j], direction)
        terms = [exact(w) * exact(t) for w, t in zip(weights, jvp(j, tangent), strict=True)]
        size = sum(float(np.sum(np.abs(x))) for x in terms)
        return sum(float(np.sum(x).real) for x in terms), 4 * subject.epsilon * size, exact(tangent)

    return directional_cases(subject, along, limit, how)


def _under_jit(subject: Subject, how: str) -> Iterator[Case]:
    """Yield cases that compare each entry of the gradients with forward mode under jit."""
    function, limit = subject.function, subject.options.limit
    jitted = jax.jit(lambda values, tangents: _jvp(subject, function.with_values(values), tangents))
    return _cases(subject, lambda j, t: jitted(function.values, _zeros_but(subject, j, t)), limit, how)


def _under_vmap(subject: Subject, how: str) -> Iterator[Case]:
    """Yield cases along random directions, with the derivatives of the first example of a batch."""
    mapped = jax.vmap(subject.function.selected(subject.cotangents))
    batched = jax.jit(lambda values, tangents: jax.jvp(mapped, values, tangents))

    def jvp(j: int, tangent: Any) -> list[Any]:
        arrays = subject.function.values, _zeros_but(subject, j, tangent)
        values, tangents = (tuple(jnp.stack([x, scaled(0.9, x)]) for x in xs) for xs in arrays)
        return [t[0] for t in batched(values, tangents)[1].values()]

    return _cases(subject, jvp, 0, how)


def _over_forward(subject: Subject, how: str) -> Iterator[Case]:
    """Yield cases with second derivatives along random directions, by forward over forward.

    Reverse over reverse differentiates (J^T w) . u, with cotangents u of J^T w. Forward over forward differentiates
    w . (J u), which is the same number.
    """
    second, count = subject.derivative, len(subject.function.values)
    u = list(second.cotangents.values())

    def products(*args: Any) -> list[Any]:  # args: the values, then w
        tangents = _jvp(subject, subject.function.with_values(args[:count]), u)
        return [w * t for w, t in zip(args[count:], tangents, strict=True)]

    def jvp(j: int, tangent: Any) -> list[Any]:
        return jax.jvp(products, tuple(second.function.values), _zeros_but(second, j, tangent))[1]

    return _cases(second, jvp, 0, how, weights=[np.ones(())] * len(subject.cotangents))

"""Whether forward mode agrees with reverse mode, for a layer and for its gradients.

Let J be the derivative of the outputs. Reverse mode gives J^T w for cotangents w, and forward mode gives J t for
tangents t. Both therefore give the same number for any w and t:

    w . (J t)  =  (J^T w) . t

If t is a unit vector, this number is one entry of the gradient J^T w. For complex arrays the real parts are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._compare import Case, exact, first_line
from ._gradients import directional_cases
from ._internals import NEEDS_VALUES, NoForwardModeError, NotLinearError, OnceDifferentiableError
from ._subject import Cases, Subject
from ._tensor_function import placed, scaled

__tracebackhide__ = True  # pytest hides the frames of this module


def forward_mode(subject: Subject) -> Cases:
    if refusal := _refusal(subject):
        return f"there is none: {refusal}"
    yield from _alone(subject, "by jax.jvp")
    yield from _under_jit(subject, "by jax.jvp, under jit")
    yield from _under_vmap(subject, "by jax.jvp of vmap")
    return "matches reverse mode, entry by entry, also under jit and vmap"


def forward_over_reverse(subject: Subject) -> Cases:
    second, how = subject.derivative, "by jax.jvp of the gradients"
    if refusal := _refusal(second, NotLinearError, OnceDifferentiableError):
        return f"there is none: {refusal}"
    over_forward = ""
    if not _refusal(subject):
        yield from _over_forward(subject, "by jax.jvp of jax.jvp")
        over_forward = "; so does forward over forward"
    try:
        yield from _under_jit(second, f"{how}, under jit")
    except NEEDS_VALUES:  # jit cannot run such a layer in reverse mode either
        yield from _alone(second, how)
        return f"matches reverse over reverse; not under jit, since it needs concrete values{over_forward}"
    return f"matches reverse over reverse, entry by entry, also under jit{over_forward}"


def _refusal(subject: Subject, *kinds: type[Exception]) -> str:
    """Return why a subject has no forward mode (also by an error of one of these kinds); empty if it has one."""
    try:
        _jvp(subject, subject.function.values, subject.function.values)
    except (TypeError, RuntimeError) as error:
        # JAX has no type for its error about a `jax.custom_vjp` function.
        if not isinstance(error, (NoForwardModeError, *kinds)) and "autodiff (jvp) to a custom_vjp" not in str(error):
            raise
        return first_line(error).split(". ")[0]
    return ""


def _outputs(subject: Subject, values: Sequence[Any]) -> list[Any]:
    returned = subject.function.outputs(values)
    return [returned[k] for k in subject.cotangents]


def _jvp(subject: Subject, values: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Return J t."""
    return jax.jvp(lambda *values: _outputs(subject, values), tuple(values), tuple(tangents))[1]


def _zeros_but(subject: Subject, j: int, tangent: Any) -> tuple[Any, ...]:
    return tuple(tangent if i == j else jnp.zeros_like(x) for i, x in enumerate(subject.function.values))


# -- derivatives by forward mode, each a function of the tangent of one array ---------------------


def _cases(subject: Subject, jvp: Callable[[int, Any], list[Any]], limit: int, how: str) -> Iterator[Case]:
    """Yield gradients beside w . (J t); `jvp` maps the position of an array, and its tangent, to J t."""
    weights = list(subject.cotangents.values())

    def terms(j: int, tangent: Any) -> list[np.ndarray]:
        return [exact(w) * exact(t) for w, t in zip(weights, jvp(j, tangent), strict=True)]

    return _summed_cases(subject, terms, limit, how)


def _summed_cases(subject: Subject, terms: Callable[[int, Any], list[Any]], limit: int, how: str) -> Iterator[Case]:
    def along(j: int, direction: np.ndarray) -> tuple[float, float, np.ndarray]:
        tangent = placed(subject.function.values[j], direction)
        arrays = list(map(exact, terms(j, tangent)))
        size = sum(float(np.sum(np.abs(x))) for x in arrays)
        return sum(float(np.sum(x).real) for x in arrays), 4 * subject.epsilon * size, exact(tangent)

    return directional_cases(subject, along, limit, how)


def _alone(subject: Subject, how: str) -> Iterator[Case]:
    """Yield the gradient of each array along a random direction, in eager mode; no other array has a tangent."""
    values = subject.function.values

    def jvp(j: int, tangent: Any) -> list[Any]:
        return jax.jvp(lambda x: _outputs(subject, [*values[:j], x, *values[j + 1 :]]), [values[j]], [tangent])[1]

    return _cases(subject, jvp, 0, how)


def _under_jit(subject: Subject, how: str) -> Iterator[Case]:
    """Yield gradients entry by entry."""
    jitted, values = jax.jit(lambda values, tangents: _jvp(subject, values, tangents)), subject.function.values
    return _cases(subject, lambda j, t: jitted(values, _zeros_but(subject, j, t)), subject.options.limit, how)


def _under_vmap(subject: Subject, how: str) -> Iterator[Case]:
    """Yield gradients along random directions, from the first example of a batch."""

    def jvp(j: int, tangent: Any) -> list[Any]:
        arrays = subject.function.values, _zeros_but(subject, j, tangent)
        values, tangents = (tuple(jnp.stack([x, scaled(0.9, x)]) for x in xs) for xs in arrays)
        return [t[0] for t in batched(values, tangents)[1]]

    mapped = jax.vmap(lambda *values: _outputs(subject, values))
    batched = jax.jit(lambda values, tangents: jax.jvp(mapped, values, tangents))
    return _cases(subject, jvp, 0, how)


def _over_forward(subject: Subject, how: str) -> Iterator[Case]:
    """Yield second derivatives along random directions.

    Reverse over reverse differentiates (J^T w) . u, where u are cotangents. In forward mode this is w . (J u).
    """
    second, count = subject.derivative, len(subject.function.values)
    u = list(second.cotangents.values())

    def products(*args: Any) -> list[Any]:  # of the values and w
        return [w * t for w, t in zip(args[count:], _jvp(subject, args[:count], u), strict=True)]

    def terms(j: int, tangent: Any) -> list[Any]:
        return jax.jvp(products, tuple(second.function.values), _zeros_but(second, j, tangent))[1]

    return _summed_cases(second, terms, 0, how)

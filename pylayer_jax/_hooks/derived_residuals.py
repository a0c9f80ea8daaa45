"""Residuals that follow from another tensor that is kept: they are computed again, and not packed.

A plain operation leaves residuals such as y and 1 - y of a tanh, the zeros of a selection, or a mask as large as what
it masks. The recorder sees the operations that make them. A residual follows from others by steps that move values,
compute with integers, or scale everything alike: the error of a packed form is then scaled with it. `Errors` says
whether a pair allows more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.imports import eval_jaxpr, set_current_trace
from pylayer_jax._jax.jaxprs import inner_jaxprs, is_inlinable, jaxpr_and_consts, with_users_line
from pylayer_jax._jax.tracers import PassThroughTrace
from pylayer_jax._jax.types import typeof

_MOVES = frozenset(
    ("broadcast_in_dim", "copy", "copy_p", "expand_dims", "iota", "reshape", "rev", "squeeze", "transpose")
)
_OF_INTEGERS = frozenset(("add", "and", "eq", "ge", "gt", "le", "lt", "mul", "ne", "not", "or", "sub", "xor"))
_LONGEST_OPENED = 8  # equations; a longer jitted function stays one


class Errors(NamedTuple):
    """What is known of the error that a pair of hooks makes."""

    # Whether it stays as it is where a constant is added: it does not depend on the size of a value, or there is none.
    error_is_absolute: bool = False
    # How many values a row along the last axis has at least, if it may be scaled by a number of its own: the error of
    # its values then comes from that row only. None if no row may.
    shortest_scaled_row: int | None = None

    def and_then(self, other: Errors) -> Errors:
        """The errors of a pair that packs with two others, one after the other."""
        first, second = self.shortest_scaled_row, other.shortest_scaled_row
        # If both divide by rows, the second may mix numbers of the first that belong to several rows.
        rows = None if first is None or second is None or (first and second) else first + second
        return Errors(self.error_is_absolute and other.error_is_absolute, rows)


class Origin(NamedTuple):
    """The equation that made a value."""

    primitive: Any
    params: dict[str, Any]
    inputs: Sequence[Any]
    value: Any  # held, so that its id stays its own


Origins = dict[int, Origin]  # by the identity of the value


class Recorder(PassThroughTrace):
    """Runs operations on the trace below, and remembers of each one that has one result what made it."""

    __slots__ = ("origins",)

    def __init__(self, parent_trace: Any) -> None:
        super().__init__(parent_trace)
        self.origins: Origins = {}

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if primitive.name == "jit" and (opened := _opened(params)) is not None:
            with set_current_trace(self):
                return eval_jaxpr(*opened, *tracers)
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*tracers, **params)
        if not primitive.multiple_results and not any(result is x for x in tracers):
            self.origins[id(result)] = Origin(primitive, params, tracers, result)
        return result


def _opened(params: dict[str, Any]) -> tuple[Any, Sequence[Any]] | None:
    """The jaxpr and constants of a small jitted function, such as those of jax.numpy; None for another one."""
    jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
    is_small = len(jaxpr.eqns) <= _LONGEST_OPENED and not any(inner_jaxprs(e.params) for e in jaxpr.eqns)
    return (with_users_line(jaxpr), consts) if is_small and not jaxpr.effects and is_inlinable(params) else None


class Step(NamedTuple):
    primitive: Any
    params: dict[str, Any]
    inputs: Sequence[tuple[int, Any]]  # an index among roots and earlier steps, or -1 and a constant


class Expression:
    """A tensor as a function of others, its roots. Holds no array."""

    __slots__ = ("steps",)

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    @staticmethod
    def of(
        tensor: Any, origins: Origins, is_kept: Callable[[Any], bool], errors: Errors
    ) -> tuple[Expression, list[Any]]:
        """The expression of a tensor and its roots, of which as many as possible are kept; without steps for a root."""
        roots: list[Any] = []
        made: list[tuple[Any, Origin]] = []
        _follow_back(tensor, origins, is_kept, errors, roots, made)
        values = [*roots, *(value for value, _ in made)]

        def place(x: Any) -> tuple[int, Any]:
            return next(((i, None) for i, value in enumerate(values) if value is x), (-1, x))

        return Expression([Step(o.primitive, o.params, [place(x) for x in o.inputs]) for _, o in made]), roots

    def evaluate(self, roots: Sequence[Any]) -> Any:
        values = list(roots)
        for primitive, params, inputs in self.steps:
            values.append(primitive.bind(*(x if i < 0 else values[i] for i, x in inputs), **params))
        return values[-1]


def _follow_back(
    value: Any,
    origins: Origins,
    is_kept: Callable[[Any], bool],
    errors: Errors,
    roots: list[Any],
    made: list[tuple[Any, Origin]],
) -> None:
    """Add to `roots` what a value follows from, and to `made` what is made of them, in order.

    Not a nested function: one that calls itself is a reference cycle, which would hold the arrays for a while.
    """
    if _is_constant(value) or any(value is x for x in roots) or any(value is x for x, _ in made):
        return
    origin = None if is_kept(value) else origins.get(id(value))
    if origin is None or not _is_simple(origin, origins, errors):
        roots.append(value)
        return
    for x in origin.inputs:
        _follow_back(x, origins, is_kept, errors, roots, made)
    made.append((value, origin))


def _is_constant(value: Any) -> bool:
    """Whether a value is a number, or a literal of JAX; not an array that may change from one run to the next."""
    return not isinstance(value, jax.Array) and np.ndim(value) == 0


def _is_simple(origin: Origin, origins: Origins, errors: Errors) -> bool:
    name, inputs = origin.primitive.name, origin.inputs
    if name in _MOVES or name == "neg":
        return True
    if name in _OF_INTEGERS and all(map(_is_integer, inputs)):
        return True
    if name == "convert_element_type":
        return _is_integer(inputs[0]) or np.can_cast(_dtype(inputs[0]), origin.params["new_dtype"])
    if name in ("mul", "div") or (name in ("add", "sub") and errors.error_is_absolute):
        shortest, shape = errors.shortest_scaled_row, np.shape(origin.value)
        by_row = shortest is not None and (not shape or _is_at_least(shape[-1], shortest))
        is_uniform = _is_constant_along_rows if by_row else _is_one_number
        return any(is_uniform(x, origins) for x in (inputs[1:] if name == "div" else inputs))
    if name == "one_minus_square":
        return errors.error_is_absolute
    return name == "square" or (name == "integer_pow" and origin.params["y"] in (2, 3))


def _is_at_least(length: Any, shortest: int) -> bool:
    """Whether an axis is known to have a length; in `jax.export` the length may be a symbol."""
    return length >= shortest if isinstance(length, int) else not shortest


def is_offset(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation adds a scalar, so that its result may follow from a tensor that is kept."""
    return name in ("add", "sub") and any(np.size(x) == 1 for x in args)


def _dtype(value: Any) -> Any:
    return typeof(value).dtype


def _is_integer(value: Any) -> bool:
    dtype = _dtype(value)
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


def _is_one_number(value: Any, origins: Origins) -> bool:
    origin = origins.get(id(value))
    if origin is not None and origin.primitive.name == "broadcast_in_dim":
        value = origin.inputs[0]
    return np.size(value) == 1


def _is_constant_along_rows(value: Any, origins: Origins) -> bool:
    shape = np.shape(value)
    if _is_one_number(value, origins) or shape[-1] == 1:
        return True
    origin = origins.get(id(value))
    if origin is None or origin.primitive.name != "broadcast_in_dim":
        return False
    operand, dimensions = np.shape(origin.inputs[0]), origin.params["broadcast_dimensions"]
    return not dimensions or dimensions[-1] != len(shape) - 1 or operand[-1] == 1

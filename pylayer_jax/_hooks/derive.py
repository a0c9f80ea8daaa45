"""Functions that find the residuals that can be recomputed from other residuals, and so need no packing.

An operation has residuals such as y and 1 - y of a tanh, the zeros of a selection, or a mask as large as the masked
array. A `Recorder` records the equations in the forward pass of one operation. The function `follow` walks back through
the equations that do not amplify the packing error. If y is a residual, `y * y * 3` becomes:

    root = Root([array of y], how y is packed)
    Computed(mul, {}, [Computed(mul, {}, [root, root]), 3.0])

A comparison of floating-point numbers is never recomputed from a packed value: `x == max(x)` would become False
everywhere. tests: test_derived.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.imports import eval_jaxpr, set_current_trace
from pylayer_jax._jax.jaxprs import inner_jaxprs, is_inlinable, jaxpr_and_consts, with_users_line
from pylayer_jax._jax.tracers import PassThroughTrace, is_tracer
from pylayer_jax._jax.types import typeof

from .pair import OFFSETS, SCALES

MOVE_NAMES: Final = frozenset(
    ("broadcast_in_dim", "copy", "copy_p", "expand_dims", "iota", "reshape", "rev", "squeeze", "transpose")
)
_OF_INTEGERS: Final = frozenset(("add", "and", "eq", "ge", "gt", "le", "lt", "mul", "ne", "not", "or", "sub", "xor"))
_LONGEST_OPENED: Final = 8  # number of equations; a longer jitted function stays one operation


class Origin(NamedTuple):
    """The equation that computed a value."""

    primitive: Any
    params: dict[str, Any]
    inputs: Sequence[Any]
    value: Any  # the value is held, so that no other object gets its id


class Recorder(PassThroughTrace):
    """A trace that passes operations on to its parent, and records the origin of each single result of a primitive."""

    __slots__ = ("origins",)

    def __init__(self, parent_trace: Any) -> None:
        super().__init__(parent_trace)
        self.origins: dict[int, Origin] = {}  # id of a value -> its origin

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        if primitive.name == "jit" and (opened := small_jaxpr(params)) is not None:
            with set_current_trace(self):
                return eval_jaxpr(*opened, *tracers)
        with set_current_trace(self.parent_trace):
            result = primitive.bind(*tracers, **params)
        if not primitive.multiple_results and id(result) not in map(id, tracers):
            self.origins[id(result)] = Origin(primitive, params, tracers, result)
        return result


def small_jaxpr(params: dict[str, Any]) -> tuple[Any, Sequence[Any]] | None:
    """Return the jaxpr and constants if the function is small (like many of jax.numpy), otherwise None."""
    jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
    is_small = len(jaxpr.eqns) <= _LONGEST_OPENED and not [j for e in jaxpr.eqns for j in inner_jaxprs(e.params)]
    return (with_users_line(jaxpr), consts) if is_small and not jaxpr.effects and is_inlinable(params) else None


# -- how tensors are kept ------------------------------------------------------------------------------


class Root:
    """A tensor that JAX keeps as `arrays`. If `packed` is None, the only array is the tensor itself."""

    __slots__ = ("arrays", "packed")

    def __init__(self, arrays: list[Any], packed: Any = None) -> None:
        self.arrays, self.packed = arrays, packed


class Computed(NamedTuple):
    """A tensor that an equation recomputes from other residuals and numbers."""

    primitive: Any
    params: dict[str, Any]
    inputs: Sequence[Any]

    def evaluate(self, operands: Sequence[Any]) -> Any:
        result = self.primitive.bind(*operands, **self.params)
        return result[0] if self.primitive.multiple_results else result


Residual = Root | Computed


# A nested function that calls itself would be a reference cycle, and hold arrays longer than needed.
def fold(
    residual: Any,
    of_root: Callable[[Root], Any],
    of_equation: Callable[[Computed, list[Any]], Any],
    done: dict[int, Any],  # id of a residual -> its result
) -> Any:
    """Return `of_root(root)` for a root, and `of_equation(equation, results of its inputs)` for a computed residual."""
    if not isinstance(residual, (Root, Computed)):  # the residual is a number
        return residual
    if id(residual) not in done:
        if isinstance(residual, Root):
            done[id(residual)] = of_root(residual)
        else:
            inputs = [fold(x, of_root, of_equation, done) for x in residual.inputs]
            done[id(residual)] = of_equation(residual, inputs)
    return done[id(residual)]


def with_roots(residual: Residual, change: Callable[[Root], Root]) -> Residual:
    """Return a copy of a residual with `change(root)` in place of each root."""
    if isinstance(residual, Root):
        return change(residual)
    return fold(residual, change, lambda equation, inputs: equation._replace(inputs=inputs), {})


def follow(
    value: Any,
    origins: dict[int, Origin],
    is_known: Callable[[Any], bool],
    is_constant: Callable[[Any], bool],
    keeps: int,
    roots: list[Any],
    made: list[Origin],
) -> None:
    """Add to `roots` the values from which `value` follows, and to `made` the equations from them to `value`.

    A root is a known value wherever that is possible.
    """
    if is_constant(value) or id(value) in map(id, [*roots, *[o.value for o in made]]):
        return
    origin = None if is_known(value) else origins.get(id(value))
    if origin is None or not _keeps_errors(origin, origins, keeps):
        roots.append(value)
        return
    for x in origin.inputs:
        follow(x, origins, is_known, is_constant, keeps, roots, made)
    made.append(origin)


def is_number(value: Any) -> bool:
    """Return whether a value is a concrete scalar, which is the same in all runs of a program."""
    return np.ndim(value) == 0 and not is_tracer(value)


def _keeps_errors(origin: Origin, origins: dict[int, Origin], keeps: int) -> bool:
    """Return whether an equation does not amplify the packing errors of its inputs."""
    name, inputs = origin.primitive.name, origin.inputs
    if name in MOVE_NAMES or name == "neg":
        return True
    if name in _OF_INTEGERS and all(map(_is_integer, inputs)):
        return True
    if name == "convert_element_type":
        return _is_integer(inputs[0]) or np.can_cast(typeof(inputs[0]).dtype, origin.params["new_dtype"])
    if (name in ("mul", "div") and keeps >= SCALES) or (name in ("add", "sub") and keeps >= OFFSETS):
        return any(_is_constant_along_rows(x, origins) for x in (inputs[1:] if name == "div" else inputs))
    if name == "one_minus_square":
        return keeps >= OFFSETS
    return keeps >= SCALES and (name == "square" or (name == "integer_pow" and origin.params["y"] in (2, 3)))


def adds_a_number(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operation adds a scalar, so that its result may be recomputed from another residual."""
    return name in ("add", "sub") and any(np.size(x) == 1 for x in args)


def _is_integer(value: Any) -> bool:
    dtype = typeof(value).dtype
    return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


def _is_constant_along_rows(value: Any, origins: dict[int, Origin]) -> bool:
    shape = np.shape(value)
    if not shape or shape[-1] == 1:
        return True
    origin = origins.get(id(value))
    if origin is None or origin.primitive.name != "broadcast_in_dim":
        return False
    operand, dimensions = np.shape(origin.inputs[0]), origin.params["broadcast_dimensions"]
    return not dimensions or dimensions[-1] != len(shape) - 1 or operand[-1] == 1


def is_larger(values: Sequence[Any], tensor: Any) -> bool:
    """Return True if the total size of the values could exceed the size of the tensor."""

    def n_bytes(aval: Any) -> int:
        return aval.size * aval.dtype.itemsize

    try:
        return sum(n_bytes(aval) for aval in map(typeof, values) if aval.ndim) > n_bytes(typeof(tensor))
    except jax.errors.InconclusiveDimensionOperation:  # symbolic dimensions of `jax.export`
        return True

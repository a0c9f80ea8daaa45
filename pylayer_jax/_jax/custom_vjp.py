"""Functions with a rule for reverse mode: making, calling and finding `jax.custom_vjp` functions."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from .imports import DebugInfo, SymbolicZero
from .jaxprs import inner_jaxprs
from .types import manual_axes


def custom_vjp(
    name: str,
    source: str,
    primal: Callable[..., Any],
    forward_rule: Callable[..., Any],
    backward_rule: Callable[..., Any],
    symbolic_zeros: bool = True,
) -> Callable[..., Any]:
    """A `jax.custom_vjp` function of (static, *tensors), by position.

    JAX's errors show `source`, the name and the place, as in `Tanh at layers.py:12`.
    """
    primal, forward_rule, backward_rule = (_copy(f, name, source) for f in (primal, forward_rule, backward_rule))
    function = jax.custom_vjp(primal)
    function.defvjp(forward_rule, backward_rule, symbolic_zeros=symbolic_zeros)
    return function


_BY_POSITION: Final = inspect.Signature([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


def _copy(function: Any, name: str, source: str) -> Any:
    """A copy of a plain function, under another name.

    NOTE [names made once]
    At each call of a custom_vjp function, JAX reads the signatures of its three functions, and works out their names
    and the names of their arguments, which errors show. This takes more than a tenth of the time to trace a layer.
    Therefore the copies have these as attributes. A JAX that does not read `__fun_debug_info__` works them out again,
    which only takes longer.
    """
    copy: Any = types.FunctionType(function.__code__, function.__globals__, name)
    copy.__qualname__ = name
    copy.__signature__ = _BY_POSITION
    copy.__fun_debug_info__ = DebugInfo("custom_vjp", source, None, None)
    return copy


def call_with_symbolic_zeros(rule: Callable[..., Any], static: Any, tensors: Sequence[Any]) -> Any:
    """Call a `custom_vjp` function that was defined with `symbolic_zeros=True`."""
    __tracebackhide__ = True
    try:
        return rule(static, *tensors)
    except NotImplementedError:
        # In eager shard_map JAX runs such a rule only if it is staged. An error of the rule itself is raised again.
        if not manual_axes():
            raise
        return jax.jit(lambda *tensors: rule(static, *tensors))(*tensors)


def is_symbolic_zero(cotangent: Any) -> bool:
    # The bwd rule of a custom_vjp gets these for an output that has no gradient; float0 is the dtype for an integer.
    # A Python number, which a vjp function takes too, has no dtype.
    return isinstance(cotangent, SymbolicZero) or getattr(cotangent, "dtype", None) == jax.dtypes.float0


def custom_function_name(primitive: Any, params: dict[str, Any]) -> str | None:
    """The name of the `custom_vjp` function that an operation applies, if it applies one."""
    if primitive.name == "custom_vjp_call":
        return params["call_jaxpr"].debug_info.func_name
    if primitive.name == "call_hi_primitive":  # the same under jax_custom_vjp3
        traced = getattr(params["_prim"], "traced", None)
        return getattr(traced, "fun_name", None)
    return None


def custom_function_in(jaxpr: Any) -> str | None:
    """The name of the first `custom_vjp` function that a jaxpr applies, at any depth; None if there is none."""
    for equation in jaxpr.eqns:
        names = (custom_function_in(inner) for inner in inner_jaxprs(equation.params))
        name = custom_function_name(equation.primitive, equation.params) or next(filter(None, names), None)
        if name is not None:
            return name
    return None

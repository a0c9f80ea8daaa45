"""Plain JAX operations inside a hooks block.

A trace that wraps the current one meets every operation of the block. If an operation is, or may later be,
differentiated, it is bound as a function with a rule that packs residuals (`operation_rule`). An operation is anything
that JAX binds: an addition, an already jitted function, a scan, a function with a custom gradient. Inside an operation
hooks are suspended: its residuals are packed once, as the residuals of the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from pylayer_jax._jax.custom_vjp import custom_function_name
from pylayer_jax._jax.define_primitive import PrimitiveWithObject
from pylayer_jax._jax.identity_primitives import holds_hooks_block
from pylayer_jax._jax.imports import ShapedArray, eval_jaxpr, set_current_trace
from pylayer_jax._jax.jaxprs import as_parameter, has_equation, inner_jaxprs, jaxpr_and_consts, stage
from pylayer_jax._jax.tracers import (
    PassThroughTrace,
    current_trace,
    is_differentiated,
    is_differentiated_twice,
    is_reverse_mode_tracer,
    is_staged,
    is_staged_below,
    is_unknown,
    nothing_is_traced,
    trace_below,
)
from pylayer_jax._jax.types import as_arrays, typeof
from pylayer_jax._trees.partition import split

from .derived_residuals import is_offset
from .open_blocks import Block, Hooks, hooks_suspended, innermost_block
from .operation_rule import Operation, Run
from .pair import Pair

# Their vjp keeps no array, so that there is nothing to pack: they stay the operations that they are.
_WITHOUT_RESIDUALS = frozenset(
    (
        "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "device_put",
        "expand_dims", "name", "neg", "new_ref", "pad", "pcast", "psum", "real", "imag", "reduce_sum", "reshape", "rev",
        "sharding_constraint", "slice", "squeeze", "stop_gradient", "sub", "transpose",
        "barrier", "forbid_derivative", "map_all_outputs", "with_tangent",
    )
)  # fmt: skip


_JITTED = ("jit", "pjit")


class HooksTrace(PassThroughTrace):
    """The current trace of a hooks block."""

    __slots__ = ("block", "outer_trace", "pair")
    is_hooks_block = True  # a trace that wraps this one hands it on

    def __init__(self, block: Block, pair: Pair) -> None:
        self.outer_trace = current_trace()  # which may be that of a block around this one
        super().__init__(trace_below(self.outer_trace))  # only the innermost pair applies
        self.block = block
        self.pair = pair

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        def bind(*args: Any) -> Any:
            return primitive.bind(*args, **params)

        if not self._applies() or any(holds_hooks_block(j) or _closes_over_ref(j) for j in inner_jaxprs(params)):
            with set_current_trace(self.parent_trace):
                return bind(*tracers)
        # Packed within, residuals of a scan have no second derivative: NOTE [packed tensors].
        is_once = not any(map(is_differentiated_twice, tracers)) and not _is_in_forward_mode(tracers)
        if is_once and any(map(is_staged_below, tracers)) and all(map(_is_plain_array, tracers)):
            jaxpr = _packing_inside(primitive.name, params, self.pair)
            if jaxpr is not None:
                with set_current_trace(self.parent_trace):
                    return primitive.bind(*tracers, **{**params, "jaxpr": jaxpr})
        is_named = primitive.name in _JITTED or isinstance(primitive, PrimitiveWithObject)
        shown = params["name"] if is_named else custom_function_name(primitive, params) or ""
        return self._process(bind, primitive.name, tracers, runs_again=True, shown=shown)

    def _applies(self) -> bool:
        # A trace within this one may end, and make this one the current one again, after the block was left. One of
        # `jax.vmap` hands on what was packed in a block within it: only the innermost pair applies.
        return not self.block.left_in and innermost_block() is self.block

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        return self._process_call("process_custom_jvp_call", (primitive, fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self._process_call("process_custom_vjp_call", (primitive, fun, fwd, bwd), tracers, params)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        result: Any = None  # a tree of JAX's own, which is no pytree

        def bind(*args: Any) -> Any:
            nonlocal result
            result = current_trace().process_shard_map(primitive, fun, args, **params)
            return list(result.vals)

        values = self._process(bind, primitive.name, tracers)
        return result.update(values)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a decorated function. In staged code it is one operation, which packs each tensor once."""
        __tracebackhide__ = True
        tensors, skeleton = split((args, kwargs))
        if any(map(is_reverse_mode_tracer, tensors)) or not any(map(is_staged, tensors)):
            return function(*args, **kwargs)

        def run(*tensors: Any) -> tuple[list[Any], Any]:
            args, kwargs = skeleton.fill(tensors)
            values, rest = split(function(*args, **kwargs))
            return as_arrays(values), rest

        name = getattr(function, "__name__", type(function).__name__)
        with set_current_trace(self.parent_trace):
            operation, consts, rest = Operation.staged(name, run, Hooks(self.pair, tensors), tensors)
            if operation.packs_as_one and not _is_in_forward_mode([*consts, *tensors]):
                return rest.fill(operation.apply([*consts, *tensors]))
        return function(*args, **kwargs)

    def _process_call(self, method: str, functions: tuple[Any, ...], tracers: Any, params: dict[str, Any]) -> Any:
        def bind(*args: Any) -> Any:
            return getattr(current_trace(), method)(*functions, args, **params)

        return self._process(bind, functions[0].name, tracers, shown=getattr(functions[1], "__name__", ""))

    def _process(self, bind: Run, name: str, args: Sequence[Any], runs_again: bool = False, shown: str = "") -> Any:
        """Bind one operation; `bind` may be called more than once if it `runs_again`; errors show `shown`."""
        with set_current_trace(self.parent_trace):
            # Under jit a staged value may be differentiated later; elsewhere JAX's own tracers tell.
            is_reverse = any(map(is_reverse_mode_tracer, args))
            is_chosen = is_reverse_mode_tracer if is_reverse else is_staged
            keeps_nothing = name in _WITHOUT_RESIDUALS and not (
                self.pair.errors.error_is_absolute and is_offset(name, args)
            )
            is_linear = any(map(is_unknown, args))  # which JAX transposes by itself
            is_packed = not (keeps_nothing or is_linear or _is_in_forward_mode(args)) and self._applies()
            if not is_packed or not any(map(is_chosen, args)) or not all(map(_is_plain_array, args)):
                # In eager mode JAX compiles an operation anew for each pair, if it sees the pair.
                with hooks_suspended() if runs_again else contextlib.nullcontext():
                    return bind(*args)
            if self.block.is_of_another_task():
                raise self.block.other_task_error()
            hooks = Hooks(self.pair, args)
            # Staged, a shard_map shows whether it holds a block of its own.
            if is_reverse and not hooks.deferred and name != "shard_map":
                return Operation(shown or name, bind, hooks).apply(args)
            operation, consts, _ = Operation.staged(shown or name, lambda *args: (bind(*args), None), hooks, args)
            return operation.apply([*consts, *args])


def enter_block(pair: Pair) -> Block:
    """Enter a block, which the caller leaves."""
    block = Block(pair)
    block.enter()
    if not nothing_is_traced():
        set_current_trace(HooksTrace(block, pair)).__enter__()  # `Block.leave` restores the trace
    return block


def _is_in_forward_mode(values: Sequence[Any]) -> bool:
    """Whether `jax.jvp` alone differentiates an operation now, which then keeps nothing for backward."""
    return any(map(is_differentiated, values)) and not any(map(is_reverse_mode_tracer, values))


def _is_plain_array(value: Any) -> bool:
    return isinstance(typeof(value), ShapedArray)  # not a Ref or a token


def _closes_over_ref(jaxpr: Any) -> bool:
    """Whether a `jax.Ref` is a constant of a jaxpr, and so is no operand of the equation that holds it."""
    return not all(isinstance(v.aval, ShapedArray) for v in jaxpr.constvars)


def _packing_inside(name: str, params: dict[str, Any], pair: Pair) -> Any:
    """The jaxpr of a staged scan that packs in each iteration; None for another operation.

    Packed as a whole, a scan would stack the residuals of all iterations first. A jitted function that holds a scan is
    traced again in the same way, operation by operation.
    """
    if name not in ("scan", *_JITTED):
        return None
    jaxpr, consts = jaxpr_and_consts(params["jaxpr"])
    if name != "scan" and not has_equation(jaxpr, "scan"):
        return None

    def body(*args: Any) -> tuple[list[Any], None]:
        block = enter_block(pair)
        try:
            return eval_jaxpr(jaxpr, consts, *args), None
        finally:
            block.leave()

    hooked, closed_over, _ = stage(body, [v.aval for v in jaxpr.invars], name)
    same = [v.aval for v in hooked.outvars] == [v.aval for v in jaxpr.outvars]
    return as_parameter(hooked) if same and not closed_over else None

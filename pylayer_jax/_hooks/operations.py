"""Plain JAX operations inside a hooks block.

A trace that stands before the current one meets every operation of the block. Where an operation is, or
may later be, differentiated, it is bound as a `jax.custom_vjp` whose residuals are those of its own `jax.vjp`,
packed. An operation is anything that JAX binds: an addition, an already jitted function, a scan, a function
with a custom gradient. What is inside is covered: its residuals are packed once, as those of the whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._jax.names import (
    ShapedArray,
    call_with_symbolic_zeros,
    closed,
    current_trace,
    differentiable,
    eval_jaxpr,
    has_equation,
    inner_jaxprs,
    instantiate,
    is_refused_effect,
    is_reverse_mode_tracer,
    is_staged,
    is_staged_beneath,
    is_symbolic_zero,
    keep_one_result,
    opened,
    runs_custom_vjp_functions_once,
    set_current_trace,
    stage,
    tangent_type,
    typeof,
)
from pylayer_jax._methods.arguments import as_arrays
from pylayer_jax._trees.partition import Carried, Skeleton, split

from .active import Hooks, Interceptor, Pair, covered, holds_block
from .packing import Packed, pack

# Their vjp keeps no array, so that there is nothing to pack: they stay the operations that they are.
_WITHOUT_RESIDUALS = frozenset(
    (
        "add", "add_any", "broadcast_in_dim", "concatenate", "convert_element_type", "copy", "copy_p", "device_put",
        "expand_dims", "name", "neg", "new_ref", "pad", "pcast", "psum", "real", "imag", "reduce_sum", "reshape", "rev",
        "sharding_constraint", "slice", "squeeze", "stop_gradient", "sub", "transpose",
    )
)  # fmt: skip

Bind = Callable[..., Any]


class HooksTrace(Interceptor):
    """The current trace of a hooks block."""

    __slots__ = ("pair",)

    def __init__(self, parent_trace: Any, pair: Pair) -> None:
        super().__init__()
        self.parent_trace = parent_trace
        self.pair = pair
        self.requires_low = parent_trace.requires_low

    def process_primitive(self, primitive: Any, tracers: Sequence[Any], params: dict[str, Any], /) -> Any:
        def bind(*args: Any) -> Any:
            return primitive.bind(*args, **params)

        if any(map(holds_block, inner_jaxprs(params))):
            with set_current_trace(self.parent_trace):
                return bind(*tracers)
        if any(map(is_staged_beneath, tracers)) and all(map(_is_plain_array, tracers)):
            jaxpr = _packing_inside(primitive.name, params, self.pair, any(map(is_reverse_mode_tracer, tracers)))
            if jaxpr is not None:
                with set_current_trace(self.parent_trace):
                    return primitive.bind(*tracers, **{**params, "jaxpr": jaxpr})
        return self._process(bind, primitive.name, tracers, again=True)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        try:
            return self._process_call("process_custom_jvp_call", (primitive, fun, jvp), tracers, params)
        finally:
            keep_one_result(fun, jvp)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self._process_call("process_custom_vjp_call", (primitive, fun, fwd, bwd), tracers, params)

    def process_shard_map(self, primitive: Any, fun: Any, tracers: Any, /, **params: Any) -> Any:
        results: list[Any] = []

        def bind(*args: Any) -> Any:
            results[:] = [current_trace().process_shard_map(primitive, fun, args, **params)]
            return list(results[0].vals)

        values = self._process(bind, primitive.name, tracers)
        return results[0].update(values)  # a tree of JAX's own, with other leaves

    def process_call(self, primitive: Any, fun: Any, tracers: Any, params: Any, /) -> Any:
        def bind(*args: Any) -> Any:
            return current_trace().process_call(primitive, fun, args, params)

        return self._process(bind, primitive.name, tracers)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a decorated function: as one operation where it is staged, so that what it shares is packed once."""
        tensors, skeleton = split((args, kwargs))
        if any(map(is_reverse_mode_tracer, tensors)) or not any(map(is_staged, tensors)):
            return function(*args, **kwargs)
        rest: list[Skeleton] = []

        def run(*tensors: Any) -> list[Any]:
            args, kwargs = skeleton.fill(tensors)
            values, result = split(function(*args, **kwargs))
            rest[:] = [result]
            return as_arrays(values)

        name = getattr(function, "__name__", type(function).__name__)
        with set_current_trace(self.parent_trace):
            staged, inputs = _staged(name, run, tensors)
            hooks = Hooks(self.pair, tensors)
            values = None if staged.holds_block else _bound_staged(staged, inputs, hooks, is_staged)
        return function(*args, **kwargs) if values is None else rest[0].fill(values)

    def stage_value(self, val: Any) -> Any:
        return self.parent_trace.stage_value(val)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parent_trace, name)  # what else JAX asks of the current trace, such as `cur_qdd`

    def _process_call(self, method: str, functions: tuple[Any, ...], tracers: Any, params: dict[str, Any]) -> Any:
        def bind(*args: Any) -> Any:
            return getattr(current_trace(), method)(*functions, args, **params)

        return self._process(bind, functions[0].name, tracers)

    def _process(self, bind: Bind, name: str, args: Sequence[Any], again: bool = False) -> Any:
        # `again`: whether `bind` may be called more than once.
        with set_current_trace(self.parent_trace):
            # Under jit what is staged may be differentiated later; elsewhere JAX's own tracers tell.
            reverse = any(map(is_reverse_mode_tracer, args))
            chosen = is_reverse_mode_tracer if reverse else is_staged
            if name in _WITHOUT_RESIDUALS or not any(map(chosen, args)) or not all(map(_is_plain_array, args)):
                # In eager mode JAX compiles an operation for each pair anew, if it sees the pair.
                with covered() if again else contextlib.nullcontext():
                    return bind(*args)
            hooks = Hooks(self.pair, args)
            if reverse and (again or runs_custom_vjp_functions_once()):
                return _bound(_Operation(name, bind, hooks), args)
            return _bound_staged(*_staged(name, bind, args), hooks, chosen)


def _is_plain_array(value: Any) -> bool:
    return isinstance(typeof(value), ShapedArray)  # not a Ref or a token


class _Operation:
    """One operation of a block, as it travels through JAX inside a treedef. Holds no array."""

    __slots__ = ("differentiated", "hooks", "kept", "name", "run", "single")

    def __init__(
        self, name: str, run: Bind, hooks: Hooks | None = None, differentiated: Sequence[bool] | None = None
    ) -> None:
        self.name = name
        self.run = run
        self.hooks = hooks
        self.differentiated = differentiated  # None: what JAX perturbs
        self.single = False
        self.kept: list[_Kept] = []

    def outputs(self, args: Sequence[Any]) -> tuple[Any, ...]:
        values = self.run(*args)
        self.single = not isinstance(values, (list, tuple))
        return (values,) if self.single else tuple(values)


def _bound(operation: _Operation, args: Sequence[Any]) -> Any:
    values = call_with_symbolic_zeros(_rule, Carried(operation), args)
    return values[0] if operation.single else list(values)


class _Staged:
    """An operation that may be run any number of times, whose functions JAX lets us call once.

    Its first arguments are what it closes over, which it does not hold.
    """

    __slots__ = ("holds_block", "jaxpr", "name", "single")

    def __init__(self, name: str, jaxpr: Any, single: bool) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self.single = single
        self.holds_block = holds_block(self.jaxpr)

    def run(self, *args: Any) -> Any:
        values = eval_jaxpr(self.jaxpr, (), *args)
        return values[0] if self.single else values


def _staged(name: str, bind: Bind, args: Sequence[Any]) -> tuple[_Staged, list[Any]]:
    once = _Operation(name, bind)
    jaxpr, consts = stage(lambda *xs: once.outputs(xs), [typeof(x) for x in args], name)
    return _Staged(name, jaxpr, once.single), [*consts, *args]


def _bound_staged(staged: _Staged, args: Sequence[Any], hooks: Hooks, chosen: Callable[[object], bool]) -> Any:
    differentiated = [chosen(x) and differentiable(typeof(x)) for x in args]
    some = any(differentiated) and any(differentiable(v.aval) for v in staged.jaxpr.outvars)
    if staged.holds_block or not some:
        return staged.run(*args)
    try:
        return _bound(_Operation(staged.name, staged.run, hooks, differentiated), args)
    except NotImplementedError as error:
        if not is_refused_effect(error):
            raise
        return staged.run(*args)  # nothing with such an effect can have a gradient rule of its own


def _packing_inside(name: str, params: dict[str, Any], pair: Pair, differentiated_now: bool) -> Any:
    """The jaxpr of a staged scan that packs in each iteration; None for another operation.

    Packed as a whole, a scan would stack the residuals of all iterations first. A jitted function that
    holds a scan is gone through in the same way, operation by operation.
    """
    if name not in ("scan", "jit", "pjit"):
        return None
    jaxpr, consts = opened(params["jaxpr"])
    if name != "scan" and not has_equation(jaxpr, "scan"):
        return None

    def evaluate(*args: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, consts, *args)

    def body(*args: Any) -> list[Any]:
        if name == "scan":
            # What is only staged may be differentiated for different inputs in turn, for which JAX wants the
            # same residuals.
            chosen = None if differentiated_now else [differentiable(typeof(x)) for x in args]
            return _bound(_Operation("body of scan", evaluate, Hooks(pair, args), chosen), args)
        with set_current_trace(HooksTrace(current_trace(), pair)):
            return evaluate(*args)

    hooked, new = stage(body, [v.aval for v in jaxpr.invars], name)
    same = [v.aval for v in hooked.outvars] == [v.aval for v in jaxpr.outvars]
    return closed(hooked) if same and not new else None


# -- as a custom_vjp ------------------------------------------------------------------------------


class _Kept:
    """What the fwd rule leaves for the bwd rule, without its arrays."""

    __slots__ = ("chosen", "inputs", "outputs", "packed", "pullback")

    def __init__(self, inputs: int, chosen: list[int], outputs: list[Any], packed: Packed, pullback: Any) -> None:
        self.inputs = inputs
        self.chosen = chosen  # the inputs that are differentiated
        self.outputs = outputs  # their types
        self.packed = packed
        self.pullback = pullback  # the treedef of the function that `jax.vjp` returned


def _primal(carried: Carried, *args: Any) -> tuple[Any, ...]:
    return carried.value.outputs(args)


def _forward_rule(carried: Carried, *primals: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    operation: _Operation = carried.value
    args = [p.value for p in primals]
    differentiated = operation.differentiated
    if differentiated is None:
        differentiated = [p.perturbed and differentiable(typeof(p.value)) for p in primals]
    chosen = [i for i, d in enumerate(differentiated) if d]

    def run(*perturbed: Any) -> tuple[Any, ...]:
        full = list(args)
        for i, x in zip(chosen, perturbed, strict=True):
            full[i] = x
        return operation.outputs(full)

    with covered():
        outputs, pullback = jax.vjp(run, *(args[i] for i in chosen))
    residuals, treedef = jax.tree_util.tree_flatten(pullback)
    assert operation.hooks is not None
    owner = f"the operation {operation.name}, residual"
    # JAX keeps some constants as array types of its own.
    packed, arrays, outputs = pack(operation.hooks, as_arrays(residuals), outputs, owner)
    kept = _Kept(len(args), chosen, [typeof(x) for x in outputs], packed, treedef)
    if not operation.hooks.deferred:
        return tuple(outputs), (Carried((operation, kept)), *arrays)
    # It may be differentiated for different inputs, of which JAX knows the last alone: NOTE [several recordings].
    operation.kept.append(kept)
    return tuple(outputs), (Carried((operation, None)), jnp.zeros((0, len(operation.kept) - 1)), *arrays)


def _backward_rule(residuals: tuple[Any, ...], cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    operation, kept = residuals[0].value
    arrays = residuals[1:]
    if kept is None:
        kept, arrays = operation.kept[arrays[0].shape[-1]], arrays[1:]
    gradients: list[Any] = [None] * kept.inputs
    given = [None if is_symbolic_zero(c) else c for c in cotangents]
    if any(c is not None for c in given):
        pullback = jax.tree_util.tree_unflatten(kept.pullback, kept.packed.open(arrays, given))
        full = tuple(_zeros(t) if c is None else c for c, t in zip(given, kept.outputs, strict=True))
        for i, gradient in zip(kept.chosen, pullback(full), strict=True):
            gradients[i] = gradient
    return None, *gradients


def _zeros(aval: Any) -> Any:
    return instantiate(tangent_type(aval)) if differentiable(aval) else np.zeros(aval.shape, jax.dtypes.float0)


_rule = jax.custom_vjp(_primal)
_rule.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)

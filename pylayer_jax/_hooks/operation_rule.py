"""One JAX operation inside a hooks block, as a `jax.custom_vjp` whose residuals are packed.

The residuals are those of the operation's own `jax.vjp`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pylayer_jax._jax.custom_vjp import RunLog, call_with_symbolic_zeros, custom_vjp, is_symbolic_zero
from pylayer_jax._jax.identity_primitives import holds_hooks_block
from pylayer_jax._jax.imports import ShapedArray, eval_jaxpr, set_current_trace
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.masks import merge, scatter, select
from pylayer_jax._jax.tracers import current_trace, is_tracer, trace_below
from pylayer_jax._jax.types import as_arrays, has_tangent, tangent_type, typeof, zeros_of
from pylayer_jax._trees.opaque import Static

from .derived_residuals import Recorder
from .open_blocks import Hooks, hooks_suspended
from .packed_residuals import PackedResiduals, pack

Run = Callable[..., Any]  # from arrays to an array or a list of arrays


class Operation:
    """Static data of one operation of a block. It travels through JAX inside a treedef, and holds no array."""

    __slots__ = ("constants", "differentiated", "hooks", "log", "name", "run", "run_in_block")

    def __init__(
        self,
        name: str,
        run: Run,
        hooks: Hooks,
        differentiated: Sequence[bool] | None = None,
        run_in_block: Run | None = None,
        constants: Sequence[bool] = (),
    ) -> None:
        self.name = name
        self.run = run
        self.run_in_block = run_in_block  # the same, if its own operations pack what they keep
        self.hooks = hooks
        self.differentiated = differentiated  # a mask of the inputs; None: the inputs that JAX perturbs
        self.constants = constants  # a mask of the first inputs; the forward rule sees tracers in their place
        self.log: RunLog[_SavedRun] | None = RunLog() if hooks.deferred else None

    def apply(self, args: Sequence[Any]) -> Any:
        return call_with_symbolic_zeros(_rule, Static(self), args)


class StagedOperation:
    """An operation that may run any number of times, made of functions that JAX calls only once.

    The values that it closes over, which it does not hold, are its first arguments.
    """

    __slots__ = ("jaxpr", "name", "packs_as_one", "treedef")

    def __init__(self, name: str, jaxpr: Any, treedef: Any) -> None:
        self.name = name
        self.jaxpr = jaxpr
        self.treedef = treedef
        # A custom_vjp function with symbolic zeros takes no Ref. A layer that takes a Ref packs its own saved tensors.
        takes_arrays = all(isinstance(v.aval, ShapedArray) for v in jaxpr.invars)
        self.packs_as_one = takes_arrays and not holds_hooks_block(jaxpr)

    @classmethod
    def of(cls, name: str, run: Run, args: Sequence[Any]) -> tuple[StagedOperation, list[Any], Any]:
        """The operation, the values that it closes over, and the second value that `run` returned."""

        def outputs(*args: Any) -> tuple[Sequence[Any], Any]:
            result, second = run(*args)
            values, treedef = jax.tree_util.tree_flatten(result)
            return values, (treedef, second)

        jaxpr, consts, (treedef, second) = stage(outputs, [typeof(x) for x in args], name)
        return cls(name, jaxpr, treedef), consts, second

    def run(self, *args: Any) -> Any:
        return self.treedef.unflatten(eval_jaxpr(self.jaxpr, (), *args))

    def apply(self, args: Sequence[Any], hooks: Hooks, is_differentiated: Callable[[object], bool]) -> Any:
        """The outputs; with packed residuals if the operation can be differentiated."""
        differentiated = [is_differentiated(x) and has_tangent(typeof(x)) for x in args]
        has_derivative = any(differentiated) and any(has_tangent(v.aval) for v in self.jaxpr.outvars)
        if not self.packs_as_one or not has_derivative:
            return self.run(*args)
        constants = [hooks.deferred and not is_tracer(x) for x in args]
        return Operation(self.name, self.run, hooks, differentiated, constants=constants).apply(args)


# -- the custom_vjp -------------------------------------------------------------------------------


class _SavedRun:
    """The non-array state that the forward rule saved for the backward rule."""

    __slots__ = ("differentiated", "output_types", "packed", "pullback", "treedef")

    def __init__(
        self, differentiated: Sequence[bool], output_types: list[Any], treedef: Any, packed: PackedResiduals, vjp: Any
    ) -> None:
        self.differentiated = differentiated
        self.output_types = output_types
        self.treedef = treedef  # of the outputs
        self.packed = packed
        self.pullback = vjp  # the treedef of the function that `jax.vjp` returned


def _primal(static: Static, *args: Any) -> Any:
    return static.value.run(*args)


def _forward_rule(static: Static, *primals: Any) -> tuple[Any, tuple[Any, ...]]:
    operation: Operation = static.value
    args = [p.value for p in primals]
    differentiated = operation.differentiated
    if differentiated is None:
        differentiated = [p.perturbed and has_tangent(typeof(p.value)) for p in primals]

    def run(*perturbed: Any) -> Any:
        return (operation.run_in_block or operation.run)(*merge(differentiated, perturbed, args))

    recorder = Recorder(trace_below(current_trace()))
    with hooks_suspended(), set_current_trace(recorder):
        result, pullback = jax.vjp(run, *select(args, differentiated))
    outputs, output_treedef = jax.tree_util.tree_flatten(result)
    residuals, vjp = jax.tree_util.tree_flatten(pullback)
    arrays = as_arrays(residuals)  # JAX keeps some constants as array types of its own
    if operation.run_in_block:
        packed = PackedResiduals.unchanged(len(arrays))
    else:
        owner = f"the operation {operation.name}, residual"
        constants = list(itertools.compress(args, operation.constants))
        packed, arrays, outputs = pack(operation.hooks, arrays, outputs, owner, recorder.origins, constants)
    run_of_rule = _SavedRun(differentiated, [typeof(x) for x in outputs], output_treedef, packed, vjp)
    result = output_treedef.unflatten(outputs)
    if operation.log is None:
        return result, (Static(run_of_rule), *arrays)
    return result, (Static(operation.log), operation.log.add(run_of_rule), *arrays)  # NOTE [several runs]


def _backward_rule(residuals: tuple[Any, ...], result: Any) -> tuple[Any, ...]:
    run, arrays = residuals[0].value, residuals[1:]
    if isinstance(run, RunLog):
        run, arrays = run.find(arrays[0]), arrays[1:]
    cotangents = [None if is_symbolic_zero(c) else c for c in run.treedef.flatten_up_to(result)]
    if all(c is None for c in cotangents):
        return None, *(None for _ in run.differentiated)
    pullback = jax.tree_util.tree_unflatten(run.pullback, run.packed.unpack(arrays, cotangents))
    full = [_zeros(t) if c is None else c for c, t in zip(cotangents, run.output_types, strict=True)]
    return None, *scatter(pullback(run.treedef.unflatten(full)), run.differentiated)


def _zeros(aval: Any) -> Any:
    return zeros_of(tangent_type(aval)) if has_tangent(aval) else np.zeros(aval.shape, jax.dtypes.float0)


_rule = custom_vjp("operation", "operation in a hooks block", _primal, _forward_rule, _backward_rule)

"""One JAX operation inside a hooks block, as a function whose derivative keeps packed residuals.

In reverse mode the residuals are those of the operation's own `jax.vjp`; in forward mode nothing is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

from pylayer_jax._jax import linear_map
from pylayer_jax._jax.identity_primitives import holds_hooks_block
from pylayer_jax._jax.imports import ShapedArray, set_current_trace
from pylayer_jax._jax.jaxprs import stage
from pylayer_jax._jax.linear_map import LinearMap
from pylayer_jax._jax.masks import merge, scatter, select
from pylayer_jax._jax.rule_function import rule_function_p
from pylayer_jax._jax.tracers import current_trace, is_tracer, trace_below, trace_of_known_values
from pylayer_jax._jax.types import as_arrays, full_cotangent, has_tangent, tangent_type, typeof
from pylayer_jax._jax.undecided_mode import TwoModeFunction

from .derived_residuals import Recorder
from .open_blocks import Hooks, hooks_suspended
from .packed_residuals import PackedResiduals, pack

Run = Callable[..., Any]  # from arrays to a tree of arrays


class Operation(TwoModeFunction):
    """One operation of a block: a jaxpr, or a function that is called once, since JAX calls some only once."""

    kind = "operation"

    def __init__(self, name: str, run: Run | None, hooks: Hooks) -> None:
        self.name = name
        self.hooks = hooks
        self.jaxpr: Any = None
        self.treedef: Any = None  # of what `run` returns, once that is known
        self.constants: Sequence[bool] = ()  # a mask of the operands; the rule sees tracers in their place
        self._run = run

    @classmethod
    def staged(cls, name: str, run: Run, hooks: Hooks, args: Sequence[Any]) -> tuple[Self, list[Any], Any]:
        """An operation that may run any number of times, for `run`, which returns a tree and a second value.

        Returns the operation; the values that it closes over, which are its first operands; and that second value.
        """

        def values_of(*args: Any) -> tuple[Sequence[Any], Any]:
            result, second = run(*args)
            values, treedef = jax.tree_util.tree_flatten(result)
            return values, (treedef, second)

        operation = cls(name, None, hooks)
        operation.jaxpr, consts, (operation.treedef, second) = stage(values_of, [typeof(x) for x in args], name)
        operation.constants = [hooks.deferred and not is_tracer(x) for x in (*consts, *args)]
        return operation, consts, second

    @property
    def packs_as_one(self) -> bool:
        """Whether the operation packs what it keeps."""
        if self.jaxpr is None:
            return True
        # A layer that takes a Ref packs its own saved tensors.
        takes_arrays = all(isinstance(v.aval, ShapedArray) for v in self.jaxpr.invars)
        return takes_arrays and not holds_hooks_block(self.jaxpr)

    def apply(self, args: Sequence[Any]) -> Any:
        """What `run` returns."""
        sides = () if self.jaxpr is None else (self.jaxpr.invars, self.jaxpr.outvars)
        has_derivative = self.packs_as_one and all(any(has_tangent(v.aval) for v in side) for side in sides)
        values = rule_function_p.bind(*args, function=self) if has_derivative else self.run(*args)
        return self.treedef.unflatten(values)

    def run(self, *args: Any) -> list[Any]:
        if self._run is None:
            return super().run(*args)
        values, self.treedef = jax.tree_util.tree_flatten(self._run(*args))
        return values

    def call_staged(self, *args: Any) -> list[Any]:
        return self.run(*args)

    def also_mapped(self, differ: list[bool], is_any: bool) -> list[bool]:
        del is_any
        return [self.jaxpr is None] * len(differ)  # what all examples share stays so, as without hooks

    def forward_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [t is not None for t in tangents]

        def run(*args: Any) -> list[Any]:
            return self.run(*merge(moving, args, primals))

        values, found = jax.jvp(run, select(primals, moving), select(tangents, moving))
        return values, [t if has_tangent(typeof(v)) else None for v, t in zip(values, found, strict=True)]

    def reverse_rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [t is not None for t in tangents]

        def run(*args: Any) -> list[Any]:
            return self.run(*merge(moving, args, primals))

        with set_current_trace(trace_of_known_values(primals)):
            recorder = Recorder(trace_below(current_trace()))
            with hooks_suspended(), set_current_trace(recorder):
                values, pullback = jax.vjp(run, *select(primals, moving))
            residuals, treedef = jax.tree_util.tree_flatten(pullback)
            arrays = as_arrays(residuals)  # JAX keeps some constants as array types of its own
            owner = f"the operation {self.name}, residual"
            constants = list(itertools.compress(primals, self.constants))
            packed, arrays, values = pack(self.hooks, arrays, values, owner, recorder.origins, constants)
        pulled = PackedPullback(self.name, packed, treedef, [typeof(x) for x in values])
        found = linear_map.call(pulled, arrays, select(tangents, moving))
        return values, scatter(found, [has_tangent(typeof(v)) for v in values])


class PackedPullback(LinearMap):
    """packed residuals, tangents of the operands -> tangents of the values; reverse mode only."""

    def __init__(self, name: str, packed: PackedResiduals, pullback: Any, value_types: Sequence[Any]) -> None:
        self.name = name
        self.constants = packed.size
        self.types = [tangent_type(t) for t in value_types if has_tangent(t)]
        self._packed = packed
        self._pullback = pullback  # the treedef of the function that `jax.vjp` returned
        self._value_types = value_types

    def push(self, constants: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
        del constants, tangents
        raise self._linearize_error()

    def jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        del primals, tangents
        raise self._linearize_error()

    def _linearize_error(self) -> TypeError:
        return TypeError(
            f"jax.linearize goes through the operation {self.name} in a block of saved_tensors_hooks, which packed its "
            "residuals for reverse mode. Use jax.jvp, which keeps nothing, or jax.vjp."
        )

    def pull(self, constants: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        pullback = jax.tree_util.tree_unflatten(self._pullback, self._packed.unpack(constants, cotangents))
        given = iter(cotangents)
        return list(pullback([full_cotangent(next(given) if has_tangent(t) else None, t) for t in self._value_types]))

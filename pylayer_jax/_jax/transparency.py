"""Defines how JAX's program transformations treat a `rule_function` equation, and identities that restrict them.

If a policy of `jax.checkpoint` saves matrix products for the backward pass,

    c = rule_function[call_jaxpr={ d = dot_general a b; c = tanh d }] a b

becomes an equation of the forward pass and one of the backward pass, which computes the other results again:

    c, d = rule_function[call_jaxpr={ d = dot_general a b; c = tanh d }] a b
    c    = rule_function[call_jaxpr={ c = tanh d }] d a b

JAX divides the equation in this way, removes its unused code, and checks its operations, as it does with a jitted
function. Each part has the derivative of the whole function. So `a` and `b` are operands of both, although the code of
the second reads only `d`. Its rule ignores the tangent of `d`: the tangents of `a` and `b` account for it.
tests: derivatives/test_checkpoint.py
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from .jaxprs import jaxpr_and_consts, lower_jaxpr, stage
from .rule_function import RuleFunction, Values, apply, merge, payload_at, payload_of, rule_function_p, scatter, select
from .traces import DebugInfo, Literal, ShapedArray, Tracer, eval_jaxpr, partial_eval, set_current_trace
from .types import has_tangent, typeof

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere

# -- parts of a function -------------------------------------------------------------------------------


class PartialFunction(RuleFunction):
    """A function that computes some results of `whole`, with the derivative of `whole`.

    Its operands are `n_residuals` residuals, then those of `whole`. Its results are those of `whole` at `positions`,
    then residuals for another `PartialFunction`.
    """

    def __init__(self, whole: RuleFunction, jaxpr: Any, n_residuals: int, positions: Sequence[int]) -> None:
        debug = DebugInfo("pylayer_jax", f"part of {whole.name}", None, None)
        self.whole, self.name, self.jaxpr = whole, whole.name, jaxpr.replace(debug_info=debug)
        self.n_residuals, self.positions = n_residuals, list(positions)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        n = self.n_residuals
        values = apply(self, primals)
        if all(t is None for t in tangents[n:]):
            return values, [None] * len(values)
        _, found = self.whole.rule(primals[n:], tangents[n:])
        return values, [*[found[i] for i in self.positions], *[None] * (len(values) - len(self.positions))]

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return self.whole.transpose(jaxpr, args, cotangents)

    def without_unused(self, used: Sequence[bool]) -> tuple[RuleFunction, list[bool]]:
        """Return a function that computes only the `used` results, and a mask of the operands that it reads."""
        n, n_positions = self.n_residuals, len(self.positions)
        # The rule differentiates the whole function, whose operands stay.
        is_kept = [False] * n + [True] * (len(self.jaxpr.invars) - n)
        code, is_read = partial_eval.dce_jaxpr(self.jaxpr, list(used), is_kept)
        part = PartialFunction(self.whole, code, sum(is_read[:n]), select(self.positions, used[:n_positions]))
        return part, list(is_read)


def _with_function(equation: Any, function: RuleFunction, **changes: Any) -> Any:
    return equation.replace(params=rule_function_p.params_of(function), effects=function.jaxpr.effects, **changes)


# -- jax.checkpoint ------------------------------------------------------------------------------------


def _divide(saveable: Callable[..., Any], unknown: Sequence[bool], instantiated: Sequence[bool], equation: Any) -> Any:
    """Divide an equation between the forward and the backward pass: a rule of `partial_eval_jaxpr_custom_rules`.

    Two masks tell which operands are `unknown` in forward, and which backward has anyway (`instantiated`). Return the
    equations of forward and of backward, or None; two masks of the results, that are unknown in forward, and that
    backward computes; and the variables that backward needs from forward.
    """
    function, n = payload_of(equation), len(equation.outvars)
    operands = zip(equation.invars, instantiated, strict=True)
    missing = [v for v, is_there in operands if not (is_there or isinstance(v, Literal))]
    if any(unknown):
        return None, equation, [True] * n, [True] * n, missing
    # A part of an identity would have more operands than results, so it would be no identity.
    if isinstance(function, Identity) or not function.is_divisible:
        is_saved = saveable(equation.primitive, *[v.aval for v in equation.invars], **equation.params) is True
        if is_saved or equation.effects:
            return equation, None, [False] * n, [False] * n, []
        return equation, equation, [False] * n, [True] * n, missing

    # Let JAX divide a jitted function with the same code: above, into `c, d = jit a b` and `c = jit d`.
    with equation.ctx.manager, jax.disable_jit(False):
        jitted = jax.jit(lambda *args: eval_jaxpr(function.jaxpr, (), *args))
        outer, _, _ = stage(lambda *args: (jitted(*args), None), [v.aval for v in equation.invars], "jit")
    (call,) = outer.eqns
    call = call.replace(invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info)
    rule: Any = partial_eval.partial_eval_jaxpr_custom_rules[call.primitive]
    known, staged, unknown_out, computed, residuals = rule(saveable, unknown, instantiated, call)

    code, _ = jaxpr_and_consts(known.params["jaxpr"])
    part = PartialFunction(function, code, 0, range(n))
    forward = _with_function(equation, part, invars=known.invars, outvars=known.outvars)
    if not any(computed):
        return forward, None, unknown_out, computed, []

    code, _ = jaxpr_and_consts(staged.params["jaxpr"])
    # JAX's rule may leave an unused equation in this code, which would compute a saved value again.
    code, is_read = partial_eval.dce_jaxpr(code, [True] * len(code.outvars))
    read = select(staged.invars, is_read)
    code = code.replace(invars=[*code.invars, *function.jaxpr.invars])  # the derivative needs all operands
    part = PartialFunction(function, code, len(read), select(range(n), computed))
    backward = _with_function(equation, part, invars=[*read, *equation.invars], outvars=staged.outvars)
    return forward, backward, unknown_out, computed, [v for v in residuals if v in backward.invars]


partial_eval.partial_eval_jaxpr_custom_rules[rule_function_p] = _divide


def _drop_unused(used: Sequence[bool], *rest: Any) -> tuple[list[bool], Any]:
    """Remove unused results, and return a mask of the operands that are read: a rule of `partial_eval.dce_rules`."""
    equation = rest[-1]  # since jax 0.12, JAX passes a mask of the operands before the equation
    all_operands = [True] * len(equation.invars)
    if used and all(used):
        return all_operands, equation
    function = payload_of(equation)
    if not any(used) and not partial_eval.dce_jaxpr(function.jaxpr, list(used))[0].eqns:
        return [False] * len(equation.invars), None
    if isinstance(function, WaitingBarrier) or not function.is_divisible:
        return all_operands, equation
    if not hasattr(function, "without_unused"):
        function = PartialFunction(function, function.jaxpr, 0, range(len(used)))
    part, is_read = function.without_unused(used)
    invars, outvars = select(equation.invars, is_read), select(equation.outvars, used)
    return is_read, _with_function(equation, part, invars=invars, outvars=outvars)


partial_eval.dce_rules[rule_function_p] = _drop_unused


def _evaluate_checked(function: RuleFunction, checked: Any, *args: Any) -> Values:
    # `checkify` has replaced the equation by its operations. JAX would differentiate these, not apply the rule.
    error = lambda: TypeError(
        f"{function.name}: jax.grad(checkify(jax.grad(f))) would ignore backward, and differentiate the operations of "
        "forward. Differentiate first, as in checkify(jax.grad(jax.grad(f)))."
    )
    return forbid_derivative(checked.call_wrapped(*args), error)


rule_function_p.evaluate_checked = _evaluate_checked


# -- identities ----------------------------------------------------------------------------------------


class Identity(RuleFunction):
    """A function that returns its operands, and affects only how JAX or XLA transforms code."""

    # JAX searches the jaxprs in parameters several times while it lowers a program. To save time, this one has none.
    searched_jaxpr = None

    def __init__(self, types: Sequence[Any]) -> None:
        self.jaxpr = _identity_jaxpr(self.name, tuple(types))
        self.original_positions: Sequence[int] = range(len(types))  # of its operands, before JAX divided it

    def of(self, types: Sequence[Any], positions: Sequence[int]) -> Identity:
        other = copy.copy(self)
        other.jaxpr, other.original_positions = _identity_jaxpr(self.name, tuple(types)), positions
        return other

    def without_unused(self, used: Sequence[bool]) -> tuple[RuleFunction, list[bool]]:
        types = select([v.aval for v in self.jaxpr.outvars], used)
        return self.of(types, select(self.original_positions, used)), list(used)

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        return apply(self, primals), list(tangents)

    def batch_rule(self, axis: Any, args: Sequence[Any], dims: Sequence[Any]) -> tuple[Values, list[Any]]:
        return apply(self.of([typeof(x) for x in args], self.original_positions), args), list(dims)

    def transpose(self, jaxpr: Any, args: Sequence[Any], cotangents: Sequence[Any]) -> Values:
        return list(cotangents)


@functools.lru_cache(maxsize=1024)
def _identity_jaxpr(name: str, types: tuple[Any, ...]) -> Any:
    return stage(lambda *xs: (xs, None), types, name)[0]


class Barrier(Identity):
    """An identity across which XLA optimizes nothing. It computes all operands before it uses any."""

    name = "barrier"

    def lower_rule(self, context: Any, *args: Any) -> Any:
        return lower_jaxpr(context, _lowered_barrier(tuple(context.avals_in)), *args)


@functools.lru_cache(maxsize=1024)
def _lowered_barrier(types: tuple[Any, ...]) -> Any:
    # In jax 0.10, all results of a barrier vary if an operand does, so the types here have no varying axes, and the
    # jaxpr of a `Barrier` has no barrier. tests: devices/test_shard_map.py
    types = tuple([ShapedArray(t.shape, t.dtype, sharding=t.sharding) for t in types])
    return stage(lambda *xs: (jax.lax.optimization_barrier(xs), None), types, "barrier")[0]


class WaitingBarrier(Barrier):
    """A barrier that keeps all operands as long as one result is used: XLA waits for all of them."""

    name = "wait"


class Guard(Identity):
    name = "forbid_derivative"

    def __init__(self, types: Sequence[Any], error: Callable[[], Exception]) -> None:
        super().__init__(types)
        self.error = error

    def rule(self, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Values, Values]:
        raise self.error()


def barrier(values: Sequence[Any], waits: bool = False) -> Values:
    # `jax.lax.optimization_barrier` will not do: in jax 0.10, its JVP rule puts the tangents behind a barrier too, and
    # makes arrays of zeros for those that are zero. tests: hooks/test_recompute.py::test_memory_of_a_compiled_gradient
    return apply((WaitingBarrier if waits else Barrier)([typeof(x) for x in values]), values)


def forbid_derivative(values: Sequence[Any], error: Callable[[], Exception]) -> Values:
    """Return the values; if JAX differentiates any of them, raise the exception that `error` returns."""
    mask = [isinstance(x, Tracer) and type(x.aval) is ShapedArray and has_tangent(x) for x in values]
    traced = select(values, mask)
    return merge(mask, apply(Guard([x.aval for x in traced], error), traced) if traced else (), values)


def _partial_eval(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Divide an `Identity` of known and unknown operands, so that JAX never transposes it for some operands."""
    known = [tracer.is_known() for tracer in tracers]
    function = payload_at(params["payload"])
    if not isinstance(function, Identity) or all(known) or not any(known):
        return trace.default_process_primitive(rule_function_p, tracers, params)
    unknown = [not is_known for is_known in known]
    # Known operands pass through it too. tests: hooks/test_nesting.py::test_a_plan_leaves_what_a_scan_packs_once
    with set_current_trace(trace):
        parts = [apply(function.without_unused(x)[0], select(tracers, x)) for x in (known, unknown)]
    return merge(known, parts[0], scatter(parts[1], unknown))


partial_eval.custom_partial_eval_rules[rule_function_p] = _partial_eval

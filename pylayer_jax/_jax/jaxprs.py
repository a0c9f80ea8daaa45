"""Making jaxprs, and reading and changing them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.ref import AbstractRef, freeze, new_ref

from .imports import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    Literal,
    ShapedArray,
    current,
    eval_jaxpr,
    jaxprs_in_params,
    partial_eval,
    register_exclusion,
    summarize,
    wrap_init,
)
from .probes import UNSPECIFIED_SHARDING

# The lines that JAX shows for an operation (in errors about tracers, in profiles) are those of users.
for _part in Path(__file__).parents[1].iterdir():
    if _part.name != "_commands":  # holds layers, as the code of a user does
        register_exclusion(str(_part))


def stage(
    function: Callable[..., tuple[Sequence[Any], Any]], avals: Sequence[Any], name: str
) -> tuple[Any, list[Any], Any]:
    """The jaxpr of a flat function that returns its outputs and a second value.

    `jax.make_jaxpr` does the same at five times the cost, which every traced layer would pay. `name` is what JAX's
    errors call the function, as in `Tanh at layers.py:12`.

    Returns:
        The jaxpr, the values that the function closes over (they are the first inputs of the jaxpr), and the second
        value that the function returned.
    """
    __tracebackhide__ = True
    second: Any = None

    def outputs_of(*args: Any) -> Sequence[Any]:
        __tracebackhide__ = True
        nonlocal second
        outputs, second = function(*args)
        return outputs

    debug = DebugInfo("pylayer_jax", name, None, None)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrap_init(outputs_of, debug_info=debug), list(avals))
    if jaxpr.constvars:  # jax 0.10 keeps them apart from the inputs, 0.12 does not
        jaxpr = jaxpr.replace(constvars=(), invars=[*jaxpr.constvars, *jaxpr.invars])
    return jaxpr, list(consts), second


def jaxpr_and_consts(parameter: Any) -> tuple[Any, Sequence[Any]]:
    """The jaxpr in the parameters of an equation, and its constants."""
    return getattr(parameter, "jaxpr", parameter), parameter.consts  # one object since jax 0.12


def as_parameter(jaxpr: Any) -> Any:
    """A jaxpr without constants as the parameter of an equation."""
    return jaxpr if ClosedJaxpr is type(jaxpr) else ClosedJaxpr(jaxpr, ())


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    """The jaxprs in the parameters of an equation: of a jitted function, a loop, the branches of a cond."""
    return list(jaxprs_in_params(params))


def with_users_line(jaxpr: Any) -> Any:
    """The jaxpr of a jitted function of JAX, whose equations have no line of a user, with the line that runs now."""
    if not jaxpr.eqns or summarize(jaxpr.eqns[0].source_info):
        return jaxpr
    line = current().traceback
    return jaxpr.replace(eqns=[e.replace(source_info=e.source_info.replace(traceback=line)) for e in jaxpr.eqns])


def has_equation(jaxpr: Any, name: str) -> bool:
    """Whether a jaxpr, or one in the parameters of its equations, applies a primitive."""
    return any(
        e.primitive.name == name or any(has_equation(j, name) for j in inner_jaxprs(e.params)) for e in jaxpr.eqns
    )


def is_inlinable(params: dict[str, Any]) -> bool:
    """Whether the operations of a jitted function may run without it: it neither places nor donates arrays."""
    shardings = [*params["in_shardings"], *params["out_shardings"]]
    layouts = [*params["in_layouts"], *params["out_layouts"]]
    is_unplaced = all(isinstance(s, UNSPECIFIED_SHARDING) for s in shardings) and all(x is None for x in layouts)
    return is_unplaced and not any(params["donated_invars"]) and not params["compiler_options_kvs"]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many of the first operands of a scan are constants, and how many of the next ones are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since jax 0.12
    return len(list(consts)), len(list(carry))


def is_literal(atom: Any) -> bool:
    return isinstance(atom, Literal)


def dependence(jaxpr: Any, inputs: Sequence[bool], variables: Sequence[Any] = ()) -> list[bool]:
    """A mask of the outputs that depend on the inputs that are set, or on `variables` that an equation computes."""
    dependent = {v for v, is_set in zip(jaxpr.invars, inputs, strict=True) if is_set}
    for equation in jaxpr.eqns:
        if any(not is_literal(v) and v in dependent for v in equation.invars):
            dependent.update(equation.outvars)
            dependent.update(_refs(equation))  # it may write to them
        dependent.update(v for v in variables if v in equation.outvars)
    return [not is_literal(v) and v in dependent for v in jaxpr.outvars]


def _refs(equation: Any) -> list[Any]:
    """The operands of an equation that are Refs."""
    return [v for v in equation.invars if isinstance(v.aval, AbstractRef)]


def reads_refs(jaxpr: Any) -> bool:
    """Whether a Ref is among the inputs of a jaxpr, so that the state is not its own."""
    return bool([v for v in jaxpr.invars if isinstance(v.aval, AbstractRef)])


def without_refs(jaxpr: Any) -> Any:
    """The jaxpr as a function of what its Ref inputs hold; None if it may write to one of these Refs."""
    others = jaxpr.effects - effects_of_own_refs()
    if not {type(effect) for effect in others} <= _effects_of_reading():
        return None
    is_ref = [isinstance(v.aval, AbstractRef) for v in jaxpr.invars]

    def with_own_refs(*args: Any) -> tuple[list[Any], None]:
        inputs = [new_ref(x) if is_one else x for x, is_one in zip(args, is_ref, strict=True)]
        return eval_jaxpr(jaxpr, (), *inputs), None

    types = [v.aval.inner_aval if is_one else v.aval for v, is_one in zip(jaxpr.invars, is_ref, strict=True)]
    return stage(with_own_refs, types, "forward")[0]


@functools.cache
def _effects_of_reading() -> frozenset[type]:
    ref = AbstractRef(ShapedArray((), np.dtype(np.float32)))
    jaxpr, _, _ = stage(lambda x: ([x[...]], None), [ref], "a Ref")
    return frozenset(map(type, jaxpr.effects))


@functools.cache
def effects_of_own_refs() -> frozenset[Any]:
    """The effects of a jaxpr that makes a Ref for itself. From outside it has none."""
    jaxpr, _, _ = stage(lambda x: ([freeze(new_ref(x))], None), [ShapedArray((), np.dtype(np.float32))], "a Ref")
    return jaxpr.effects


def prune(jaxpr: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """The jaxpr without the equations that only unused outputs need, and a mask of the inputs that it still reads."""
    return partial_eval.dce_jaxpr(jaxpr, list(used))


def _needed_equations(
    jaxpr: Any,
    atoms: Sequence[Any],
    known: Collection[Any] = (),
    is_wanted: Callable[[Any], bool] = lambda _: False,
) -> list[Any]:
    """The equations that compute `atoms` from the inputs and the `known` values, and those that are wanted anyway."""
    needed: set[Any] = set()

    def need(atoms: Sequence[Any]) -> None:
        needed.update({v for v in atoms if not is_literal(v)}.difference(known))

    need(atoms)
    kept: list[Any] = []
    for equation in reversed(jaxpr.eqns):
        # What a Ref holds where it is read, an equation before wrote.
        if is_wanted(equation) or any(v in needed for v in (*equation.outvars, *_refs(equation))):
            kept.append(equation)
            need(equation.invars)
    return kept[::-1]


def computing_only(jaxpr: Any, wanted: Sequence[bool]) -> Any:
    """The jaxpr of the outputs that are wanted. Unlike `prune`, it drops unused equations that have effects."""
    outputs = [v for v, is_wanted in zip(jaxpr.outvars, wanted, strict=True) if is_wanted]
    return _with_equations(jaxpr, _needed_equations(jaxpr, outputs), outputs)


def eval_with_given(jaxpr: Any, args: Sequence[Any], given: dict[Any, Any]) -> list[Any]:
    """The outputs of a jaxpr, in which some variables have `given` values from where they are computed."""
    values: dict[Any, Any] = dict(zip(jaxpr.invars, args, strict=True))
    values.update(given)
    rest = _needed_equations(jaxpr, jaxpr.outvars, known=given)
    while rest:
        # Up to the next equation that computes one of these variables beside others, which are needed.
        count = next((i for i, e in enumerate(rest, 1) if any(v in given for v in e.outvars)), len(rest))
        part, rest = rest[:count], rest[count:]
        computed = [v for e in part for v in e.outvars]
        piece = _with_equations(jaxpr, part, computed).replace(invars=list(values))
        values.update(zip(computed, eval_jaxpr(piece, (), *values.values()), strict=True))
        values.update((v, given[v]) for v in computed if v in given)
    return [v.val if is_literal(v) else values[v] for v in jaxpr.outvars]


def without_checks(jaxpr: Any) -> tuple[Any, Any]:
    """The jaxpr without its equations of `checkify.check`, and one without outputs that makes only these checks.

    The second is None if there are no checks. Checks within a loop or a branch stay where they are.
    """

    def is_check(equation: Any) -> bool:
        return equation.primitive.name == "check"

    # Nobody can have called `check` before this module was imported. Tracing a layer then needs no walk.
    if "jax.experimental.checkify" not in sys.modules or not any(map(is_check, jaxpr.eqns)):
        return jaxpr, None
    rest = [e for e in jaxpr.eqns if not is_check(e)]
    checks = _needed_equations(jaxpr, [], is_wanted=is_check)
    return _with_equations(jaxpr, rest, jaxpr.outvars), _with_equations(jaxpr, checks, [])


def _with_equations(jaxpr: Any, equations: list[Any], outvars: Sequence[Any]) -> Any:
    debug = DebugInfo("pylayer_jax", "part of a jaxpr", None, None)
    effects = frozenset().union(*(e.effects for e in equations))
    return jaxpr.replace(eqns=equations, outvars=list(outvars), effects=effects, debug_info=debug)


def without_select_of_stop_gradient(jaxpr: Any) -> Any:
    """The jaxpr without selections between a value and the same value behind `stop_gradient`, at any depth.

    A batched `jax.lax.cond` has them, to stop the gradients of the branches that are not taken. They are equal to the
    value, but JAX cannot transpose them.
    """
    stopped: dict[Any, Any] = {}
    same: dict[Any, Any] = {}

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [a if is_literal(a) else same.get(a, a) for a in atoms]

    equations: list[Any] = []
    changed = False
    for equation in jaxpr.eqns:
        if equation.primitive.name == "stop_gradient" and not is_literal(equation.invars[0]):
            stopped[equation.outvars[0]] = equation.invars[0]
        elif equation.primitive.name == "select_n" and not any(map(is_literal, equation.invars[1:])):
            values = {stopped.get(v, v) for v in equation.invars[1:]}
            if len(values) == 1:
                (value,) = values
                same[equation.outvars[0]] = same.get(value, value)
                continue
        params = {name: changed_inside(without_select_of_stop_gradient, x) for name, x in equation.params.items()}
        changed = changed or any(params[name] is not x for name, x in equation.params.items())
        equations.append(equation.replace(invars=renamed(equation.invars), params=params))
    if not same and not changed:
        return jaxpr
    # Not by `dce_jaxpr`, which would drop inputs too.
    left = jaxpr.replace(eqns=equations, outvars=renamed(jaxpr.outvars))
    return left.replace(eqns=_needed_equations(left, left.outvars, is_wanted=lambda equation: bool(equation.effects)))


def changed_inside(change: Callable[[Any], Any], parameter: Any) -> Any:
    """A parameter of an equation with its jaxprs changed; the same object if none of them changes."""
    if type(parameter) is Jaxpr:
        return change(parameter)
    if type(parameter) is ClosedJaxpr:  # another type before jax 0.12
        changed = change(parameter.jaxpr)
        return parameter if changed is parameter.jaxpr else ClosedJaxpr(changed, parameter.consts)
    if type(parameter) is tuple:
        each = tuple(changed_inside(change, x) for x in parameter)
        return each if any(a is not b for a, b in zip(each, parameter, strict=True)) else parameter
    return parameter

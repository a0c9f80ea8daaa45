"""Functions that stage, inspect, evaluate and lower jaxprs, and that read source information of equations.

    jaxpr = { lambda ; a b. let c = sin a; d = mul c b; e = cos d in (d, e) }

    dependence(jaxpr, [b])                          [True, True]: a mask of the outputs
    equations_to(jaxpr, [c, b], [e])                the equations of d and e, and the variables {c, b, d, e}
    evaluate_part(jaxpr, {c: 0.5, b: 2.0}, [e])     [cos(0.5 * 2.0)], without sin

Outputs and operands of equations are variables or literals. Only variables can be keys of a dict.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, Final

import jax
import numpy as np
from jax.ref import AbstractRef, freeze, new_ref

from .traces import (
    DebugInfo,
    Jaxpr,
    Literal,
    ShapedArray,
    Var,
    checkpoint_name,
    current,
    eval_jaxpr,
    jaxprs_in_params,
    mlir,
    partial_eval,
    register_exclusion,
    summarize,
    wrap_init,
)

__tracebackhide__ = True  # pytest hides these frames, as JAX does elsewhere

# In errors about tracers and in profiles, JAX shows a source line for each operation. Exclude lines of this package.
for _part in Path(__file__).parents[1].iterdir():
    if _part.name != "_demo.py":  # which contains layers, as user code does
        register_exclusion(str(_part))


NO_DEBUG_INFO: Final = DebugInfo("pylayer_jax", "code of this package", None, None)


def stage(
    function: Callable[..., tuple[Sequence[Any], Any]], types: Sequence[Any], name: str, arg_names: Sequence[str] = ()
) -> tuple[Any, list[Any], Any]:
    """Stage a flat function, and return the jaxpr, the values that the function closes over, and its second result.

        jaxpr, consts, second = stage(lambda x: ([x * w], "any object"), [typeof(x)], "Scale at layers.py:12")

    The first inputs of the jaxpr are the `consts`. Errors of JAX show `name` and `arg_names`. `jax.make_jaxpr` takes
    five times as long.
    """
    second: Any = None

    def outputs_of(*args: Any) -> Sequence[Any]:
        nonlocal second
        outputs, second = function(*args)
        return outputs

    debug = DebugInfo("pylayer_jax", name, tuple(arg_names) or None, None)
    jaxpr, _, consts = partial_eval.trace_to_jaxpr_dynamic(wrap_init(outputs_of, debug_info=debug), list(types))
    if jaxpr.constvars:  # jax 0.10 separates constvars from inputs, jax 0.12 does not
        invars = [*jaxpr.constvars, *jaxpr.invars]
        jaxpr = jaxpr.replace(constvars=(), invars=invars, debug_info=debug._replace(arg_names=None))
    return jaxpr, list(consts), second


def jaxpr_and_consts(parameter: Any) -> tuple[Any, Sequence[Any]]:
    return getattr(parameter, "jaxpr", parameter), parameter.consts  # since jax 0.12, `Jaxpr` and `ClosedJaxpr` are one


def with_jaxpr(parameter: Any, jaxpr: Any) -> Any:
    """Return the parameter of an equation with another jaxpr, and the same constants."""
    return jaxpr if type(parameter) is type(jaxpr) else parameter.replace(jaxpr=jaxpr)


def is_inlinable(params: dict[str, Any]) -> bool:
    """Return whether the operations of a jitted function may run outside `jax.jit`."""
    shardings = [*params["in_shardings"], *params["out_shardings"]]
    layouts = [*params["in_layouts"], *params["out_layouts"]]
    is_placed = any(isinstance(s, jax.sharding.Sharding) for s in shardings) or any(x is not None for x in layouts)
    return not (is_placed or any(params["donated_invars"]) or params["compiler_options_kvs"])


def body_inputs(equation: Any) -> tuple[int, range]:
    """Return how many operands precede those of the bodies (the index of a cond), and which of these a scan carries."""
    body, *_ = inner_jaxprs(equation.params)
    n_before = len(equation.invars) - len(body.invars)
    if equation.primitive.name != "scan":
        return n_before, range(0)
    # An array and its slice differ in shape.
    count = lambda outside, inside: sum(map(operator.eq, shapes_of(outside), shapes_of(inside)))
    n_carry = count(equation.outvars, body.outvars)
    n_consts = count(equation.invars, body.invars) - n_carry
    return n_before, range(n_consts, n_consts + n_carry)


def shapes_of(atoms: Sequence[Any]) -> list[Any]:
    return [getattr(a.aval, "shape", None) for a in atoms]  # a token has none


def with_current_line(jaxpr: Any) -> Any:
    """Give equations the user's current source line: JAX's staging hides the code around it."""
    line = current().traceback
    return jaxpr.replace(eqns=[e.replace(source_info=e.source_info.replace(traceback=line)) for e in jaxpr.eqns])


def variables(atoms: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys([a for a in atoms if not isinstance(a, Literal)]))


# -- walks over equations --------------------------------------------------------------------------------


def inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    return list(jaxprs_in_params(params))


def all_equations(jaxpr: Any, are_live: bool = False) -> Iterator[Any]:
    """Yield the equations of a jaxpr, or those that compute its outputs, each before those of its inner jaxprs."""
    for equation in equations_to(jaxpr, jaxpr.invars, jaxpr.outvars)[0] if are_live else jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from all_equations(inner, are_live)


def operations(jaxpr: Any) -> list[str]:
    return [e.primitive.name for e in all_equations(jaxpr)]


def is_user_code(jaxpr: Any) -> bool:
    """Return whether the user's code defines a jaxpr: JAX's own functions have no source lines."""
    return any(summarize(e.source_info) for e in all_equations(jaxpr))


def interpret(
    rule: Callable[[Any, list[Any]], Iterable[Any]],
    equations: Iterable[Any],
    known: Mapping[Any, Any],
    wanted: Iterable[Any],
    of_literal: Callable[[Any], Any] = operator.attrgetter("val"),
) -> list[Any]:
    """Return the values of `wanted`, where `rule` maps an equation and the values of its operands to its results.

    A value is anything: an array, a type, a kind. One that is known replaces the result of an equation.
    """
    values = dict(known)
    read = lambda atoms: [of_literal(a) if isinstance(a, Literal) else values[a] for a in atoms]
    for equation in equations:
        for variable, value in zip(equation.outvars, rule(equation, read(equation.invars)), strict=True):
            values.setdefault(variable, value)
    return read(wanted)


def evaluate_equation(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Apply the operation of an equation to arrays: a rule of `interpret`."""
    pairs = zip(equation.invars, operands, strict=True)
    value_of = {a: x for a, x in pairs if not isinstance(a, Literal)}
    return eval_jaxpr(jaxpr_of([equation]), (), *value_of.values())  # its inputs are these variables, in this order


def evaluate_jaxpr(jaxpr: Any, *args: Any) -> list[Any]:
    try:
        return eval_jaxpr(jaxpr, (), *args)
    except NotImplementedError:
        # JAX cannot evaluate a custom_vjp function with symbolic zeros within an eager shard_map.
        # tests: devices/test_shard_map.py
        if "shard_map" not in operations(jaxpr):
            raise
        return jax.jit(lambda *args: eval_jaxpr(jaxpr, (), *args))(*args)


# -- parts of a jaxpr ------------------------------------------------------------------------------------


def dependence(jaxpr: Any, sources: Sequence[Any]) -> list[bool]:
    """Return a mask of the outputs that depend on `sources`, which are inputs or results of equations."""
    dependent = set(sources)
    for equation in jaxpr.eqns:
        if not dependent.isdisjoint(read := variables(equation.invars)):  # it may write to its Refs
            dependent.update(equation.outvars, [v for v in read if isinstance(v.aval, AbstractRef)])
    return [not isinstance(v, Literal) and v in dependent for v in jaxpr.outvars]


def equations_to(
    jaxpr: Any, known: Collection[Any], wanted: Sequence[Any], keeps_effects: bool = False
) -> tuple[list[Any], set[Any]]:
    """Return the equations that compute `wanted` from `known`, and the variables that are wanted or that they read."""
    known, read = set(known), set(variables(wanted))
    equations: list[Any] = []
    for equation in reversed(jaxpr.eqns):
        # An equation may write to a `jax.Ref`, so it is also kept if a later kept equation reads one of its Refs.
        refs = [v for v in equation.invars if isinstance(v.aval, AbstractRef)]
        is_read = read.intersection(equation.outvars) - known or read.intersection(refs)
        if is_read or (keeps_effects and equation.effects):
            equations.append(equation)
            read.update(variables(equation.invars))
    return equations[::-1], read


def evaluate_part(jaxpr: Any, known: dict[Any, Any], wanted: Sequence[Any]) -> list[Any]:
    return interpret(evaluate_equation, equations_to(jaxpr, known, wanted)[0], known, wanted)


def with_checkpoint_names(jaxpr: Any, name_of: dict[Any, str], debug_name: str) -> Any:
    """Return a copy of a jaxpr in which `checkpoint_name` names the variables in `name_of`.

    All later equations read the named value: if a policy of `jax.checkpoint` saves it, backward does not compute it
    again. tests: derivatives/test_checkpoint.py
    """

    def rule(equation: Any, operands: list[Any]) -> list[Any]:
        pairs = zip(map(name_of.get, equation.outvars), evaluate_equation(equation, operands), strict=True)
        return [checkpoint_name(x, name) if name else x for name, x in pairs]

    def named(*args: Any) -> tuple[list[Any], None]:
        return interpret(rule, jaxpr.eqns, dict(zip(jaxpr.invars, args, strict=True)), jaxpr.outvars), None

    return stage(named, [v.aval for v in jaxpr.invars], debug_name)[0]


def jaxpr_of(equations: Sequence[Any]) -> Any:
    """Return a jaxpr of equations, in order, from the variables that they read to all their results."""
    results = {v: None for e in equations for v in e.outvars}
    inputs = [v for v in variables([x for e in equations for x in e.invars]) if v not in results]
    effects = frozenset[Any]().union(*[e.effects for e in equations])
    return Jaxpr((), inputs, [*results], [*equations], effects, NO_DEBUG_INFO)


def interpret_opened(
    rule: Callable[..., Sequence[Any]], jaxpr: Any, known: Mapping[Any, Any], constants: dict[Any, Any]
) -> list[Any]:
    """Return the outputs of a jaxpr as `interpret` does, where each jitted function is replaced by its equations.

    `rule` also gets the calls around an equation. The arrays that jitted functions close over are added to `constants`,
    by variable.
    """
    is_user_code_cached = functools.cache(is_user_code)

    def opened(code: Any, known: Mapping[Any, Any], calls: tuple[Any, ...]) -> list[Any]:
        outer = calls[-1].source_info if calls else None
        shows_own_lines = outer is None or is_user_code_cached(code)

        def rule_or_call(equation: Any, operands: list[Any]) -> Sequence[Any]:
            source, params = equation.source_info, equation.params
            if outer is not None:
                traceback = source.traceback if shows_own_lines else outer.traceback
                source = source.replace(name_stack=outer.name_stack + source.name_stack, traceback=traceback)
                equation = equation.replace(source_info=source)
            if equation.primitive.name == "jit" and is_inlinable(params):
                inner, consts = jaxpr_and_consts(params["jaxpr"])
                own = [Var(v.aval) for v in inner.constvars]  # two calls may share a jaxpr, with different arrays
                constants.update(zip(own, consts, strict=True))
                known = dict(zip((*inner.constvars, *inner.invars), (*own, *operands), strict=True))
                return opened(inner, known, (*calls, equation))
            return rule(equation, operands, calls)

        return interpret(rule_or_call, code.eqns, known, code.outvars, of_literal=lambda literal: literal)

    return opened(jaxpr, known, ())


# -- Refs and lowering ---------------------------------------------------------------------------------


@functools.cache
def _effects_of_own_refs() -> frozenset[Any]:
    jaxpr, _, _ = stage(lambda x: ([freeze(new_ref(x))], None), [ShapedArray((), np.dtype(np.float32))], "a Ref")
    return jaxpr.effects


def uses_own_refs(jaxpr: Any) -> bool:
    return bool(jaxpr.effects & _effects_of_own_refs())


def outside_effects(jaxpr: Any) -> frozenset[Any]:
    """Return the effects of a jaxpr, except effects on Refs that it makes itself."""
    effects = frozenset[Any](jaxpr.effects)
    return effects and effects - _effects_of_own_refs()


def lower_jaxpr(context: Any, jaxpr: Any, *args: Any) -> Any:
    """Lower a jaxpr directly, at half the cost of `mlir.lower_fun`, which traces it again."""
    if uses_own_refs(jaxpr):  # `mlir.lower_fun` turns reads and writes of these Refs into values
        traced = mlir.lower_fun(lambda *xs: eval_jaxpr(jaxpr, (), *xs), multiple_results=True)
        return traced(context.replace(avals_in=[v.aval for v in jaxpr.invars]), *args)
    module = context.module_context
    if context.platforms is not None:
        module = module.replace(platforms=context.platforms)
    out, tokens = mlir.jaxpr_subcomp(
        module,
        jaxpr,
        context.name_stack,
        context.tokens_in,
        (),
        *args,
        dim_var_values=context.dim_var_values,
        const_lowering=context.const_lowering,
        outer_traceback=None,
    )
    context.set_tokens_out(tokens)
    return out


# -- source information --------------------------------------------------------------------------------


_FRAME: Final = re.compile(r"(?P<file>.*?):(?P<line>\d+)(:\d+)? \((?P<function>.*)\)")
_SCOPE: Final = re.compile(r"[^/()]+(?=[/)]|$)")  # the scopes of "jvp(Attention)/scores", without transformations


def _frames(source: Any) -> list[re.Match[str]]:
    """Return the frames of user code, outermost first. JAX leaves out frames of its own code and of this package."""
    lines = summarize(source, num_frames=1000).splitlines()
    return [match for match in map(_FRAME.fullmatch, lines) if match]


def _rest(outer: Sequence[Any], inner: Sequence[Any]) -> Sequence[Any]:
    """Return the rest of `inner` after its longest common prefix with `outer`."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(outer, inner, strict=False))
    return inner[len(list(pairs)) :]


def frames_between(outer: Any, inner: Any) -> list[str]:
    """Return the names of the functions, and of their classes, called between `outer` and `inner`, outermost first."""
    around, within = ([frame.group("file", "function") for frame in _frames(source)] for source in (outer, inner))
    rest = _rest(around, within)
    names = [name for _, function in rest for name in function.rpartition("<locals>.")[2].split(".")]
    return [n for n in names if not n.startswith("<") and not (n.startswith("__") and n.endswith("__"))]


def scopes_between(outer: Any, inner: Any) -> list[str]:
    around, within = (_SCOPE.findall(str(source.name_stack)) for source in (outer, inner))
    return list(_rest(around, within))


def line_of(sources: Sequence[Any]) -> str:
    """Return the innermost line of user code, such as `model.py:12`, or "". The outermost source comes first."""
    frames = [frame for source in reversed(sources) for frame in reversed(_frames(source))]
    own = [f for f in frames if "site-packages" not in f["file"] and "dist-packages" not in f["file"]]
    frame = next(iter(own or frames), None)
    return f"{PureWindowsPath(frame['file']).name}:{frame['line']}" if frame else ""

"""What a generated layer has to compute, in plain JAX, which shares no code with the package.

A layer becomes nested `jax.custom_vjp` functions, one per order of derivative: the rule of each takes the outputs, and
the saved values, from the next function, so that a derivative of an output, or of a saved output, follows the custom
rule again. The innermost is the bare `forward`. What a saved object counts as (the contract, section 7):

- an object that is an input counts as that input, also where it is returned as well; each argument is an input of its
  own, also where one array is passed twice;
- a closed-over array is a constant for what is computed from it; if it is returned and saved, it is that output;
  `setup_context` gets a NumPy output as a new JAX array, so that values computed from it follow the rule;
- an operation that does nothing, for which JAX hands back its operand, is its operand;
- an object that is an output carries the rule; of one that is returned twice, the last counts;
- all else is an intermediate: what `forward` makes of the inputs and of those outputs that carry the rule;
- an output that is marked as not differentiable carries no rule: saved, it is a constant of later derivatives; what
  `forward` computes from it is an intermediate. Outside its derivative is zero.

Forward mode is the transpose of the rule, so that a tangent is the Jacobian of reverse mode times the tangent. A Ref is
an argument of the function, which has a first derivative only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .cases import CONSTANTS, OPERATIONS, Case, Layer
from .classes import function_of

Tensors = tuple[jax.Array, ...]


def reference_of(layer: Layer, constants: dict[str, Any], order: int, ref: Any = None) -> Callable[..., Tensors]:
    """The layer as a function of its tensors, for derivatives up to that order."""
    inputs = layer.inputs
    outputs = [layer.origin(name) for name in layer.outputs]
    marked = {layer.origin(name) for name in layer.marked}
    plain = {*inputs, *constants, *marked}
    carries_rule = {name: i for i, name in enumerate(outputs) if name not in plain}
    returned_constants = {name: i for i, name in enumerate(outputs) if name in constants and name not in marked}
    if "N0" in returned_constants:
        of_numpy = [s.name for s in layer.later if s.operation == "output" and s.operands == ("N0",)]
        carries_rule |= dict.fromkeys(of_numpy, returned_constants["N0"])
    saved_origins = [(name, layer.origin(name)) for name, _ in layer.saved]

    def names(xs: Tensors, carried: dict[str, jax.Array]) -> dict[str, Any]:
        """What each name of `forward` stands for, where some objects are given."""
        scope = {**constants, **layer.statics, **dict(zip(inputs, xs, strict=True))}
        for statement in [*layer.body, *layer.later]:
            if statement.name in carried:
                scope[statement.name] = carried[statement.name]
            elif statement.same_as:
                scope[statement.name] = scope[statement.same_as]
            else:
                scope[statement.name] = statement.value(scope)
        return scope

    def bare(ref: Any, *xs: jax.Array) -> Tensors:
        if layer.writes == "forward":
            ref[...] += 1.0
        scope = names(xs, {})
        return tuple(jnp.asarray(scope[name]) for name in outputs)

    def gradients(saved: list[jax.Array], xs: Tensors, ref: Any, cotangents: Tensors) -> tuple[Any, ...]:
        given = [jnp.zeros_like(d) if o in marked else d for d, o in zip(cotangents, outputs, strict=True)]
        if layer.writes == "backward":
            ref[...] += sum((jnp.sum(d) for d in given), jnp.zeros((), given[0].dtype))

        def gradient(name: str, x: jax.Array, terms: Any) -> jax.Array:
            values = [term.value(saved, given[term.output]) for term in terms or []]
            return sum((layer.fitted(value, name, wide=False) for value in values), jnp.zeros_like(x))

        return None, *map(gradient, inputs, xs, layer.gradients)

    def with_rule(inner: Callable[..., Tensors]) -> Callable[..., Tensors]:
        def forward(ref: Any, *xs: jax.Array) -> Any:
            ys = inner(ref, *xs)
            scope = names(xs, {name: ys[i] for name, i in carries_rule.items()})
            scope |= {name: ys[returned_constants[o]] for name, o in saved_origins if o in returned_constants}
            constant = marked.difference(inputs)
            saved = [jax.lax.stop_gradient(scope[n]) if o in constant else scope[n] for n, o in saved_origins]
            return ys, (saved, xs, ref)

        function = jax.custom_vjp(inner)
        function.defvjp(forward, lambda residuals, cotangents: gradients(*residuals, cotangents))
        return function

    function = bare
    for _ in range(order):
        function = with_rule(function)

    def outside(*xs: jax.Array) -> Tensors:
        ys = function(ref, *xs)
        return tuple(jax.lax.stop_gradient(y) if o in marked else y for y, o in zip(ys, outputs, strict=True))

    return outside


# -- derivatives and transforms, each with its counterpart for the reference -----------------------------


def weights(y: Any) -> jax.Array:
    return jnp.sin(1.0 + jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)


def _loss(f):
    return lambda *xs: sum(jnp.sum(weights(y) * jnp.sin(y)) for y in jax.tree.leaves(f(*xs)))


def _of_some(f, positions, xs):
    """`f` of the arguments at those positions, and these."""

    def run(*some):
        given = dict(zip(positions, some, strict=True))
        return f(*(given.get(i, x) for i, x in enumerate(xs)))

    return run, [xs[i] for i in positions]


def _grad(f, positions):
    return jax.grad(_loss(f), positions)


def _vjp(f, positions):
    def run(*xs):
        g, some = _of_some(f, positions, xs)
        ys, pull = jax.vjp(g, *some)
        return pull(jax.tree.map(weights, ys))

    return run


def _along_weights(slope):
    """The step that is a derivative along fixed tangents, from `slope(f, arguments, tangents)`."""

    def step(f, positions):
        def run(*xs):
            g, some = _of_some(f, positions, xs)
            return slope(g, some, [weights(x) for x in some])

        return run

    return step


def _reverse_slope(f, xs, tangents):
    """The Jacobian of reverse mode, times the tangent."""
    jacobian = jax.jacrev(f, tuple(range(len(xs))))(*xs)

    def times_tangent(_, row):
        return sum(jnp.tensordot(j, t, t.ndim) for j, t in zip(row, tangents, strict=True))

    return jax.tree.map(times_tangent, jax.eval_shape(f, *xs), jacobian)


_jvp = _along_weights(lambda f, xs, tangents: jax.jvp(f, xs, tangents)[1])
_linearize = _along_weights(lambda f, xs, tangents: jax.linearize(f, *xs)[1](*tangents))
_jvp_in_reverse = _along_weights(_reverse_slope)


def _scales(xs):
    return (1.0, 0.5, 0.8)[: max(2, *(x.shape[-1] if x.ndim else 2 for x in xs))]


def _vmap(f, how):
    axes, out_axis = how

    def run(*xs):
        stacked = [
            x if a is None else jnp.stack([s * x for s in _scales(xs)], max(a, -1 - x.ndim))
            for x, a in zip(xs, axes, strict=True)
        ]
        return jax.tree.map(lambda y: y.sum(out_axis), jax.vmap(f, axes, out_axis)(*stacked))

    return run


def _one_by_one(f, how):
    axes, _ = how

    def run(*xs):
        examples = [[x if a is None else s * x for x, a in zip(xs, axes, strict=True)] for s in _scales(xs)]
        return jax.tree.map(lambda *ys: sum(ys[1:], ys[0]), *(f(*example) for example in examples))

    return run


def _scan(f, _):
    def run(*xs):
        scales = jnp.array([1.0, 0.7], xs[0].dtype)
        _, ys = jax.lax.scan(lambda carry, scale: (carry, f(*(x * scale for x in xs))), 0, scales)
        return jax.tree.map(lambda y: y.sum(0), ys)

    return run


def _twice(f, _):
    return lambda *xs: jax.tree.map(jnp.add, f(*xs), f(*(0.7 * x for x in xs)))


def _branch(f, _):
    return lambda *xs: jax.lax.cond(xs[0].sum() < 1e3, f, lambda *xs: jax.tree.map(lambda y: 0 * y, f(*xs)), *xs)


def _nothing(f, _):
    return f


NAMES = ["named", *(f"L{i}.saved[{j}]" for i in range(2) for j in range(2))]
POLICIES = {
    "everything": jax.checkpoint_policies.everything_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "some operations": lambda primitive, *_, **__: primitive.name in ("sin", "tanh", "mul"),
    "other operations": lambda primitive, *_, **__: primitive.name in ("cos", "add", "name", "rule_function"),
    "names": jax.checkpoint_policies.save_only_these_names(*NAMES),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=NAMES[:2],
        names_which_can_be_offloaded=NAMES[2:],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}

STEPS: dict[str, tuple[Any, Any]] = {
    "": (_nothing, _nothing),
    "grad": (_grad, _grad),
    "vjp": (_vjp, _vjp),
    "jacrev": (jax.jacrev, jax.jacrev),
    "jvp": (_jvp, _jvp_in_reverse),
    "linearize": (_linearize, _jvp_in_reverse),
    "jacfwd": (jax.jacfwd, jax.jacrev),
    "jit": (lambda f, _: jax.jit(f), _nothing),
    "remat": (lambda f, policy: jax.checkpoint(f, policy=POLICIES.get(policy)), _nothing),
    "vmap": (_vmap, _one_by_one),
    "scan": (_scan, _twice),
    "cond": (_branch, _nothing),
}
DERIVATIVES = {"grad", "vjp", "jacrev", "jvp", "linearize", "jacfwd"}


# -- what both sides make of a case ------------------------------------------------------------------------


def computed(case: Case, package: Any) -> Any:
    """What the layers of `package` make of a case."""
    constants = _arrays(case, CONSTANTS)

    def run() -> Any:
        ref = _ref(case)
        layers = {layer.name: function_of(layer, package, constants, ref) for layer in case.layers}
        program = _in_block(case, "inside", package, _program(case, layers, constants, 0))
        return _applied(case, program, 0), None if ref is None else ref[...]

    # JAX compiles a jitted function that closes over a Ref only within another one.
    return _in_block(case, "outside", package, jax.jit(run) if _writes(case) else run)()


def expected(case: Case) -> Any:
    order = sum(name in DERIVATIVES for name, _ in case.steps)

    def run() -> Any:
        ref, constants = _ref(case), _arrays(case, CONSTANTS)
        layers = {layer.name: reference_of(layer, constants, order, ref) for layer in case.layers}
        return _applied(case, _program(case, layers, constants, 1), 1), None if ref is None else ref[...]

    # One program: operation by operation it takes four times as long.
    return jax.jit(run)()


def _writes(case: Case) -> bool:
    return any(layer.writes for layer in case.layers)


def _ref(case: Case) -> Any:
    return jax.new_ref(jnp.zeros((), case.dtype)) if _writes(case) else None


def _arrays(case: Case, names: Any) -> dict[str, Any]:
    """NumPy where the name says so."""
    return {k: (np if k[0] == "N" else jnp).asarray(case.values[k], case.dtype) for k in names}


PAIRS: dict[str, tuple[Any, Any]] = {
    "same": (lambda x: x, lambda x: x),
    "boxed": (lambda x: {"x": [x]}, lambda packed: packed["x"][0]),
    "negated": (
        lambda x: -x if jnp.issubdtype(x.dtype, jnp.floating) else (x,),
        lambda p: p[0] if type(p) is tuple else -p,
    ),
}


def _in_block(case: Case, place: str, package: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    block = case.blocks.get(place)
    if block is None:
        return function
    options = {"differentiable": True} if block.differentiable else {}
    hooks = package.saved_tensors_hooks(*PAIRS[block.pair], **options)

    def run(*args: Any) -> Any:
        with hooks:
            return function(*args)

    return run if block.form == "with" else hooks(function)


def _program(case: Case, layers: dict[str, Any], constants: dict[str, Any], which: int) -> Callable[..., Tensors]:
    shapes = {layer.name: [layer.shapes[name] for name in layer.inputs] for layer in case.layers}

    def program(*xs: Any) -> Tensors:
        pool = constants | dict(zip(case.inputs, xs, strict=True))
        for call in case.calls:
            given = [pool[name] for name in call.arguments]
            if call.layer is None:
                found = (OPERATIONS[call.operation](*given),)
            else:
                name, how = call.around
                given = [_in_shape(x, shape) for x, shape in zip(given, shapes[call.layer], strict=True)]
                found = STEPS[name][which](layers[call.layer], how)(*given)
            pool |= dict(zip(call.results, found, strict=True))
        return tuple(pool[name] for name in case.results)

    return program


def _in_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """A tensor in the shape that a layer takes; the same object where it has it."""
    if x.shape == shape:
        return x
    return jnp.mean(x).reshape(shape) if np.prod(shape) == 1 else jnp.broadcast_to(x, shape)


def _applied(case: Case, function: Any, which: int) -> Any:
    for name, how in case.steps:
        function = STEPS[name][which](function, how)
    return function(*_arrays(case, case.inputs).values())

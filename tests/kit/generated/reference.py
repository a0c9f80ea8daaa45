"""What a generated layer has to compute, in plain JAX, which shares no code with the package.

A layer becomes nested `jax.custom_vjp` functions, one per order of derivative: the rule of each takes the outputs, and
the saved values, from the next function, so that a derivative of an output, or of a saved output, follows the custom
rule again. The innermost is the bare `forward`. What a saved object counts as (the contract, section 7):

- an object that is an input counts as that input, also where it is returned as well; each argument is an input of its
  own, also where one array is passed twice;
- a closed-over array is a constant for what is computed from it; if it is returned and saved, it is that output;
- an operation that does nothing, for which JAX hands back its operand, is its operand;
- an object that is an output carries the rule; of one that is returned twice, the last counts;
- all else is an intermediate: what `forward` makes of the inputs and of those outputs that carry the rule;
- an output that is marked as not differentiable carries no rule: saved, it is a constant of later derivatives; what
  `forward` computes from it is an intermediate. Outside its derivative is zero.

Forward mode is the transpose of the rule, so that a tangent is the Jacobian of reverse mode times the tangent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.kit.generated.text import PRELUDE, Case, Layer

Tensors = tuple[jax.Array, ...]


def reference_of(layer: Layer, constants: dict[str, Any], order: int) -> Callable[..., Tensors]:
    """The layer as a function of its tensors, for derivatives up to that order."""
    inputs = layer.inputs
    outputs = [layer.origin(name) for name in layer.outputs]
    marked = {layer.origin(name) for name in layer.marked}
    plain = {*inputs, *constants, *marked}
    carries_rule = {name: i for i, name in enumerate(outputs) if name not in plain}
    returned_constants = {name: i for i, name in enumerate(outputs) if name in constants and name not in marked}
    saved_origins = [(name, layer.origin(name)) for name, _ in layer.saved]

    def names(xs: Tensors, carried: dict[str, jax.Array]) -> dict[str, Any]:
        """What each name of `forward` stands for, where some objects are given."""
        scope = {**constants, **layer.statics, **dict(zip(inputs, xs, strict=True))}
        for statement in [*layer.body, *layer.later]:
            if statement.same_as:
                scope[statement.name] = scope[statement.same_as]
            elif statement.name in carried:
                scope[statement.name] = carried[statement.name]
            else:
                scope[statement.name] = eval(statement.text, {"jnp": jnp}, scope)
        return scope

    def bare(*xs: jax.Array) -> Tensors:
        scope = names(xs, {})
        return tuple(scope[name] for name in outputs)

    def gradients(saved: list[jax.Array], xs: Tensors, cotangents: Tensors) -> Tensors:
        scope = {**constants, **{f"s{i}": s for i, s in enumerate(saved)}}
        given = [jnp.zeros_like(d) if o in marked else d for d, o in zip(cotangents, outputs, strict=True)]
        scope |= {f"d{i}": d for i, d in enumerate(given)}
        return tuple(
            sum((eval(t.text.format(d=f"d{t.output}"), {"jnp": jnp}, scope) for t in terms or []), jnp.zeros_like(x))
            for x, terms in zip(xs, layer.gradients, strict=True)
        )

    def with_rule(inner: Callable[..., Tensors]) -> Callable[..., Tensors]:
        def forward(*xs: jax.Array) -> Any:
            ys = inner(*xs)
            scope = names(xs, {name: ys[i] for name, i in carries_rule.items()})
            scope |= {name: ys[returned_constants[o]] for name, o in saved_origins if o in returned_constants}
            constant = marked.difference(inputs)
            saved = [jax.lax.stop_gradient(scope[n]) if o in constant else scope[n] for n, o in saved_origins]
            return ys, (saved, xs)

        function = jax.custom_vjp(inner)
        function.defvjp(forward, lambda saved, cotangents: gradients(*saved, cotangents))
        return function

    function = bare
    for _ in range(order):
        function = with_rule(function)
    return function


# -- programs, derivatives and transforms ---------------------------------------------------------------


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


def _slope(f, positions):
    return jax.grad(lambda *xs: sum(map(jnp.sum, jax.tree.leaves(f(*xs)))), positions)


def _grad(f, positions):
    return jax.grad(_loss(f), positions)


def _vjp(f, positions):
    def run(*xs):
        ys, pull = jax.vjp(*(lambda g, some: (g, *some))(*_of_some(f, positions, xs)))
        return pull(jax.tree.map(weights, ys))

    return run


def _jvp(f, positions):
    def run(*xs):
        g, some = _of_some(f, positions, xs)
        return jax.jvp(g, some, [weights(x) for x in some])[1]

    return run


def _linearize(f, positions):
    def run(*xs):
        g, some = _of_some(f, positions, xs)
        return jax.linearize(g, *some)[1](*(weights(x) for x in some))

    return run


def _jvp_in_reverse(f, positions):
    """The Jacobian of reverse mode, times the tangent."""

    def run(*xs):
        g, some = _of_some(f, positions, xs)
        jacobian = jax.jacrev(g, tuple(range(len(some))))(*some)

        def times_tangent(_, row):
            return sum(jnp.tensordot(j, weights(x), x.ndim) for j, x in zip(row, some, strict=True))

        return jax.tree.map(times_tangent, jax.eval_shape(g, *some), jacobian)

    return run


def _jacrev(f, positions):
    return jax.jacrev(f, positions)


def _vmapped(in_axes):
    def transform(f, _):
        def run(*xs):
            axes = in_axes(len(xs))
            stacked = [x if a is None else jnp.stack([x, 0.5 * x]) for x, a in zip(xs, axes, strict=True)]
            return jax.tree.map(lambda y: y.sum(0), jax.vmap(f, axes)(*stacked))

        return run

    def reference(f, _):
        def run(*xs):
            halves = [x if a is None else 0.5 * x for x, a in zip(xs, in_axes(len(xs)), strict=True)]
            return jax.tree.map(jnp.add, f(*xs), f(*halves))

        return run

    return transform, reference


def _scanned(f, _):
    def run(*xs):
        def body(carry, scale):
            return jax.tree.map(jnp.add, carry, f(*(x * scale for x in xs))), None

        scales = jnp.array([1.0, 0.7], xs[0].dtype)
        return jax.lax.scan(body, jax.tree.map(jnp.zeros_like, jax.eval_shape(f, *xs)), scales)[0]

    return run


def _branched(f, _):
    return lambda *xs: jax.lax.cond(xs[0].sum() < 1e3, f, lambda *xs: jax.tree.map(lambda y: 0 * y, f(*xs)), *xs)


def _same(value):
    return value


def _nothing(f, _):
    return f


# Each with its counterpart for the reference.
STEPS: dict[str, tuple[Any, Any]] = {
    "slope": (_slope, _slope),
    "grad": (_grad, _grad),
    "vjp": (_vjp, _vjp),
    "jacrev": (_jacrev, _jacrev),
    "jvp": (_jvp, _jvp_in_reverse),
    "linearize": (_linearize, _jvp_in_reverse),
    "jacfwd": (lambda f, positions: jax.jacfwd(f, positions), _jacrev),
    "jit": (lambda f, _: jax.jit(f), _nothing),
    "remat": (lambda f, _: jax.checkpoint(f), _nothing),
    "vmap": _vmapped(lambda n: (0,) * n),
    "vmap_first": _vmapped(lambda n: (0,) + (None,) * (n - 1)),
    "vmap_last": _vmapped(lambda n: (None,) * (n - 1) + (0,)),
    "scan": (_scanned, lambda f, _: lambda *xs: jax.tree.map(jnp.add, f(*xs), f(*(0.7 * x for x in xs)))),
    "cond": (_branched, _nothing),
}
FORWARD_MODE = {"jvp", "linearize", "jacfwd"}
DERIVATIVES = {"slope", "grad", "vjp", "jacrev"} | FORWARD_MODE


def computed(case: Case, package: Any) -> Any:
    """What the layers of `package` make of a case."""
    scope = _scope(case) | {name: getattr(package, name) for name in ("PyLayer", "Function", "saved_tensors_hooks")}
    exec(case.text(), scope)
    hooks = {"differentiable": True} if case.hooks_differentiable else {}
    around = package.saved_tensors_hooks(_same, _same, **hooks) if case.hooks == "outside" else None
    with around or contextlib.nullcontext():
        return _apply(case, scope, 0)


def expected(case: Case) -> Any:
    # One program: operation by operation it takes four times as long.
    return jax.jit(lambda: _expected(case))()


def _expected(case: Case) -> Any:
    scope = _scope(case) | {"saved_tensors_hooks": lambda *_, **__: contextlib.nullcontext()}
    order = sum(name in DERIVATIVES for name, _ in case.steps)
    scope |= {layer.name: reference_of(layer, {k: scope[k] for k in ("C0", "C1")}, order) for layer in case.layers}
    exec(case.program(), scope)
    return _apply(case, scope, 1)


def _scope(case: Case) -> dict[str, Any]:
    scope: dict[str, Any] = {
        "jnp": jnp,
        "same": _same,
        **{k: jnp.array(v, case.dtype) for k, v in case.values().items()},
    }
    exec(PRELUDE, scope)
    return scope


def _apply(case: Case, scope: dict[str, Any], which: int) -> Any:
    function = scope["program"]
    for name, positions in case.steps:
        function = STEPS[name][which](function, positions)
    return function(*(scope[x] for x in case.inputs))

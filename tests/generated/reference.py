"""Computes what a generated layer has to compute, in plain JAX, with no code of the package.

A layer becomes nested `jax.custom_vjp` functions, one per order of derivative. The innermost function is `forward`
itself. The fwd rule of each other function calls the next inner one for the outputs, and saves these outputs where the
layer saves its outputs: so a derivative of an output, or of a saved output, follows the custom rule again. Example:

    u0 = sin(a); u1 = u0 * u0      # `forward` of the layer, which returns (a, u0), and saves u0 and u1

    def fwd(a):                    # of each custom_vjp function
        ys = inner(a)              # (a, u0)
        return ys, [ys[1], ys[1] * ys[1]]

How a derivative of the rule treats a saved object:

- An input is that input, also if it is an output too. Two arguments are two inputs, also if they are one array.
- An output follows the custom rule, as u0 does. An object at two positions is the output at the last one.
- Any other value is an intermediate, as u1 is: it is differentiated through the operations of `forward`, from the
  inputs and from the outputs that follow the rule.
- The result of an operation for which JAX returns the operand itself is the operand.
- A closed-over array is a constant for the operations of `forward`. If it is both returned and saved, the saved one is
  the output. `setup_context` gets a NumPy output as a new JAX array: what it computes from that follows the rule.
- An output that is marked as not differentiable is a constant, unless it is an input, but what `forward` computes from
  it is an intermediate. The caller of the layer gets it with a zero derivative.

In forward mode, the tangent of the outputs is the Jacobian of reverse mode times the tangent of the inputs.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.kit.transforms import of_positions

from .cases import CONSTANTS, NUMPY_CONSTANT, OPERATIONS, Case, Layer
from .classes import function_of

Tensors = tuple[jax.Array, ...]


def reference_of(layer: Layer, constants: dict[str, Any], order: int) -> Callable[..., Tensors]:
    """Return the layer as a function of its tensors, with derivatives up to that order."""
    non_differentiable = {layer.origin(name) for name in layer.non_differentiable}

    def forward(*xs: jax.Array) -> Tensors:
        scope = _scope(layer, constants, xs, {})
        return tuple(jnp.asarray(scope[layer.origin(name)]) for name in layer.outputs)

    function = forward
    for _ in range(order):
        function = _with_rule(function, layer, constants, non_differentiable)

    def of_tensors(*xs: jax.Array) -> Tensors:
        ys = zip(layer.outputs, function(*xs), strict=True)
        return tuple(jax.lax.stop_gradient(y) if layer.origin(name) in non_differentiable else y for name, y in ys)

    return of_tensors


def _scope(layer: Layer, constants: dict[str, Any], xs: Tensors, outputs: dict[str, jax.Array]) -> dict[str, Any]:
    """Return the value of each name. A name in `outputs` has the value given there; others are computed."""
    scope = {**constants, **layer.statics, **dict(zip(layer.inputs, xs, strict=True))}
    for statement in [*layer.body, *layer.setup_statements]:
        if statement.name in outputs:
            scope[statement.name] = outputs[statement.name]
        elif statement.same_as:
            scope[statement.name] = scope[statement.same_as]
        else:
            scope[statement.name] = statement.value(scope)
    return scope


def _with_rule(
    inner: Callable[..., Tensors], layer: Layer, constants: dict[str, Any], non_differentiable: set[str]
) -> Callable[..., Tensors]:
    """Return `inner` with the rule of the layer."""
    # Each is a dict from a name, under which an object was first defined, to the position among the outputs: the last.
    position = {layer.origin(name): i for i, name in enumerate(layer.outputs)}
    computed = {n: i for n, i in position.items() if n not in {*layer.inputs, *constants, *non_differentiable}}
    closed_over = {n: i for n, i in position.items() if n in constants and n not in non_differentiable}
    if NUMPY_CONSTANT in closed_over:
        arrays = [s.name for s in layer.setup_statements if s.operation == "output" and s.same_as == NUMPY_CONSTANT]
        computed |= dict.fromkeys(arrays, closed_over[NUMPY_CONSTANT])

    def saved_value(name: str, scope: dict[str, Any], ys: Tensors) -> Any:
        origin = layer.origin(name)
        if origin in closed_over:
            return ys[closed_over[origin]]
        is_constant = origin in non_differentiable and origin not in layer.inputs
        return jax.lax.stop_gradient(scope[name]) if is_constant else scope[name]

    def fwd(*xs: jax.Array) -> Any:
        ys = inner(*xs)
        scope = _scope(layer, constants, xs, {name: ys[i] for name, i in computed.items()})
        return ys, ([saved_value(name, scope, ys) for name, _ in layer.saved], xs)

    def bwd(residuals: Any, cotangents: Tensors) -> tuple[Any, ...]:
        saved, xs = residuals
        pairs = zip(layer.outputs, cotangents, strict=True)
        cotangents = [jnp.zeros_like(d) if layer.origin(name) in non_differentiable else d for name, d in pairs]

        def gradient(name: str, x: jax.Array, terms: Any) -> jax.Array:
            values = [term.value(saved, cotangents[term.output]) for term in terms or []]
            return sum((layer.fitted(value, name, keep_broadcast=False) for value in values), jnp.zeros_like(x))

        return tuple(map(gradient, layer.inputs, xs, layer.gradients))

    function = jax.custom_vjp(inner)
    function.defvjp(fwd, bwd)
    return function


# -- derivatives and transforms: functions of a function and a parameter --------------------------------------


def weights(y: Any) -> jax.Array:
    return jnp.sin(1.0 + jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)


def _loss(f):
    return lambda *xs: sum(jnp.sum(weights(y) * jnp.sin(y)) for y in jax.tree.leaves(f(*xs)))


def _vjp(f, positions):
    def run(*xs):
        g, chosen = of_positions(f, positions, xs)
        ys, pull = jax.vjp(g, *chosen)
        return pull(jax.tree.map(weights, ys))

    return run


def _along_weights(slope):
    """Return the derivative along fixed tangents that `slope(f, arguments, tangents)` computes."""

    def step(f, positions):
        def run(*xs):
            g, chosen = of_positions(f, positions, xs)
            return slope(g, chosen, [weights(x) for x in chosen])

        return run

    return step


def _reverse_slope(f, xs, tangents):
    """Return the Jacobian, computed by reverse mode, times the tangents."""
    jacobian = jax.jacrev(f, tuple(range(len(xs))))(*xs)

    def times_tangent(_, row):
        return sum(jnp.tensordot(j, t, t.ndim) for j, t in zip(row, tangents, strict=True))

    return jax.tree.map(times_tangent, jax.eval_shape(f, *xs), jacobian)


_jvp = _along_weights(lambda f, xs, tangents: jax.jvp(f, xs, tangents)[1])
_linearize = _along_weights(lambda f, xs, tangents: jax.linearize(f, *xs)[1](*tangents))
_jvp_in_reverse = _along_weights(_reverse_slope)


def _scales(xs):
    """Return the factor of each example in a batch of `xs`.

    There are as many as the last axis is long, so that a batch is square. Then a batch axis that is taken for another
    axis changes the numbers, and raises no error.
    """
    return (1.0, 0.5, 0.8)[: max(2, *(x.shape[-1] if x.ndim else 2 for x in xs))]


def _vmap(f, axes):
    """Return the sum of `f` over a batch. An axis of -1 is the last axis of the batch of an array."""
    in_axes, out_axis = axes

    def run(*xs):
        stacked = [
            x if a is None else jnp.stack([s * x for s in _scales(xs)], max(a, -1 - x.ndim))
            for x, a in zip(xs, in_axes, strict=True)
        ]
        return jax.tree.map(lambda y: y.sum(out_axis), jax.vmap(f, in_axes, out_axis)(*stacked))

    return run


def _one_by_one(f, axes):
    """Return what `_vmap` returns, by one call of `f` for each example."""
    in_axes, _ = axes

    def run(*xs):
        examples = [[x if a is None else s * x for x, a in zip(xs, in_axes, strict=True)] for s in _scales(xs)]
        return jax.tree.map(lambda *ys: sum(ys[1:], ys[0]), *(f(*example) for example in examples))

    return run


def _scan(f, _):
    def run(*xs):
        scales = jnp.array([1.0, 0.7], xs[0].dtype)
        _, ys = jax.lax.scan(lambda carry, scale: (carry, f(*(x * scale for x in xs))), 0, scales)
        return jax.tree.map(lambda y: y.sum(0), ys)

    return run


def _twice(f, _):
    """Return what `_scan` returns, by two calls of `f`."""
    return lambda *xs: jax.tree.map(jnp.add, f(*xs), f(*(0.7 * x for x in xs)))


def _cond(f, _):
    """Return `f` as the branch of a cond that is taken."""
    return lambda *xs: jax.lax.cond(xs[0].sum() < 1e3, f, lambda *xs: jax.tree.map(lambda y: 0 * y, f(*xs)), *xs)


def _unchanged(f, _):
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


PACKAGE_STEPS = {
    "": _unchanged,
    "grad": lambda f, positions: jax.grad(_loss(f), positions),
    "vjp": _vjp,
    "jacrev": jax.jacrev,
    "jvp": _jvp,
    "linearize": _linearize,
    "jacfwd": jax.jacfwd,
    "jit": lambda f, _: jax.jit(f),
    "remat": lambda f, policy: jax.checkpoint(f, policy=POLICIES.get(policy)),
    "vmap": _vmap,
    "scan": _scan,
    "cond": _cond,
}
# A `jax.custom_vjp` has no forward mode. In a vmap or scan, JAX refuses some of these functions, and it gives other
# numbers for one that returns a constant.
REFERENCE_STEPS = PACKAGE_STEPS | {
    "jvp": _jvp_in_reverse,
    "linearize": _jvp_in_reverse,
    "jacfwd": jax.jacrev,
    "jit": _unchanged,
    "remat": _unchanged,
    "vmap": _one_by_one,
    "scan": _twice,
    "cond": _unchanged,
}
DERIVATIVES = {"grad", "vjp", "jacrev", "jvp", "linearize", "jacfwd"}


# -- a case, by the package and by the reference -----------------------------------------------------------------


def run_package(case: Case, package: Any) -> Any:
    """Return the results of a case, by layers of `package`."""
    constants = _arrays(case, CONSTANTS)

    def run() -> Any:
        layers = {layer.name: function_of(layer, package, constants) for layer in case.layers}
        program = _in_block(case, "inside", package, _program(case, layers, constants, PACKAGE_STEPS))
        return _apply_steps(case, program, PACKAGE_STEPS)

    return _in_block(case, "outside", package, run)()


def run_reference(case: Case) -> Any:
    """Return the results of a case, by the reference."""
    order = sum(name in DERIVATIVES for name, _ in case.steps)

    def run() -> Any:
        constants = _arrays(case, CONSTANTS)
        layers = {layer.name: reference_of(layer, constants, order) for layer in case.layers}
        return _apply_steps(case, _program(case, layers, constants, REFERENCE_STEPS), REFERENCE_STEPS)

    # Jitted, because the reference takes four times as long operation by operation.
    return jax.jit(run)()


def _arrays(case: Case, names: Any) -> dict[str, Any]:
    """Return the arrays with these names: JAX arrays, but for the NumPy constant."""
    return {k: (np if k == NUMPY_CONSTANT else jnp).asarray(case.values[k], case.dtype) for k in names}


HOOKS: dict[str, tuple[Any, Any]] = {  # pack and unpack
    "same": (lambda x: x, lambda x: x),
    "boxed": (lambda x: {"x": [x]}, lambda packed: packed["x"][0]),
    "negated": (
        lambda x: -x if jnp.issubdtype(x.dtype, jnp.floating) else (x,),
        lambda p: p[0] if type(p) is tuple else -p,
    ),
}


def _in_block(case: Case, place: str, package: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function in the block of hooks that a case has at a place, "inside" or "outside"."""
    block = case.blocks.get(place)
    if block is None:
        return function
    options = {"differentiable": True} if block.differentiable else {}
    hooks = package.saved_tensors_hooks(*HOOKS[block.hooks], **options)

    def run(*args: Any) -> Any:
        with hooks:
            return function(*args)

    return run if block.form == "with" else hooks(function)


def _program(
    case: Case, layers: dict[str, Any], constants: dict[str, Any], steps: dict[str, Callable[..., Any]]
) -> Callable[..., Tensors]:
    """Return the program of a case as a function of its inputs."""
    shapes = {layer.name: [layer.shapes[name] for name in layer.inputs] for layer in case.layers}

    def program(*xs: Any) -> Tensors:
        values = constants | dict(zip(case.inputs, xs, strict=True))
        for call in case.calls:
            arguments = [values[name] for name in call.arguments]
            if call.layer is None:
                results = (OPERATIONS[call.operation](*arguments),)
            else:
                transform, parameter = call.around
                arguments = [_in_shape(x, shape) for x, shape in zip(arguments, shapes[call.layer], strict=True)]
                results = steps[transform](layers[call.layer], parameter)(*arguments)
            values |= dict(zip(call.results, results, strict=True))
        return tuple(values[name] for name in case.results)

    return program


def _in_shape(x: Any, shape: tuple[int, ...]) -> Any:
    """Return a tensor in the shape that a layer takes: the same object, if it has this shape."""
    if x.shape == shape:
        return x
    return jnp.mean(x).reshape(shape) if np.prod(shape) == 1 else jnp.broadcast_to(x, shape)


def _apply_steps(case: Case, program: Any, steps: dict[str, Callable[..., Any]]) -> Any:
    """Apply the derivatives and transforms of a case to its program, and the result to its inputs."""
    function = program
    for name, parameter in case.steps:
        function = steps[name](function, parameter)
    return function(*_arrays(case, case.inputs).values())

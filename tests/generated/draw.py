"""Draws a case from an integer: `print(draw(7))` shows the layers, the program and the derivatives of case 7.

The rule of a drawn layer is not the gradient of its `forward`. It is any expression in the saved values and the
cotangents, most often linear in the cotangents.

Each choice takes the next numbers of one generator. So a change of their order, or of a list to choose from, changes
all cases.
"""

import dataclasses
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .cases import (
    COEFFICIENTS,
    CONSTANTS,
    IDENTITIES,
    LINEAR,
    NOT_LINEAR,
    NUMPY_CONSTANT,
    Block,
    Call,
    Case,
    Layer,
    Statement,
    Static,
    Term,
    names_in,
    without_unused_statements,
)

UNARY = ["sin", "cos", "tanh", "square", "scale", "plus zero", "negate", "name"]
BINARY = ["times", "plus", "minus", "sin times"]
POLICIES = ["everything", "nothing", "some operations", "other operations", "names", "offload"]
REVERSE = ["grad", "grad", "grad", "vjp", "jacrev"]
FORWARD = ["jvp", "jacfwd", "linearize"]
TRANSFORMS = ["jit", "jit", "vmap", "vmap", "vmap", "scan", "remat", "cond"]
# Under vmap and remat, JAX may give a rule the sum of several cotangents, or a part of one. A rule that is not linear
# then gives other gradients, as with any `jax.custom_vjp`. So these transforms are drawn for linear rules only.
FOR_LINEAR_RULES = {"vmap", "remat"}
HOOK_NAMES = ["same", "same", "boxed", "negated"]


class Traits(NamedTuple):
    """The properties that all layers of a case share."""

    shape: tuple[int, ...]  # of the inputs of the program
    forward_mode: bool
    linear: bool  # whether all rules are linear in the cotangents


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    shape = rng.choice([(3,)] * 4 + [()])
    forward_mode = rng.random() < 0.4
    linear = forward_mode or rng.random() < 0.7
    traits = Traits(shape, forward_mode, linear)
    n_calls = rng.choice([1, 1, 1, 2, 2, 3])
    layers = [_layer(rng, f"l{i}", traits) for i in range(rng.choice([1, min(n_calls, 2)]))]
    n_inputs = rng.choice([1, 2, 2, 3])
    calls, pool = [], [f"x{i}" for i in range(n_inputs)]
    for i in range(n_calls):
        layer = layers[i] if i < len(layers) else rng.choice(layers)
        arguments = [_recent(rng, pool) if rng.random() < 0.95 else "C0" for _ in layer.inputs]
        results = [f"y{len(pool) + n}" for n in range(len(layer.outputs))]
        around = _around(rng, len(arguments), linear)
        calls.append(Call(results, layer.name, arguments, around=around))
        pool += results
        if rng.random() < 0.4:
            calls.append(Call([f"y{len(pool)}"], None, [_recent(rng, pool), rng.choice(pool)], rng.choice(BINARY)))
            pool.append(f"y{len(pool)}")
    results = [y for y in pool[n_inputs:] if rng.random() < 0.6] or pool[-1:]
    order = rng.choices([0, 1, 2, 3], [1, 2, 12, 1])[0]
    differentiable = rng.random() < 0.5
    where = rng.choice(["", "", "", "inside", "outside", "both"])
    blocks = {place: _block(rng, differentiable) for place in ("inside", "outside") if where in (place, "both")}
    steps = _steps(rng, order, calls, n_inputs, traits)
    dtype = rng.choice(["float64"] * 4 + ["float32"])
    values = {name: _number(rng, shape) for name in [*CONSTANTS, *(f"x{i}" for i in range(n_inputs))]}
    return Case(seed, dtype, shape, values, layers, calls, results, blocks, steps)


def _number(rng: random.Random, shape: tuple[int, ...]) -> Any:
    """Return a number, or a list of three."""
    one = lambda: round(rng.uniform(0.2, 1.2) * rng.choice([-1, 1, 1]), 2)
    return [one() for _ in range(3)] if shape else one()


def _recent(rng: random.Random, pool: list[str]) -> str:
    """Return a name, most often one of the last three."""
    return rng.choice(pool[-3:] if rng.random() < 0.6 else pool)


def _block(rng: random.Random, differentiable: bool) -> Block:
    return Block(rng.choice(HOOK_NAMES), rng.choice(["with", "decorator"]), differentiable)


def _around(rng: random.Random, n_arguments: int, linear: bool) -> tuple[str, Any]:
    """Return a transform around one layer of the program, and its parameter."""
    if rng.random() < 0.7:
        return "", None
    name = rng.choice(["jit", "vmap", "remat"] if linear else ["jit"])
    return name, _parameter(rng, name, n_arguments)


def _parameter(rng: random.Random, transform: str, n_arguments: int) -> Any:
    """Return the axes of a vmap, or the policy of a checkpoint."""
    if transform == "remat":
        return rng.choice(["", *POLICIES])
    return _axes(rng, n_arguments) if transform == "vmap" else None


def _axes(rng: random.Random, n_arguments: int) -> tuple[tuple[int | None, ...], int]:
    """Return `in_axes` and `out_axes` of a vmap. Batched arrays are square: see `_scales` in `reference.py`."""
    in_axes = [rng.choice([0, 0, -1, None]) for _ in range(n_arguments)]
    if all(axis is None for axis in in_axes):
        in_axes[rng.randrange(n_arguments)] = 0
    return tuple(in_axes), rng.choice([0, 0, -1])


def _steps(rng: random.Random, order: int, calls: list[Call], n_inputs: int, traits: Traits) -> list[tuple[str, Any]]:
    """Return `order` derivatives and some transforms around the program."""
    steps: list[tuple[str, Any]] = []
    forward = traits.linear and traits.forward_mode  # whether the next derivative may be in forward mode
    for _ in range(order):
        kind = rng.choice(FORWARD if forward and rng.random() < 0.4 else REVERSE)
        positions = tuple(sorted(rng.sample(range(n_inputs), rng.randint(1, n_inputs))))
        forward = forward or (traits.linear and kind in REVERSE and _reaches_all(calls, positions, n_inputs))
        steps.append((kind, positions))
    transforms = [name for name in TRANSFORMS if traits.linear or name not in FOR_LINEAR_RULES]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 2])):
        name = rng.choice(transforms)
        steps.insert(rng.randint(0, len(steps)), (name, _parameter(rng, name, n_inputs)))
    # Half of the cases are one program: operation by operation they take several times as long.
    return [*steps, ("jit", None)] if rng.random() < 0.5 else steps


def _reaches_all(calls: list[Call], positions: tuple[int, ...], n_inputs: int) -> bool:
    """Return whether each call that depends on any input also depends on the inputs at `positions`.

    Then reverse mode at these positions differentiates all layers, and forward mode may follow.
    """

    def dependent_calls(inputs: Iterable[int]) -> set[int]:
        names = {f"x{i}" for i in inputs}
        found = set()
        for n, call in enumerate(calls):
            if not names.isdisjoint(call.arguments):
                names.update(call.results)
                found.add(n)
        return found

    return dependent_calls(positions) == dependent_calls(range(n_inputs))


def _layer(rng: random.Random, name: str, traits: Traits) -> Layer:
    shape, forward_mode, linear = traits
    dialect = rng.choice(["PyLayer", "PyLayer", "Function", "setup_context"])
    inputs = list("abc"[: rng.choice([1, 1, 2, 2, 3])])
    arguments = _arguments(rng, inputs)
    inputs = names_in(arguments)
    statics = [f"k{i}" for i, t in enumerate(arguments) if isinstance(t, Static) and isinstance(t.value, int | float)]
    narrow = rng.random() < 0.2
    shapes = {x: rng.choice([shape, (), (1,) if shape else ()]) if narrow else shape for x in inputs}
    # A reshape of a scalar makes a new array, so that it is no identity.
    identities = [name for name in IDENTITIES if name != "reshape" or () not in shapes.values()]
    body = _statements(rng, "u", rng.choice([1, 2, 2, 3, 4]), inputs, identities, statics, list(CONSTANTS))
    pool = [*inputs, *(s.name for s in body)]
    outputs = [_output(rng, inputs, body) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    if rng.random() < 0.15:
        outputs.append(rng.choice(outputs))
    returned = _returned(rng, outputs)
    outputs = names_in(returned)
    setup_statements: list[Statement] = []
    if dialect == "setup_context":
        setup_statements = [Statement(f"o{i}", "output", (o,)) for i, o in enumerate(outputs)]
        constants = [*CONSTANTS, *(s.name for s in setup_statements if s.same_as in CONSTANTS)]
        pool = [*inputs, *(2 * [s.name for s in setup_statements])]  # an output is drawn twice as often
        setup_statements += _statements(rng, "v", rng.choice([0, 0, 1, 2]), pool, identities, [], constants)
        pool += [s.name for s in setup_statements]
    computed = {s.name for s in [*body, *setup_statements] if s.operation != "output"}
    computed_pool = [name for name in pool if name in computed] or pool
    saved = []
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        names = (computed_pool if rng.random() < 0.5 else pool) if rng.random() < 0.95 else CONSTANTS
        saved.append((rng.choice(names), rng.choice(["save", "save", "attribute", "nested"])))
    if dialect == "PyLayer" and NUMPY_CONSTANT in outputs and rng.random() < 0.5:
        saved[0] = (NUMPY_CONSTANT, saved[0][1])
    layer = Layer(
        name=name,
        dialect=dialect,
        arguments=arguments,
        shapes=shapes,
        body=body,
        returned=returned,
        setup_statements=setup_statements,
        saved=saved,
        materialize_grads=rng.random() < 0.65,
        gradients=[_gradient(rng, linear, len(outputs), len(saved)) for _ in inputs],
        keeps_broadcast_shape=rng.random() < 0.5,
        checks_needs_input_grad=rng.random() < 0.15,
        forward_mode=forward_mode,
        saved_names=rng.random() < 0.3,
    )
    return without_unused_statements(_marked(rng, layer))


def _arguments(rng: random.Random, inputs: list[str]) -> list[Any]:
    """Return the trees of the arguments, which hold the inputs and some statics."""
    if len(inputs) > 1 and rng.random() < 0.2:
        together = rng.choice([lambda x, y: [x, y], lambda x, y: {"m": x, "n": [y]}, lambda x, y: (x, y)])
        trees: list[Any] = [together(*inputs[:2]), *inputs[2:]]
    else:
        trees = [rng.choice([{"m": x, "n": Static("text")}, [x]]) if rng.random() < 0.1 else x for x in inputs]
    if rng.random() < 0.2:
        trees.insert(rng.randint(0, len(trees)), Static(rng.choice([3, 0.5, "text", None])))
    if rng.random() < 0.1:
        trees.insert(rng.randint(0, len(trees)), Static(np.arange(2, dtype=np.int32)))
    return trees


def _statements(
    rng: random.Random,
    letter: str,
    n_statements: int,
    pool: list[str],
    identities: list[str],
    statics: list[str],
    constants: list[str],
) -> list[Statement]:
    """Return statements that compute `<letter>0`, `<letter>1`, ... from the names in the pool and from each other."""
    statements: list[Statement] = []
    pool = list(pool)
    for i in range(n_statements):
        operands = [rng.choice(pool) if rng.random() < 0.95 else rng.choice(CONSTANTS) for _ in range(2)]
        kind = rng.random()
        # For a closed-over array, which is no tracer, most identities return a new array: they are no identities then.
        if kind < 0.15 and operands[0] not in constants:
            statements.append(Statement(f"{letter}{i}", rng.choice(identities), (operands[0],)))
        elif kind < 0.25 and statics:
            statements.append(Statement(f"{letter}{i}", "times", (rng.choice(statics), operands[0])))
        else:
            operation = rng.choice(UNARY + BINARY)
            statements.append(Statement(f"{letter}{i}", operation, tuple(operands[: 2 if operation in BINARY else 1])))
        pool.append(statements[-1].name)
    return statements


def _output(rng: random.Random, inputs: list[str], body: list[Statement]) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(inputs)
    return rng.choice(body).name if kind < 0.92 else rng.choice(CONSTANTS)


def _returned(rng: random.Random, outputs: list[str]) -> Any:
    entries: list[Any] = list(outputs)
    if len(entries) > 1 and rng.random() < 0.15:
        entries = [{"m": entries[0], "n": [entries[1]]}, *entries[2:]]
    if rng.random() < 0.1:
        entries.insert(rng.randint(0, len(entries)), Static(rng.choice(["text", None, 3])))
    if len(entries) == 1 and rng.random() < 0.7:
        return entries[0]
    return tuple(entries) if rng.random() < 0.85 else entries


def _gradient(rng: random.Random, linear: bool, n_outputs: int, n_saved: int) -> list[Term] | None:
    if rng.random() < 0.05:
        return None
    terms = []
    for i in [i for i in range(n_outputs) if rng.random() < 0.85] or [rng.randrange(n_outputs)]:
        forms = LINEAR if linear or rng.random() < 0.5 else NOT_LINEAR
        coefficient = rng.choice(["one", *COEFFICIENTS])
        form = rng.choice(["times", *LINEAR] if forms is LINEAR else list(forms))
        terms.append(Term(i, form, coefficient, (rng.randrange(n_saved), rng.randrange(n_saved))))
    return terms


def _marked(rng: random.Random, layer: Layer) -> Layer:
    """Return the layer, perhaps with outputs marked as not differentiable and a returned input marked as dirty."""
    names = [s.name for s in layer.setup_statements if s.operation == "output"] or layer.outputs
    # `jnp.real` of a real tensor is the same tensor to a derivative, but within vmap or a hooks block another object.
    copied: set[str] = set()
    for statement in layer.body:
        if statement.operation == "real" or statement.same_as in copied:
            copied.add(statement.name)
    origins = {layer.origin(name) for name in layer.outputs if name not in copied}
    returned_inputs = [x for x in layer.inputs if x in origins]
    non_differentiable: list[str] = []
    if rng.random() < 0.25:
        for name in names:
            origin = layer.origin(name)
            # In setup_context, an output that is an input may be marked by the name of the output or of the input.
            if rng.random() < 0.5:
                by_input = origin in returned_inputs and rng.random() < 0.5
                non_differentiable.append(origin if by_input else name)
    dirty: list[str] = []
    if layer.dialect != "PyLayer" and returned_inputs and rng.random() < 0.2:
        dirty = [rng.choice(returned_inputs)]
    return dataclasses.replace(layer, non_differentiable=list(dict.fromkeys(non_differentiable)), dirty=dirty)

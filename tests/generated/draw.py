"""Draws a case from an integer.

A rule is not the gradient of its `forward`: it is any expression in the saved values and the cotangents, most often
linear in the cotangents.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np

from .cases import (
    COEFFICIENTS,
    CONSTANTS,
    LINEAR,
    NOT_LINEAR,
    NOTHING,
    REF,
    Block,
    Call,
    Case,
    Layer,
    Statement,
    Static,
    Term,
    names_in,
    without_what_is_not_used,
)

UNARY = ["sin", "cos", "tanh", "square", "scale", "plus zero", "negate", "name"]
BINARY = ["times", "plus", "minus", "sin times"]
POLICIES = ["everything", "nothing", "some operations", "other operations", "names", "offload"]
KINDS = ["positional", "default", "rest", "keyword", "more"]  # in the order of a signature
REVERSE = ["grad", "grad", "grad", "vjp", "jacrev"]
FORWARD = ["jvp", "jacfwd", "linearize"]
TRANSFORMS = ["jit", "jit", "vmap", "vmap", "vmap", "scan", "remat", "cond"]
# JAX applies a layer once more for its derivative in a remat, and once for all rows that share its operands, and so
# gives its rule a sum of cotangents or parts of one: a rule that is not linear means something else there, as in any
# custom_vjp.
OF_LINEAR_RULES = {"vmap", "remat"}
PAIRS = ["same", "same", "boxed", "negated"]


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    shape = rng.choice([(3,)] * 4 + [()])
    forward_mode = rng.random() < 0.4
    linear = forward_mode or rng.random() < 0.7
    writes = "" if forward_mode or rng.random() < 0.9 else rng.choice(["forward", "backward"])
    many = rng.choice([1, 1, 1, 2, 2, 3])
    layers = [_layer(rng, f"l{i}", shape, linear, forward_mode, writes) for i in range(rng.choice([1, min(many, 2)]))]
    count = rng.choice([1, 2, 2, 3])
    calls, pool = [], [f"x{i}" for i in range(count)]
    for i in range(many):
        layer = layers[i] if i < len(layers) else rng.choice(layers)
        arguments = [_recent(rng, pool) if rng.random() < 0.95 else "C0" for _ in layer.inputs]
        results = [f"y{len(pool) + n}" for n in range(len(layer.outputs))]
        calls.append(Call(results, layer.name, arguments, around=_around(rng, len(arguments), linear and not writes)))
        pool += results
        if rng.random() < 0.4:
            calls.append(Call([f"y{len(pool)}"], None, [_recent(rng, pool), rng.choice(pool)], rng.choice(BINARY)))
            pool.append(f"y{len(pool)}")
    results = [y for y in pool[count:] if rng.random() < 0.6] or pool[-1:]
    order = rng.randint(0, 1) if writes else rng.choices([0, 1, 2, 3], [1, 2, 12, 1])[0]
    differentiable = rng.random() < 0.5
    where = rng.choice(["", "", "", "inside", "outside", "both"])
    blocks = {place: _block(rng, differentiable) for place in ("inside", "outside") if where in (place, "both")}
    steps = _steps(rng, order, calls, linear, forward_mode, count, writes)
    dtype = rng.choice(["float64"] * 4 + ["float32"])
    values = {name: _number(rng, shape) for name in [*CONSTANTS, *(f"x{i}" for i in range(count))]}
    return Case(seed, dtype, shape, values, layers, calls, results, blocks, steps)


def _number(rng: random.Random, shape: tuple[int, ...]) -> Any:
    one = lambda: round(rng.uniform(0.2, 1.2) * rng.choice([-1, 1, 1]), 2)  # noqa: E731
    return [one() for _ in range(3)] if shape else one()


def _recent(rng: random.Random, pool: list[str]) -> str:
    return rng.choice(pool[-3:] if rng.random() < 0.6 else pool)


def _block(rng: random.Random, differentiable: bool) -> Block:
    return Block(rng.choice(PAIRS), rng.choice(["with", "decorator"]), differentiable)


def _around(rng: random.Random, count: int, linear: bool) -> tuple[str, Any]:
    """A transform around one layer of the program."""
    if rng.random() < 0.7:
        return "", None
    name = rng.choice(["jit", "vmap", "remat"] if linear else ["jit"])
    return name, _parameter(rng, name, count)


def _parameter(rng: random.Random, transform: str, count: int) -> Any:
    """The axes of a vmap, or the policy of a checkpoint."""
    if transform == "remat":
        return rng.choice(["", *POLICIES])
    return _axes(rng, count) if transform == "vmap" else None


def _axes(rng: random.Random, count: int) -> tuple[Any, ...]:
    """Which argument is mapped, along which axis, and along which axis the results are. The sizes of all are equal."""
    axes = [rng.choice([0, 0, -1, None]) for _ in range(count)]
    if all(axis is None for axis in axes):
        axes[rng.randrange(count)] = 0
    return tuple(axes), rng.choice([0, 0, -1])


def _steps(
    rng: random.Random, order: int, calls: list[Call], linear: bool, forward_mode: bool, count: int, writes: str
) -> list[tuple[str, Any]]:
    steps: list[tuple[str, Any]] = []
    forward = linear and forward_mode
    reverse = ["grad", "vjp"] if writes else REVERSE
    for _ in range(order):
        kind = rng.choice(FORWARD if forward and rng.random() < 0.4 else reverse)
        positions = tuple(sorted(rng.sample(range(count), rng.randint(1, count))))
        forward = forward or (linear and kind in REVERSE and _reaches_all(calls, positions, count))
        steps.append((kind, positions))
    transforms = [name for name in TRANSFORMS if linear or name not in OF_LINEAR_RULES]
    if writes:
        transforms = ["jit", "scan"]  # jax 0.10 cannot differentiate a cond that writes to a Ref
    for _ in range(rng.choice([0, 0, 1, 1, 2, 2])):
        name = rng.choice(transforms)
        steps.insert(rng.randint(0, len(steps)), (name, _parameter(rng, name, count)))
    # Half of the cases are one program: operation by operation they take several times as long. JAX compiles a jitted
    # function that closes over a Ref only within another one.
    return [*steps, ("jit", None)] if writes or rng.random() < 0.5 else steps


def _reaches_all(calls: list[Call], positions: tuple[int, ...], count: int) -> bool:
    """Whether each layer that has a derivative at all is differentiated in reverse mode, and so has forward over it."""

    def reached(inputs: Iterable[int]) -> set[int]:
        names = {f"x{i}" for i in inputs}
        numbers = set()
        for n, call in enumerate(calls):
            if not names.isdisjoint(call.arguments):
                names.update(call.results)
                numbers.add(n)
        return numbers

    return reached(positions) == reached(range(count))


def _layer(
    rng: random.Random, name: str, shape: tuple[int, ...], linear: bool, forward_mode: bool, writes: str
) -> Layer:
    dialect = rng.choice(["PyLayer", "PyLayer", "Function", "setup_context"])
    inputs = list("abc"[: rng.choice([1, 1, 2, 2, 3])])
    arguments = _arguments(rng, inputs)
    kinds = KINDS[:2] if dialect == "setup_context" else KINDS
    how = sorted((rng.choice(kinds if rng.random() < 0.3 else KINDS[:1]) for _ in arguments), key=KINDS.index)
    if writes:
        arguments.insert(0, REF)
        how.insert(0, "positional")
    inputs = [leaf for tree in arguments for leaf in names_in(tree) if leaf != REF]
    statics = [f"k{i}" for i, t in enumerate(arguments) if isinstance(t, Static) and isinstance(t.value, int | float)]
    narrow = rng.random() < 0.2
    shapes = {x: rng.choice([shape, (), (1,) if shape else ()]) if narrow else shape for x in inputs}
    nothing = [name for name in NOTHING if name != "reshape" or () not in shapes.values()]  # which makes a new scalar
    body = _statements(rng, "u", rng.choice([1, 2, 2, 3, 4]), inputs, nothing, statics, list(CONSTANTS))
    pool = [*inputs, *(s.name for s in body)]
    outputs = [_output(rng, inputs, body) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    if rng.random() < 0.15:
        outputs.append(rng.choice(outputs))
    returned = _returned(rng, outputs)
    outputs = names_in(returned)
    later: list[Statement] = []
    if dialect == "setup_context":
        later = [Statement(f"o{i}", "output", (o,)) for i, o in enumerate(outputs)]
        pool = [*inputs, *(s.name for s in later), *(s.name for s in later)]
        constants = [*CONSTANTS, *(s.name for s in later if s.same_as in CONSTANTS)]
        later += _statements(rng, "v", rng.choice([0, 0, 1, 2]), pool, nothing, [], constants)
        pool += [s.name for s in later]
    made = [name for name in pool if name[0] in "uv"] or pool
    saved = []
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        one = rng.choice(made if rng.random() < 0.5 else pool) if rng.random() < 0.95 else rng.choice(CONSTANTS)
        saved.append((one, rng.choice(["save", "save", "attribute", "nested"])))
    if dialect == "PyLayer" and "N0" in outputs and rng.random() < 0.5:
        saved[0] = ("N0", saved[0][1])
    layer = Layer(
        name=name,
        dialect=dialect,
        arguments=arguments,
        kinds=how,
        by_name=rng.random() < 0.2,
        shapes=shapes,
        body=body,
        returned=returned,
        later=later,
        saved=saved,
        materialize=rng.random() < 0.65,
        gradients=[_gradient(rng, linear, len(outputs), len(saved)) for _ in inputs],
        per_slot=dialect == "PyLayer" and rng.random() < 0.5,
        wide=rng.random() < 0.5,
        left_out=rng.random() < 0.3,
        surplus=rng.choice([0, 0, 1, 2]),
        asks=rng.random() < 0.15,
        forward_mode=forward_mode,
        has_names=rng.random() < 0.3,
        writes=writes,
    )
    _mark(rng, layer)
    without_what_is_not_used(layer)
    return layer


def _arguments(rng: random.Random, inputs: list[str]) -> list[Any]:
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
    number: int,
    pool: list[str],
    nothing: list[str],
    statics: list[str],
    constants: list[str],
) -> list[Statement]:
    made: list[Statement] = []
    pool = list(pool)
    for i in range(number):
        operands = [rng.choice(pool) if rng.random() < 0.95 else rng.choice(CONSTANTS) for _ in range(2)]
        kind = rng.random()
        # Of a closed-over array most of these make a new one, since it is no tracer.
        if kind < 0.15 and operands[0] not in constants:
            made.append(Statement(f"{letter}{i}", rng.choice(nothing), (operands[0],)))
        elif kind < 0.25 and statics:
            made.append(Statement(f"{letter}{i}", "times", (rng.choice(statics), operands[0])))
        else:
            operation = rng.choice(UNARY + BINARY)
            made.append(Statement(f"{letter}{i}", operation, tuple(operands[: 2 if operation in BINARY else 1])))
        pool.append(made[-1].name)
    return made


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


def _gradient(rng: random.Random, linear: bool, outputs: int, saved: int) -> list[Term] | None:
    if rng.random() < 0.05:
        return None
    terms = []
    for i in [i for i in range(outputs) if rng.random() < 0.85] or [rng.randrange(outputs)]:
        forms = LINEAR if linear or rng.random() < 0.5 else NOT_LINEAR
        coefficient = rng.choice(["one", *COEFFICIENTS])
        form = rng.choice(["times", *LINEAR] if forms is LINEAR else list(forms))
        terms.append(Term(i, form, coefficient, (rng.randrange(saved), rng.randrange(saved))))
    return terms


def _mark(rng: random.Random, layer: Layer) -> None:
    names = [s.name for s in layer.later if s.name[0] == "o"] or layer.outputs
    # `jnp.real` of a real tensor is the same tensor to a derivative, but within vmap or a hooks block another object.
    copied: set[str] = set()
    copied.update(s.name for s in layer.body if s.operation == "real" or s.same_as in copied)
    kept = [x for x in layer.outputs if x not in copied]
    returned = [x for x in layer.inputs if x in map(layer.origin, kept)]
    if rng.random() < 0.25:
        for name in names:
            origin = layer.origin(name)
            # In setup_context an output that is an input may be named either way.
            if rng.random() < 0.5:
                layer.marked.append(origin if origin in returned and rng.random() < 0.5 else name)
        layer.marked = list(dict.fromkeys(layer.marked))
    if layer.dialect != "PyLayer" and returned and rng.random() < 0.2:
        layer.dirty = [rng.choice(returned)]

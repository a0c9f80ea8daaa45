"""Draws a case from an integer.

A rule is not the gradient of its `forward`: it is any expression in the saved values and the cotangents, most often
linear in the cotangents.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from tests.kit.generated.text import Call, Case, Layer, Statement, Static, Term, leaves, without_what_is_not_used

Steps = list[tuple[str, Any]]

UNARY = ["jnp.sin({})", "jnp.cos({})", "jnp.tanh({})", "{0} * {0}", "0.7 * {}", "{} + 0", "-{}"]
BINARY = ["{} * {}", "{} + {}", "{} - {}", "jnp.sin({}) * {}"]
# Operations that do nothing: JAX hands back their operand, as the same object, always or where it traces.
NOTHING = ["{0}.astype({0}.dtype)", "jnp.broadcast_to({0}, {0}.shape)", "jnp.real({0})", "jnp.asarray({0})"]
NOTHING_TO_A_VECTOR = ["{0}.reshape({0}.shape)"]
STATICS = [3, 0.5]
LINEAR = ["{c} * {d}", "{c} * {d}", "0.6 * {d}", "-{c} * {d}"]
LINEAR_IN_A_VECTOR = ["jnp.flip({c} * {d})", "{c} * jnp.cumsum({d})"]
# Nearly linear for large cotangents, so that rounding does not grow.
NOT_LINEAR = ["{c} * {d} * jnp.tanh({d})", "jnp.tanh({c} * {d})", "{c} * jnp.tanh({d})"]
COEFFICIENTS = ["{0}", "{0}", "1.3 * {0}", "jnp.cos({0})", "{0} * {1}", "({0} + {1})", "(1.0 + {0} * {0})"]
REVERSE = ["grad", "grad", "grad", "vjp", "jacrev"]
FORWARD = ["jvp", "jacfwd", "linearize"]
TRANSFORMS = ["jit", "jit", "vmap", "vmap", "vmap_first", "vmap_last", "scan", "remat", "cond"]
# JAX applies a layer once for several rows, or once more for its derivative, and so gives its rule a sum of cotangents
# or parts of one: a rule that is not linear means something else there, as in any custom_vjp.
OTHER_COTANGENTS = {"vmap_first", "vmap_last", "remat"}


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    shape = rng.choice([(3,)] * 4 + [()])
    forward_mode = rng.random() < 0.4
    linear = forward_mode or rng.random() < 0.7
    many = rng.choice([1, 1, 1, 2, 2, 3])
    layers = [_layer(rng, f"l{i}", shape, linear, forward_mode) for i in range(rng.choice([1, min(many, 2)]))]
    count = rng.choice([1, 2, 2, 3])
    calls, pool = [], [f"x{i}" for i in range(count)]
    for i in range(many):
        layer = layers[i] if i < len(layers) else rng.choice(layers)
        arguments = [_recent(rng, pool) if rng.random() < 0.95 else "C0" for _ in layer.inputs]
        results = [f"y{len(pool) + n}" for n in range(len(layer.outputs))]
        calls.append(Call(results, layer.name, arguments))
        pool += results
        if rng.random() < 0.4:
            text = rng.choice(UNARY + BINARY)
            calls.append(Call([f"y{len(pool)}"], None, [_recent(rng, pool), rng.choice(pool)], text))
            pool.append(f"y{len(pool)}")
    results = [y for y in pool[count:] if rng.random() < 0.6] or pool[-1:]
    order = rng.choices([0, 1, 2, 3], [1, 2, 12, 1])[0]
    hooks = rng.choice(["", "", "", "inside", "outside"])
    steps = _steps(rng, order, calls, linear, forward_mode, count)
    dtype = rng.choice(["float64"] * 4 + ["float32"])
    return Case(seed, dtype, shape, count, layers, calls, results, hooks, rng.random() < 0.5, steps)


def _recent(rng: random.Random, pool: list[str]) -> str:
    return rng.choice(pool[-3:] if rng.random() < 0.6 else pool)


def _steps(rng: random.Random, order: int, calls: list[Call], linear: bool, forward_mode: bool, count: int) -> Steps:
    steps: Steps = []
    forward = linear and forward_mode
    for _ in range(order):
        kind = rng.choice(FORWARD if forward and rng.random() < 0.4 else REVERSE)
        positions = tuple(sorted(rng.sample(range(count), rng.randint(1, count))))
        forward = forward or (linear and kind in REVERSE and _reaches_all(calls, positions, count))
        steps.append((kind, positions))
    transforms = [name for name in TRANSFORMS if linear or name not in OTHER_COTANGENTS]
    for _ in range(rng.choice([0, 0, 1, 1, 2, 2])):
        steps.insert(rng.randint(0, len(steps)), (rng.choice(transforms), None))
    # Half of the cases are one program: operation by operation they take several times as long.
    return [*steps, ("jit", None)] if rng.random() < 0.5 else steps


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


def _layer(rng: random.Random, name: str, shape: tuple[int, ...], linear: bool, forward_mode: bool) -> Layer:
    dialect = rng.choice(["PyLayer", "PyLayer", "Function", "setup_context"])
    inputs = list("abc"[: rng.choice([1, 1, 2, 2, 3])])
    arguments = _arguments(rng, inputs)
    statics = [f"k{i}" for i, tree in enumerate(arguments) if isinstance(tree, Static)]
    nothing = NOTHING + (NOTHING_TO_A_VECTOR if shape else [])
    body = _statements(rng, "u", rng.choice([1, 2, 2, 3, 4]), inputs, nothing, statics, ["C0"])
    pool = [*inputs, *(s.name for s in body)]
    outputs = [_output(rng, inputs, body) for _ in range(rng.choice([1, 1, 2, 2, 3]))]
    if rng.random() < 0.15:
        outputs.append(rng.choice(outputs))
    returned = _returned(rng, outputs)
    outputs = [leaf for leaf, _ in leaves(returned, "")]
    later: list[Statement] = []
    if dialect == "setup_context":
        later = [Statement(f"o{i}", at, o) for i, (o, at) in enumerate(leaves(returned, "output"))]
        pool = [*inputs, *(s.name for s in later), *(s.name for s in later)]
        constants = ["C0", *(s.name for s in later if s.same_as in ("C0", "C1"))]
        later += _statements(rng, "v", rng.choice([0, 0, 1, 2]), pool, nothing, [], constants)
        pool += [s.name for s in later]
    made = [name for name in pool if name[0] in "uv"] or pool
    saved = []
    for _ in range(rng.choice([1, 1, 2, 2, 3])):
        one = rng.choice(made if rng.random() < 0.5 else pool) if rng.random() < 0.97 else "C0"
        saved.append((one, rng.choice(["save", "save", "attribute", "nested"])))
    layer = Layer(
        name=name,
        dialect=dialect,
        arguments=arguments,
        body=body,
        returned=returned,
        later=later,
        saved=saved,
        marked=[],
        dirty=[],
        materialize=rng.random() < 0.65,
        gradients=[_gradient(rng, shape, linear, len(outputs), len(saved)) for _ in inputs],
        per_slot=dialect == "PyLayer" and rng.random() < 0.5,
        asks=rng.random() < 0.15,
        forward_mode=forward_mode,
    )
    _mark(rng, layer)
    without_what_is_not_used(layer)
    return layer


def _arguments(rng: random.Random, inputs: list[str]) -> list[Any]:
    if len(inputs) > 1 and rng.random() < 0.2:
        together = rng.choice([lambda x, y: [x, y], lambda x, y: {"m": x, "n": [y]}, lambda x, y: (x, y)])
        trees: list[Any] = [together(*inputs[:2]), *inputs[2:]]
    else:
        trees = [rng.choice([{"m": x}, [x]]) if rng.random() < 0.1 else x for x in inputs]
    if rng.random() < 0.2:
        trees.insert(rng.randint(0, len(trees)), Static(rng.choice(STATICS)))
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
        operands = [rng.choice(pool) if rng.random() < 0.95 else "C0" for _ in range(2)]
        kind = rng.random()
        # Of a closed-over array most of these make a new one, since it is no tracer.
        if kind < 0.15 and operands[0] not in constants:
            made.append(Statement(f"{letter}{i}", rng.choice(nothing).format(*operands), operands[0]))
        elif kind < 0.25 and statics:
            made.append(Statement(f"{letter}{i}", f"{rng.choice(statics)} * {operands[0]}"))
        else:
            made.append(Statement(f"{letter}{i}", rng.choice(UNARY + BINARY).format(*operands)))
        pool.append(made[-1].name)
    return made


def _output(rng: random.Random, inputs: list[str], body: list[Statement]) -> str:
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(inputs)
    return rng.choice(body).name if kind < 0.94 else rng.choice(["C0", "C1"])


def _returned(rng: random.Random, outputs: list[str]) -> Any:
    entries: list[Any] = list(outputs)
    if len(entries) > 1 and rng.random() < 0.15:
        entries = [{"m": entries[0], "n": [entries[1]]}, *entries[2:]]
    if rng.random() < 0.1:
        entries.insert(rng.randint(0, len(entries)), Static(rng.choice(["text", None, 3])))
    if len(entries) == 1 and rng.random() < 0.7:
        return entries[0]
    return tuple(entries) if rng.random() < 0.85 else entries


def _gradient(rng: random.Random, shape: tuple[int, ...], linear: bool, outputs: int, saved: int) -> list[Term] | None:
    if rng.random() < 0.05:
        return None
    chosen = [i for i in range(outputs) if rng.random() < 0.85] or [rng.randrange(outputs)]
    terms = []
    for i in chosen:
        coefficient = rng.choice(COEFFICIENTS).format(f"s{rng.randrange(saved)}", f"s{rng.randrange(saved)}")
        forms = LINEAR + (LINEAR_IN_A_VECTOR if shape else [])
        if not linear and rng.random() < 0.5:
            forms = NOT_LINEAR
        terms.append(Term(i, rng.choice(forms).format(c=coefficient, d="{d}")))
    return terms


def _mark(rng: random.Random, layer: Layer) -> None:
    names = [s.name for s in layer.later if s.name[0] == "o"] or layer.outputs
    # `jnp.real` of a real tensor is the same tensor to a derivative, but within vmap or a hooks block another object.
    copied: set[str] = set()
    copied.update(s.name for s in layer.body if "jnp.real" in s.text or s.same_as in copied)
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

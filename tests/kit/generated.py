"""Layers, programs of layers and stacks of transforms, drawn from an integer, as the text that a user would write.

A case is `draw(seed)`. `case.text()` is a module: the classes, functions from tensors to tensors that apply them, and a
`program` that calls those functions. `generated_reference.py` says what a case has to compute.

A rule is not the gradient of its `forward`: it is any expression in the saved values and the cotangents.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

UNARY = ["jnp.sin({})", "jnp.cos({})", "jnp.tanh({})", "{0} * {0}", "0.7 * {}", "{} + 0", "-{}"]
BINARY = ["{} * {}", "{} + {}", "{} - {}", "jnp.sin({}) * {}"]
# Operations that do nothing: JAX hands back their operand, as the same object, always or where it traces.
NOTHING = ["{0}.astype({0}.dtype)", "jnp.broadcast_to({0}, {0}.shape)", "jnp.real({0})", "jnp.asarray({0})"]
NOTHING_TO_A_VECTOR = ["{0}.reshape({0}.shape)"]
STATICS = [3, 0.5]
LINEAR = ["{c} * {d}", "{c} * {d}", "0.6 * {d}", "-{c} * {d}"]
LINEAR_IN_A_VECTOR = ["jnp.flip({c} * {d})", "{c} * jnp.cumsum({d})"]
NOT_LINEAR = ["{c} * {d} * {d}", "jnp.sin({c} * {d})", "{c} * jnp.tanh({d})"]
COEFFICIENTS = ["{0}", "{0}", "1.3 * {0}", "jnp.cos({0})", "{0} * {1}", "({0} + {1})", "(1.0 + {0} * {0})"]
REVERSE = ["grad", "grad", "grad", "vjp", "jacrev"]
FORWARD = ["jvp", "jacfwd", "linearize"]
TRANSFORMS = ["jit", "jit", "vmap", "vmap", "vmap_first", "vmap_last", "scan", "remat", "cond"]

PRELUDE = '''
def add(*terms):
    """The sum of the terms that are there."""
    terms = [term for term in terms if term is not None]
    return sum(terms[1:], terms[0]) if terms else None


def same(value):
    return value
'''


@dataclasses.dataclass(frozen=True)
class Static:
    value: Any


@dataclasses.dataclass
class Statement:
    """`name = text`; an operation that does nothing has the name of its operand in `same_as`."""

    name: str
    text: str
    same_as: str | None = None


@dataclasses.dataclass
class Term:
    """A part of a gradient: `text` has `{d}` for the cotangent of that output, and s0, s1, ... for saved values."""

    output: int
    text: str


@dataclasses.dataclass
class Layer:
    """Tensors have the names a, b, c as inputs, u0, u1, ... in `forward`, o0, ... and v0, ... in `setup_context`."""

    name: str
    dialect: str
    arguments: list[Any]  # trees of names and statics
    body: list[Statement]
    returned: Any  # a tree of names and statics
    later: list[Statement]  # in setup_context
    saved: list[tuple[str, str]]  # name, how
    marked: list[str]
    dirty: list[str]
    materialize: bool
    gradients: list[list[Term] | None]  # per input
    per_slot: bool
    asks: bool  # computes a gradient only where ctx.needs_input_grad
    forward_mode: bool

    @property
    def inputs(self) -> list[str]:
        return [leaf for leaf, _ in leaves(self.arguments, "")]

    @property
    def outputs(self) -> list[str]:
        return [leaf for leaf, _ in leaves(self.returned, "")]

    @property
    def statics(self) -> dict[str, Any]:
        return {f"k{i}": tree.value for i, tree in enumerate(self.arguments) if isinstance(tree, Static)}

    def origin(self, name: str) -> str:
        """The name under which the object was made."""
        same_as = {s.name: s.same_as for s in [*self.body, *self.later] if s.same_as}
        while name in same_as:
            name = same_as[name]
        return name

    # -- text

    def text(self) -> str:
        base = "PyLayer" if self.dialect == "PyLayer" else "Function"
        lines = [f"class {self.name.upper()}({base}):"]
        if self.forward_mode:
            lines += ["    forward_mode = True", ""]
        if self.dialect == "setup_context":
            lines += method("forward", self._parameters(), [*self._arguments(), *map(_line, self.body), self._return()])
            given = [f"{leaf} = {at}" for leaf, at in leaves(self.arguments, "inputs")]
            lines += method("setup_context", ["ctx", "inputs", "output"], [*given, *map(_line, self.later), *self._ctx()])
        else:
            inner = [*self._arguments(), *map(_line, self.body), *self._ctx(), self._return()]
            lines += method("forward", ["ctx", *self._parameters()], inner)
        lines += method("backward", ["ctx", *self._cotangents()], self._backward())
        return "\n".join([*lines, *self._function()])

    def _parameters(self) -> list[str]:
        return [self._parameter(i) for i in range(len(self.arguments))]

    def _parameter(self, i: int) -> str:
        tree = self.arguments[i]
        return tree if isinstance(tree, str) else f"{'k' if isinstance(tree, Static) else 'p'}{i}"

    def _arguments(self) -> list[str]:
        """Gives its name to each tensor within an argument."""
        nested = [(i, tree) for i, tree in enumerate(self.arguments) if not isinstance(tree, str | Static)]
        return [f"{leaf} = {at}" for i, tree in nested for leaf, at in leaves(tree, f"p{i}")]

    def _ctx(self) -> list[str]:
        of = {how: [name for name, h in self.saved if h == how] for how in ("save", "attribute", "nested")}
        lines = [f"ctx.save_for_backward({', '.join(of['save'])})"] if of["save"] else []
        lines += [f"ctx.kept{i} = {name}" for i, name in enumerate(of["attribute"])]
        lines += [f"ctx.kept = {{'deep': [{', '.join(of['nested'])}]}}"] if of["nested"] else []
        lines += [f"ctx.mark_non_differentiable({', '.join(self.marked)})"] if self.marked else []
        lines += [f"ctx.mark_dirty({', '.join(self.dirty)})"] if self.dirty else []
        return lines if self.materialize else [*lines, "ctx.set_materialize_grads(False)"]

    def _return(self) -> str:
        return f"return {text_of(self.returned)}"

    def _top(self) -> list[Any]:
        """The entries of what `forward` returns that have a cotangent."""
        entries = list(self.returned) if isinstance(self.returned, list | tuple) else [self.returned]
        return entries if self.dialect != "PyLayer" else [e for e in entries if list(leaves(e, ""))]

    def _cotangents(self) -> list[str]:
        numbers = iter(range(len(self.outputs)))
        return [f"d{next(numbers)}" if isinstance(e, str) else self._nested(i, e, numbers) for i, e in enumerate(self._top())]

    @staticmethod
    def _nested(i: int, entry: Any, numbers: Iterator[int]) -> str:
        for _ in leaves(entry, ""):
            next(numbers)
        return f"g{i}"

    def _backward(self) -> list[str]:
        numbers = iter(range(len(self.outputs)))
        lines = []
        for i, entry in enumerate(self._top()):
            for _, at in leaves(entry, f"g{i}"):
                n = next(numbers)
                if not isinstance(entry, str):
                    lines.append(f"d{n} = {at}" if self.materialize else f"d{n} = None if g{i} is None else {at}")
        saved = {i: how for i, (_, how) in enumerate(self.saved)}
        names = [f"s{i}" for i, how in saved.items() if how == "save"]
        lines += [f"{', '.join(names)}, = ctx.saved_tensor{'()' if self.dialect == 'PyLayer' else 's'}"] if names else []
        lines += [f"s{i} = ctx.kept{n}" for n, i in enumerate(i for i, how in saved.items() if how == "attribute")]
        lines += [f"s{i} = ctx.kept['deep'][{n}]" for n, i in enumerate(i for i, how in saved.items() if how == "nested")]
        lines += [f"g{x} = {self._gradient(terms)}{self._asks(x)}" for x, terms in zip(self.inputs, self.gradients, strict=True)]
        trees = [t for t in self.arguments if not isinstance(t, Static)] if self.per_slot else self.arguments
        entries = ["None" if isinstance(t, Static) else text_of(t, lambda x: f"g{x}") for t in trees]
        return [*lines, f"return {', '.join(entries)},"]

    def _asks(self, x: str) -> str:
        numbers = [i for i, tree in enumerate(self.arguments) if x in dict(leaves(tree, ""))]
        return f" if ctx.needs_input_grad[{numbers[0]}] else None" if self.asks else ""

    def _gradient(self, terms: list[Term] | None) -> str:
        if terms is None:
            return "None"
        texts = [term.text.format(d=f"d{term.output}") for term in terms]
        if self.materialize:
            return " + ".join(texts)
        return f"add({', '.join(f'None if d{t.output} is None else {text}' for t, text in zip(terms, texts, strict=True))})"

    def _function(self) -> list[str]:
        """The layer as a function from tensors to the tuple of the tensors that it returns."""
        found = "".join(f"{at}, " for _, at in leaves(self.returned, "out"))
        return [
            f"def {self.name}({', '.join(self.inputs)}):",
            f"    out = {self.name.upper()}.apply({', '.join(map(text_of, self.arguments))})",
            f"    return ({found})",
        ]


@dataclasses.dataclass
class Call:
    """`results = layer(*arguments)` of a program; an operation of plain JAX has its text in place of a layer."""

    results: list[str]
    layer: str | None
    arguments: list[str]
    text: str = ""

    def line(self) -> str:
        if self.layer is None:
            return f"{self.results[0]} = {self.text.format(*self.arguments)}"
        return f"{', '.join(self.results)}, = {self.layer}({', '.join(self.arguments)})"


@dataclasses.dataclass
class Case:
    seed: int
    dtype: str
    shape: tuple[int, ...]
    count: int  # of inputs of the program
    layers: list[Layer]
    calls: list[Call]
    results: list[str]
    hooks: str  # "", "inside" the program, or "outside" all
    hooks_differentiable: bool
    steps: list[tuple[str, Any]]  # transforms, and derivatives with the positions that they differentiate
    given: dict[str, Any] = dataclasses.field(default_factory=dict)  # numbers, where they are not drawn

    @property
    def inputs(self) -> list[str]:
        return [f"x{i}" for i in range(self.count)]

    def values(self) -> dict[str, Any]:
        """Numbers for the constants and the inputs."""
        if self.given:
            return self.given
        rng = random.Random(self.seed)
        size = 3 if self.shape else 1
        drawn = {name: [round(rng.uniform(0.2, 1.2) * rng.choice([-1, 1, 1]), 2) for _ in range(size)] for name in ["C0", "C1", "x0", "x1", "x2"]}
        return {name: v if self.shape else v[0] for name, v in drawn.items() if name[0] == "C" or name in self.inputs}

    def program(self) -> str:
        lines = [call.line() for call in self.calls]
        if self.hooks == "inside":
            block = f"with saved_tensors_hooks(same, same{self._flag()}):"
            lines = [block, *(f"    {line}" for line in lines)]
        lines.append(f"return {', '.join(self.results)},")
        return "\n".join([f"def program({', '.join(self.inputs)}):", *(f"    {line}" for line in lines)])

    def _flag(self) -> str:
        return ", differentiable=True" if self.hooks_differentiable else ""

    def text(self) -> str:
        constants = [f"{name} = jnp.array({v}, '{self.dtype}')" for name, v in self.values().items() if name[0] == "C"]
        used = " ".join([*(layer.text() for layer in self.layers), self.program()])
        constants = [line for line in constants if re.search(rf"\b{line[:2]}\b", used)]
        prelude = [PRELUDE] if "add(" in used or "same" in used else []
        return "\n\n".join(["\n".join(constants), *prelude, *(layer.text() for layer in self.layers), self.program()])

    def asked(self) -> str:
        """What is computed, in a line."""
        text = "program"
        for name, how in self.steps:
            text = f"{name}({text}{', ' + repr(how) if how is not None else ''})"
        values = {name: v for name, v in self.values().items() if name[0] == "x"}
        around = f"with saved_tensors_hooks(same, same{self._flag()}): " if self.hooks == "outside" else ""
        return f"{around}{text} at {values} in {self.dtype}"


# -- trees and text -----------------------------------------------------------------------------------


def leaves(tree: Any, at: str) -> Iterator[tuple[str, str]]:
    """Each name in a tree, and how it is reached from `at`."""
    if isinstance(tree, list | tuple):
        for i, v in enumerate(tree):
            yield from leaves(v, f"{at}[{i}]")
    elif isinstance(tree, dict):
        for k, v in tree.items():
            yield from leaves(v, f"{at}[{k!r}]")
    elif isinstance(tree, str):
        yield tree, at


def text_of(tree: Any, name: Callable[[str], str] = lambda x: x) -> str:
    if isinstance(tree, list):
        return f"[{', '.join(text_of(v, name) for v in tree)}]"
    if isinstance(tree, tuple):
        return f"({', '.join(text_of(v, name) for v in tree)},)"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{k!r}: {text_of(v, name)}" for k, v in tree.items()) + "}"
    return repr(tree.value) if isinstance(tree, Static) else name(tree)


def names_in(text: str) -> set[str]:
    return set(re.findall(r"\b[a-z]\d*\b|\bC\d\b", text))


def method(name: str, parameters: list[str], lines: list[str]) -> list[str]:
    inner = [f"        {line}" for line in lines]
    return ["    @staticmethod", f"    def {name}({', '.join(parameters)}):", *inner, ""]


def _line(statement: Statement) -> str:
    return f"{statement.name} = {statement.text}"


# -- drawing ------------------------------------------------------------------------------------------


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
    steps = _steps(rng, order, count, linear, forward_mode)
    dtype = rng.choice(["float64"] * 4 + ["float32"])
    return Case(seed, dtype, shape, count, layers, calls, results, hooks, rng.random() < 0.5, steps)


def _recent(rng: random.Random, pool: list[str]) -> str:
    return rng.choice(pool[-3:] if rng.random() < 0.6 else pool)


def _steps(rng: random.Random, order: int, count: int, linear: bool, forward_mode: bool) -> list[tuple[str, Any]]:
    steps: list[tuple[str, Any]] = []
    forward = linear and forward_mode
    for _ in range(order):
        kind = rng.choice(FORWARD if forward and rng.random() < 0.4 else REVERSE)
        forward = forward or (linear and kind in REVERSE)
        steps.append((kind, tuple(sorted(rng.sample(range(count), rng.randint(1, count))))))
    for _ in range(rng.choice([0, 0, 1, 1, 2, 2])):
        steps.insert(rng.randint(0, len(steps)), (rng.choice(TRANSFORMS), None))
    # Half of the cases are one program: operation by operation they take several times as long.
    return [*steps, ("jit", None)] if rng.random() < 0.5 else steps


def _layer(rng: random.Random, name: str, shape: tuple[int, ...], linear: bool, forward_mode: bool) -> Layer:
    dialect = rng.choice(["PyLayer", "PyLayer", "Function", "setup_context"])
    inputs = list("abc"[: rng.choice([1, 1, 2, 2, 3])])
    arguments = _arguments(rng, inputs)
    statics = [f"k{i}" for i, tree in enumerate(arguments) if isinstance(tree, Static)]
    nothing = NOTHING + (NOTHING_TO_A_VECTOR if shape else [])
    body = _statements(rng, "u", rng.choice([1, 2, 2, 3, 4]), inputs, nothing, statics)
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
        later += _statements(rng, "v", rng.choice([0, 0, 1, 2]), pool, nothing, [])
        pool += [s.name for s in later]
    made = [name for name in pool if name[0] in "uv"] or pool
    saved = [
        (rng.choice(made if rng.random() < 0.5 else pool) if rng.random() < 0.97 else "C0", rng.choice(["save", "save", "attribute", "nested"]))
        for _ in range(rng.choice([1, 1, 2, 2, 3]))
    ]
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
    rng: random.Random, letter: str, number: int, pool: list[str], nothing: list[str], statics: list[str]
) -> list[Statement]:
    made: list[Statement] = []
    pool = list(pool)
    for i in range(number):
        operands = [rng.choice(pool) if rng.random() < 0.95 else "C0" for _ in range(2)]
        kind = rng.random()
        if kind < 0.15:
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
    if rng.random() < 0.25:
        chosen = [name for name in names if rng.random() < 0.5]
        # In setup_context an output that is an input may be named either way.
        layer.marked = [o if (o := layer.origin(name)) in layer.inputs and rng.random() < 0.5 else name for name in chosen]
        layer.marked = list(dict.fromkeys(layer.marked))
    returned = [x for x in layer.inputs if x in map(layer.origin, layer.outputs)]
    if layer.dialect != "PyLayer" and returned and rng.random() < 0.2:
        layer.dirty = [rng.choice(returned)]


def without_what_is_not_used(layer: Layer) -> None:
    used = {*layer.outputs, *(name for name, _ in layer.saved), *layer.marked}
    for statements in (layer.later, layer.body):
        for statement in reversed(list(statements)):
            if statement.name in used:
                used |= names_in(statement.text) | {statement.same_as or ""}
            else:
                statements.remove(statement)

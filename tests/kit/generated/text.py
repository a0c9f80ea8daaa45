"""Generated layers and programs of layers, as data, and as the text that a user would write.

`case.text()` is a module: the classes, functions from tensors to tensors that apply them, and a `program` that calls
those functions.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

WAYS_TO_SAVE = ("save", "attribute", "nested")
PRELUDE = '''
def add(*terms):
    """The sum of the terms that are there."""
    terms = [term for term in terms if term is not None]
    return sum(terms[1:], terms[0]) if terms else None
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
            given += [*map(_line, self.later), *self._ctx()]
            lines += method("setup_context", ["ctx", "inputs", "output"], given)
        else:
            inner = [*self._arguments(), *map(_line, self.body), *self._ctx(), self._return()]
            lines += method("forward", ["ctx", *self._parameters()], inner)
        lines += method("backward", ["ctx", *(name for name, _ in self._top())], self._backward())
        return "\n".join([*lines, *self._function()])

    def _parameters(self) -> list[str]:
        return [tree if isinstance(tree, str) else f"{_letter(tree)}{i}" for i, tree in enumerate(self.arguments)]

    def _arguments(self) -> list[str]:
        """Gives its name to each tensor within an argument."""
        nested = [(i, tree) for i, tree in enumerate(self.arguments) if _letter(tree) == "p"]
        return [f"{leaf} = {at}" for i, tree in nested for leaf, at in leaves(tree, f"p{i}")]

    def _ctx(self) -> list[str]:
        of = {how: [name for name, h in self.saved if h == how] for how in WAYS_TO_SAVE}
        lines = [f"ctx.save_for_backward({', '.join(of['save'])})"] if of["save"] else []
        lines += [f"ctx.kept{i} = {name}" for i, name in enumerate(of["attribute"])]
        lines += [f"ctx.kept = {{'deep': [{', '.join(of['nested'])}]}}"] if of["nested"] else []
        lines += [f"ctx.mark_non_differentiable({', '.join(self.marked)})"] if self.marked else []
        lines += [f"ctx.mark_dirty({', '.join(self.dirty)})"] if self.dirty else []
        return lines if self.materialize else [*lines, "ctx.set_materialize_grads(False)"]

    def _return(self) -> str:
        return f"return {text_of(self.returned)}"

    def _top(self) -> list[tuple[str, Any]]:
        """The parameters of `backward`, each with the tree of the outputs whose cotangents it holds."""
        entries = list(self.returned) if isinstance(self.returned, list | tuple) else [self.returned]
        if self.dialect == "PyLayer":
            entries = [entry for entry in entries if not isinstance(entry, Static)]
        n, top = 0, []
        for i, entry in enumerate(entries):
            top.append((f"d{n}" if isinstance(entry, str) else f"g{i}", entry))
            n += len(list(leaves(entry, "")))
        return top

    def _backward(self) -> list[str]:
        lines = []
        places = [(name, at) for name, entry in self._top() for _, at in leaves(entry, name)]
        for n, (name, at) in enumerate(places):
            if name != f"d{n}":
                lines.append(f"d{n} = {at}" if self.materialize else f"d{n} = None if {name} is None else {at}")
        of = {how: [f"s{i}" for i, (_, h) in enumerate(self.saved) if h == how] for how in WAYS_TO_SAVE}
        call = "saved_tensor()" if self.dialect == "PyLayer" else "saved_tensors"
        lines += [f"{', '.join(of['save'])}, = ctx.{call}"] if of["save"] else []
        lines += [f"{name} = ctx.kept{i}" for i, name in enumerate(of["attribute"])]
        lines += [f"{', '.join(of['nested'])}, = ctx.kept['deep']"] if of["nested"] else []
        for x, terms in zip(self.inputs, self.gradients, strict=True):
            lines.append(f"g{x} = {self._gradient(terms)}{self._asks(x)}")
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
        given = [f"None if d{t.output} is None else {text}" for t, text in zip(terms, texts, strict=True)]
        return f"add({', '.join(given)})"

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
            return {name: v for name, v in self.given.items() if name[0] == "C" or name in self.inputs}
        rng = random.Random(self.seed)

        def number() -> float:
            return round(rng.uniform(0.2, 1.2) * rng.choice([-1, 1, 1]), 2)

        names = ["C0", "C1", *self.inputs]
        return {name: [number() for _ in range(3)] if self.shape else number() for name in names}

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
        prelude = [PRELUDE.strip()] if "add(" in used else []
        return "\n\n".join([*constants, *prelude, *(layer.text() for layer in self.layers), self.program()])

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


def _letter(tree: Any) -> str:
    return "" if isinstance(tree, str) else "k" if isinstance(tree, Static) else "p"


def _line(statement: Statement) -> str:
    return f"{statement.name} = {statement.text}"


def without_what_is_not_used(layer: Layer) -> None:
    used = {*layer.outputs, *(name for name, _ in layer.saved), *layer.marked}
    for statements in (layer.later, layer.body):
        for statement in reversed(list(statements)):
            if statement.name in used:
                used |= names_in(statement.text) | {statement.same_as or ""}
            else:
                statements.remove(statement)

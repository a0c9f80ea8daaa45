"""Makes a generated case smaller while it fails in the same way, so that somebody can read it."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from tests.kit.generated.reference import DERIVATIVES
from tests.kit.generated.text import Case, Layer, Statement, Static, without_what_is_not_used


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    at, since = 0, 0  # the place among the changes, and how many failed since one was kept
    while True:
        changed = list(simpler(case))
        if since >= len(changed):
            return case
        smaller = changed[at % len(changed)]
        if fails(smaller):
            case, since = smaller, 0
        else:
            at, since = at % len(changed) + 1, since + 1


def simpler(case: Case) -> Iterator[Case]:
    yield from _changed(case, _steps(case))
    yield from _changed(case, _settings(case))
    yield from _changed(case, _program(case))
    for i, layer in enumerate(case.layers):
        yield from _changed(case, _layer(layer, i))
    if case.steps and case.steps[-1][0] == "jit":  # last, since one program takes less time
        yield from _changed(case, iter([lambda c: c.steps.pop()]))


def _changed(case: Case, changes: Iterator[Callable[[Case], Any]]) -> Iterator[Case]:
    for change in changes:
        smaller = copy.deepcopy(case)
        change(smaller)
        for layer in smaller.layers:
            without_what_is_not_used(layer)
        if _size(smaller) < _size(case):
            yield smaller


def _size(case: Case) -> tuple[int, str]:
    text = case.text() + case.asked()
    return len(text), text


def _steps(case: Case) -> Iterator[Callable[[Case], Any]]:
    for i, (name, how) in enumerate(case.steps):
        if (i, name) != (len(case.steps) - 1, "jit"):
            yield lambda c, i=i: c.steps.pop(i)
        if name in DERIVATIVES:
            for p in how if len(how) > 1 else ():
                yield lambda c, i=i, name=name, p=p: c.steps.__setitem__(i, (name, (p,)))
            if name == "jacrev":
                yield lambda c, i=i, how=how: c.steps.__setitem__(i, ("grad", how))
            if name in ("jacfwd", "linearize"):
                yield lambda c, i=i, how=how: c.steps.__setitem__(i, ("jvp", how))
        elif name in ("vmap_first", "vmap_last"):
            yield lambda c, i=i: c.steps.__setitem__(i, ("vmap", None))


def _settings(case: Case) -> Iterator[Callable[[Case], Any]]:
    yield lambda c: setattr(c, "hooks", "")
    yield lambda c: setattr(c, "hooks_differentiable", False)
    yield lambda c: setattr(c, "shape", ()) if not re.search("flip|cumsum|reshape", c.text()) else None
    if case.hooks == "inside":
        yield lambda c: setattr(c, "hooks", "outside")


def _program(case: Case) -> Iterator[Callable[[Case], Any]]:
    for i in range(len(case.results) if len(case.results) > 1 else 0):
        yield lambda c, i=i: c.results.pop(i)
    for i, call in enumerate(case.calls):
        for other in (*call.arguments, "x0"):
            yield lambda c, i=i, other=other: _drop_call(c, i, other)
    for i, call in enumerate(case.calls):
        for j, name in enumerate(call.arguments):
            if name != "x0":
                yield lambda c, i=i, j=j: c.calls[i].arguments.__setitem__(j, "x0")
    for i, layer in enumerate(case.layers):
        if all(call.layer != layer.name for call in case.calls):
            yield lambda c, i=i: c.layers.pop(i)
    used = {name for call in case.calls for name in call.arguments} | set(case.results)
    differentiated = [p for name, how in case.steps if name in DERIVATIVES for p in how]
    if case.count > 1 and f"x{case.count - 1}" not in used and case.count - 1 not in differentiated:
        yield lambda c: setattr(c, "count", c.count - 1)


def _drop_call(case: Case, i: int, other: str) -> None:
    gone = set(case.calls.pop(i).results)
    for call in case.calls:
        call.arguments = [other if name in gone else name for name in call.arguments]
    case.results = list(dict.fromkeys(other if name in gone else name for name in case.results))


def _layer(layer: Layer, n: int) -> Iterator[Callable[[Case], Any]]:
    def on(change: Callable[[Layer], Any]) -> Callable[[Case], Any]:
        return lambda case: change(case.layers[n])

    def set_to(**fields: Any) -> Callable[[Case], Any]:
        return on(lambda one: [setattr(one, name, value) for name, value in fields.items()])

    yield set_to(materialize=True)
    yield set_to(dirty=[])
    yield lambda case: [setattr(one, "forward_mode", False) for one in case.layers]
    yield set_to(per_slot=False)
    yield set_to(asks=False)
    for i in range(len(layer.marked)):
        yield on(lambda one, i=i: one.marked.pop(i))
    if layer.dialect != "PyLayer":
        yield on(_as_pylayer)
    for i in range(len(layer.outputs) if len(layer.outputs) > 1 else 0):
        yield lambda case, i=i: _drop_output(case, n, i)
    for i in range(len(layer.inputs) if len(layer.inputs) > 1 else 0):
        for other in layer.inputs:
            yield lambda case, i=i, other=other: _drop_input(case, n, i, other)
    if any(not isinstance(tree, str) for tree in layer.arguments):
        yield on(_no_statics) if layer.statics else set_to(arguments=layer.inputs)
    flat = tuple(layer.outputs)
    yield set_to(returned=flat)
    if len(flat) == 1:
        yield on(lambda one: _returned_alone(one))
    for i in range(len(layer.saved)):
        yield on(lambda one, i=i: _drop_saved(one, i))
        if layer.saved[i][1] != "save":
            yield on(lambda one, i=i: one.saved.__setitem__(i, (one.saved[i][0], "save")))
        for x in layer.inputs:
            if layer.saved[i][0] != x:
                yield on(lambda one, i=i, x=x: one.saved.__setitem__(i, (x, one.saved[i][1])))
    for i, terms in enumerate(layer.gradients):
        if terms is not None:
            yield on(lambda one, i=i: one.gradients.__setitem__(i, None))
        for j in range(len(terms or []) if len(terms or []) > 1 else 0):
            yield on(lambda one, i=i, j=j: one.gradients[i].pop(j))
        for j, term in enumerate(terms or []):
            for s in sorted(set(re.findall(r"s\d", term.text))):
                text = f"{s} * {{d}}"
                if text != term.text:
                    yield on(lambda one, i=i, j=j, text=text: setattr(one.gradients[i][j], "text", text))
    for statements in ("body", "later"):
        for i, statement in enumerate(getattr(layer, statements)):
            if statement.name[0] == "o":
                continue
            operands = sorted(set(re.findall(r"\b[abcuvo]\d*\b", statement.text)))
            for operand in operands:
                yield on(lambda one, of=statements, i=i, operand=operand: _drop_statement(one, of, i, operand))
                text = f"jnp.sin({operand})"
                if not statement.same_as and len(statement.text) > len(text):
                    change = Statement(statement.name, text)
                    yield on(lambda one, of=statements, i=i, new=change: getattr(one, of).__setitem__(i, new))


def _as_pylayer(layer: Layer) -> None:
    layer.dialect, layer.dirty = "PyLayer", []
    layer.body, layer.later = layer.body + layer.later, []
    for statement in layer.body:
        if statement.name[0] == "o":
            statement.text = statement.same_as
    for statement in [s for s in layer.body if s.name[0] == "o"]:
        _drop_statement(layer, "body", layer.body.index(statement), statement.same_as)


def _renamed(layer: Layer, old: str, new: str) -> None:
    def again(text: str) -> str:
        return re.sub(rf"\b{old}\b", new, text)

    def tree(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)([tree(v) for v in value])
        if isinstance(value, dict):
            return {k: tree(v) for k, v in value.items()}
        return again(value) if isinstance(value, str) else value

    for statement in [*layer.body, *layer.later]:
        if statement.name[0] != "o":
            statement.text = again(statement.text)
        statement.same_as = statement.same_as and again(statement.same_as)
    layer.returned = tree(layer.returned)
    layer.saved = [(again(name), how) for name, how in layer.saved]
    layer.marked = list(dict.fromkeys(map(again, layer.marked)))


def _drop_statement(layer: Layer, statements: str, i: int, operand: str) -> None:
    _renamed(layer, getattr(layer, statements).pop(i).name, operand)


def _no_statics(layer: Layer) -> None:
    for name, value in layer.statics.items():
        _renamed(layer, name, repr(value))
    layer.arguments = [tree for tree in layer.arguments if not isinstance(tree, Static)]
    for statement in layer.later:
        statement.text = re.sub(r"inputs.*", "", statement.text)


def _returned_alone(layer: Layer) -> None:
    layer.returned = layer.outputs[0]
    for statement in layer.later:
        if statement.name == "o0":
            statement.text = "output"


def _drop_output(case: Case, n: int, i: int) -> None:
    layer = case.layers[n]
    layer.returned = tuple(name for j, name in enumerate(layer.outputs) if j != i)
    gone = set()
    for call in case.calls:
        if call.layer == layer.name:
            gone.add(call.results.pop(i))
            other = call.results[0]
            for later in case.calls:
                later.arguments = [other if name in gone else name for name in later.arguments]
            case.results = list(dict.fromkeys(other if name in gone else name for name in case.results))
    for k, terms in enumerate(layer.gradients):
        kept = [dataclasses.replace(t, output=t.output - (t.output > i)) for t in terms or [] if t.output != i]
        layer.gradients[k] = kept or None
    if layer.dialect == "setup_context":
        name = f"o{i}"
        _renamed(layer, name, "o0" if i else "o1")
        layer.later = [s for s in layer.later if s.name != name]
        for j in range(i + 1, len(layer.outputs) + 1):
            _renamed(layer, f"o{j}", f"o{j - 1}")
            for s in layer.later:
                if s.name == f"o{j}":
                    s.name = f"o{j - 1}"
        for s in layer.later:
            if s.name[0] == "o":
                s.text = f"output[{s.name[1:]}]"


def _drop_input(case: Case, n: int, i: int, other: str) -> None:
    layer = case.layers[n]
    name = layer.inputs[i]
    if name == other or layer.statics:
        return
    layer.arguments = [x for x in layer.inputs if x != name]
    layer.dirty = [x for x in layer.dirty if x != name]
    layer.gradients.pop(i)
    _renamed(layer, name, other)
    for call in case.calls:
        if call.layer == layer.name:
            call.arguments.pop(i)


def _drop_saved(layer: Layer, i: int) -> None:
    layer.saved.pop(i)
    for terms in layer.gradients:
        for term in terms or []:
            if re.search(rf"\bs{i}\b", term.text):
                term.text = "2.0 * {d}"
            term.text = re.sub(r"\bs(\d)\b", lambda m: f"s{int(m[1]) - (int(m[1]) > i)}", term.text)

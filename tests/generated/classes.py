"""Generated layers as classes of the package, and the functions from tensors to tensors that apply them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .cases import REF, Layer, Static, filled, is_slot, pairs

WAYS_TO_SAVE = ("save", "attribute", "nested")


def function_of(layer: Layer, package: Any, constants: dict[str, Any], ref: Any) -> Callable[..., Any]:
    """The layer as a function from its tensors to the tuple of the tensors that it returns."""
    apply = class_of(layer, package, constants).apply

    def run(*xs: Any) -> tuple[Any, ...]:
        values = filled(layer.arguments, dict(zip(layer.inputs, xs, strict=True)) | {REF: ref})
        by_kind = list(zip(layer.kinds, range(len(values)), values, strict=True))
        positional = [(f"p{i}", value) for kind, i, value in by_kind if kind in ("positional", "default", "rest")]
        named = {f"p{i}": value for kind, i, value in by_kind if kind in ("keyword", "more")}
        if layer.by_name and "rest" not in layer.kinds:
            positional, named = [], dict(reversed(positional)) | named
        outputs = apply(*(value for _, value in positional), **named)
        return tuple(value for _, value in pairs(layer.returned, outputs))

    return run


def class_of(layer: Layer, package: Any, constants: dict[str, Any]) -> Any:
    signature = _signature(layer)

    def scope_of(values: list[Any]) -> dict[str, Any]:
        return {**constants, **layer.statics, **dict(pairs(layer.arguments, values))}

    def compute(values: list[Any]) -> tuple[dict[str, Any], Any]:
        """The values of all names, and what `forward` returns."""
        scope = scope_of(values)
        if layer.writes == "forward":
            scope[REF][...] += 1.0
        for statement in layer.body:
            scope[statement.name] = statement.value(scope)
        return scope, filled(layer.returned, scope)

    def forward(ctx: Any, *args: Any, **named: Any) -> Any:
        scope, returned = compute(_values(layer, signature.bind(*args, **named)))
        _keep(layer, ctx, scope)
        return returned

    def forward_alone(*args: Any, **named: Any) -> Any:
        return compute(_values(layer, signature.bind(*args, **named)))[1]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        scope, returned = scope_of(list(inputs)), [value for _, value in pairs(layer.returned, output)]
        for statement in layer.later:
            if statement.operation == "output":
                scope[statement.name] = returned[int(statement.name[1:])]
            else:
                scope[statement.name] = statement.value(scope)
        _keep(layer, ctx, scope)

    def backward(ctx: Any, *given: Any) -> Any:
        return _backward(layer, ctx, given)

    parameters = list(signature.parameters.values())
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[context, *parameters])
    forward_alone.__signature__ = signature
    methods = {"forward": forward, "backward": backward}
    if layer.dialect == "setup_context":
        methods = {"forward": forward_alone, "setup_context": setup_context, "backward": backward}
    base = package.PyLayer if layer.dialect == "PyLayer" else package.Function
    flags = {"forward_mode": True} if layer.forward_mode else {}
    flags |= {"saved_names": True} if layer.has_names else {}
    return type(layer.name.upper(), (base,), {name: staticmethod(m) for name, m in methods.items()} | flags)


def _signature(layer: Layer) -> inspect.Signature:
    kinds = inspect.Parameter
    by_kind = {"positional": kinds.POSITIONAL_OR_KEYWORD, "default": kinds.POSITIONAL_OR_KEYWORD}
    by_kind["keyword"] = kinds.KEYWORD_ONLY
    named = [
        kinds(f"p{i}", by_kind[kind], default=None if kind == "default" else kinds.empty)
        for i, kind in enumerate(layer.kinds)
        if kind in by_kind
    ]
    if "rest" in layer.kinds:
        named.append(kinds("rest", kinds.VAR_POSITIONAL))
    if "more" in layer.kinds:
        named.append(kinds("more", kinds.VAR_KEYWORD))
    return inspect.Signature(sorted(named, key=lambda parameter: parameter.kind))


def _values(layer: Layer, bound: inspect.BoundArguments) -> list[Any]:
    given, rest = bound.arguments, iter(bound.arguments.get("rest", ()))
    found = given | given.get("more", {})
    return [next(rest) if kind == "rest" else found[f"p{i}"] for i, kind in enumerate(layer.kinds)]


def _keep(layer: Layer, ctx: Any, scope: dict[str, Any]) -> None:
    of = {how: [scope[name] for name, h in layer.saved if h == how] for how in WAYS_TO_SAVE}
    if of["save"]:
        ctx.save_for_backward(*of["save"])
    for i, value in enumerate(of["attribute"]):
        setattr(ctx, f"kept{i}", value)
    if of["nested"]:
        ctx.kept = {"deep": of["nested"]}
    if layer.marked:
        ctx.mark_non_differentiable(*(scope[name] for name in layer.marked))
    if layer.dirty:
        ctx.mark_dirty(*(scope[name] for name in layer.dirty))
    if not layer.materialize:
        ctx.set_materialize_grads(False)
    if layer.writes == "backward":
        ctx.ref = scope[REF]


def _saved(layer: Layer, ctx: Any) -> list[Any]:
    found = {
        "save": iter(ctx.saved_tensors),
        "attribute": (getattr(ctx, f"kept{i}") for i in itertools.count()),
        "nested": iter(getattr(ctx, "kept", {"deep": []})["deep"]),
    }
    return [next(found[how]) for _, how in layer.saved]


def _backward(layer: Layer, ctx: Any, given: tuple[Any, ...]) -> Any:
    entries = list(layer.returned) if isinstance(layer.returned, list | tuple) else [layer.returned]
    if layer.dialect == "PyLayer":
        entries = [entry for entry in entries if not isinstance(entry, Static)]
    assert len(given) == len(entries)
    cotangents = [cotangent for _, cotangent in pairs(entries, given)]
    if layer.writes == "backward":
        ctx.ref[...] += sum((jnp.sum(d) for d in cotangents if d is not None), jnp.zeros((), ctx.ref.dtype))
    saved, needed = _saved(layer, ctx), ctx.needs_input_grad
    place = {name: i for i, tree in enumerate(layer.arguments) for name, _ in pairs(tree, None)}

    def gradient(name: str, terms: list[Any] | None) -> Any:
        found = [t.value(saved, cotangents[t.output]) for t in terms or [] if cotangents[t.output] is not None]
        if not found or (layer.asks and not needed[place[name]]):
            return None
        if layer.wide and len(found) == 1:
            return layer.fitted(found[0], name, wide=True)
        found = [layer.fitted(term, name, wide=False) for term in found]
        return sum(found[1:], found[0])

    scope = {name: gradient(name, terms) for name, terms in zip(layer.inputs, layer.gradients, strict=True)}
    kept = [i for i, tree in enumerate(layer.arguments) if not layer.per_slot or is_slot(tree)]
    while layer.per_slot and layer.left_out and kept and not needed[kept[-1]]:
        kept.pop()
    none = {REF: None} | scope
    trees = [_without_statics(layer.arguments[i]) for i in kept]
    return (*(filled(tree, none) for tree in trees), *[None] * (layer.surplus if layer.dialect != "PyLayer" else 0))


def _without_statics(tree: Any) -> Any:
    if isinstance(tree, Static):
        return Static(None)
    if isinstance(tree, dict):
        return {key: _without_statics(part) for key, part in tree.items()}
    return type(tree)(map(_without_statics, tree)) if isinstance(tree, list | tuple) else tree

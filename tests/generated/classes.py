"""Makes a class of the package from a generated layer, and a function from tensors to tensors that applies it.

The layer of the example in `cases.py` becomes the class

    class L0(PyLayer):
        def forward(ctx, p0):
            u0 = jnp.sin(p0)
            ctx.save_for_backward(u0)
            return u0

        def backward(ctx, d):
            return 1.3 * ctx.saved_tensors[0] * d
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .cases import REF, Layer, Static, Term, filled, holds_tensor, names_and_values

WAYS_TO_SAVE = ("save", "attribute", "nested")


def function_of(layer: Layer, package: Any, constants: dict[str, Any], ref: Any) -> Callable[..., Any]:
    """Return a function that applies the layer to its tensors, and returns its output tensors as a tuple."""
    apply = class_of(layer, package, constants).apply

    def run(*xs: Any) -> tuple[Any, ...]:
        values = filled(layer.arguments, dict(zip(layer.inputs, xs, strict=True)) | {REF: ref})
        arguments = [(kind, f"p{i}", value) for i, (kind, value) in enumerate(zip(layer.kinds, values, strict=True))]
        positional = [(name, value) for kind, name, value in arguments if kind in ("positional", "default", "rest")]
        keywords = {name: value for kind, name, value in arguments if kind in ("keyword", "more")}
        if layer.passed_by_keyword and "rest" not in layer.kinds:
            positional, keywords = [], dict(reversed(positional)) | keywords
        outputs = apply(*(value for _, value in positional), **keywords)
        return tuple(value for _, value in names_and_values(layer.returned, outputs))

    return run


def class_of(layer: Layer, package: Any, constants: dict[str, Any]) -> Any:
    signature = _signature(layer)

    def scope_of(values: list[Any]) -> dict[str, Any]:
        """Return the value of each name before the first statement, from the values of the arguments."""
        return {**constants, **layer.statics, **dict(names_and_values(layer.arguments, values))}

    def compute(*args: Any, **keywords: Any) -> tuple[dict[str, Any], Any]:
        """Run the statements of `forward`. Return the value of each name, and the returned tree."""
        scope = scope_of(_values(layer, signature.bind(*args, **keywords)))
        if layer.ref_writer == "forward":
            scope[REF][...] += 1.0
        for statement in layer.body:
            scope[statement.name] = statement.value(scope)
        return scope, filled(layer.returned, scope)

    def forward(ctx: Any, *args: Any, **keywords: Any) -> Any:
        scope, returned = compute(*args, **keywords)
        _write_context(layer, ctx, scope)
        return returned

    def forward_without_context(*args: Any, **keywords: Any) -> Any:
        return compute(*args, **keywords)[1]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        scope = scope_of(list(inputs))
        outputs = {f"o{i}": value for i, (_, value) in enumerate(names_and_values(layer.returned, output))}
        for statement in layer.setup_statements:
            is_output = statement.operation == "output"
            scope[statement.name] = outputs[statement.name] if is_output else statement.value(scope)
        _write_context(layer, ctx, scope)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _backward(layer, ctx, cotangents)

    parameters = list(signature.parameters.values())
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = signature.replace(parameters=[context, *parameters])
    forward_without_context.__signature__ = signature
    methods = {"forward": forward, "backward": backward}
    if layer.dialect == "setup_context":
        methods = {"forward": forward_without_context, "setup_context": setup_context, "backward": backward}
    base = package.PyLayer if layer.dialect == "PyLayer" else package.Function
    flags = {"forward_mode": True} if layer.forward_mode else {}
    flags |= {"saved_names": True} if layer.saved_names else {}
    return type(layer.name.upper(), (base,), {name: staticmethod(m) for name, m in methods.items()} | flags)


def _signature(layer: Layer) -> inspect.Signature:
    """Return the signature of `forward` without the context: argument i has the name p<i>, unless it is variadic."""
    Parameter = inspect.Parameter
    named_kinds = {
        "positional": Parameter.POSITIONAL_OR_KEYWORD,
        "default": Parameter.POSITIONAL_OR_KEYWORD,
        "keyword": Parameter.KEYWORD_ONLY,
    }
    parameters = [
        Parameter(f"p{i}", named_kinds[kind], default=None if kind == "default" else Parameter.empty)
        for i, kind in enumerate(layer.kinds)
        if kind in named_kinds
    ]
    if "rest" in layer.kinds:
        parameters.append(Parameter("rest", Parameter.VAR_POSITIONAL))
    if "more" in layer.kinds:
        parameters.append(Parameter("more", Parameter.VAR_KEYWORD))
    return inspect.Signature(sorted(parameters, key=lambda parameter: parameter.kind))


def _values(layer: Layer, bound: inspect.BoundArguments) -> list[Any]:
    """Return the values of the arguments, in the order of `layer.arguments`."""
    rest = iter(bound.arguments.get("rest", ()))
    by_name = bound.arguments | bound.arguments.get("more", {})
    return [next(rest) if kind == "rest" else by_name[f"p{i}"] for i, kind in enumerate(layer.kinds)]


def _write_context(layer: Layer, ctx: Any, scope: dict[str, Any]) -> None:
    """Save and mark in the context what the layer saves and marks."""
    values = {way: [scope[name] for name, w in layer.saved if w == way] for way in WAYS_TO_SAVE}
    if values["save"]:
        ctx.save_for_backward(*values["save"])
    for i, value in enumerate(values["attribute"]):
        setattr(ctx, f"kept{i}", value)
    if values["nested"]:
        ctx.kept = {"deep": values["nested"]}
    if layer.non_differentiable:
        ctx.mark_non_differentiable(*(scope[name] for name in layer.non_differentiable))
    if layer.dirty:
        ctx.mark_dirty(*(scope[name] for name in layer.dirty))
    if not layer.materialize_grads:
        ctx.set_materialize_grads(False)
    if layer.ref_writer == "backward":
        ctx.ref = scope[REF]


def _saved(layer: Layer, ctx: Any) -> list[Any]:
    """Return the saved values in the order of `layer.saved`. Within each way to save, it is the order of saving."""
    values = {
        "save": iter(ctx.saved_tensors),
        "attribute": (getattr(ctx, f"kept{i}") for i in itertools.count()),
        "nested": iter(getattr(ctx, "kept", {"deep": []})["deep"]),
    }
    return [next(values[way]) for _, way in layer.saved]


def _backward(layer: Layer, ctx: Any, given: tuple[Any, ...]) -> Any:
    cotangents = _cotangents(layer, given)
    if layer.ref_writer == "backward":
        ctx.ref[...] += sum((jnp.sum(d) for d in cotangents if d is not None), jnp.zeros((), ctx.ref.dtype))
    saved, needs_grad = _saved(layer, ctx), ctx.needs_input_grad
    argument_of = {name: i for i, tree in enumerate(layer.arguments) for name, _ in names_and_values(tree, None)}
    gradients: dict[str, Any] = {REF: None}
    for name in layer.inputs:
        is_needed = needs_grad[argument_of[name]] or not layer.checks_needs_input_grad
        gradients[name] = _gradient(layer, name, saved, cotangents) if is_needed else None
    entries = [filled(_without_statics(layer.arguments[i]), gradients) for i in _with_entry(layer, needs_grad)]
    return *entries, *[None] * (layer.n_extra_nones if layer.dialect != "PyLayer" else 0)


def _cotangents(layer: Layer, given: tuple[Any, ...]) -> list[Any]:
    """Return the cotangent of each output tensor, from those that `backward` gets: one for each returned tree."""
    trees = list(layer.returned) if isinstance(layer.returned, list | tuple) else [layer.returned]
    if layer.dialect == "PyLayer":
        trees = [tree for tree in trees if not isinstance(tree, Static)]
    assert len(given) == len(trees)
    return [cotangent for _, cotangent in names_and_values(trees, given)]


def _gradient(layer: Layer, name: str, saved: list[Any], cotangents: list[Any]) -> Any:
    """Return the gradient of an input: the sum of its terms, or None if no output of a term has a cotangent."""
    terms: list[Term] = layer.gradients[layer.inputs.index(name)] or []
    values = [t.value(saved, cotangents[t.output]) for t in terms if cotangents[t.output] is not None]
    if not values:
        return None
    if layer.keeps_broadcast_shape and len(values) == 1:
        return layer.fitted(values[0], name, keep_broadcast=True)
    values = [layer.fitted(value, name, keep_broadcast=False) for value in values]
    return sum(values[1:], values[0])


def _with_entry(layer: Layer, needs_grad: Any) -> list[int]:
    """Return the positions of the arguments for which `backward` returns an entry."""
    if not layer.entry_per_tensor_argument:
        return list(range(len(layer.arguments)))
    positions = [i for i, tree in enumerate(layer.arguments) if holds_tensor(tree)]
    while layer.omits_trailing and positions and not needs_grad[positions[-1]]:
        positions.pop()
    return positions


def _without_statics(tree: Any) -> Any:
    """Return a tree with None in place of each static."""
    if isinstance(tree, Static):
        return Static(None)
    if isinstance(tree, dict):
        return {key: _without_statics(part) for key, part in tree.items()}
    return type(tree)(map(_without_statics, tree)) if isinstance(tree, list | tuple) else tree

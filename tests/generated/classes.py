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

import itertools
from collections.abc import Callable
from typing import Any

from .cases import Layer, Static, Term, filled, names_and_values

WAYS_TO_SAVE = ("save", "attribute", "nested")


def function_of(layer: Layer, package: Any, constants: dict[str, Any]) -> Callable[..., Any]:
    """Return a function that applies the layer to its tensors, and returns its output tensors as a tuple."""
    apply = class_of(layer, package, constants).apply

    def run(*xs: Any) -> tuple[Any, ...]:
        outputs = apply(*filled(layer.arguments, dict(zip(layer.inputs, xs, strict=True))))
        return tuple(value for _, value in names_and_values(layer.returned, outputs))

    return run


def class_of(layer: Layer, package: Any, constants: dict[str, Any]) -> Any:
    def scope_of(values: list[Any]) -> dict[str, Any]:
        """Return the value of each name before the first statement, from the values of the arguments."""
        return {**constants, **layer.statics, **dict(names_and_values(layer.arguments, values))}

    def compute(*args: Any) -> tuple[dict[str, Any], Any]:
        """Run the statements of `forward`. Return the value of each name, and the returned tree."""
        scope = scope_of(list(args))
        for statement in layer.body:
            scope[statement.name] = statement.value(scope)
        return scope, filled(layer.returned, scope)

    def forward(ctx: Any, *args: Any) -> Any:
        scope, returned = compute(*args)
        _write_context(layer, ctx, scope)
        return returned

    def forward_without_context(*args: Any) -> Any:
        return compute(*args)[1]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        scope = scope_of(list(inputs))
        outputs = {f"o{i}": value for i, (_, value) in enumerate(names_and_values(layer.returned, output))}
        for statement in layer.setup_statements:
            is_output = statement.operation == "output"
            scope[statement.name] = outputs[statement.name] if is_output else statement.value(scope)
        _write_context(layer, ctx, scope)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        return _backward(layer, ctx, cotangents)

    methods = {"forward": forward, "backward": backward}
    if layer.dialect == "setup_context":
        methods = {"forward": forward_without_context, "setup_context": setup_context, "backward": backward}
    base = package.PyLayer if layer.dialect == "PyLayer" else package.Function
    flags = {"forward_mode": True} if layer.forward_mode else {}
    flags |= {"saved_names": True} if layer.saved_names else {}
    return type(layer.name.upper(), (base,), {name: staticmethod(m) for name, m in methods.items()} | flags)


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
    saved, needs_grad = _saved(layer, ctx), ctx.needs_input_grad
    argument_of = {name: i for i, tree in enumerate(layer.arguments) for name, _ in names_and_values(tree, None)}
    gradients: dict[str, Any] = {}
    for name in layer.inputs:
        is_needed = needs_grad[argument_of[name]] or not layer.checks_needs_input_grad
        gradients[name] = _gradient(layer, name, saved, cotangents) if is_needed else None
    return tuple(filled(_without_statics(tree), gradients) for tree in layer.arguments)


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


def _without_statics(tree: Any) -> Any:
    """Return a tree with None in place of each static."""
    if isinstance(tree, Static):
        return Static(None)
    if isinstance(tree, dict):
        return {key: _without_statics(part) for key, part in tree.items()}
    return type(tree)(map(_without_statics, tree)) if isinstance(tree, list | tuple) else tree

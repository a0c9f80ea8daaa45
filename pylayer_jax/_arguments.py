"""The arguments of one call of `forward`: by name, in parameter order, with tensors and statics separated."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._jax.types import as_arrays, has_tangent, is_array, is_ref, typeof
from ._messages import source_of
from ._trees import LEAF, Skeleton, first_change, is_tensor_or_ref, split

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


class Argument:
    """One argument of a call; a *slot* if it holds a tensor that is no Ref."""

    __slots__ = ("name", "skeleton", "span")

    def __init__(self, name: str, skeleton: Skeleton, first: int) -> None:
        self.name = name
        self.skeleton = skeleton
        self.span = slice(first, first + skeleton.size)  # of its tensors among all tensors of the call


class Arguments:
    """The arguments of one call in the order of `forward`'s parameters, without their tensors.

        arguments, tensors = Arguments.of("Linear", [("x", x), ("params", {"w": w, "b": b})], n_positional=2)
        arguments.names()   # ['x', 'params']
        len(tensors)        # 3

    An instance lives in a treedef, where an array would be a leak. A `jax.Ref` counts as a tensor.
    """

    __slots__ = ("arguments", "is_plain", "keywords", "layer", "n_positional", "ref_mask", "types")

    def __init__(
        self, layer: str, arguments: list[Argument], tensor_types: list[Any], n_positional: int, keywords: Sequence[str]
    ) -> None:
        self.layer = layer
        self.arguments = arguments
        self.types = tensor_types
        self.n_positional = n_positional  # arguments that the parameters of `forward` take by position
        self.keywords = keywords  # names of the arguments that the call gave by keyword, in the order of the call
        # True if each argument is one tensor, given by position, as in nearly every call.
        self.is_plain = not keywords and all([a.skeleton is LEAF for a in arguments])  # noqa: C419 - fewer calls
        self.ref_mask: list[bool] | None = None  # which tensors are Refs; None if none is

    @staticmethod
    def of(
        layer: str, values: Sequence[tuple[str, Any]], n_positional: int, keywords: Sequence[str] = ()
    ) -> tuple[Arguments, list[Any]]:
        """Return the arguments of a call and its tensors as JAX arrays."""
        arguments: list[Argument] = []
        tensors: list[Any] = []
        has_ref = False
        for name, value in values:
            if is_array(value):  # as most arguments are
                arguments.append(Argument(name, LEAF, len(tensors)))
                tensors.append(value)
                continue
            found, skeleton = split(value, is_tensor_or_ref)
            arguments.append(Argument(name, skeleton, len(tensors)))
            found = as_arrays(found)
            has_ref = has_ref or any(map(is_ref, found))
            tensors += found
        result = Arguments(layer, arguments, [typeof(x) for x in tensors], n_positional, keywords)
        if has_ref:
            result.ref_mask = [is_ref(x) for x in tensors]
        return result, tensors

    def names(self) -> list[str]:
        return [a.name for a in self.arguments]

    def ref_names(self) -> list[str]:
        """Return where each Ref was passed, as in `params['history']`."""
        paths = [a.name + path for a in self.arguments for path in a.skeleton.tensor_paths()]
        return [path for path, is_one in zip(paths, self.ref_mask or (), strict=False) if is_one]

    def slots(self) -> list[Argument]:
        """Return the arguments for which `backward` returns a gradient."""
        mask = self.ref_mask
        if mask is None:
            return [a for a in self.arguments if a.skeleton.size]
        return [a for a in self.arguments if not all(mask[a.span])]

    def call(self, method: str, function: Callable[..., Any], ctx: Any, tensors: Sequence[Any]) -> Any:
        """Call `function`, which runs the method named `method`, on the context and the arguments.

        Raises:
            ValueError: if the method changed a container among the arguments in place.
        """
        __tracebackhide__ = True
        if self.is_plain:
            return function(ctx, *tensors)
        values = [a.skeleton.fill(tensors[a.span]) for a in self.arguments]
        before = [
            (a.name, value, split(value))
            for a, value in zip(self.arguments, values, strict=True)
            if a.skeleton.is_container
        ]
        # A decorator of `forward` may treat keywords in its own way, so it gets them in the order of the call.
        names = self.keywords if method == "forward" else [a.name for a in self.arguments[self.n_positional :]]
        first = len(values) - len(names)
        named = {a.name: x for a, x in zip(self.arguments[first:], values[first:], strict=True)}
        result = function(ctx, *values[:first], **{name: named[name] for name in names})
        for name, value, parts in before:
            try:
                after = split(value)
            except Exception:  # an equinox.nn.State may not be read after a new State was made from it
                continue
            if (path := first_change(parts, after)) is not None:
                raise ValueError(
                    f"{self.layer}.{method} changed its argument {name}{path} in place, which JAX would lose: "
                    "methods get copies of containers. Return the new value as an output, and leave the argument "
                    "as it is: params = {**params, 'w': w}."
                )
        return result

    def per_argument(self, values: Sequence[Any]) -> list[Any]:
        """Return one entry per argument, in its structure, from one value per tensor; None for every static."""
        return [a.skeleton.without_statics(values[a.span]) if a.skeleton.size else None for a in self.arguments]

    def needs(self, mask: Sequence[bool]) -> tuple[bool, ...]:
        """Return one bool per argument, from one bool per tensor."""
        return tuple([any(mask[a.span]) for a in self.arguments])

    def can_get_gradient(self, mask: Sequence[bool]) -> list[bool]:
        """Return `mask`, but False for tensors that cannot have a gradient: integers, bools, PRNG keys, and Refs."""
        found = [m and has_tangent(t) for m, t in zip(mask, self.types, strict=True)]
        return found if self.ref_mask is None else [m and not r for m, r in zip(found, self.ref_mask, strict=True)]


def bind(
    layer: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Arguments, list[Any]]:
    """Bind a call to the signature of `forward(ctx, ...)`, or to the own signature of a decorator around it.

    Raises:
        TypeError: for an unknown keyword, or a missing or surplus argument.
    """
    declared = _declared(forward)
    if not kwargs and declared.required <= len(args) <= len(declared.names):
        return Arguments.of(layer, list(zip(declared.names, args, strict=False)), len(args))
    signature = declared.called
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        first = next(iter(signature.parameters), None)
        context = ""
        if first != "ctx":
            context = (
                f" The first parameter of {source_of('forward', forward)}, {first!r}, takes the context: "
                "forward(ctx, ...). Only a pylayer_jax.Function with setup_context(ctx, inputs, output) does without."
            )
        static = " Is @staticmethod missing?" if first == "self" else ""
        raise TypeError(
            f"{layer}.apply: {error}. It takes the arguments of forward without the context: "
            f"{layer}.apply{_without_context(declared.named)}.{context}{static}"
        ) from None
    if declared.named is not signature:
        with contextlib.suppress(TypeError):  # fails if a decorator adds an argument
            bound, signature = declared.named.bind(None, *args, **kwargs), declared.named
    positional: list[tuple[str, Any]] = []
    keywords: list[tuple[str, Any]] = []
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            # If the context has no parameter, as in forward(*args), it is the first of the values.
            values = value if _has_context(signature) else value[1:]
            positional += [(f"{name}[{i}]", x) for i, x in enumerate(values)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keywords += value.items()
        elif name in bound.kwargs:
            keywords.append((name, value))
        else:
            positional.append((name, value))
    if _has_context(signature):
        del positional[0]
    return Arguments.of(layer, positional + keywords, len(positional), list(kwargs))


def call_of_apply(layer: Any) -> str:
    """Return how the layer is called, as in `Tanh.apply(x)`."""
    try:
        signature = _without_context(_declared(layer._forward_with_ctx()).named)
    except (TypeError, ValueError):  # Python cannot tell the signature of `forward`
        parameters = "..."
    else:
        parameters = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
    return f"{layer.__qualname__}.apply({parameters})"


# -- signatures ------------------------------------------------------------------------------------------


def _without_context(signature: inspect.Signature) -> inspect.Signature:
    if not _has_context(signature):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _has_context(signature: inspect.Signature) -> bool:
    """Return whether the signature has a separate parameter for the context."""
    first = next(iter(signature.parameters.values()), None)
    return first is not None and first.kind is not first.VAR_POSITIONAL


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function` itself, not of a function that it wraps: a decorator may add parameters.

    If `function` takes `*args` or `**kwargs`, the wrapped function gives the names.
    """
    own = inspect.signature(function, follow_wrapped=False)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None or not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values()):
        return own
    return signature_of(types.MethodType(wrapped, function.__self__) if inspect.ismethod(function) else wrapped)


class _Declared(NamedTuple):
    """The signature of a `forward`, read once for all calls."""

    called: inspect.Signature  # of the outermost function
    named: inspect.Signature  # of the function that names the arguments; often the same signature
    names: tuple[str, ...]  # the parameters that a plain positional call fills, without the context
    required: int  # how many of these names a plain positional call has to fill


# Keys: the function, then whether it is called as a bound method. A signature does not keep its function alive.
_known: weakref.WeakKeyDictionary[Any, dict[bool, _Declared]] = weakref.WeakKeyDictionary()


def _declared(forward: Callable[..., Any]) -> _Declared:
    function = getattr(forward, "__func__", forward)
    try:
        known = _known.setdefault(function, {})
    except TypeError:  # an object with `__call__` that cannot be hashed, or has no weak references
        return _read_declared(forward)
    is_bound = function is not forward
    if is_bound not in known:
        known[is_bound] = _read_declared(forward)
    return known[is_bound]


def _read_declared(forward: Callable[..., Any]) -> _Declared:
    called, named = inspect.signature(forward, follow_wrapped=False), signature_of(forward)
    called = named if called == named else called
    names, required = _by_position(called)
    if any(p.kind is p.VAR_POSITIONAL for p in called.parameters.values()):
        names, more = _by_position(named)
        required = max(required, more)
    return _Declared(called, named, names, required)


def _by_position(signature: inspect.Signature) -> tuple[tuple[str, ...], int]:
    """Return the names that a plain positional call fills, without the context, and how many of them it has to fill."""
    parameters, kinds = list(signature.parameters.values()), inspect.Parameter
    plain = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)][1:]
    needs_keyword = any(p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty for p in parameters)
    required = sum(p.default is kinds.empty for p in plain)
    return tuple(p.name for p in plain), sys.maxsize if needs_keyword else required

"""The arguments of one call of `forward`, split into tensors (`jax.Ref`s too) and statics (all other leaves)."""

from __future__ import annotations

import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._jax.types import as_arrays, has_tangent, is_array, is_ref, is_tensor_or_ref, types_of
from ._trees import LEAF, Skeleton, has_changed, split

__tracebackhide__ = True  # pytest hides these frames: errors raised here concern the user's values


class Argument:
    """One argument: its name, its skeleton, and the positions of its tensors."""

    __slots__ = ("name", "skeleton", "span")

    def __init__(self, name: str, skeleton: Skeleton, first: int) -> None:
        self.name = name
        self.skeleton = skeleton
        self.span = slice(first, first + skeleton.size)  # the argument's positions among all tensors of the call


class Arguments:
    """The arguments of one layer call, in the order of the parameters of `forward`, without the tensors in them.

        arguments, tensors = Arguments.of("Linear", [("x", x), ("params", {"w": w, "b": b})], n_positional=2)
        arguments.names()   # ['x', 'params']
        len(tensors)        # 3

    An instance holds no array: it is part of a treedef, which JAX may cache.
    """

    __slots__ = ("arguments", "has_refs", "is_plain", "layer", "n_positional", "ref_mask", "types")

    def __init__(
        self, layer: str, arguments: list[Argument], tensor_types: list[Any], n_positional: int, ref_mask: list[bool]
    ) -> None:
        self.layer = layer
        self.arguments = arguments
        self.types = tensor_types
        self.n_positional = n_positional  # how many arguments the layer's methods get by position
        # True in nearly every call: each argument is one tensor, which the layer's methods get by position.
        is_positional = n_positional == len(arguments)
        self.is_plain = is_positional and all([a.skeleton is LEAF for a in arguments])  # noqa: C419 - a list is faster
        self.ref_mask = ref_mask  # one bool per tensor: whether the tensor is a Ref; empty if there is no Ref
        self.has_refs = bool(ref_mask)

    @staticmethod
    def of(layer: str, values: Sequence[tuple[str, Any]], n_positional: int) -> tuple[Arguments, list[Any]]:
        arguments: list[Argument] = []
        tensors: list[Any] = []
        has_ref = False
        for name, value in values:
            if is_array(value):  # the usual case
                arguments.append(Argument(name, LEAF, len(tensors)))
                tensors.append(value)
                continue
            found, skeleton = split(value, is_tensor_or_ref)
            arguments.append(Argument(name, skeleton, len(tensors)))
            found = as_arrays(found)
            has_ref = has_ref or any(map(is_ref, found))
            tensors += found
        ref_mask = [is_ref(x) for x in tensors] if has_ref else []
        return Arguments(layer, arguments, types_of(tensors), n_positional, ref_mask), tensors

    def names(self) -> list[str]:
        return [a.name for a in self.arguments]

    def tensor_names(self) -> list[str]:
        """Return the path of each tensor, such as `params['w']`."""
        if self.is_plain:
            return self.names()
        return [a.name + path for a in self.arguments for path in a.skeleton.tensor_paths()]

    def ref_names(self) -> list[str]:
        return [path for path, is_one in zip(self.tensor_names(), self.ref_mask, strict=False) if is_one]

    def slots(self) -> list[Argument]:
        """Return the arguments that hold a tensor other than a Ref: `backward` returns a gradient for each."""
        if not self.has_refs:
            return [a for a in self.arguments if a.skeleton.size]
        return [a for a in self.arguments if not all(self.ref_mask[a.span])]

    def call(self, method: str, function: Callable[..., Any], ctx: Any, tensors: Sequence[Any]) -> Any:
        """Call `function(ctx, ...)` on the arguments of this call. Error messages show the name `method`."""
        __tracebackhide__ = True
        if self.is_plain:
            return function(ctx, *tensors)
        values = [a.skeleton.fill(tensors[a.span]) for a in self.arguments]
        containers = [
            (a.name, value, split(value))
            for a, value in zip(self.arguments, values, strict=True)
            if a.skeleton.is_container
        ]
        n = self.n_positional
        keywords = {a.name: value for a, value in zip(self.arguments[n:], values[n:], strict=True)}
        result = function(ctx, *values[:n], **keywords)
        for name, value, before in containers:
            try:
                after = split(value)
            except Exception:  # an equinox.nn.State cannot be read after a new State was made from it
                continue
            if has_changed(before, after):
                raise ValueError(
                    f"{self.layer}.{method} changed its argument {name} in place, which JAX would lose: methods get "
                    "copies of containers. Return the new value as an output, and leave the argument as it is: "
                    "params = {**params, 'w': w}."
                )
        return result

    def per_argument(self, values: Sequence[Any]) -> list[Any]:
        """Return one pytree per argument: `values` replace the tensors, and None replaces all other leaves."""
        return [a.skeleton.without_statics(values[a.span]) if a.skeleton.size else None for a in self.arguments]

    def needs(self, mask: Sequence[bool]) -> tuple[bool, ...]:
        """Turn one bool per tensor into one per argument."""
        return tuple([any(mask[a.span]) for a in self.arguments])

    def can_get_gradient(self, mask: Sequence[bool]) -> list[bool]:
        """Return `mask` with False for integers, bools, PRNG keys and Refs, which have no gradient."""
        found = [m and has_tangent(t) for m, t in zip(mask, self.types, strict=True)]
        return [m and not r for m, r in zip(found, self.ref_mask, strict=True)] if self.has_refs else found


def bind(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
    """Bind the arguments of `apply` to the signature of `forward(ctx, ...)`."""
    declared = _declared(layer)
    if not kwargs and declared.required <= len(args) <= len(declared.names):
        return Arguments.of(layer.__qualname__, list(zip(declared.names, args, strict=False)), len(args))
    signature = declared.signature
    try:
        bound = signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{layer.__qualname__}.apply: {error}. It takes the arguments of forward without the context: "
            f"{call_of_apply(layer)}. forward is a static method, whose first parameter takes the context: "
            "forward(ctx, ...). Only a pylayer_jax.Function with setup_context(ctx, inputs, output) does without."
        ) from None
    if layer._has_setup_context():
        bound.apply_defaults()
    positional: list[tuple[str, Any]] = []
    keywords: list[tuple[str, Any]] = []
    by_keyword = bound.kwargs
    first = next(iter(signature.parameters.values()), None)
    has_context = first is not None and first.kind is not first.VAR_POSITIONAL
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            # A method `forward(*args)` has no separate parameter for the context. The context is `args[0]`.
            values = value if has_context else value[1:]
            positional += [(f"{name}[{i}]", x) for i, x in enumerate(values)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            keywords += value.items()
        elif name in by_keyword:
            keywords.append((name, value))
        else:
            positional.append((name, value))
    if has_context:
        del positional[0]
    return Arguments.of(layer.__qualname__, positional + keywords, len(positional))


def call_of_apply(layer: Any) -> str:
    """Return the call of a layer as error messages show it, e.g. `Tanh.apply(x)`."""
    parameters = list(_declared(layer).signature.parameters.values())
    shown = [str(p.replace(annotation=p.empty)) for i, p in enumerate(parameters) if i or p.kind is p.VAR_POSITIONAL]
    return f"{layer.__qualname__}.apply({', '.join(shown)})"


# -- signatures ------------------------------------------------------------------------------------------


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of `function`, whose decorator may drop parameters of the function that it wraps."""
    own = inspect.signature(function, follow_wrapped=False)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None or not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values()):
        return own
    return signature_of(types.MethodType(wrapped, function.__self__) if inspect.ismethod(function) else wrapped)


class _Declared(NamedTuple):
    """The signature of a `forward` method, cached for all calls."""

    signature: inspect.Signature
    names: tuple[str, ...]  # the parameters that can be passed by position, except the context
    required: int  # how many of these parameters a call without keywords has to pass


# The outer key is `forward`, or its `__func__` if it is a bound method; the inner key says whether it is bound. A
# signature does not keep the function alive.
_known: weakref.WeakKeyDictionary[Any, dict[bool, _Declared]] = weakref.WeakKeyDictionary()


def _declared(layer: Any) -> _Declared:
    forward = layer._forward_with_ctx()
    function = getattr(forward, "__func__", forward)
    is_bound = function is not forward
    try:
        known = _known.setdefault(function, {})
    except TypeError:  # `function` is an object that cannot be hashed or weakly referenced
        known = {}
    if is_bound in known:
        return known[is_bound]
    signature = signature_of(forward)
    parameters, kinds = list(signature.parameters.values()), inspect.Parameter
    plain = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)][1:]
    required = sum(p.default is kinds.empty for p in plain)
    if layer._has_setup_context():  # then `bind` has to add the defaults, which `setup_context` gets too
        required = len(parameters) - 1
    if any(p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty for p in parameters):
        required = sys.maxsize  # then `bind` never skips `signature.bind`, which raises the error
    known[is_bound] = _Declared(signature, tuple(p.name for p in plain), required)
    return known[is_bound]

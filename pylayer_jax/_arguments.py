"""The arguments of one call of `forward`, split into tensors (`jax.Ref`s too) and statics (all other leaves)."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ._jax.types import as_arrays, has_tangent, is_array, is_ref, is_tensor_or_ref, types_of
from ._trees import LEAF, Skeleton, has_changed, split

__tracebackhide__ = True  # pytest hides these frames: errors raised here concern the user's values


class Argument(NamedTuple):
    name: str
    skeleton: Skeleton
    span: slice  # the positions of its tensors among all tensors of the call


@dataclasses.dataclass(eq=False, slots=True)
class Arguments:
    """The arguments of one layer call, in the order of the parameters of `forward`, without the tensors in them.

        arguments, tensors = Arguments.of("Linear", [("x", x), ("params", {"w": w, "b": b})], n_positional=2)
        arguments.names()   # ['x', 'params']
        len(tensors)        # 3

    It holds no array, since it is part of a treedef, which JAX may cache.
    """

    layer: str
    arguments: list[Argument]
    types: list[Any]  # of the tensors
    n_positional: int  # how many arguments the layer's methods get by position
    is_plain: bool  # True in nearly every call: each argument is one tensor, which methods get by position
    ref_mask: list[bool]  # one bool per tensor: whether it is a Ref; empty if there is no Ref

    @staticmethod
    def of(layer: str, values: Sequence[tuple[str, Any]], n_positional: int) -> tuple[Arguments, list[Any]]:
        arguments, tensors = list[Argument](), list[Any]()
        has_ref, is_plain = False, n_positional == len(values)
        for name, value in values:
            n = len(tensors)
            if is_array(value):  # the usual case
                arguments.append(Argument(name, LEAF, slice(n, n + 1)))
                tensors.append(value)
                continue
            found, skeleton = split(value, is_tensor_or_ref)
            arguments.append(Argument(name, skeleton, slice(n, n + len(found))))
            tensors += as_arrays(found)
            is_plain = is_plain and skeleton is LEAF
            has_ref = has_ref or any(map(is_ref, found))
        ref_mask = [is_ref(x) for x in tensors] if has_ref else []
        return Arguments(layer, arguments, types_of(tensors), n_positional, is_plain, ref_mask), tensors

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
        """Return the arguments for which `backward` returns a gradient: those that hold a tensor other than a Ref."""
        is_refs = self.ref_mask or [False] * len(self.types)
        return [a for a in self.arguments if not all(is_refs[a.span])]

    def call(self, method: str, function: Callable[..., Any], ctx: Any, tensors: Sequence[Any]) -> Any:
        """Call `function(ctx, ...)` on the arguments; `method` is its name in error messages."""
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
        """Return one pytree per argument, with `values` for the tensors, and None for all other leaves."""
        return [a.skeleton.without_statics(values[a.span]) if a.skeleton.size else None for a in self.arguments]

    def needs(self, mask: Sequence[bool]) -> tuple[bool, ...]:
        """Return one bool per argument: whether it needs a gradient, and can have one."""
        can = self.can_get_gradient(mask)
        return tuple([any(can[a.span]) for a in self.arguments])

    def can_get_gradient(self, mask: Sequence[bool]) -> list[bool]:
        """Return `mask` with False for tensors without a gradient: integers, bools, PRNG keys and Refs."""
        found = [m and has_tangent(t) for m, t in zip(mask, self.types, strict=True)]
        return [m and not r for m, r in zip(found, self.ref_mask, strict=True)] if self.ref_mask else found


def bind(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
    declared = _declared(layer)
    if not kwargs and declared.required <= len(args) <= len(declared.names):
        return Arguments.of(layer.__qualname__, list(zip(declared.names, args, strict=False)), len(args))
    try:
        bound = declared.signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{layer.__qualname__}.apply: {error}. It takes the arguments of forward without the context: "
            f"{call_of_apply(layer)}. forward is a static method, whose first parameter takes the context: "
            "forward(ctx, ...). Only a pylayer_jax.Function with setup_context(ctx, inputs, output) does without."
        ) from None
    if layer._has_setup_context():
        bound.apply_defaults()
    values = bound.args[1:]  # without the context, also if it is `args[0]` of a `forward(*args)`
    names = [*declared.names, *(f"{declared.rest}[{i}]" for i in range(len(values) - len(declared.names)))]
    pairs = [*zip(names, values, strict=False), *bound.kwargs.items()]
    return Arguments.of(layer.__qualname__, pairs, len(values))


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
    signature: inspect.Signature
    names: tuple[str, ...]  # the parameters that can be passed by position, except the context
    rest: str  # the name of `*args`
    required: int  # how many positional arguments a call without keywords has to pass


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
    rest = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), "")
    known[is_bound] = _Declared(signature, tuple(p.name for p in plain), rest, required)
    return known[is_bound]

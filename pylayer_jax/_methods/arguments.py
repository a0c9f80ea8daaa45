"""The arguments of one call of `forward`: by name, in parameter order, with tensors and statics separated."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pylayer_jax._jax.types import as_arrays, has_tangent, is_ref, typeof
from pylayer_jax._trees.changes import MutationCheck
from pylayer_jax._trees.messages import source_of
from pylayer_jax._trees.partition import LEAF, TreeWithoutTensors, split

from .mistakes import Attributes

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user


class Argument:
    """One argument of a call; a *slot* if it holds a tensor."""

    __slots__ = ("name", "skeleton", "span")

    def __init__(self, name: str, skeleton: TreeWithoutTensors, first: int) -> None:
        self.name = name
        self.skeleton = skeleton
        self.span = slice(first, first + skeleton.size)  # of its tensors among those of the call


class _RefPlace(NamedTuple):
    """Stands for a `jax.Ref` in an argument, which is the tensor of that number."""

    place: int


class Arguments:
    """The arguments of one call, in the order of the parameters of `forward`.

    `positional` counts those that these parameters take by position. `by_keyword` names those that the call gave by
    keyword, in the order of the call.

    The tensors are not kept here: an instance lives in a treedef, where an array would be a leak. A `jax.Ref` travels
    behind the tensors. It is a static of its argument otherwise, which has no gradient.
    """

    __slots__ = ("arguments", "avals", "by_keyword", "first_ref", "is_plain_call", "layer", "positional", "refs")

    def __init__(
        self, layer: str, values: Sequence[tuple[str, Any]], positional: int, by_keyword: Sequence[str] = ()
    ) -> None:
        self.layer = layer
        self.positional = positional
        self.by_keyword = by_keyword
        self.arguments: list[Argument] = []
        self.avals: list[Any] = []
        self.refs: list[str] = []  # where each of them was passed, as in `params['history']`
        for name, value in values:
            tensors, skeleton = split(value)
            self.arguments.append(Argument(name, skeleton, len(self.avals)))
            self.avals.extend(tensors)
        self.first_ref = len(self.avals)  # the index of the first Ref among the tensors of the call
        # Whether each argument is one tensor, given by position, as in nearly every call.
        self.is_plain_call = not by_keyword and all(a.skeleton is LEAF for a in self.arguments)
        if not self.is_plain_call and any(any(map(is_ref, a.skeleton.leaves)) for a in self.arguments):
            self._take_refs()

    def _take_refs(self) -> None:
        refs: list[Any] = []

        def take(argument: str, path: str, leaf: Any) -> Any:
            if not is_ref(leaf):
                return leaf
            for name, ref in zip(self.refs, refs, strict=True):
                if ref is leaf:
                    raise ValueError(
                        f"{self.layer}.apply: arguments {name} and {argument}{path} are one jax.Ref. JAX allows it "
                        "once among the arguments of a function; pass it once."
                    )
            refs.append(leaf)
            self.refs.append(argument + path)
            return _RefPlace(len(self.avals) + len(refs) - 1)

        for argument in self.arguments:
            if argument.skeleton.leaves and argument.skeleton is not LEAF:
                argument.skeleton.replace_statics(functools.partial(take, argument.name))
        self.avals += refs

    def refs_of(self, tensors: Sequence[Any]) -> list[tuple[str, Any]]:
        """Each Ref among the tensors of the call, with the place where it was passed."""
        return list(zip(self.refs, tensors[self.first_ref :], strict=True))

    def take_tensors(self) -> list[Any]:
        """The tensors as JAX arrays, and the Refs behind them. From then on the object keeps only their types."""
        tensors = as_arrays(self.avals)
        self.avals = [typeof(x) for x in tensors]
        return tensors

    @property
    def slots(self) -> list[Argument]:
        return [a for a in self.arguments if a.skeleton.size]

    def call(
        self, method: str, function: Callable[..., Any], ctx: Any, tensors: Sequence[Any], layer: Any = None
    ) -> Any:
        """Call `function`, which runs the method of that name, on the context and the arguments.

        Raises:
            ValueError: if it changed a container among the arguments in place, or wrote a traced value to an object, or
                to the class, `layer`.
            AttributeError: if it set an attribute of an array.
        """
        __tracebackhide__ = True
        statics = () if self.is_plain_call else [(a.name, x) for a in self.arguments for x in a.skeleton.statics()]
        attributes = Attributes(statics, tensors, layer)
        result = self._call(method, function, ctx, tensors)
        attributes.check(self.layer, method, result)
        return result

    def _call(self, method: str, function: Callable[..., Any], ctx: Any, tensors: Sequence[Any]) -> Any:
        __tracebackhide__ = True
        if self.is_plain_call:
            return function(ctx, *tensors)

        def with_ref(static: Any) -> Any:
            return tensors[static.place] if type(static) is _RefPlace else static

        values = [a.skeleton.fill(tensors[a.span], with_ref) for a in self.arguments]
        watched = [
            (a.name, MutationCheck(x)) for a, x in zip(self.arguments, values, strict=True) if a.skeleton.is_container
        ]
        # A decorator of `forward` may treat keywords in its own way.
        names = self.by_keyword if method == "forward" else [a.name for a in self.arguments[self.positional :]]
        first = len(values) - len(names)
        named = {a.name: x for a, x in zip(self.arguments[first:], values[first:], strict=True)}
        result = function(ctx, *values[:first], **{name: named[name] for name in names})
        for name, value in watched:
            if (path := value.change()) is not None:
                raise ValueError(
                    f"{self.layer}.{method} changed its argument {name}{path} in place, which JAX would lose: methods "
                    "get copies of containers. Return the new value as an output, and leave the argument as it is: "
                    "params = {**params, 'w': w}."
                )
        return result

    def per_argument(self, values: Sequence[Any]) -> list[Any]:
        """One entry per argument, in its structure, from one value per tensor; None for every static."""
        return [a.skeleton.fill_without_statics(values[a.span]) if a.skeleton.size else None for a in self.arguments]

    def needs(self, perturbed: Sequence[bool]) -> tuple[bool, ...]:
        """One bool per argument, from one bool per tensor."""
        return tuple(any(perturbed[a.span]) for a in self.arguments)

    def can_get_gradient(self, perturbed: Sequence[bool]) -> list[bool]:
        """`perturbed`, but False for tensors that cannot have a gradient (integers, bools, PRNG keys), and for Refs."""
        can_be = zip(perturbed[: self.first_ref], self.avals[: self.first_ref], strict=True)
        return [p and has_tangent(aval) for p, aval in can_be] + [False] * len(self.refs)


def bind(layer: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Bind a call to the signature of `forward(ctx, ...)`, which is that of a decorator if it has its own.

    Raises:
        TypeError: for an unknown keyword, or a missing or surplus argument.
        ValueError: for one `jax.Ref` in two places.
    """
    declared = _declared(forward)
    if not kwargs and declared.required <= len(args) <= len(declared.names):
        return Arguments(layer, list(zip(declared.names, args, strict=False)), len(args))
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
        with contextlib.suppress(TypeError):  # a decorator that adds an argument: the call has no names for the values
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
    return Arguments(layer, positional + keywords, len(positional), list(kwargs))


def call_of_apply(layer: Any) -> str:
    """How the layer is called, as in `Tanh.apply(x)`."""
    try:
        signature = _without_context(_declared(layer._forward_with_ctx()).named)
    except (TypeError, ValueError):  # a forward whose signature is not known
        parameters = "..."
    else:
        parameters = ", ".join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())
    return f"{layer.__qualname__}.apply({parameters})"


def _without_context(signature: inspect.Signature) -> inspect.Signature:
    if not _has_context(signature):
        return signature
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _has_context(signature: inspect.Signature) -> bool:
    """Whether the context has a parameter."""
    first = next(iter(signature.parameters.values()), None)
    return first is not None and first.kind is not first.VAR_POSITIONAL


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of what is called, and not of what it wraps: a decorator may have parameters of its own.

    Where it takes `*args` or `**kwargs`, the function that it wraps gives the names.
    """
    own = inspect.signature(function, follow_wrapped=False)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None or not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values()):
        return own
    return signature_of(types.MethodType(wrapped, function.__self__) if inspect.ismethod(function) else wrapped)


class _Declared(NamedTuple):
    """The signature of a `forward`, read once for all calls."""

    called: inspect.Signature  # of what is called
    named: inspect.Signature  # that names the arguments of a call which fits it; often the same
    names: tuple[str, ...]  # the parameters that a plain positional call fills, without the context
    required: int  # the number of them that such a call has to fill


# By function, and then for a bound method and for the function itself. A signature does not keep its function alive.
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
    """The names that a plain positional call fills, without the context, and how many of them it has to fill."""
    parameters, kinds = list(signature.parameters.values()), inspect.Parameter
    plain = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)][1:]
    needs_keyword = any(p.kind is kinds.KEYWORD_ONLY and p.default is kinds.empty for p in parameters)
    required = sum(p.default is kinds.empty for p in plain)
    return tuple(p.name for p in plain), sys.maxsize if needs_keyword else required

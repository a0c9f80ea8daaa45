"""The arguments of one call of `forward`, and what has to match them: the gradients that `backward` returns.

Arguments are split into tensors (`jax.Ref`s too) and statics (all other leaves). Tangents of `jvp` match outputs.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._context import Outputs
from ._jax.types import (
    as_arrays,
    has_tangent,
    is_array,
    is_key,
    is_ref,
    is_tensor,
    is_tensor_or_ref,
    tangent_type,
    typeof,
    types_of,
    unboxed,
    varying_axes,
    varying_over,
)
from ._messages import describe, innermost, plural, source_of
from ._trees import LEAF, Skeleton, has_changed, split

__tracebackhide__ = True  # pytest hides these frames: errors raised here concern the user's values


class Argument(NamedTuple):
    name: str
    skeleton: Skeleton
    span: slice  # the positions of its tensors among all tensors of the call


@dataclasses.dataclass(eq=False, slots=True)
class Arguments:
    """The arguments of one layer call, in the order of the parameters of `forward`, without the tensors in them.

    It holds no array, since it is part of a treedef, which JAX may cache.
    """

    layer_name: str
    passed: list[Argument]
    types: list[Any]  # of the tensors
    n_positional: int  # how many arguments the layer's methods get by position
    is_plain: bool  # True in nearly every call: each argument is one tensor, which methods get by position
    ref_mask: list[bool]  # one bool per tensor: whether it is a Ref

    @staticmethod
    def of(layer_name: str, values: Sequence[tuple[str, Any]], n_positional: int) -> tuple[Arguments, list[Any]]:
        arguments, tensors = list[Argument](), list[Any]()
        ref_mask, is_plain = list[bool](), n_positional == len(values)
        for name, value in values:
            n = len(tensors)
            if is_array(value):  # the usual case
                arguments.append(Argument(name, LEAF, slice(n, n + 1)))
                tensors.append(value)
                ref_mask.append(False)
                continue
            found, skeleton = split(value, is_tensor_or_ref)
            arguments.append(Argument(name, skeleton, slice(n, n + len(found))))
            tensors += as_arrays(found)
            is_plain = is_plain and skeleton is LEAF
            ref_mask += map(is_ref, found)
        return Arguments(layer_name, arguments, types_of(tensors), n_positional, is_plain, ref_mask), tensors

    def names(self) -> list[str]:
        return [a.name for a in self.passed]

    def tensor_names(self) -> list[str]:
        """Return the path of each tensor, such as `params['w']`."""
        if self.is_plain:
            return self.names()
        return [a.name + path for a in self.passed for path in a.skeleton.tensor_paths()]

    def ref_names(self) -> list[str]:
        return [path for path, is_one in zip(self.tensor_names(), self.ref_mask, strict=True) if is_one]

    def call(self, method: str, function: Callable[..., Any], tensors: Sequence[Any], *first: Any) -> Any:
        """Call `function` on `first`, then on the arguments; `method` is its name in error messages."""
        if self.is_plain:
            return function(*first, *tensors)
        n, values = self.n_positional, [a.skeleton.fill(tensors[a.span]) for a in self.passed]
        pairs = list(zip(self.passed, values, strict=True))
        # The path to a leaf that is no container is empty.
        containers = [(a.name, value, split(value)) for a, value in pairs if a.skeleton.leaf_paths != [()]]
        result = function(*first, *values[:n], **{a.name: value for a, value in pairs[n:]})
        for name, value, before in containers:
            try:
                after = split(value)
            except Exception:  # an equinox.nn.State cannot be read after a new State was made from it
                continue
            # Its `flatten` may make new leaves each time.
            if has_changed(before, after) and not has_changed(after, split(value)):
                raise ValueError(
                    f"{self.layer_name}.{method} changed its argument {name} in place, which JAX would lose: methods "
                    "get copies of containers. Return the new value as an output, and leave the argument as it is: "
                    "params = {**params, 'w': w}."
                )
        return result

    def per_argument(self, values: Sequence[Any]) -> list[Any]:
        """Return one pytree per argument, with `values` for the tensors, and None for all other leaves."""
        return [a.skeleton.without_statics(values[a.span]) if a.skeleton.size else None for a in self.passed]

    def needs_input_grad(self, mask: Sequence[bool]) -> tuple[bool, ...]:
        """Return one bool per argument: whether it needs a gradient, and can have one."""
        can = self.can_get_gradient(mask)
        return tuple([any(can[a.span]) for a in self.passed])

    def can_get_gradient(self, mask: Sequence[bool]) -> list[bool]:
        """Return `mask` with False for tensors without a gradient: integers, bools, PRNG keys and Refs."""
        return [m and not r and has_tangent(t) for m, r, t in zip(mask, self.ref_mask, self.types, strict=True)]


def bind(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, list[Any]]:
    declared = _declared(layer)
    if not kwargs and len(args) in declared.counts_by_position:
        return Arguments.of(layer.__qualname__, list(zip(declared.names, args, strict=False)), len(args))
    try:
        bound = declared.signature.bind(None, *args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{layer.__qualname__}.apply: {error}. It takes the arguments of forward without the context: "
            f"{call_of_apply(layer)}. forward is a static method, whose first parameter takes the context: "
            "forward(ctx, ...). Only a pylayer_jax.Function with setup_context(ctx, inputs, output) does without."
        ) from None
    if layer._forward_and_setup is not None:
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
    """Follow `__wrapped__` only through wrappers that take `*args` or `**kwargs`."""
    own = inspect.signature(function, follow_wrapped=False)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is None or not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values()):
        return own
    return signature_of(types.MethodType(wrapped, function.__self__) if inspect.ismethod(function) else wrapped)


class _Declared(NamedTuple):
    forward: Callable[..., Any]
    signature: inspect.Signature
    names: tuple[str, ...]  # the parameters that can be passed by position, except the context
    rest: str  # the name of `*args`
    counts_by_position: range  # how many arguments a call may pass, all by position, without `signature.bind`


def _declared(layer: Any) -> _Declared:
    forward, known = layer._forward_with_ctx(), vars(layer).get("_declared_forward")
    if known is not None and known.forward == forward:  # a class may be made from the attributes of another class
        return known
    signature = signature_of(forward)
    parameters, kinds = list(signature.parameters.values()), inspect.Parameter
    plain = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)][1:]
    has_setup, variadic = layer._forward_and_setup is not None, (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    # setup_context gets the defaults too.
    required = [p for p in parameters[1:] if has_setup or (p.default is kinds.empty and p.kind not in variadic)]
    counts_by_position = range(len(required), len(plain) + 1) if all(p in plain for p in required) else range(0)
    rest = next((p.name for p in parameters if p.kind is kinds.VAR_POSITIONAL), "")
    declared = _Declared(forward, signature, tuple(p.name for p in plain), rest, counts_by_position)
    layer._declared_forward = declared
    return declared


# -- gradients -------------------------------------------------------------------------------------------------


def match_gradients(
    result: Any, arguments: Arguments, needs: Sequence[bool], layer: Any, batch: tuple[int, ...] | None = None
) -> list[Any]:
    """Return one gradient (or None for zero) per tensor of the call, with the dtype and shape of that tensor.

    `needs` has one bool per tensor; gradients that are not needed are dropped. With a `batch`, the gradients are NumPy
    arrays, whose first axes have these lengths.
    """
    gradients: list[Any] = [None] * len(needs)
    where = f"{arguments.layer_name}.backward, gradient of "
    try:
        for argument, entry in _pair(result, arguments, needs, layer._torch_convention):
            skeleton = argument.skeleton
            if not any(needs[argument.span]):
                continue
            found = [entry] if skeleton is LEAF else _flatten_like(skeleton, entry, f"{where}{argument.name!r}")
            for i, leaf in zip(range(len(needs))[argument.span], found, strict=True):
                if needs[i]:
                    gradients[i] = coerce(
                        leaf, arguments.types[i], lambda i=i: f"{where}{arguments.tensor_names()[i]!r}", True, batch
                    )
    except ValueError as error:
        error.add_note(f"Defined here: {source_of(f'{arguments.layer_name}.backward', layer.backward)}.")
        raise
    if result is None and any(needs):
        text = (
            f"{arguments.layer_name}.backward returned None, although a gradient is needed; it counts as zero. Did you "
            "forget return? Return (None,) if zero is meant."
        )
        _warn_once(layer, text, "backward")
    return gradients


def _entries(result: Any, unpack_list: bool) -> list[Any]:
    return list(result) if isinstance(result, tuple) or (unpack_list and isinstance(result, list)) else [result]


def _pair(
    result: Any, arguments: Arguments, needs: Sequence[bool], torch_convention: bool
) -> list[tuple[Argument, Any]]:
    """Pair each argument that holds a tensor other than a Ref (a *slot*) with its entry in the result of `backward`.

    | convention | entries of the result                                                                           |
    |------------|-------------------------------------------------------------------------------------------------|
    | Paddle     | one per slot; those at the end whose gradients are not needed may be left out                   |
    | Paddle     | or one per argument of the call                                                                 |
    | torch      | one per argument of the call, and any number of Nones after them                                |
    """
    passed = arguments.passed
    slots = [a for a in passed if not all(arguments.ref_mask[a.span])]
    # A list has one entry per item, as a tuple has, but is one gradient in the torch convention, or for a single slot.
    entries = _entries(result, unpack_list=not torch_convention and len(slots) != 1)
    if torch_convention:
        while len(entries) > len(passed) and entries[-1] is None:
            entries.pop()
    elif len(entries) <= len(slots) and not any(any(needs[left_out.span]) for left_out in slots[len(entries) :]):
        return list(zip(slots, entries, strict=False))
    if (count := len(entries)) != len(passed):
        of_all, kind = arguments.names(), "argument" if torch_convention else "tensor argument"
        names = of_all if torch_convention else [a.name for a in slots]
        problem = f"missing: {', '.join(names[count:])}" if count < len(names) else f"{count - len(names)} too many"
        or_all = f" One for each argument passed ({', '.join(of_all)}) is right too." if of_all != names else ""
        raise ValueError(
            f"{arguments.layer_name}.backward returned {plural(count, 'gradient')} for "
            f"{plural(len(names), kind)} ({', '.join(names)}); {problem}.{or_all} None is a zero gradient."
        )
    pairs = list(zip(passed, entries, strict=True))
    for argument, entry in pairs:
        is_number = any(isinstance(x, (int, float, complex)) for x in argument.skeleton.leaves)
        if entry is not None and not argument.skeleton.size and not is_number:
            raise ValueError(
                f"{arguments.layer_name}.backward returned a gradient ({describe(entry)}) for argument "
                f"{argument.name!r}, which holds no tensor. Return None in its place."
            )
    return [(argument, entry) for argument, entry in pairs if argument.skeleton.size]


def _flatten_like(skeleton: Skeleton, entry: Any, where: str) -> list[Any]:
    try:
        return skeleton.flatten_up_to(entry)
    except ValueError as error:
        raise ValueError(f"{where}: expected its structure, or None for zero; got {describe(entry)}. {error}") from None


_warned: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


def warn_of_integer_outputs(layer: Any, outputs: Outputs, arguments: Arguments, needs: Sequence[bool]) -> None:
    if any(map(has_tangent, outputs.types)) or len(outputs.marked) == len(outputs.types):
        return
    needed = arguments.needs_input_grad(needs)
    if not layer._has_backward() or not any(needed):
        return
    names = ", ".join(name for name, need in zip(arguments.names(), needed, strict=True) if need)
    dtypes = ", ".join(dict.fromkeys(str(t.dtype) for t in outputs.types))
    text = (
        f"{arguments.layer_name} is differentiated with respect to {names}, but all outputs of forward have dtype "
        f"{dtypes}, which carries no gradient: the gradient is zero, and backward is never called. Return "
        "floating-point outputs; or mark these with ctx.mark_non_differentiable, if no gradient is meant."
    )
    _warn_once(layer, text, "forward")


def _warn_once(layer: Any, text: str, method: str) -> None:
    code = getattr(innermost(getattr(layer, method)), "__code__", None)  # None if the method is implemented in C
    place = ("<unknown>", 0) if code is None else (code.co_filename, code.co_firstlineno)
    with _lock:
        methods = _warned.setdefault(layer, set())
        if method not in methods:
            warnings.warn_explicit(text, UserWarning, *place)  # raises at each call if warnings are errors
            methods.add(method)


def match_tangents(result: Any, outputs: Outputs, layer_name: str) -> list[Any]:
    """Return one tangent (or None for zero) per differentiable output, with its shape and dtype."""
    entries = _entries(result, unpack_list=outputs.is_sequence)
    if len(entries) != len(outputs.groups):
        raise ValueError(
            f"{layer_name}.jvp returned {len(entries)} tangents; expected {len(outputs.groups)}, one per output of "
            "forward. Return None for an output that has none."
        )
    found: list[Any] = []
    for i, (group, entry) in enumerate(zip(outputs.groups, entries, strict=True)):
        found += _flatten_like(group, entry, f"{layer_name}.jvp, tangent of output {i}")
    rows = zip(found, outputs.types, outputs.skeleton.tensor_paths(), outputs.has_tangent, strict=True)
    return [
        coerce(tangent, tangent_type(aval), lambda path=path: f"{layer_name}.jvp, tangent of output{path}")
        for tangent, aval, path, can_have_one in rows
        if can_have_one
    ]


def coerce(
    value: Any, aval: Any, where: Callable[[], str], is_gradient: bool = False, batch: tuple[int, ...] | None = None
) -> Any:
    """Return `value` with the dtype, the shape and the varying mesh axes of `aval`, or None for None.

    With a `batch`, return a NumPy array: on the host, JAX must not compute.

    A gradient of a shape to which `aval.shape` broadcasts is summed, as in torch. Every other shape is refused, even if
    it differs in axes of length 1 only: to reshape `(1, 3)` to `(3, 1)` would hide that `backward` returned the
    gradients of `(3, 1) @ (1, 3)` in the wrong order. tests: contract/test_backward.py
    """
    value = unboxed(value)
    if value is None:
        return None
    if not is_tensor(value) or is_key(value):
        raise ValueError(
            f"{where()}: expected an array of dtype {aval.dtype} and shape {tuple(aval.shape)}, or None for zero; got "
            f"{describe(value)}."
        )
    value = as_arrays([value])[0] if batch is None else np.asarray(value)
    if batch is None and typeof(value) == aval:
        return value
    n, expected = len(batch or ()), (*(batch or ()), *aval.shape)
    if value.shape != expected:
        # np.broadcast_shapes refuses the symbolic dimensions of jax.export.
        ends = zip(reversed(aval.shape), reversed(value.shape), strict=False)
        broadcasts = value.ndim >= len(expected) and all(a == b or a == 1 for a, b in ends)
        if not (is_gradient and broadcasts and value.shape[:n] == expected[:n]):
            summed = " (or one that it broadcasts to, which is summed)" if is_gradient else ""
            advice = ""
            if [k for k in expected if k != 1] == [k for k in value.shape if k != 1]:
                advice = f" They differ in axes of length 1 only: return g.reshape({expected})"
                advice += ", unless backward returns its gradients in another order than that of the arguments."
            raise ValueError(f"{where()}: expected shape {expected}{summed}, got {tuple(value.shape)}.{advice}")
        extra = value.ndim - len(aval.shape)
        stretched = [axis for axis, k in enumerate(aval.shape, extra) if k == 1 and value.shape[axis] != 1]
        value = value.sum(axis=(*range(n, extra), *stretched)).reshape(expected)
    if jnp.iscomplexobj(value) and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
        raise ValueError(
            f"{where()}: expected a real array of dtype {aval.dtype}, got dtype {value.dtype}. Return its real part: "
            "jnp.real(...)."
        )
    value = value if value.dtype == aval.dtype else value.astype(aval.dtype)
    if batch is not None:
        return value
    if axes := sorted(map(str, varying_axes(typeof(value)) - varying_axes(aval))):
        name = repr(axes[0] if len(axes) == 1 else tuple(axes))
        raise ValueError(
            f"{where()}: expected a value that is the same on all devices of the mesh axis {', '.join(axes)}, but it "
            f"differs from device to device. Sum it before it is returned, with jax.lax.psum(value, {name}); or make "
            f"the argument vary before the layer gets it: jax.lax.pcast(argument, {name}, to='varying')."
        )
    return varying_over(varying_axes(aval), value)

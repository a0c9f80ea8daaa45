"""Mistakes that are easily made in a method: no return, a parameter too few, a lost write."""

from __future__ import annotations

import inspect
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pylayer_jax._jax.imports import Tracer
from pylayer_jax._jax.tracers import nothing_is_traced
from pylayer_jax._jax.types import is_key
from pylayer_jax._trees.closures import reached_from, traced_names, tracers_in, values_in_reach
from pylayer_jax._trees.hints import NO_ATTRIBUTES, jax_for
from pylayer_jax._trees.messages import innermost, plural
from pylayer_jax._trees.partition import contains

from .outputs import Outputs

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user

# -- gradients that may not be meant ---------------------------------------------------------------

_warned: weakref.WeakKeyDictionary[type, set[str]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def warn_of_missing_return(layer: Any, name: str) -> None:
    """Warn, once per class, that `backward` returned None though a gradient is needed."""
    _warn_once(
        layer,
        f"{name}.backward returned None",
        ", although a gradient is needed; it counts as zero. Did you forget return? Return (None,) if zero is meant.",
    )


def warn_of_narrow_gradient(layer: Any, name: str, argument: str, wide: Any, narrow: Any) -> None:
    """Warn, once per class, that a gradient is cast to a dtype of one byte."""
    if wide.itemsize > 1:
        _warn_once(
            layer,
            f"{name}.backward returned a {wide} gradient",
            f" for {argument}, which is {narrow}: it is cast, and what {narrow} cannot hold is lost. To keep it wide, "
            "pass the wide tensor and its scale as arguments of their own and cast in forward; or pass a jax.Ref to "
            "which backward adds the gradient.",
        )


def warn_of_summed_cotangents(layer: Any, name: str, axes: Sequence[str]) -> None:
    """Warn, once per class, that `backward` adds up cotangents that JAX has added up."""
    over = ", ".join(axes)
    _warn_once(
        layer,
        f"{name}.backward adds up over the mesh axis {over} a cotangent that is the same on all of its devices",
        ". In a shard_map, JAX has added up the cotangents of a value that does not vary, so that the gradient is too "
        "large by the number of devices. Return the cotangent as it is; for an identity in forward, use "
        f"pylayer_jax.parallel.copy_to(x, {axes[0]!r}); for a mean, jax.lax.pmean.",
    )


def _warn_once(layer: Any, finding: str, advice: str) -> None:
    """Warn once per class, at the line of its `backward`."""
    with _lock:
        warned = _warned.setdefault(layer, set())
        if finding in warned:
            return
        warned.add(finding)
    code = getattr(innermost(layer.backward), "__code__", None)
    try:
        if code is None:  # an object of C
            warnings.warn(finding + advice, UserWarning, stacklevel=2)
        else:
            warnings.warn_explicit(finding + advice, UserWarning, code.co_filename, code.co_firstlineno)
    except UserWarning:  # warnings are errors: the next run raises it too
        with _lock:
            warned.discard(finding)
        raise


# -- calls that do not fit ------------------------------------------------------------------------


def backward_arity_error(
    error: Exception, name: str, backward: Callable[..., Any], args: Sequence[Any], outputs: Outputs
) -> TypeError | None:
    """The error for a `backward` whose parameters do not take `args`; None if `error` has another reason."""
    count, given = len(outputs.groups), len(args) - 1
    which = "" if count == given else f", of which {given} {'holds a tensor' if given == 1 else 'hold tensors'}"
    names = ", ".join(["ctx", *(["dy"] if given == 1 else (f"dy{i}" for i in range(given)))])
    return _arity_error(
        error,
        f"{name}.backward",
        backward,
        args,
        f"forward returned {plural(count, 'output', 'outputs')}{which}, so backward takes ctx and "
        f"{plural(given, 'cotangent', 'cotangents')}: def backward({names})",
    )


def missing_cotangents(error: Exception, outputs: Outputs, cotangents: Sequence[Any]) -> str:
    """For the note of an error about None: the outputs whose cotangent is None, if `backward` gets it as None."""
    paths = outputs.skeleton.tensor_paths() if "None" in str(error) else ()
    missing = ", ".join(f"output{path}" for path, c in zip(paths, cotangents, strict=False) if c is None)
    return missing and (
        f", where the cotangent of {missing} is None: no gradient came for it, and forward called "
        "ctx.set_materialize_grads(False). Test it with `is None`, or remove that call to get zeros"
    )


def jvp_arity_error(
    error: Exception, name: str, jvp: Callable[..., Any], args: Sequence[Any], arguments: Sequence[str]
) -> TypeError | None:
    """The error for a `jvp` whose parameters do not take `args`; None if `error` has another reason."""
    return _arity_error(
        error,
        f"{name}.jvp",
        jvp,
        args,
        f"the call has {plural(len(arguments), 'argument', 'arguments')} ({', '.join(arguments)}), so jvp takes ctx "
        f"and {plural(len(arguments), 'tangent', 'tangents')}",
    )


def _arity_error(
    error: Exception, method: str, function: Callable[..., Any], args: Sequence[Any], expected: str
) -> TypeError | None:
    if not isinstance(error, TypeError):
        return None
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # not callable, or an object of C
        return None
    try:
        signature.bind(*args)
    except TypeError as misfit:
        # An error that the method itself raised stays as it is. A decorator may have changed the arguments.
        code = getattr(innermost(function), "__code__", None)
        if any(frame.f_code is code for frame, _ in traceback.walk_tb(error.__traceback__)):
            return None
        first = next(iter(signature.parameters.values()), None)
        has_context = first is not None and (first.name == "ctx" or first.kind is first.VAR_POSITIONAL)
        hint = "" if has_context else " Is ctx missing, which comes first?"
        return TypeError(f"{method}: {expected}. It is defined with the parameters {signature}: {misfit}.{hint}")
    return None


# -- writes that JAX would lose --------------------------------------------------------------------


_INSTEAD = {
    "forward": "Return it as one more output, or keep it for backward with ctx.save_for_backward",
    "backward": "Return it as the gradient of an argument",
}


class Attributes:
    """The attributes of objects, of arrays and of a class before a method runs. `check` refuses what JAX would lose.

    Under a trace an attribute of an object, or of the class, would keep a traced value, which nothing can use after the
    trace. Only concrete arrays take attributes, and an operation on them does not hand these on.
    """

    __slots__ = ("_arrays", "_bases", "_given", "_known", "_layer", "_methods", "_objects")

    def __init__(self, objects: Sequence[tuple[str, object]], arrays: Sequence[Any], layer: Any) -> None:
        self._layer, self._given, self._objects = layer, len(objects), None
        if not nothing_is_traced():
            # The classes of the package have no state.
            self._bases = [b for b in layer.__mro__[:-1] if b.__module__[:12] != "pylayer_jax."] if layer else []
            # What the methods of a class close over is no attribute: a user may note there what was traced.
            self._methods = {id(x): x for base in self._bases for x in vars(base).values() if callable(x)}
            self._objects = [*objects, *self._own()]
            self._known = self._tracers(self._objects)
        self._arrays = [(x, dict(vars(x))) for x in arrays if not isinstance(x, Tracer) and hasattr(x, "__dict__")]

    def check(self, layer: str, method: str, result: Any) -> None:
        """Raise if the method, which returned `result`, set an attribute of an array, or one to a traced value."""
        returned = result if isinstance(result, (tuple, list)) else [result]
        returned = [x for x in returned if not isinstance(x, Tracer) and getattr(x, "__dict__", None)]
        if made := [x for x in returned if isinstance(x, jax.Array) and not is_key(x)]:
            # It may have been there before: as an input, or as a constant that the method reads.
            there = reached_from([self._layer, *values_in_reach(getattr(self._layer, method))])
            there += [array for array, _ in self._arrays]
            made = [x for x in made if not contains(there, x)]
        for array, before in [*self._arrays, *[(x, {}) for x in made]]:
            now = vars(array)
            for name in [name for name in now if name not in before or now[name] is not before[name]]:
                now.clear()
                now.update(before)
                hint = jax_for(name)
                raise AttributeError(
                    f"{layer}.{method} set the attribute {name} of an array, which JAX would lose"
                    + (f". It is of torch or Paddle; in JAX: {hint}." if hint else f": {NO_ATTRIBUTES}.")
                )
        if self._objects is None:
            return
        objects = [*self._objects[: self._given], *self._own()]
        new = {id(x) for x in self._tracers(objects)} - {id(x) for x in self._known}
        for i, (name, held) in enumerate(objects if new else ()):
            for path in [""] if id(held) in new else traced_names(held, lambda value: id(value) in new):
                where = name + (path if path[:1] in ("", ".", "[") else f".{path}")
                why = f"{name} is no pytree, and " if i < self._given else ""
                raise ValueError(
                    f"{layer}.{method} wrote a traced value to {where}, which JAX would lose: {why}nothing can use the "
                    f"value after the trace. {_INSTEAD.get(method, _INSTEAD['forward'])}."
                )

    def _tracers(self, objects: Sequence[tuple[str, object]]) -> list[Any]:
        if not objects:
            return []
        held = [value for _, value in objects]
        return tracers_in(held, but=[*(self._layer.__mro__ if self._layer else ()), *map(type, held)])

    def _own(self) -> list[tuple[str, object]]:
        """The attributes of the class, but for the methods, functions and classes that it had before the method ran."""
        return [
            (f"{base.__name__}.{name}", x)
            for base in self._bases
            for name, x in vars(base).items()
            if not (isinstance(x, _NO_STATE) or id(x) in self._methods)
        ]


_NO_STATE = (classmethod, property, str, int, type(None), types.GetSetDescriptorType)

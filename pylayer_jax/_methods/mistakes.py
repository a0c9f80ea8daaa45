"""Mistakes that are easily made in a method, and what was meant: a forgotten return, a parameter too few."""

from __future__ import annotations

import inspect
import linecache
import threading
import traceback
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pylayer_jax._trees import innermost, plural

from .outputs import Outputs

__tracebackhide__ = True  # for pytest: errors raised here are about values of the user

# -- backward without a return --------------------------------------------------------------------

_warned: weakref.WeakSet[type] = weakref.WeakSet()
_lock = threading.Lock()


def warn_of_missing_return(layer: type, name: str, backward: Callable[..., Any]) -> None:
    """Warn, once per class, that `backward` returned None though a gradient is needed."""
    with _lock:
        if layer in _warned:
            return
        _warned.add(layer)
    message = (
        f"{name}.backward returned None, although a gradient is needed; it counts as zero. Did you forget return? "
        "Return (None,) if zero is meant."
    )
    code = getattr(innermost(backward), "__code__", None)
    try:
        if code is None:  # an object of C
            warnings.warn(message, UserWarning, stacklevel=2)
        else:
            warnings.warn_explicit(message, UserWarning, code.co_filename, _definition_line(code))
    except UserWarning:  # warnings are errors: the next run raises it too
        with _lock:
            _warned.discard(layer)
        raise


def _definition_line(code: types.CodeType) -> int:
    """The line of `def`, which stands below the decorators, where the code begins."""
    first = code.co_firstlineno
    for line in range(first, max((n for _, _, n in code.co_lines() if n is not None), default=first) + 1):
        if linecache.getline(code.co_filename, line).lstrip().startswith(("def ", "async def ")):
            return line
    return first


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

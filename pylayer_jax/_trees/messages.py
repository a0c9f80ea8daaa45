"""How error messages show values and counts, and where a user's exception happened."""

from __future__ import annotations

import functools
import itertools
import linecache
import re
import traceback
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax

from pylayer_jax._jax.tracers import NEEDS_VALUES, is_tracer

from .habits import habit
from .partition import is_tensor


def describe(value: Any) -> str:
    """A value as an error message shows it: the type, and dtype and shape of a tensor."""
    if is_tensor(value):
        return f"{type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if len(repr(value)) < 60 else type(value).__name__


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def name_meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs from `name` by one letter: wrong, missing, too many, or two that changed places."""

    def is_near(other: str) -> bool:
        same = [x == y for x, y in zip(name, other, strict=False)]
        begin = [*same, False].index(False)
        a, b = name[begin:], other[begin:]
        return a[1:] == b[1:] or a[1:] == b or a == b[1:] or (a[:2] == b[1::-1] and a[2:] == b[2:])

    return next((other for other in known if other != name and is_near(other)), None)


def innermost(function: Any) -> Any:
    """The function inside of decorators, partials and methods, as far as they tell it."""
    for _ in range(100):  # a wrapper may name itself
        if hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, types.FunctionType):
            break
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif not isinstance(function, type) and hasattr(type(function).__call__, "__code__"):  # an object
            function = type(function).__call__
        else:
            break
    return function


def source_of(name: str, function: Callable[..., Any]) -> str:
    """A name, and the place where a function is defined if that is known, as in `Tanh at layers.py:12`."""
    code = getattr(innermost(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def add_note(error: Exception, layer: str, method: str) -> None:
    """Add the class and the method to a user's exception, which keeps its type, and what was meant if that is plain."""
    note = f"This happened in {layer}.{method}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
        names = {name for frame, _ in traceback.walk_tb(error.__traceback__) for name in frame.f_code.co_names}
        hints = _values_needed(error, layer, method), _what_was_meant(error, names, method), habit(error, names)
        for hint in hints:
            if hint:
                error.add_note(hint)


_NOT_OF_THE_USER = ("pylayer_jax", "functools", "jax", "numpy")


def _values_needed(error: Exception, layer: str, method: str) -> str:
    """Where traced code asks for a number, and which variables are traced there; empty for any other error."""
    places: list[tuple[types.TracebackType, types.CodeType]] = []
    entry = error.__traceback__ if isinstance(error, NEEDS_VALUES) else None
    while entry is not None:
        if str(entry.tb_frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_OF_THE_USER:
            places.append((entry, entry.tb_frame.f_code))
        entry = entry.tb_next
    if not places:
        return ""
    # The last line in the file of the method: behind it may come other packages.
    entry, code = [place for place in places if place[1].co_filename == places[0][1].co_filename][-1]
    first, last, begin, end = next(itertools.islice(code.co_positions(), max(entry.tb_lasti, 0) // 2, None), [None] * 4)
    line = linecache.getline(code.co_filename, entry.tb_lineno)
    text = line.encode()[begin:end].decode() if first == last == entry.tb_lineno and begin is not None else line
    values = entry.tb_frame.f_locals
    read = [name for name in dict.fromkeys(re.findall(r"(?<![.\w])[A-Za-z_]\w*", text)) if is_tracer(values.get(name))]
    which = ", ".join(f"{name}: {jax.typeof(values[name])}" for name in read)
    return (
        f"{layer}.{method} asks for numbers at {code.co_filename}:{entry.tb_lineno}, in `{text.strip()}`, where arrays "
        f"are traced, as under jax.jit, and have none{which and f' ({which})'}. Use jnp.where or jax.lax.cond in place "
        "of if, jnp in place of np, and a Python number, which jax.jit keeps with static_argnums, in place of an array."
    )


def _what_was_meant(error: Exception, names: set[str], method: str) -> str:
    """A hint for the misuse of a context that ends in an error of Python or JAX; empty for any other error."""
    text = str(error)
    reads_saved = names & {"saved_tensor", "saved_tensors"}
    match error:
        case TypeError() if "PyLayerContext" in text or "FunctionCtx" in text:
            return f"A context was used as a value. The first parameter of {method} takes it: def {method}(ctx, ...)."
        case TypeError() if "'tuple' object is not callable" in text and "needs_input_grad" in names:
            return (
                "ctx.needs_input_grad is a tuple, with an entry for each argument of forward: ctx.needs_input_grad[0]."
            )
        case TypeError() if "'tuple' object is not callable" in text and "saved_tensors" in names:
            return "Is it ctx.saved_tensors()? That is a property, without parentheses: ctx.saved_tensors."
        case TypeError() if re.search(r"\bmethod\b", text) and "saved_tensor" in names:
            return "Is it ctx.saved_tensor? That is a method, with parentheses: ctx.saved_tensor()."
        case TypeError() if re.search("operand.*'tuple'|got <class 'tuple'>", text) and reads_saved:
            return "What forward saved comes back as a tuple, also if it is one tensor: (x,) = ctx.saved_tensor()."
        case ValueError() if "values to unpack" in text and reads_saved:
            return "ctx.saved_tensor() has as many entries as ctx.save_for_backward got."
        case NameError() if "unbound axis name" in text and method == "backward":
            return (
                "If jax.vmap names this axis: in a class without forward mode, backward has it for mapped values "
                "only, and jax.lax.pmean also adds up ones. Add forward_mode = True to the class."
            )
        case IndexError() if "tuple index" in text and "needs_input_grad" in names:
            return "ctx.needs_input_grad has one entry for each argument of forward."
        case _:
            return ""

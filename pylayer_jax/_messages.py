"""Makes texts for error messages, such as descriptions of values, source lines and hints. Defines error classes.

This module also lists the variables that a function closes over.
"""

from __future__ import annotations

import contextlib
import functools
import re
import types
from collections.abc import Callable
from typing import Any, Final

import jax

from ._jax.linearity import NotLinearError
from ._jax.traces import NEEDS_VALUES
from ._jax.types import is_tensor


def describe(value: Any) -> str:
    """Return the text that shows a value in a message: the type, and the dtype and shape of a tensor."""
    if is_tensor(value):
        return f"{type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if len(repr(value)) < 60 else type(value).__name__


def plural(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def innermost(function: Any) -> Any:
    """Return the function inside decorators, `functools.partial` objects and bound methods."""
    for _ in range(100):  # a limit, since a function may be its own `__wrapped__`
        if hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        else:
            break
    return function


def closed_over(function: Any) -> dict[str, Any]:
    """Return the names and values of the variables that `innermost(function)` closes over.

    Default values of parameters, and arguments that a `functools.partial` binds, count as closed-over values.
    """
    values: dict[str, Any] = {}
    inner: Any = innermost(function)
    code: Any = getattr(inner, "__code__", None)
    names: tuple[str, ...] = code.co_varnames[: code.co_argcount] if code else ()
    for name, cell in zip(code.co_freevars if code else (), getattr(inner, "__closure__", None) or (), strict=False):
        with contextlib.suppress(ValueError):  # an empty cell has no `cell_contents`
            values[name] = cell.cell_contents
    defaults = getattr(inner, "__defaults__", None) or ()
    values |= dict(zip(names[len(names) - len(defaults) :], defaults, strict=False))
    values |= getattr(inner, "__kwdefaults__", None) or {}
    while isinstance(function, functools.partial):  # Python merges nested partials, unless the inner one has attributes
        bound = [*names, *(f"argument {i}" for i in range(len(names), len(function.args)))]
        values |= dict(zip(bound, function.args, strict=False)) | function.keywords
        function = function.func
    return values


def held_by(value: Any) -> dict[str, Any]:
    """Return a dict of the values that a function closes over, or of the attributes of an object, or of both."""
    found = closed_over(value) if callable(value) else {}
    owner: Any = getattr(value, "__self__", value)  # the object of a bound method
    if isinstance(owner, (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, functools.partial)):
        return found
    slots: list[str] = [name for kind in type(owner).__mro__ for name in _slots_of(kind)]
    with contextlib.suppress(Exception):  # objects of the user may refuse to be read
        found |= {f".{name}": x for name, x in getattr(owner, "__dict__", {}).items()}
        found |= {f".{name}": getattr(owner, name) for name in slots if hasattr(owner, name)}
    return found


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def tensors_in(value: Any) -> list[Any]:
    """Return the tensors in a value: the value itself, or tensors in a list, tuple or dict."""
    if type(value) not in (list, tuple, dict):
        return [value] if is_tensor(value) else []
    return [x for x in jax.tree.leaves(list(value.values()) if type(value) is dict else value) if is_tensor(x)]


def source_of(name: str, function: Callable[..., Any]) -> str:
    """Return `name` with the file and line where `function` is defined, as in `Tanh at layers.py:12`."""
    code = getattr(innermost(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def add_note(error: Exception, layer: str, method: str, where: str = "") -> None:
    """Add a note that says which method of a layer raised the error.

    If `layer` is empty, `method` is the name of a hook, and the note names this hook.
    """
    note = f"This happened in {layer and layer + '.'}{method}{where}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    notes = [*getattr(error, "__notes__", ())]  # a copy without the note that is added below
    if note in notes:
        return
    error.add_note(note)
    if not any(other.startswith("This happened in") for other in notes) and (advice := hint(error, layer, method)):
        error.add_note(advice)


# -- hints -----------------------------------------------------------------------------------------------------


# The table lists the most used names of torch and Paddle. Each line lists names from torch or Paddle, then a colon and
# the equivalent JAX code.
_TABLE: Final = """
numel nelement: x.size
dim ndimension: x.ndim
size: x.shape[0] for x.size(0), x.shape for x.size()
view: x.reshape(a, b)
view_as reshape_as: x.reshape(y.shape)
unsqueeze: jnp.expand_dims(x, axis)
permute: jnp.transpose(x, axes)
transpose: jnp.swapaxes(x, 1, 2) for x.transpose(1, 2)
expand expand_as: jnp.broadcast_to(x, shape)
chunk: jnp.array_split(x, sections, axis)
t: x.T
to type cast: x.astype(dtype)
type_as: x.astype(y.dtype)
float: x.astype(jnp.float32)
double: x.astype(jnp.float64)
half: x.astype(jnp.float16)
bfloat16: x.astype(jnp.bfloat16)
int long: x.astype(jnp.int32)
bool: x.astype(jnp.bool)
clone: x itself, which never changes; jnp.copy(x) is a second array
contiguous is_contiguous stride storage: x itself: JAX lays out arrays by itself
detach data: jax.lax.stop_gradient(x)
cpu cuda is_cuda get_device place: nothing, or jax.device_put(x, device): JAX places arrays by itself
data_ptr: arrays have no address in traced code; a kernel of your own gets them by jax.ffi.ffi_call or jax.pure_callback
numpy: np.asarray(x), outside of traced code; with host = True on the class, methods get NumPy arrays
exp sqrt log tanh abs sign sin cos floor ceil square: of jax.numpy, as jnp.exp(x)
sigmoid relu softmax log_softmax: of jax.nn, as jax.nn.relu(x)
erf rsqrt: of jax.lax, as jax.lax.rsqrt(x)
pow: x ** n
mul add sub div neg: an operator: x * y, x + y, x - y, x / y, -x
mm bmm mv matmul: x @ y
addmm: bias + x @ y
ger outer: jnp.outer(x, y)
norm: jnp.linalg.norm(x.ravel(), p)
clamp: jnp.clip(x, low, high)
masked_fill: jnp.where(mask, value, x)
gather: jnp.take_along_axis(x, index, axis)
scatter_add index_add: x.at[index].add(y)
index_select: jnp.take(x, index, axis)
topk: jax.lax.top_k(x, k)
requires_grad stop_gradient: ctx.needs_input_grad[i] tells it; jax.lax.stop_gradient(x) cuts a gradient
grad: a gradient is returned by backward and by jax.grad
backward: y, pull = jax.vjp(f, x), then pull(dy)
new new_tensor: jnp.asarray(values, x.dtype), or jnp.zeros(shape, x.dtype)
new_zeros new_ones new_empty new_full: jnp.zeros(shape, x.dtype), jnp.ones(shape, x.dtype), jnp.full(shape, n, x.dtype)
is_floating_point: jnp.issubdtype(x.dtype, jnp.floating)
"""
_IN_JAX: Final = {
    name: text for names, _, text in (line.partition(": ") for line in _TABLE.strip().splitlines())
    for name in names.split()
}  # fmt: skip

_KEYWORDS: Final = {
    "dim": "axis",
    "keepdim": "keepdims",
    "unbiased": "ddof=1 for unbiased=True, which is torch's default",
}


def hint(error: Exception, layer: str, method: str) -> str:
    """Return advice about an error in a layer's method or in a hook, or an empty string if there is no advice."""
    if isinstance(error, NEEDS_VALUES):
        return (
            f"{layer}.{method} needs the values of an array that is traced, as under jax.jit. Use jnp.where or "
            "jax.lax.cond in place of if, jnp in place of np, and a Python number in place of an array. If the code is "
            "NumPy or SciPy, set host = True on the class: its methods then get NumPy arrays, under jax.jit too. "
            "jax.pure_callback runs a part of a method on the host."
        )
    if isinstance(error, TypeError) and re.search(r"pylayer_jax\._.*(PyLayerContext|FunctionCtx)", str(error)):
        without = (
            "forward may be transformed if it takes no ctx: write setup_context(ctx, inputs, output) in a Function"
        )
        if method == "forward":
            without += ". static_argnums does not help: what the transformed function keeps on ctx ends with it"
        return (
            f"A transformation of JAX gets ctx, which is no array: it decorates {layer}.{method}, or a function that "
            f"{method} calls. Put jax.jit, jax.checkpoint, ... around the call, as in jax.jit({layer}.apply), which "
            f"transforms backward too. A {without}."
        )
    if "forward-mode autodiff" in str(error) and "custom_vjp" in str(error):
        return (
            "A layer without a rule for forward mode is in code that JAX staged before it differentiated it: a jitted "
            "function, a loop, jax.linearize. Add forward_mode = True to the class of that layer, or a static "
            "jvp(ctx, *tangents); or use reverse mode."
        )
    if "callbacks do not support JVP" in str(error):
        return (
            "Host code has no derivative. Run it in the forward of a layer whose backward is its derivative, "
            f"and apply that layer in {method}. If second derivatives are not meant, decorate backward with "
            "@once_differentiable."
        )
    if isinstance(error, AttributeError):
        return _hint_for_attribute(error)
    if isinstance(error, TypeError):
        if "does not support item assignment" in str(error) or "immutable" in str(error):
            return "Arrays never change in place: y = x.at[i].set(value)."
        if found := re.search(rf"unexpected keyword argument '({'|'.join(_KEYWORDS)})'", str(error)):
            return f"{found[1]} is of torch or Paddle. In JAX: {_KEYWORDS[found[1]]}."
        if "'int' object is not callable" in str(error):
            return "x.size is a number in JAX: x.shape[0] for x.size(0), x.shape for x.size()."
    if isinstance(error, (TypeError, NotImplementedError)) and "view" in str(error):
        return f"x.view takes a dtype in JAX: {_IN_JAX['view']} for x.view(a, b)."
    return ""


def _hint_for_attribute(error: AttributeError) -> str:
    owner: Any = error.obj
    if isinstance(owner, types.ModuleType):
        is_numeric = owner.__name__.partition(".")[0] in ("jax", "numpy")
    else:
        is_numeric = is_tensor(owner) or isinstance(owner, jax.Array)
    # If code sets an attribute of a tracer in Python 3.11, the attributes `name` and `obj` of the AttributeError are
    # None.
    written = re.match(r"'\w*(?:Tracer|ArrayImpl)' object has no attribute '(\w+)'", str(error))
    name = (error.name if is_numeric else None) or (written and written[1])
    if not name:
        return ""
    if name.endswith("_") and not name.startswith("_"):
        return f"x.{name} changes x in place, and arrays never change. In JAX: y = ..., a new array."
    if name in _IN_JAX:
        return f"{name} is of torch or Paddle. In JAX: {_IN_JAX[name]}."
    return f"An array takes no attributes under jit: keep it on the context, ctx.{name} = value." if written else ""


# -- exceptions ------------------------------------------------------------------------------------------------


__all__ = [
    "HostBackwardError",
    "NoForwardModeError",
    "NotLinearError",
    "OnceDifferentiableError",
    "once_differentiable_error",
    "second_derivative_error",
]


class OnceDifferentiableError(RuntimeError):
    """Raised if a second derivative goes through a `backward` that is decorated with @once_differentiable."""


class HostBackwardError(OnceDifferentiableError):
    """Raised if a second derivative goes through a `backward` that runs on NumPy arrays."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"{layer}.backward gets NumPy arrays (host = True), so it has no derivative, but a second derivative goes "
            "through it. Set host = 'forward' on the class, and write backward with jax.numpy; it may apply layers."
        )


def once_differentiable_error(layer: Any) -> OnceDifferentiableError | None:
    """Return the error that a second derivative raises if the `backward` of a layer class has no derivative.

    Return None for other classes.
    """
    has_no_derivative = hasattr(layer.backward, "second_derivative_error") or layer.host is True
    return second_derivative_error(layer) if has_no_derivative else None


def second_derivative_error(layer: Any) -> OnceDifferentiableError:
    """Return the error for a `backward` that is decorated with @once_differentiable, or that is NumPy code."""
    make_error = getattr(layer.backward, "second_derivative_error", None)
    return HostBackwardError(layer.__qualname__) if make_error is None else make_error()


class NoForwardModeError(TypeError):
    """Raised if forward mode is used on a layer that has no rule for forward mode."""

    def __init__(self, layer: Any) -> None:
        name = layer.__qualname__
        advice = (
            "Add forward_mode = True to the class, which derives the rule from a backward that is linear in its "
            "cotangents; or a static jvp(ctx, *tangents). Or use"
        )
        self.way_out = f"set forward_mode = True on {name}"  # for `check_layer`
        if layer.host:
            advice, self.way_out = "A layer of NumPy cannot have one. Use", f"{name} is a layer of NumPy"
        super().__init__(
            f"{name} has no rule for forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize): it defines "
            f"backward alone. {advice} reverse mode: jax.vjp, jax.grad, jax.jacrev."
        )

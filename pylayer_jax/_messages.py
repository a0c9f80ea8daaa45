"""Makes texts for error messages, and defines error classes. Also lists the variables that a function closes over."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
import traceback
import types
from collections.abc import Callable, Generator
from typing import Any, Final

import jax
import numpy as np

from ._jax.linearity import NotLinearError as NotLinearError  # beside the other errors
from ._jax.traces import NEEDS_VALUES
from ._jax.types import is_tensor
from ._trees import split


def describe(value: Any) -> str:
    if is_tensor(value):
        return f"{type(value).__name__} of dtype {value.dtype} and shape {tuple(value.shape)}"
    return f"{value!r} of type {type(value).__name__}" if len(repr(value)) < 60 else type(value).__name__


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


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


def closed_over(function: Any) -> dict[str, list[Any]]:
    """Return by name the tensors that a function closes over, and those in its default and bound arguments."""
    if not callable(function):
        return {}
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
        names = names[isinstance(function.func, types.MethodType) :]  # without `self`
        bound = [*names, *(f"argument {i}" for i in range(len(names), len(function.args)))]
        values |= dict(zip(bound, function.args, strict=False)) | function.keywords
        function = function.func
    return {k: split(x)[0] for k, x in values.items() if is_tensor(x) or type(x) in (list, tuple, dict)}


def source_of(name: str, function: Callable[..., Any]) -> str:
    """Return `name` with the file and line where `function` is defined, as in `Tanh at layers.py:12`."""
    code = getattr(innermost(function), "__code__", None)
    return name if code is None else f"{name} at {code.co_filename}:{code.co_firstlineno}"


def add_note(error: Exception, layer_name: str, method: str, where: str = "") -> None:
    """Add a note that says which method of a layer, or which hook if `layer_name` is empty, raised the error."""
    note = f"This happened in {layer_name and layer_name + '.'}{method}{where}."
    if isinstance(error, jax.errors.UnexpectedTracerError):
        note += (
            " If it uses a traced value from elsewhere (a closure, a global, an object kept on ctx), pass that value "
            "as an argument of forward, or keep it with ctx.save_for_backward or as ctx.name = array."
        )
    notes = [*getattr(error, "__notes__", ())]  # a copy without the note that is added below
    if note in notes:
        return
    error.add_note(note)
    if not any(other.startswith("This happened in") for other in notes) and (advice := hint(error, layer_name, method)):
        error.add_note(advice)


@contextlib.contextmanager
def noting(layer_name: str, method: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        add_note(error, layer_name, method)
        raise


# -- hints -----------------------------------------------------------------------------------------------------


# The most used names of torch and Paddle, a colon, and the code of JAX. `{}` is the name itself, and "A for B" says
# which call of torch A replaces. tests/layers/test_hints.py runs each A beside its B in torch.
_TABLE: Final = """
numel nelement: x.size for x.numel()
dim ndimension: x.ndim for x.dim()
size: x.shape[0] for x.size(0); x.shape for x.size()
view: x.reshape(a, b) for x.view(a, b); x.reshape(-1) for x.view(-1)
view_as reshape_as: x.reshape(y.shape) for x.view_as(y)
flatten: x.reshape(*x.shape[:1], -1) for x.flatten(1); x.reshape(-1) for x.flatten()
unsqueeze: jnp.expand_dims(x, 1) for x.unsqueeze(1)
permute: jnp.transpose(x, (2, 0, 1)) for x.permute(2, 0, 1)
transpose: jnp.swapaxes(x, 1, 2) for x.transpose(1, 2)
expand: jnp.broadcast_to(x, (2, 3, 4)) for x.expand(2, 3, 4)
expand_as: jnp.broadcast_to(x, y.shape) for x.expand_as(y)
split: jnp.split(x, np.arange(n, len(x), n)) for x.split(n); jnp.split(x, np.cumsum(sizes)[:-1]) for x.split(sizes)
chunk: jnp.array_split(x, n, axis) for x.chunk(n, axis), if n divides the length
unbind: list(x) for x.unbind(0)
cat: jnp.concatenate([x, y], 1) for torch.cat([x, y], 1)
t: x.T for x.t()
to type cast float double half bfloat16 int long bool: x.astype(dtype) for x.to(dtype); x.astype(jnp.int32) for x.int()
type_as: x.astype(y.dtype) for x.type_as(y)
tensor as_tensor: jnp.asarray(values) for torch.tensor(values)
clone: x itself, which never changes; jnp.copy(x) is a second array
contiguous is_contiguous stride storage: x itself: JAX lays out arrays by itself
detach data: jax.lax.stop_gradient(x) for x.detach()
cpu cuda is_cuda get_device place: nothing, or jax.device_put(x, device): JAX places arrays by itself
numpy: np.asarray(x), outside of traced code; with host = True on the class, methods get NumPy arrays
abs exp log log1p expm1 sqrt square sign sin cos tanh floor ceil trunc reciprocal isnan tril triu: jnp.{}(x) for x.{}()
sigmoid relu: jax.nn.{}(x) for x.{}()
softmax log_softmax logsumexp: jax.nn.{}(x, axis) for x.{}(axis)
erf rsqrt: jax.lax.{}(x) for x.{}()
maximum minimum: jnp.{}(x, y) for x.{}(y)
amax amin: jnp.{}(x, axis) for x.{}(axis)
lt le gt ge eq ne add sub mul div pow neg: operators; x < y for x.lt(y); x ** n for x.pow(n); -x for x.neg()
mm mv matmul: x @ w for x.matmul(w)
bmm: x @ y for torch.bmm(x, y)
norm: jnp.linalg.norm(x, axis=1) for x.norm(dim=1); jnp.linalg.norm(x.ravel(), p) for x.norm(p)
clamp: jnp.clip(x, low, high) for x.clamp(low, high)
masked_fill: jnp.where(mask, value, x) for x.masked_fill(mask, value)
gather: jnp.take_along_axis(x, index, axis) for x.gather(axis, index), if all other axes of x and index are as long
scatter_add: x.at[jnp.arange(len(index))[:, None], index].add(src) for x.scatter_add(1, index, src)
index_select: jnp.take(x, rows, 0) for x.index_select(0, rows)
topk: jax.lax.top_k(x, k) for x.topk(k)
roll: jnp.roll(x, n, 0) for x.roll(n, 0)
flip: jnp.flip(x, 0) for x.flip(0)
requires_grad stop_gradient: ctx.needs_input_grad[i] tells it; jax.lax.stop_gradient(x) cuts a gradient
grad: a gradient is returned by backward and by jax.grad
backward: y, pull = jax.vjp(f, x), then pull(dy)
no_grad: nothing in forward and backward; elsewhere jax.lax.stop_gradient(x)
register_hook: a layer whose backward returns the changed gradient
saved_variables: ctx.saved_tensors
new_zeros new_ones new_full new_empty: jnp.zeros((3, 4), x.dtype) for x.new_zeros((3, 4))
"""
_IN_JAX: Final = {
    name: text.replace("{}", name) for names, _, text in (line.partition(": ") for line in _TABLE.strip().splitlines())
    for name in names.split()
}  # fmt: skip

_JAX: Final = f"{os.path.dirname(jax.__file__)}{os.sep}"
_OTHER_ARGUMENTS: Final = "view", "flatten", "transpose"
_KEYWORDS: Final = {"dim": "axis", "keepdim": "keepdims", "unbiased": "ddof=1 for unbiased=True"}


def hint(error: Exception, layer: str, method: str) -> str:
    """Return advice about an error in a layer's method or in a hook, or ""."""
    if isinstance(error, NEEDS_VALUES) or "concrete values" in str(error):
        return (
            f"{layer}.{method} needs the values of an array that is traced, as under jax.jit. A flag or a size has to "
            f"be a Python value: jax.jit({layer}.apply, static_argnums=1), or close over it, as in jax.jit(lambda x: "
            f"{layer}.apply(x, True)). Use jnp.where or jax.lax.cond in place of if, and jnp in place of np. If the "
            "code is NumPy or SciPy, set host = True on the class: its methods then get NumPy arrays, under jax.jit "
            "too. jax.pure_callback runs a part of a method on the host."
        )
    if isinstance(error, NameError) and "axis name" in str(error) and method == "backward":
        return (
            "If JAX differentiates a jax.vmap as a whole, it runs backward outside of it, where the axis has no name. "
            f"With forward_mode = True on {layer}, JAX runs backward inside. Or differentiate inside: "
            "jax.vmap(jax.grad(f), axis_name=...)."
        )
    if isinstance(error, TypeError) and re.search(r"pylayer_jax\._.*(PyLayerContext|FunctionCtx)", str(error)):
        return (
            f"A transformation of JAX gets ctx, which is no array: it decorates {layer}.{method}, or a function that "
            f"{method} calls. Put jax.jit, jax.checkpoint, ... around the call, as in jax.jit({layer}.apply), which "
            "transforms backward too. Or write a Function whose forward takes no ctx, with setup_context(ctx, inputs, "
            "output): such a forward may be transformed."
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
        owner, name = error.obj, error.name or ""
        module = owner.__name__.partition(".")[0] if isinstance(owner, types.ModuleType) else ""
        is_numeric = module in ("jax", "numpy") or is_tensor(owner) or isinstance(owner, jax.Array)
        if name == "saved_variables" or (is_numeric and name in _IN_JAX):
            return f"{name} is of torch or Paddle. In JAX: {_IN_JAX[name]}."
        if is_numeric and name.endswith("_") and not name.startswith("_"):
            return f"x.{name} changes x in place, and arrays never change. In JAX: y = ..., a new array."
    if isinstance(error, TypeError):
        if "does not support item assignment" in str(error) or "immutable" in str(error):
            return "Arrays never change in place: y = x.at[i].set(value)."
        if found := re.search(rf"unexpected keyword argument '({'|'.join(_KEYWORDS)})'", str(error)):
            return f"{found[1]} is of torch or Paddle. In JAX: {_KEYWORDS[found[1]]}."
        if "'int' object is not callable" in str(error):
            return "x.size is a number in JAX: x.shape[0] for x.size(0), x.shape for x.size()."
    name = _method_that_raised(error) if isinstance(error, (TypeError, ValueError, NotImplementedError)) else ""
    return f"x.{name} takes other arguments in JAX. In JAX: {_IN_JAX[name]}." if name in _OTHER_ARGUMENTS else ""


def _method_that_raised(error: Exception) -> str:
    """Return the name of the method whose call, in code outside of JAX, raised an error, or ""."""
    calls = traceback.extract_tb(error.__traceback__)
    call = [x for x in calls if not x.filename.startswith(_JAX)][-1]
    lines = [line.encode() for line in linecache.getlines(call.filename)[(call.lineno or 1) - 1 : call.end_lineno]]
    with contextlib.suppress(AttributeError, IndexError, SyntaxError, ValueError):
        lines[-1] = lines[-1][: call.end_colno]
        expression: Any = ast.parse(b"".join(lines)[call.colno :], mode="eval").body
        return expression.func.attr
    return ""


# -- exceptions ------------------------------------------------------------------------------------------------


class OnceDifferentiableError(RuntimeError):
    """Raised if a second derivative goes through a `backward` that is decorated with @once_differentiable."""


class HostBackwardError(OnceDifferentiableError):
    def __init__(self, layer: str) -> None:
        super().__init__(
            f"{layer}.backward gets NumPy arrays (host = True), so it has no derivative, but a second derivative goes "
            "through it. Set host = 'forward' on the class, and write backward with jax.numpy; it may apply layers."
        )


def once_differentiable_error(layer: Any) -> Any:
    make_error = getattr(layer.backward, "second_derivative_error", None)
    if make_error is not None:
        return make_error()
    return HostBackwardError(layer.__qualname__) if layer.host is True else None


class NoForwardModeError(TypeError):
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


def bytes_of(memory: Any, owner: str) -> float:
    if isinstance(memory, (int, float, np.integer, np.floating)) and not isinstance(memory, bool) and memory >= 0:
        return float(memory)
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([KMGT])(I?))?B\s*", str(memory).upper())
    if match is None:
        raise ValueError(
            f'{owner}: expected a number of bytes, or a text such as "2 GiB" or "1.5 GB", got {memory!r}. The units '
            "are B, kB, MB, GB, TB, KiB, MiB, GiB and TiB."
        )
    number, prefix, is_binary = match.groups()
    return float(number) * (1024 if is_binary else 1000) ** " KMGT".index(prefix or " ")

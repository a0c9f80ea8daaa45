"""Hints for errors in code that uses a name from torch or Paddle, or that needs the concrete value of a tracer."""

from __future__ import annotations

import re
import types
from typing import Any, Final

import jax

from ._jax.tracers import NEEDS_VALUES
from ._trees import is_tensor

# The most used names of torch and Paddle. Each line has names, a colon, and the same operation written in JAX.
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
    # If code sets an attribute of a tracer, the AttributeError of Python 3.11 has neither `name` nor `obj`.
    written = re.match(r"'\w*(?:Tracer|ArrayImpl)' object has no attribute '(\w+)'", str(error))
    name = (error.name if is_numeric else None) or (written and written[1])
    if not name:
        return ""
    if name.endswith("_") and not name.startswith("_"):
        return f"x.{name} changes x in place, and arrays never change. In JAX: y = ..., a new array."
    if name in _IN_JAX:
        return f"{name} is of torch or Paddle. In JAX: {_IN_JAX[name]}."
    return f"An array takes no attributes under jit: keep it on the context, ctx.{name} = value." if written else ""

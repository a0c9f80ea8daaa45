"""Names of torch's and Paddle's tensors that JAX arrays lack, and what to write in JAX."""

from __future__ import annotations

import re
from typing import Final

import jax
import jax.numpy as jnp

from pylayer_jax._jax.types import is_array

_ASTYPE: Final = {
    "bfloat16": "bfloat16",
    "bool": "bool",
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "int": "int32",
    "long": "int64",
}
_PLACED: Final = "JAX places arrays itself; jax.device_put(x, device) moves one"
_NO_GRADIENT_FIELD: Final = "a gradient is what backward returns and jax.grad hands on"
_NEEDS: Final = (
    "ctx.needs_input_grad[i] tells it, ctx.mark_non_differentiable(y) and jax.lax.stop_gradient(x) cut, and nothing is "
    "set: argnums of jax.grad, or jax.vjp in a method, say what is differentiated"
)
_WRITE: Final = {
    **{name: f"x.astype(jnp.{dtype})" for name, dtype in _ASTYPE.items()},
    **dict.fromkeys(["cpu", "cuda", "get_device", "is_cuda", "pin_memory", "place"], _PLACED),
    **dict.fromkeys(["grad", "gradient", "register_hook", "retain_grad", "clear_grad"], _NO_GRADIENT_FIELD),
    **dict.fromkeys(["requires_grad", "stop_gradient"], _NEEDS),
    "backward": "y, pull = jax.vjp(f, x), then pull(dy), in a method too",
    "main_grad": "an argument that is a jax.Ref, to which backward adds: ctx.main_grad[...] += dw",
    **dict.fromkeys(["detach", "data"], "jax.lax.stop_gradient(x)"),
    **dict.fromkeys(["dim", "ndimension", "rank"], "x.ndim"),
    **dict.fromkeys(["expand", "expand_as"], "jnp.broadcast_to(x, shape)"),
    **dict.fromkeys(["bmm", "mm", "mv"], "x @ y"),
    **dict.fromkeys(["view_as", "reshape_as"], "x.reshape(y.shape)"),
    **dict.fromkeys(["to", "type", "type_as", "cast"], "x.astype(dtype)"),
    **dict.fromkeys(["new_zeros", "new_ones", "new_empty"], "jnp.zeros(shape, x.dtype), jnp.ones(shape, x.dtype)"),
    "chunk": "jnp.split(x, sections, axis)",
    "clamp": "jnp.clip(x, low, high)",
    "contiguous": "x",
    "is_floating_point": "jnp.issubdtype(x.dtype, jnp.floating)",
    "element_size": "x.dtype.itemsize",
    "erf": "jax.scipy.special.erf(x)",
    "gather": "jnp.take_along_axis(x, index, axis)",
    "index_select": "jnp.take(x, index, axis)",
    "logsumexp": "jax.nn.logsumexp(x)",
    "masked_fill": "jnp.where(mask, value, x)",
    "narrow": "jax.lax.dynamic_slice_in_dim(x, start, length, axis)",
    "norm": "jnp.linalg.norm(x)",
    "numel": "x.size",
    "numpy": "np.asarray(x), outside of traced code",
    "permute": "jnp.transpose(x, axes)",
    "rsqrt": "jax.lax.rsqrt(x)",
    "scatter": "x.at[index].set(y)",
    "scatter_add": "x.at[index].add(y)",
    "sub": "x - y",
    "mul": "x * y",
    "div": "x / y",
    "t": "x.T",
    "topk": "jax.lax.top_k(x, k)",
    "unbind": "[x[i] for i in range(len(x))]",
    "unsqueeze": "jnp.expand_dims(x, axis)",
}
_KEYWORDS: Final = {"dim": "axis", "keepdim": "keepdims", "unbiased": "ddof: 1 for unbiased=True, 0 for False"}
_MEANT_SIZE: Final = "x.size is a number in JAX: x.shape[0] for x.size(0), x.shape for x.size()."
_MEANT_RESHAPE: Final = "x.view takes a dtype in JAX: x.reshape(a, b) for x.view(a, b)."

NO_ATTRIBUTES: Final = (
    "under jit an array takes no attributes. Return the value, as one more output of forward or as the gradient of the "
    "array in backward, or keep it for backward on the context: ctx.name = value"
)


def jax_for(name: str) -> str:
    """What to write for an attribute of a tensor of torch or Paddle; empty for an unknown one."""
    if name in _WRITE:
        return _WRITE[name]
    if name.endswith("_") and not name.startswith("_"):
        return "a new array: y = x + 1 for x.add_(1), x.at[i].set(v) for a part of x. Arrays never change in place"
    for module, prefix in ((jnp, "jnp"), (jax.nn, "jax.nn")):
        if callable(getattr(module, name, None)):
            return f"{prefix}.{name}(x, ...)"
    return ""


def habit(error: Exception, names: set[str]) -> str:
    """A hint for code that uses a JAX array as a tensor of torch or Paddle; empty for any other error.

    `names` are those that the code read on the way to the error.
    """
    text = str(error)
    if isinstance(error, AttributeError):
        # The error where code sets an attribute of a traced array; on Python 3.11 it does not hold the name.
        written = re.match(r"'\w*Tracer' object has no attribute '(\w+)'", text)
        name = written[1] if written else error.name if is_array(error.obj) else None
        if hint := jax_for(name or ""):
            return f"x.{name} is of torch or Paddle. In JAX: {hint}."
        instead = f"{NO_ATTRIBUTES[0].upper()}{NO_ATTRIBUTES[1:]}"
        return f"Did it set an attribute of an array? {instead}." if written else ""
    if isinstance(error, TypeError) and "size" in names and "'int' object is not callable" in text:
        return _MEANT_SIZE
    if isinstance(error, (TypeError, NotImplementedError)) and "view" in names and re.search("view|data type", text):
        return _MEANT_RESHAPE
    keyword = re.search(r"unexpected keyword argument '(\w+)'", text)
    if isinstance(error, TypeError) and keyword is not None and keyword[1] in _KEYWORDS:
        return f"{keyword[1]} is of torch or Paddle. In JAX: {_KEYWORDS[keyword[1]]}."
    return ""

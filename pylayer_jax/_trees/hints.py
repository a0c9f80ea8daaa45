"""Hints for code that ended in an error of Python or JAX: how to write it.

`_SLIPS` is the table by errors, `_IN_JAX` by names of attributes of a tensor of torch or Paddle.
"""

from __future__ import annotations

import linecache
import re
import traceback
from typing import Any, Final

import jax
import jax.numpy as jnp

from pylayer_jax._jax.tracers import NEEDS_VALUES, is_tracer
from pylayer_jax._jax.types import is_array


def hint(error: Exception, layer: str, method: str) -> str:
    """How to write the code of a method that raised `error`; empty if the error does not tell."""
    if isinstance(error, NEEDS_VALUES):
        return _hint_for_values(error, layer, method)
    if isinstance(error, AttributeError):
        return _hint_for_attribute(error)
    read = {name for frame, _ in traceback.walk_tb(error.__traceback__) for name in frame.f_code.co_names}
    for (kinds, pattern, names), text in _SLIPS.items():
        reads = not names or read & {*names.split()}
        if isinstance(error, kinds) and reads and re.search(pattern, f"{method}: {error}", re.DOTALL):
            return text.format(layer=layer, method=method)
    return ""


# By the class of the error, its text behind the name of the method, and names of which the code read one. The first
# that fits counts.
_SLIPS: Final[dict[tuple[Any, str, str], str]] = {
    (TypeError, "PyLayerContext|FunctionCtx", ""): (
        "A context was used as a value. The first parameter of {method} takes it: def {method}(ctx, ...)."
    ),
    (TypeError, "'tuple' object is not callable", "needs_input_grad"): (
        "ctx.needs_input_grad is a tuple, with an entry for each argument of forward: ctx.needs_input_grad[0]."
    ),
    (IndexError, "tuple index", "needs_input_grad"): "ctx.needs_input_grad has one entry for each argument of forward.",
    (TypeError, "'tuple' object is not callable", "saved_tensors"): (
        "Is it ctx.saved_tensors()? That is a property, without parentheses: ctx.saved_tensors."
    ),
    (TypeError, "'method'|(not|non-iterable) method", "saved_tensor"): (
        "Is it ctx.saved_tensor? That is a method, with parentheses: ctx.saved_tensor()."
    ),
    (TypeError, "operand.*'tuple'|got <class 'tuple'>", "saved_tensor saved_tensors"): (
        "What forward saved comes back as a tuple, also if it is one tensor: (x,) = ctx.saved_tensor()."
    ),
    (ValueError, "values to unpack", "saved_tensor saved_tensors"): (
        "ctx.saved_tensor() has as many entries as ctx.save_for_backward got."
    ),
    (NameError, "^backward: .*unbound axis name", ""): (
        "If jax.vmap names this axis: in a class without forward mode, backward has it for mapped values only, and "
        "jax.lax.pmean also adds up ones. Add forward_mode = True to the class."
    ),
    (TypeError, r"(<class|operand.*) '(list|tuple)'|(list|tuple) \(not \"float|by non-int", ""): (
        "A list or tuple is no array in JAX. If it is an argument, pass an array: {layer}.apply(jnp.asarray(...))."
    ),
    (TypeError, "'int' object is not callable", "size"): (
        "x.size is a number in JAX: x.shape[0] for x.size(0), x.shape for x.size()."
    ),
    ((TypeError, NotImplementedError), "view|data type", "view"): (
        "x.view takes a dtype in JAX: x.reshape(a, b) for x.view(a, b)."
    ),
    ((TypeError, ValueError), r"flatten\(\)|'order' argument", "flatten"): (
        "x.flatten takes no axes in JAX: x.reshape(-1, *x.shape[2:]) for x.flatten(0, 1), x.reshape(len(x), -1) for "
        "x.flatten(1)."
    ),
    (TypeError, "keyword argument 'dim'", ""): "dim is of torch or Paddle. In JAX: axis.",
    (TypeError, "keyword argument 'keepdim'", ""): "keepdim is of torch or Paddle. In JAX: keepdims.",
    (TypeError, "keyword argument 'unbiased'", ""): (
        "unbiased is of torch or Paddle. In JAX: ddof: 1 for unbiased=True, 0 for False."
    ),
}

# -- attributes of tensors -------------------------------------------------------------------------

NO_ATTRIBUTES: Final = (
    "under jit an array takes no attributes. Return the value, as one more output of forward or as the gradient of the "
    "array in backward, or keep it for backward on the context: ctx.name = value"
)
_HOST_CODE: Final = (
    " Code that has to run on the host, with NumPy, works under jit and vmap in these two lines, for a result that is "
    "like x:\n"
    "    like = jax.ShapeDtypeStruct(x.shape, x.dtype)\n"
    '    y = jax.pure_callback(function, like, x, vmap_method="sequential")'
)
_IN_JAX: Final = {
    name: text
    for names, text in {
        "addcdiv": "x + value * a / b",
        "addcmul": "x + value * a * b",
        "addmm baddbmm": "x + a @ b",
        "backward": "y, pull = jax.vjp(f, x), then pull(dy), in a method too",
        "bernoulli": "jax.random.bernoulli(key, p, x.shape)",
        "bfloat16": "x.astype(jnp.bfloat16)",
        "bmm mm mv": "x @ y",
        "bool": "x.astype(jnp.bool)",
        "chunk": "jnp.split(x, sections, axis)",
        "clamp": "jnp.clip(x, low, high)",
        "clone": "x itself, which never changes; jnp.copy(x) is a second array",
        "conj_physical": "jnp.conj(x)",
        "contiguous": "x",
        "copy_": "x.at[:].set(y), or y itself; arrays never change in place",
        "cpu cuda get_device is_cuda pin_memory place": "JAX places arrays itself; jax.device_put(x, device) moves one",
        "detach data": "jax.lax.stop_gradient(x)",
        "device": "jax.default_backend() is the type, as in 'cpu' or 'gpu'; x.devices() outside of traced code",
        "dim ndimension rank": "x.ndim",
        "div": "x / y",
        "double": "x.astype(jnp.float64)",
        "element_size": "x.dtype.itemsize",
        "erf": "jax.scipy.special.erf(x)",
        "expand expand_as": "jnp.broadcast_to(x, shape)",
        "fill": "jnp.full_like(x, value)",
        "float": "x.astype(jnp.float32)",
        "gather": "jnp.take_along_axis(x, index, axis)",
        "grad gradient register_hook retain_grad clear_grad": "a gradient is what backward returns and jax.grad hands "
        "on",
        "half": "x.astype(jnp.float16)",
        "index_select": "jnp.take(x, index, axis)",
        "int": "x.astype(jnp.int32)",
        "is_floating_point": "jnp.issubdtype(x.dtype, jnp.floating)",
        "logsumexp": "jax.nn.logsumexp(x)",
        "long": "x.astype(jnp.int64)",
        "main_grad": "an argument that is a jax.Ref, to which backward adds: ctx.main_grad[...] += dw",
        "masked_fill": "jnp.where(mask, value, x)",
        "mul": "x * y",
        "multinomial": "jax.random.categorical(key, jnp.log(x))",
        "narrow": "jax.lax.dynamic_slice_in_dim(x, start, length, axis)",
        "new_zeros new_ones new_empty": "jnp.zeros(shape, x.dtype), jnp.ones(shape, x.dtype)",
        "norm": "jnp.linalg.norm(x.ravel(), p), as norm(p) of Paddle and torch is that of all elements",
        "normal": "jax.random.normal(key, x.shape)",
        "numel": "x.size",
        "numpy": "np.asarray(x), outside of traced code",
        "permute": "jnp.transpose(x, axes)",
        "requires_grad requires_grad_ stop_gradient": "ctx.needs_input_grad[i] tells it, "
        "ctx.mark_non_differentiable(y) and jax.lax.stop_gradient(x) cut, and nothing is set: argnums of jax.grad, or "
        "jax.vjp in a method, say what is differentiated",
        "rsqrt": "jax.lax.rsqrt(x)",
        "scatter": "x.at[index].set(y)",
        "scatter_add index_add": "x.at[index].add(y)",
        "sub": "x - y",
        "t": "x.T",
        "to type type_as cast": "x.astype(dtype)",
        "topk": "jax.lax.top_k(x, k)",
        "unbind": "[x[i] for i in range(len(x))]",
        "uniform": "jax.random.uniform(key, x.shape)",
        "unsqueeze": "jnp.expand_dims(x, axis)",
        "view_as reshape_as": "x.reshape(y.shape)",
        "zero": "jnp.zeros_like(x)",
    }.items()
    for name in names.split()
}


def jax_for(name: str) -> str:
    """How to write an attribute of a tensor of torch or Paddle; empty for an unknown one."""
    if name in _IN_JAX:
        return _IN_JAX[name]
    if name.endswith("_") and not name.startswith("_"):
        value = jax_for(name[:-1]) or "x + 1 for x.add_(1), x.at[i].set(v) for a part of x"
        return f"a new array, since arrays never change in place: y = {value}"
    for module, prefix in ((jnp, "jnp"), (jax.nn, "jax.nn")):
        if callable(getattr(module, name, None)):
            return f"{prefix}.{name}(x, ...)"
    return ""


def _hint_for_attribute(error: AttributeError) -> str:
    # The error where code sets an attribute of a traced array; on Python 3.11 it does not hold the name.
    written = re.match(r"'\w*Tracer' object has no attribute '(\w+)'", str(error))
    name = written[1] if written else error.name if is_array(error.obj) else None
    if isinstance(error.obj, jax.Device):  # of x.device.type
        name = "device"
    if name is not None and (found := jax_for(name)):
        return f"x.{name} is of torch or Paddle. In JAX: {found}.{_HOST_CODE if name == 'numpy' else ''}"
    instead = f"{NO_ATTRIBUTES[0].upper()}{NO_ATTRIBUTES[1:]}"
    return f"Did it set an attribute of an array? {instead}." if written else ""


# -- numbers that traced code does not have --------------------------------------------------------

_NOT_OF_THE_USER: Final = ("pylayer_jax", "functools", "jax", "numpy")


def _hint_for_values(error: Exception, layer: str, method: str) -> str:
    """Where traced code asks for a number, which variables are traced there, and what to do."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_user = [
        (place, frame.f_locals)
        for place, frame in zip(traceback.extract_tb(error.__traceback__), frames, strict=False)
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _NOT_OF_THE_USER
    ]
    if not of_user:
        return ""
    # The last line in the file of the method: behind it may come other packages.
    place, values = [entry for entry in of_user if entry[0].filename == of_user[0][0].filename][-1]
    text = linecache.getline(place.filename, place.lineno or 0)
    if place.lineno == place.end_lineno:
        text = text.encode()[place.colno : place.end_colno].decode(errors="replace")
    read = [name for name in dict.fromkeys(re.findall(r"(?<![.\w])[A-Za-z_]\w*", text)) if is_tracer(values.get(name))]
    which = ", ".join(f"{name}: {jax.typeof(values[name])}" for name in read)
    branches = isinstance(error, (jax.errors.TracerBoolConversionError, jax.errors.TracerIntegerConversionError))
    return (
        f"{layer}.{method} asks for numbers at {place.filename}:{place.lineno}, in `{text.strip()}`, where arrays "
        f"are traced, as under jax.jit, and have none{which and f' ({which})'}. Use jnp.where or jax.lax.cond in place "
        "of if, jnp in place of np, and a Python number, which jax.jit keeps with static_argnums, in place of an array."
        + ("" if branches else _HOST_CODE)
    )

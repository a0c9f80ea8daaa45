"""Hints for code that ended in an error of Python or JAX: how to write it.

`_SLIPS` is the table by errors, `_IN_JAX` by names of attributes of a tensor of torch or Paddle.
"""

from __future__ import annotations

import linecache
import re
import traceback
import types
from typing import Any, Final

import jax
import jax.numpy as jnp

from pylayer_jax._jax.tracers import NEEDS_VALUES, is_tracer
from pylayer_jax._jax.types import is_array

from .partition import is_tensor


def hint(error: Exception, layer: str, method: str) -> str:
    """How to write the code of a method that raised `error`; empty if the error does not tell."""
    if isinstance(error, NEEDS_VALUES):
        return _hint_for_values(error, layer, method)
    if isinstance(error, AttributeError):
        return _hint_for_attribute(error, method)
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
    (TypeError, "^unpack_hook: .*'(list|tuple)'", ""): (
        "unpack_hook gets what pack_hook returned. A list or tuple is no array: y, scale = packed."
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
    (TypeError, r"transpose permutation|transpose\(\) takes", ""): (
        "transpose takes all axes in JAX: jnp.swapaxes(x, 1, 2) for x.transpose(1, 2)."
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
_RUN_ON_HOST: Final = " Run it on the host: saved_tensors_hooks(pack_hook, unpack_hook, host=True)."
NUMBERS_IN_HOOKS: Final = {
    "pack_hook": _RUN_ON_HOST,
    "unpack_hook": _RUN_ON_HOST,
    "only": " It may read the shape, dtype and sharding of a tensor.",
}
# Names, a colon, and JAX's way. The next entry comes behind a bar, or on the next line if that is not indented.
_TABLE: Final = """
addcdiv: x + value * a / b | addcmul: x + value * a * b | lerp: x + weight * (y - x) | scale: x * scale + bias
add_n: sum(arrays) | div: x / y | increment: x + value | mul: x * y | neg: -x | sub: x - y | floor_mod: x % y
frac: x - jnp.trunc(x) | fix: jnp.trunc(x) | sgn: jnp.sign(x) | conj_physical: jnp.conj(x) | rsqrt: jax.lax.rsqrt(x)
eq ge gt greater_than le less_than lt ne: an operator: x == y, x >= y, x > y, x <= y, x < y, x != y
equal equal_all: x == y for each element, jnp.array_equal(x, y) for all
clamp clamp_max clamp_min: jnp.clip(x, low, high) | lgamma: jax.scipy.special.gammaln(x)
prelu: jnp.where(x > 0, x, weight * x) | polar: x * jnp.exp(1j * angle)
hardsigmoid hardswish hardtanh logsigmoid softsign: with an underscore: jax.nn.hard_sigmoid, hard_swish, hard_tanh,
    log_sigmoid, soft_sign
addmm addmv baddbmm: x + a @ b | addr: x + jnp.outer(a, b) | bmm mm mv: x @ y | ger: jnp.outer(x, y)
linear: x @ w + b | embedding: weight[ids] | conv1d conv2d conv3d: jax.lax.conv_general_dilated(x, w, strides, padding)
inverse: jnp.linalg.inv(x) | pinverse: jnp.linalg.pinv(x) | logdet: jnp.linalg.slogdet(x)[1]
matrix_exp: jax.scipy.linalg.expm(x) | triangular_solve: jax.scipy.linalg.solve_triangular(a, x)
norm: jnp.linalg.norm(x.ravel(), p), as norm(p) of Paddle and torch is that of all elements
dist: jnp.linalg.norm((x - y).ravel(), p) | t: x.T | H adjoint mH: jnp.conj(x.mT)
cummax cummin logcumsumexp: jax.lax.cummax(x, axis), cummin or cumlogsumexp | kthvalue: jnp.sort(x, axis)[..., k - 1]
indices values: jnp.max(x, axis) and jnp.argmax, jnp.sort and jnp.argsort, each by itself
topk: jax.lax.top_k(x, k) | bucketize: jnp.searchsorted(boundaries, x)
reduce_as sum_to_size: x.sum(axes, keepdims=True); what backward returns is summed to the shape of its input

dim ndimension rank: x.ndim | numel nelement: x.size | element_size: x.dtype.itemsize | is_empty: x.size == 0
is_same_shape is_same_size: x.shape == y.shape | reshape_as view_as: x.reshape(y.shape) | unflatten: x.reshape(shape)
expand expand_as: jnp.broadcast_to(x, shape) | unsqueeze: jnp.expand_dims(x, axis) | permute: jnp.transpose(x, axes)
movedim: jnp.moveaxis(x, source, destination) | swapdims: jnp.swapaxes(x, i, j) | reverse: jnp.flip(x, axis)
chunk tensor_split: jnp.array_split(x, sections, axis) | unbind: [x[i] for i in range(len(x))]
split split_with_sizes: jnp.split(x, parts, axis), where parts are a number of equal ones, or where they begin
cat row_stack: jnp.concatenate(arrays, axis) | repeat_interleave: jnp.repeat(x, repeats, axis)
broadcast_tensors: jnp.broadcast_arrays(x, y) | diag_embed: x[..., None] * jnp.eye(x.shape[-1])
as_complex as_real view_as_complex view_as_real: jax.lax.complex(x[..., 0], x[..., 1]), jnp.stack([x.real, x.imag], -1)

gather index_sample take_along_dim: jnp.take_along_axis(x, index, axis) | index_select select: jnp.take(x, index, axis)
gather_nd: x[tuple(jnp.moveaxis(index, -1, 0))]
scatter_nd scatter_nd_add: x.at[tuple(jnp.moveaxis(index, -1, 0))].add(y)
scatter index_copy index_fill index_put select_scatter slice_scatter: x.at[index].set(y)
scatter_add index_add: x.at[index].add(y) | index_reduce scatter_reduce: x.at[index].add(y), .mul(y), .min(y) or .max(y)
narrow narrow_copy: jax.lax.dynamic_slice_in_dim(x, start, length, axis) | slice strided_slice: x[start:stop:step]
masked_fill: jnp.where(mask, value, x) | where: jnp.where(mask, x, y)
masked_select: x[mask], outside of traced code; jnp.where(mask, x, 0) has the shape of x

to type type_as cast: x.astype(dtype) | bfloat16: x.astype(jnp.bfloat16) | half: x.astype(jnp.float16)
float: x.astype(jnp.float32) | double: x.astype(jnp.float64) | int: x.astype(jnp.int32) | long: x.astype(jnp.int64)
bool: x.astype(jnp.bool) | cfloat: x.astype(jnp.complex64) | byte: x.astype(jnp.uint8)
char: x.astype(jnp.int8) | short: x.astype(jnp.int16)
is_complex is_floating_point is_integer: jnp.issubdtype(x.dtype, jnp.floating), jnp.complexfloating or jnp.integer

as_tensor from_numpy tensor to_tensor: jnp.asarray(values) | is_tensor Tensor: isinstance(x, jax.Array)
fill: jnp.full_like(x, value) | zero: jnp.zeros_like(x) | new_empty new_ones new_zeros: jnp.zeros(shape, x.dtype)
new_full: jnp.full(shape, value, x.dtype) | new_tensor: jnp.asarray(values, x.dtype)
bernoulli: jax.random.bernoulli(key, p, x.shape) | multinomial: jax.random.categorical(key, jnp.log(x))
exponential normal uniform: of jax.random, as in jax.random.normal(key, x.shape)
rand rand_like randint randint_like randn randn_like randperm: jax.random.uniform(key, shape), normal and others
dropout: jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0)
manual_seed seed: key = jax.random.key(seed), an argument of what draws

assign clone: x itself, which never changes; jnp.copy(x) is a second array
contiguous get_tensor resolve_conj resolve_neg value: x
copy_ set_tensor set_value: x.at[:].set(y), or y itself; arrays never change in place
data_ptr inplace_version is_contiguous storage storage_offset stride strides untyped_storage: nothing: JAX lays out an
    array itself and never changes it in place
cpu cuda get_device is_cpu is_cuda is_pinned is_xpu pin_memory place xpu: JAX places arrays itself;
    jax.device_put(x, device) moves one, and pylayer_jax.packers.save_on_cpu() saved tensors
device: jax.default_backend() is the type, as in 'cpu' or 'gpu'; x.devices() outside of traced code
numpy: np.asarray(x), outside of traced code | functional nn: jax.nn

detach data: jax.lax.stop_gradient(x) | autograd backward: y, pull = jax.vjp(f, x), then pull(dy), in a method too
enable_grad inference_mode no_grad set_grad_enabled: no block: jax.lax.stop_gradient(x) cuts a value, and jax.vjp(f, x)
    differentiates, in a method too
grad grad_fn gradient register_hook retain_grad retain_grads retains_grad clear_grad clear_gradient: a gradient is what
    backward returns and jax.grad hands on
main_grad: an argument that is a jax.Ref, to which backward adds: ctx.main_grad[...] += dw
is_leaf requires_grad requires_grad_ stop_gradient: ctx.needs_input_grad[i] tells it, ctx.mark_non_differentiable(y) and
    jax.lax.stop_gradient(x) cut, and nothing is set: argnums of jax.grad, or jax.vjp in a method, say what is
    differentiated
"""
_IN_JAX: Final = {
    name: " ".join(text.split())
    for names, _, text in (entry.partition(": ") for entry in re.split(r" \| |\n+(?! )", _TABLE.strip()))
    for name in names.split()
}
_MODULES: Final = {"jnp": jnp, "jnp.linalg": jnp.linalg, "jax.nn": jax.nn, "jax.scipy.special": jax.scipy.special}


def jax_for(name: str) -> str:
    """How to write an attribute of a tensor of torch or Paddle; empty for an unknown one."""
    if name in _IN_JAX:
        return _IN_JAX[name]
    if name.endswith("_") and not name.startswith("_"):
        value = jax_for(name[:-1]) or "x + 1 for x.add_(1), x.at[i].set(v) for a part of x"
        return f"a new array, since arrays never change in place: y = {value}"
    found = (prefix for prefix, module in _MODULES.items() if callable(getattr(module, name, None)))
    return next((f"{prefix}.{name}(x, ...)" for prefix in found), "")


def _hint_for_attribute(error: AttributeError, method: str) -> str:
    if isinstance(error.obj, types.ModuleType):
        found = error.obj.__name__.partition(".")[0] in ("jax", "numpy") and jax_for(error.name or "")
        return f"In JAX: {found}." if found else ""
    # The error where code sets an attribute of a traced array; on Python 3.11 it does not hold the name.
    written = re.match(r"'\w*Tracer' object has no attribute '(\w+)'", str(error))
    name = written[1] if written else error.name if is_tensor(error.obj) else None
    if isinstance(error.obj, jax.Device):  # of x.device.type
        name = "device"
    if name is not None and (found := jax_for(name)):
        on_host = NUMBERS_IN_HOOKS.get(method, _HOST_CODE) if name == "numpy" and is_array(error.obj) else ""
        return f"x.{name} is of torch or Paddle. In JAX: {found}.{on_host}"
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

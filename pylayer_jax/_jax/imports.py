"""This module imports every name of JAX that may move between versions. Lint forbids these imports in other modules.

The rest of the package uses `jax`, `jax.numpy`, `jax.lax`, `jax.tree_util`, `jax.errors` and this subpackage.
"""

from jax.ad_checkpoint import checkpoint_name
from jax.core import ShapedArray, Trace, Tracer, eval_context, eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    Literal,
    Primitive,
    get_opaque_trace_state,
    jaxprs_in_params,
    primal_dtype_to_tangent_dtype,
    set_current_trace,
    take_current_trace,
    unmapped_aval,
)
from jax.extend.linear_util import wrap_init
from jax.extend.mlir import ir, lower_with_sharding_in_types
from jax.extend.mlir.dialects import stablehlo
from jax.extend.source_info_util import current, register_exclusion, summarize
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.lax import convert_element_type_p

__all__ = [
    "ClosedJaxpr",
    "DebugInfo",
    "Jaxpr",
    "Literal",
    "Primitive",
    "ShapedArray",
    "SymbolicZero",
    "Trace",
    "Tracer",
    "ad",
    "batching",
    "buffer_callback",
    "checkpoint_name",
    "convert_element_type_p",
    "current",
    "eval_context",
    "eval_jaxpr",
    "get_opaque_trace_state",
    "io_callback",
    "ir",
    "jaxprs_in_params",
    "lower_with_sharding_in_types",
    "mlir",
    "partial_eval",
    "primal_dtype_to_tangent_dtype",
    "register_exclusion",
    "set_current_trace",
    "stablehlo",
    "summarize",
    "take_current_trace",
    "unmapped_aval",
    "wrap_init",
]

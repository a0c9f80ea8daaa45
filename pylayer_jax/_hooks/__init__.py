"""Saved-tensor hooks, which pack the residuals of layers and of JAX operations.

    with quantize_saved(8):             code                 its trace binds             JAX keeps
        y = jnp.tanh(x @ w)             matmul x w           rule_function[matmul]       x, w (from outside: not packed)
                                        tanh h               rule_function[tanh]         q, s (8-bit y, scales)

    In backward, y = unpack(q, s), and then 1 - y² from y. Both wait for the cotangent of tanh.

A *pair* is a pack hook and an unpack hook with their options; a *block* is the code inside `with pair:`.

1. In code that JAX traces, a block makes a `BlockTrace` JAX's current trace, which gets each operation of the block.
   In a block around a call of `jax.grad` itself, only layers pack.
2. The trace records the place of each value (outside the block, constant, or computed in it) and its origin (operation,
   layer, name, source line). A view has the origin of its operand.
3. `_outcome` names what the trace does with an operation: bind it unchanged, or with hooks suspended; stage its body
   again, as that of a scan, so that each iteration packs; or, as for most, bind a `HookedOperation`.
4. A `HookedOperation` is a `RuleFunction`, a function with its own differentiation rule. It holds the pair.
5. Its rule calls `jax.vjp` on the operation, and records the equations of the forward pass. Each array in the function
   that `jax.vjp` returns is a residual. For an operation that keeps nothing, the trace of the block records the
   equation, in eager mode that of a sum with weak references.
6. A residual is not packed if it is constant, if it comes from outside the block (unless the pair packs arguments), or
   if `only` or the keys of `by_name` exclude its origin.
7. A residual is recomputed in backward if equations lead to it from tensors that are kept anyway, or from smaller ones.
   The table of primitives says which equations, by the errors of these tensors.
8. Every other residual is packed. The pair remembers the packed result by weak references, so that another operation
   with the same residual reuses it.
9. JAX keeps each packed array once, as a residual of a `Pullback`, a linear map of tangents. In staged code, an
   optimization barrier makes XLA pack before it uses the outputs of the operation.
10. To transpose the map, `Pullback` restores the residuals and calls the function that `jax.vjp` returned. In staged
    code, a barrier makes XLA wait for the cotangents before it unpacks. A layer does the same with its saved tensors,
    but restores each only when `backward` reads it.

A decorated function is planned as a whole: `planned` stages the function and its backward, `plan` chooses what is kept,
by a minimum cut. Bodies of loops in it are planned functions. It needs neither the trace nor the records of a block.
"""

from .active import active_pair, hooks_suspended
from .block import disable_saved_tensors_hooks, saved_tensors_hooks
from .operations import (
    hooks_ignored,
    layer_block,
    layers_pack_themselves,
    mark_as_computed,
    names_recorded,
    tensors_marked,
)
from .origins import LayerFunction, Mark, Note, Value, by_value, notes_on, outputs_of
from .residuals import keeps_residuals

__all__ = [
    "LayerFunction",
    "Mark",
    "Note",
    "Value",
    "active_pair",
    "by_value",
    "disable_saved_tensors_hooks",
    "hooks_ignored",
    "hooks_suspended",
    "keeps_residuals",
    "layer_block",
    "layers_pack_themselves",
    "mark_as_computed",
    "names_recorded",
    "notes_on",
    "outputs_of",
    "saved_tensors_hooks",
    "tensors_marked",
]

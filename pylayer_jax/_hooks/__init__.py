"""Saved-tensor hooks, which pack the residuals of layers and of JAX operations.

    with quantize_saved(8):             the block            its trace binds             JAX keeps
        y = jnp.tanh(x @ w)             matmul x w           rule_function[matmul]       x, w (from outside: they stay)
                                        tanh h               rule_function[tanh]         q, s  (y as int8, with scales)
    backward                            y = unpack(q, s), then 1 - y² from y; both wait for the cotangent of tanh

1. A block sets a `BlockTrace` over JAX's current trace, and JAX passes each operation inside the block to it.
2. For each value the trace records where it comes from: its place (outside the block, a constant, computed in the
   block), and its origin (operation, layer, name, source line), which views such as a reshape or a cast carry on.
3. A pure function names one of five outcomes for an operation: pass it on, if a block inside it packs; suspend the
   hooks, if JAX keeps nothing for it; pack inside, for each iteration of a staged loop; run it once, or stage it.
4. With the last two outcomes, the trace binds an `Operation`, a function with a rule, which holds the pair of hooks.
5. The rule applies `jax.vjp` to the operation, and records the equations of the forward pass; each array in the
   pullback that `jax.vjp` returns is a residual.
6. A residual stays as it is if it comes from outside or is constant, or if the origin does not select a pair for it.
7. It is recomputed if it follows from other residuals by equations that do not amplify the error of the pair.
8. Else it is packed; the pair remembers it weakly, so that another operation that keeps the same tensor finds it.
9. JAX keeps the packed arrays, each once, as residuals of a `Pullback`, a linear map of tangents; in staged code a
   barrier makes XLA pack before it uses the outputs.
10. When JAX transposes the linear map, backward restores the residuals from these arrays, behind a barrier with the
    cotangents, and calls the pullback; a layer does the same with its own saved tensors, each when it is first read.

The modules, each using those above it:

- `pack` defines a pair of hooks, the key that compares pairs, and the `Origin` of a tensor; it packs and unpacks one
  tensor (sentence 8).
- `host` runs hooks on the host, and holds their results for compiled programs.
- `active` finds the blocks of hooks that are open in this thread.
- `residuals` decides about all residuals of a layer or an operation (sentences 6 to 10).
- `operations` defines the trace of a block and the operations that it binds (sentences 1 to 5).
- `block` defines `saved_tensors_hooks`.
"""

from .active import hooks_suspended
from .block import disable_saved_tensors_hooks, saved_tensors_hooks
from .operations import (
    hooks_ignored,
    layers_pack_themselves,
    mark_as_computed,
    names_recorded,
    pair_to_pack_with,
    tensors_marked,
)
from .pack import PACK_SCOPE
from .residuals import Mark, keeps_residuals, pack_residuals

__all__ = [
    "PACK_SCOPE",
    "Mark",
    "disable_saved_tensors_hooks",
    "hooks_ignored",
    "hooks_suspended",
    "keeps_residuals",
    "layers_pack_themselves",
    "mark_as_computed",
    "names_recorded",
    "pack_residuals",
    "pair_to_pack_with",
    "saved_tensors_hooks",
    "tensors_marked",
]

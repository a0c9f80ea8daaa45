"""Saved-tensor hooks, which pack the residuals of layers and of JAX operations.

- `pair` defines a pair of hooks, with one step or more, and the key that compares pairs.
- `host` runs hooks on the host, and holds their results for compiled programs.
- `active` finds the blocks of hooks that are open in this thread.
- `pack_array` packs and unpacks one tensor.
- `derive` finds the tensors that can be recomputed from other residuals.
- `residuals` packs all residuals of a layer or an operation.
- `operations` defines the trace that gets every operation of a block, and the rule of such an operation.
- `block` defines `saved_tensors_hooks`.

A layer packs its own saved tensors, with the pair that `pair_to_pack_with` returned when the layer was applied.
"""

from .active import hooks_suspended
from .block import disable_saved_tensors_hooks, saved_tensors_hooks
from .operations import layers_pack_themselves, mark_as_computed, pair_to_pack_with
from .pack_array import PACK_SCOPE
from .residuals import PackedResiduals, keeps_residuals

__all__ = [
    "PACK_SCOPE",
    "PackedResiduals",
    "disable_saved_tensors_hooks",
    "hooks_suspended",
    "keeps_residuals",
    "layers_pack_themselves",
    "mark_as_computed",
    "pair_to_pack_with",
    "saved_tensors_hooks",
]

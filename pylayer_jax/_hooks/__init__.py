"""Saved-tensor hooks: packing the tensors that are kept for backward.

- `pair`: a pair of hooks, of one step or more, and the key that compares it.
- `host`: hooks that run on the host, and their results, which are held for compiled programs.
- `active`: the blocks that are open in this thread.
- `pack_array`: packing one tensor.
- `derive`: which tensors can be computed again from others that are kept.
- `residuals`: packing all residuals of a layer or an operation.
- `operations`: the trace that gets every operation of a block, and one operation as a function with its rule.
- `block`: `saved_tensors_hooks` itself.

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

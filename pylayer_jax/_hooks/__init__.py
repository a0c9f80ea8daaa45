"""Saved-tensor hooks: packing the tensors that are kept for backward.

- `host_shards`: a tensor of several devices, on the host.
- `host_store`: results of pack hooks that compiled programs hold on the host.
- `disk`: tensors in files.
- `quantize`: a tensor as small integers.
- `function_keys`: when two hooks are one entry in jit's caches.
- `pack_cache`: the packed form of a tensor that several operations keep.
- `pair`: a pair of hooks, of one step or more.
- `open_blocks`: the blocks that are open, and the facts that a layer takes from them.
- `packing`: packing one tensor, and unpacking it.
- `derived_residuals`: which residuals follow from others, and how they are computed again.
- `packed_residuals`: all residuals of a layer or operation, packed or derived.
- `operation_rule`: one JAX operation, with packed residuals.
- `trace`: the trace that meets every operation of a block.
- `block`: `saved_tensors_hooks` itself.

A layer packs in its own forward rule (`_autodiff.pack_residuals`); plain operations are packed by `trace`.
"""

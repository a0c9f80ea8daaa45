"""Stub while the hooks are built (helper: replace this file)."""
import contextlib
def pair_to_pack_with(): return None
def layers_pack_themselves(): return contextlib.nullcontext()
def pack(*a): raise NotImplementedError
class saved_tensors_hooks: ...
class disable_saved_tensors_hooks: ...

"""Checks the flags of a layer class when the class is defined."""

from __future__ import annotations

import difflib
from typing import Any

from ._messages import describe

_FLAGS = ("complex_convention", "forward_mode", "generate_vmap_rule", "host", "host_vmap", "saved_names")


def check_declarations(layer: Any) -> None:
    """Raise an error for flags with invalid values or misspelled names.

    Raises:
        TypeError: for a misspelled flag, for a `forward_mode`, `saved_names`, `host` or `host_vmap` of the wrong type
            or value, and for forward mode together with `host`.
        ValueError: for an unknown `complex_convention`.
        RuntimeError: for a class with both `generate_vmap_rule` and a `vmap` method.
    """
    name = layer.__qualname__
    for member, value in vars(layer).items():
        # "hosts" differs from "host" in a fifth of its letters, and may be a name of the user. Its value tells.
        is_value_of_host = value is True or (isinstance(value, str) and value in ("forward", "broadcast"))
        near = difflib.get_close_matches(member.lower(), _FLAGS, 1, cutoff=0.85 if is_value_of_host else 0.9)
        is_method = callable(value) or isinstance(value, (staticmethod, classmethod))
        if near and not is_method and near[0] not in vars(layer):
            raise TypeError(
                f"{name}.{member}: a layer has no such attribute, and {near[0]} is not set. Did you mean {near[0]}?"
            )
    if not isinstance(layer.forward_mode, bool):
        raise TypeError(f"{name}.forward_mode: expected True or False, got {describe(layer.forward_mode)}.")
    if layer.complex_convention not in ("jax", "paddle"):
        raise ValueError(f"{name}.complex_convention: expected 'jax' or 'paddle', got {layer.complex_convention!r}.")
    for flag, values in {"host": (True, False, "forward"), "host_vmap": ("sequential", "broadcast")}.items():
        found = getattr(layer, flag)
        if not any(found is x or (isinstance(found, str) and found == x) for x in values):
            raise TypeError(f"{name}.{flag}: expected {' or '.join(map(repr, values))}, got {describe(found)}.")
    if layer.host and (layer.forward_mode or layer._jvp_method() is not None):
        given = "forward_mode = True" if layer.forward_mode else "a jvp method"
        raise TypeError(
            f"{name} has {given} and host = {layer.host!r}, but a layer of NumPy has no forward mode. Remove {given}, "
            "and use reverse mode: jax.grad, jax.vjp, jax.jacrev."
        )
    if layer.generate_vmap_rule and layer._has_vmap_method():
        raise RuntimeError(
            f"{name} has both generate_vmap_rule = True and a vmap method. Remove vmap to let JAX batch forward, or "
            "set generate_vmap_rule = False to have vmap called."
        )
    names = layer.saved_names
    if names is not True and not (isinstance(names, tuple) and all(isinstance(x, (str, type(None))) for x in names)):
        raise TypeError(
            f"{name}.saved_names: expected True, or a tuple with a string or None for each saved value; got {names!r}."
        )

"""Checks the declarations of a class when it is defined: its flags, and the names of its methods."""

from __future__ import annotations

from typing import Any

from ._messages import describe, name_meant

_FLAGS = ("complex_convention", "forward_mode", "generate_vmap_rule", "saved_names")
_METHODS = ("forward", "backward", "setup_context")
_MODULES_OF_BASES = (f"{__package__}._layer", f"{__package__}._function")  # PyLayer and Function have all these names


def check_declarations(layer: Any) -> None:
    """Refuse flags with invalid values, methods that do not fit the class, and misspelled names.

    Raises:
        TypeError: for a misspelled name, a method that is not callable, a flag or `saved_names` of a wrong type, and
            `setup_context` on a `PyLayer`.
        ValueError: for an unknown `complex_convention`.
        RuntimeError: for a class with both `generate_vmap_rule` and a `vmap` method.
    """
    name = layer.__qualname__
    _refuse_misspelled_names(layer)
    if not layer._torch_convention and hasattr(layer, "setup_context"):
        raise TypeError(
            f"{name}.setup_context: it belongs to Function. Derive the class from pylayer_jax.Function; or let "
            "forward(ctx, ...) keep on ctx what backward needs, and give setup_context another name."
        )
    for method in _METHODS:
        if not callable(member := getattr(layer, method, None)) and hasattr(layer, method):
            raise TypeError(f"{name}.{method}: expected a static method, got {describe(member)}.")
    for flag in ("forward_mode", "generate_vmap_rule"):
        if not isinstance(value := getattr(layer, flag), bool):
            raise TypeError(f"{name}.{flag}: expected True or False, got {describe(value)}.")
    if layer.complex_convention not in ("jax", "paddle"):
        raise ValueError(f"{name}.complex_convention: expected 'jax' or 'paddle', got {layer.complex_convention!r}.")
    if layer.generate_vmap_rule and layer._has_vmap_method():
        raise RuntimeError(
            f"{name} has both generate_vmap_rule = True and a vmap method. Remove vmap to let JAX batch forward, or "
            "set generate_vmap_rule = False to have vmap called."
        )
    names = layer.saved_names
    is_tuple = isinstance(names, tuple) and all(name is None or (isinstance(name, str) and name) for name in names)
    if names is not True and not is_tuple:
        raise TypeError(
            f"{name}.saved_names: expected a tuple of strings (None for a value without a name), or True; got "
            f"{names!r}."
        )


def _refuse_misspelled_names(layer: Any) -> None:
    own, bases = vars(layer), [b for b in layer.__mro__ if b.__module__ not in _MODULES_OF_BASES]
    for name, member in own.items():
        meant = name_meant(name, _FLAGS + _METHODS)
        if meant is None or any(meant in vars(base) for base in bases):  # the class has the right name as well
            continue
        is_method = callable(member) or isinstance(member, (staticmethod, classmethod))
        if is_method == (meant in _METHODS) and name[0] != "_" and not name[-1].isdigit():
            raise TypeError(
                f"{layer.__qualname__}.{name}: a layer has no such attribute, and {meant} is not set. Did you mean "
                f"{meant}? Rename it, or give it a name that differs by more than one letter."
            )

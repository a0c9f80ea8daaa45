"""Functions for lists of values with masks of the same length, which the rules of primitives use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def select(values: Iterable[Any], mask: Sequence[bool]) -> list[Any]:
    """Return the values at the positions where the mask is True."""
    return [x for x, is_set in zip(values, mask, strict=True) if is_set]


def scatter(values: Iterable[Any], mask: Sequence[bool]) -> list[Any]:
    """Return a list that has the values, in order, where the mask is True, and None elsewhere."""
    return merge(mask, values, [None] * len(mask))


def merge(mask: Sequence[bool], if_set: Iterable[Any], full: Iterable[Any]) -> list[Any]:
    """Return a copy of `full` that has the values of `if_set`, in order, where the mask is True."""
    rest = iter(if_set)
    return [next(rest) if is_set else x for is_set, x in zip(mask, full, strict=True)]

"""Layers beside closed forms: their outputs, and their gradients in a few transforms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import jax

from .case import Case
from .transforms import FIRST_ORDER, SECOND_ORDER, assert_same, scalar


def with_ways(cases: Sequence[Case], eager_twice: Collection[str]) -> list[tuple[Case, str]]:
    """Each case with the names of the transforms that `compare_gradients` takes."""
    return [(case, way) for case in cases for way in _ways(case, eager_twice)]


def _ways(case: Case, eager_twice: Collection[str]) -> Iterator[str]:
    """Eager, under vmap, and under jit of scan; each way of the second order has the first on its way."""
    # Operation by operation, second derivatives of many operations take seconds.
    yield "grad_of_grad" if case.name in eager_twice else "grad"
    yield "vmap_of_grad"
    yield "second_order_in_scan" if case.second_order else "jit_of_scan"


def compare_outputs(case: Case) -> None:
    expected = jax.jit(case.reference)(*case.args)
    assert_same(case.layer(*case.args), expected)
    assert_same(jax.jit(case.layer)(*case.args), expected)


def compare_gradients(case: Case, way: str) -> None:
    transform = {**FIRST_ORDER, **SECOND_ORDER}[way]
    ours, plain = scalar(case.layer, case.linear_loss), scalar(case.reference, case.linear_loss)
    assert_same(transform(ours, case.args), jax.jit(lambda *args: transform(plain, args))(*case.args))

"""The layers of `pylayer_jax.parallel` on four devices, against the maths of the whole arrays."""

from __future__ import annotations

import pytest

from tests.kit.transforms import assert_same

from .parallel_cases import (
    CASES,
    LAYOUTS,
    expected,
    on_each_device,
    outside,
)
from .ranks import VMA

ONE_AXIS = LAYOUTS["one axis"]
SIDES = pytest.mark.parametrize("side", [outside, on_each_device], ids=lambda side: side.__name__)
EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@EVERY
@SIDES
@VMA
def test_every_derivative(case, side, check_vma):
    assert_same(side(case, ONE_AXIS, check_vma), expected(case))


@EVERY
@pytest.mark.parametrize("layout", ["data and model", "two axes"])
@pytest.mark.parametrize(("side", "check_vma"), [(outside, True), (on_each_device, False)], ids=["vma", "plain"])
def test_every_derivative_on_a_mesh_of_two_axes(case, layout, side, check_vma):
    assert_same(side(case, LAYOUTS[layout], check_vma), expected(case))

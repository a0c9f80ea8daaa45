"""Every layer of the registry in forward mode: as reverse mode, or refused."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from tests.kit.transforms import (
    FIRST_ORDER,
    FORWARD,
    FORWARD_OVER_REVERSE,
    IMPLIED,
    SECOND_ORDER,
    SLOW,
    assert_same,
    expected,
    marks,
    meet,
    pushed,
    scalar,
)
from tests.registry import CASES

pytestmark = pytest.mark.own_primitive
X = jnp.array([0.3, 0.7])
LINEAR = [c for c in CASES if c.is_linear]


@pytest.mark.parametrize(
    ("transform", "case"),
    [
        pytest.param(name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for name in FORWARD
        for case in LINEAR
        if meet(name, case.name)
    ],
)
def test_forward_mode_is_reverse_mode(case, transform, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    found = FORWARD[transform](scalar(ours.layer, case.linear_loss), case.args, pushed)
    assert_same(found, expected(case, FORWARD, transform))


@pytest.mark.parametrize(
    ("table", "name", "case"),
    [
        pytest.param(table, name, case, id=f"{name}-{case.name}", marks=marks(name, case.name))
        for table in (FIRST_ORDER, SECOND_ORDER, FORWARD_OVER_REVERSE)
        for name in table
        for case in CASES
        if case.name in {"DoubledTanh", "Trees", "AskedLinear", "AutoScaler", "BackwardApplies"}
        if name not in SLOW | IMPLIED or case.name == "Trees"
        if case.is_linear or table is not FORWARD_OVER_REVERSE
    ],
)
def test_everything_else_is_as_without_it(table, name, case, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    found = table[name](scalar(ours.layer, case.linear_loss), case.args)
    assert_same(found, expected(case, table, name))


@pytest.mark.parametrize("case", [c for c in CASES if not c.is_linear], ids=lambda case: case.name)
def test_a_backward_that_is_not_linear_is_refused(case, monkeypatch):
    ours = case.in_forward_mode(monkeypatch)
    with pytest.raises(TypeError, match=rf"{case.forward_over_reverse}.*forward_mode = True.*jvp\(ctx, \*tangents\)"):
        pushed(scalar(ours.layer, case.linear_loss), case.args)(*case.args)

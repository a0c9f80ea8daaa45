"""Each checker rejects each wrong layer, in the rows that must fail, and accepts the right layers."""

import contextlib

import jax
import pytest

from pylayer_jax.testing import assert_equivalent, check_layer, gradcheck, gradgradcheck
from tests.checkers.wrong_layers import RIGHT, WRONG, all_but

MEANT = [name for name, wrong in WRONG.items() if wrong.meant is not None]
ROWS = [name for name, wrong in WRONG.items() if wrong.rows]
NUMERICAL = [name for name in MEANT if WRONG[name].rows and WRONG[name].order == 1]


@pytest.mark.parametrize("name", ROWS)
def test_check_layer_rejects(name):
    wrong = WRONG[name]
    tested = {"jit", "gradients", *wrong.rows}
    report = check_layer(wrong.layer, *wrong.args, raises=False, skip=all_but(*tested))
    assert {row.name for row in report if not row.passed} == set(wrong.rows)


@pytest.mark.parametrize("name", NUMERICAL)
def test_gradcheck_rejects(name):
    wrong = WRONG[name]
    with pytest.raises(AssertionError, match=r"^gradcheck of .*, first order: .*(args\[\d\]|leaked)"):
        gradcheck(wrong.layer, wrong.args)


@pytest.mark.parametrize("name", ["second order", "no second order", "sign", "global"])
def test_gradgradcheck_rejects(name):
    wrong = WRONG[name]
    with pytest.raises(AssertionError, match=r"args\[0\]"):
        gradgradcheck(wrong.layer, wrong.args)
    if wrong.order == 2:
        assert gradcheck(wrong.layer, wrong.args)


@pytest.mark.parametrize("name", MEANT)
def test_assert_equivalent_rejects(name):
    wrong = WRONG[name]
    with pytest.raises(AssertionError, match=r"^assert_equivalent of .* order: |^assert_equivalent of .* values: "):
        assert_equivalent(wrong.layer, wrong.meant, wrong.args)
    if wrong.order > 0:
        assert_equivalent(wrong.layer, wrong.meant, wrong.args, orders=range(wrong.order))


@pytest.mark.parametrize("name", ["leak", "global"])
def test_a_leak_that_jax_cannot_explain(name, monkeypatch):
    @contextlib.contextmanager
    def fails_to_explain():
        yield
        raise IndexError("list index out of range")

    monkeypatch.setattr(jax, "checking_leaks", fails_to_explain)
    with pytest.raises(AssertionError, match=r"leaked|backward"):
        gradcheck(WRONG[name].layer, WRONG[name].args)


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_right_layers_are_accepted(name):
    function, args = RIGHT[name]
    # These rows have a tolerance with a scale: against eager mode, other modes, and numbers.
    skip = all_but("jit", "vmap", "linear", "forward mode", "forward over reverse")
    assert check_layer(function, *args, skip=skip).passed
    assert gradgradcheck(jax.jit(getattr(function, "apply", function)), args)  # eagerly each operation is a program

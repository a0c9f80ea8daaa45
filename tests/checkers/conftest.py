"""Every test of this folder has the marker `checkers`, and finds the globals of the wrong layers as new."""

import pytest

from tests.checkers.wrong_layers import KEPT


def pytest_itemcollected(item):
    item.add_marker("checkers")


@pytest.fixture(autouse=True)
def fresh_globals():
    KEPT.clear()

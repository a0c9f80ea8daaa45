"""Gives each test of this folder the marker `checkers`, and clears the globals of the wrong layers before it."""

import pytest

from tests.checkers.wrong_layers import KEPT


def pytest_itemcollected(item):
    item.add_marker("checkers")


@pytest.fixture(autouse=True)
def fresh_globals():
    KEPT.clear()

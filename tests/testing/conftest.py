"""Every test of this folder has the marker `checkers`."""


def pytest_itemcollected(item):
    item.add_marker("checkers")

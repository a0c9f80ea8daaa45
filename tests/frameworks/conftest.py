"""Every test of this folder has the marker `frameworks`."""


def pytest_itemcollected(item):
    item.add_marker("frameworks")

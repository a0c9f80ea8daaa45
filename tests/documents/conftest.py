"""Every test of this folder has the marker `once`: no version of JAX changes what it is about."""


def pytest_itemcollected(item):
    item.add_marker("once")

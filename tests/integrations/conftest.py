"""Every test of this folder has the marker `ecosystem`."""

import pytest

from tests.integrations import blocks as libraries
from tests.integrations.blocks import Block


def pytest_configure(config):
    libraries.required = config.getoption("--require-ecosystem")


def pytest_itemcollected(item):
    item.add_marker("ecosystem")


@pytest.fixture(params=["none", "spy"])
def block(request):
    """Run a test without hooks, and in a block of a pair that must be called."""
    block = Block(request.param)
    yield block
    if block.spy is not None:
        packs, unpacks = block.spy.counts()
        assert packs, "nothing was packed"
        assert unpacks, "nothing was unpacked"


@pytest.fixture(autouse=True)
def usual_promotion(standard_promotion):
    """Allow standard dtype promotion, which the libraries need."""

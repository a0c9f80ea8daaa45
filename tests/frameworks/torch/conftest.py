"""Real torch."""

import pytest

from tests.kit.oracle import Torch


@pytest.fixture
def theirs(framework):
    return Torch(framework("torch"))

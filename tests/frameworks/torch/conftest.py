"""Real torch, and the layers that are written in it."""

import functools

import pytest

from tests.frameworks import names
from tests.kit.oracle import Torch

from .layers import layers


@pytest.fixture
def torch(framework):
    return framework("torch")


@pytest.fixture
def theirs(torch):
    return Torch(torch)


@pytest.fixture
def original(torch):
    return _originals(torch)


@functools.cache
def _originals(torch):
    return layers(names.Torch(torch))

"""Real torch, and the layers that are written in it."""

import importlib

import pytest

from tests.kit.oracle import Torch


@pytest.fixture
def torch(framework):
    return framework("torch")


@pytest.fixture
def theirs(torch):
    return Torch(torch)


@pytest.fixture
def original(torch):
    return importlib.import_module(".originals", __package__)

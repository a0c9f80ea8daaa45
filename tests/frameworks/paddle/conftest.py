"""Real Paddle, and the layers that are written in it."""

import functools

import pytest

from tests.frameworks import names
from tests.kit.oracle import Paddle

from .layers import layers


@pytest.fixture
def theirs(paddle):
    yield Paddle(paddle)
    paddle.set_grad_enabled(True)  # which an exception in a hook of an operation leaves off


@pytest.fixture
def original(paddle):
    return _originals(paddle)


@functools.cache
def _originals(paddle):
    return layers(names.Paddle(paddle))

"""Real Paddle."""

import pytest

from tests.kit.oracle import Paddle


@pytest.fixture
def theirs(paddle):
    yield Paddle(paddle)
    paddle.set_grad_enabled(True)  # which an exception in a hook of an operation leaves off

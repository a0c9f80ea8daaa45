"""Real torch, and the layers that are written in it."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tests.frameworks import names
from tests.kit.oracle import Torch

from .layers import layers, ported
from .sides import Side


@pytest.fixture
def torch(framework):
    return framework("torch")


@pytest.fixture
def theirs(torch):
    return Torch(torch)


@pytest.fixture
def original(torch):
    return _originals(torch)


@pytest.fixture
def both(torch, original):
    return Side(original, torch, torch.func, torch.tensor), Side(ported, jnp, jax, jnp.asarray)


@functools.cache
def _originals(torch):
    return layers(names.Torch(torch))

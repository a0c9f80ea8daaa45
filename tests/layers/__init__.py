"""Defines layers as users write them, each with a reference in plain JAX. Importing this package fills `CASES`.

A case meets every transform of tests/kit/transforms.py. The reference has the layer's intended gradient at first and
second order under ordinary differentiation.
"""

from tests.kit.case import CASES

from . import after_paddle, features  # noqa: F401

__all__ = ["CASES"]

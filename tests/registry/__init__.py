"""Layers as people write them, each beside an independent reference in plain JAX.

A case is one row: it meets every transform of tests/kit/transforms.py. The reference has the layer's intended
gradient at first and second order under ordinary differentiation. Names such as P14 and T36 point at the
Paddle and torch classes that a layer is written after.
"""

from tests.kit.case import CASES, Case

from .after_paddle import ClippedReversal, RouterLoss
from .after_torch import VectorQuantize
from .features import AskedLinear, DoubledTanh, Round, SavedIntermediate

__all__ = [
    "CASES",
    "AskedLinear",
    "Case",
    "ClippedReversal",
    "DoubledTanh",
    "Round",
    "RouterLoss",
    "SavedIntermediate",
    "VectorQuantize",
]

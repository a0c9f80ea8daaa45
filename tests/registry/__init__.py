"""Layers as people write them, each beside an independent reference in plain JAX.

A case is one row: it meets every transform of tests/transforms.py. The reference has the layer's intended
gradient at first and second order under ordinary differentiation. Names such as P14 and T36 point at the
Paddle and torch classes that a layer is written after.
"""

from .case import CASES, Case
from .features import AskedLinear, DoubledTanh, Round, SavedIntermediate
from .paddle_layers import ClippedReversal, RouterLoss
from .torch_layers import VectorQuantize

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

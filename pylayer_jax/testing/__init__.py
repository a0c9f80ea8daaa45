"""Checks of layers for a test suite: against numerical gradients, a reference, and every way to run a layer."""

from ._check_layer import check_layer
from ._equivalence import assert_equivalent
from ._gradcheck import gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

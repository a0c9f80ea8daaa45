"""One text of a layer, run by Paddle, by torch and by this library. Importing these modules fills the tables."""

from .agree import DOCUMENTED, SHARED, complex_numbers, doubled_sine, doubled_tanh, itself_inside_backward, two_inputs
from .differences import (
    DIFFERENCES,
    FAILING_HOOKS,
    exception_in_backward,
    hooks_that_are_not_callable,
    unknown_attribute,
)
from .hooks import HOOKS, packs_without_differentiation, product

__all__ = [
    "DIFFERENCES",
    "DOCUMENTED",
    "FAILING_HOOKS",
    "HOOKS",
    "SHARED",
    "complex_numbers",
    "doubled_sine",
    "doubled_tanh",
    "exception_in_backward",
    "hooks_that_are_not_callable",
    "itself_inside_backward",
    "packs_without_differentiation",
    "product",
    "two_inputs",
    "unknown_attribute",
]

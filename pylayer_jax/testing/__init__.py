"""Checks a layer against numerical gradients, against a reference, and under each transform of JAX.

`_subject` defines the function under test and compares cases; `_properties` defines the checks; `_checkers` runs them,
and makes the report.
"""

from ._checkers import assert_equivalent, check_layer, gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

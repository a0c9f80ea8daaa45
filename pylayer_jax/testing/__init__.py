"""Checks a layer against numerical gradients, against a reference, and under each transform of JAX.

A check is a generator that yields cases (the arrays that a layer returns in a certain way, such as under `jax.jit`, and
the expected arrays) and returns a sentence for the report. `_subject` defines the function under test and compares
cases; `_derivatives` and `_consistency` define the checks; `_checkers` runs them, and makes the report.
"""

from ._checkers import assert_equivalent, check_layer, gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

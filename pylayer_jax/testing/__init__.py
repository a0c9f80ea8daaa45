"""Checks a layer against numerical gradients, against a reference, and under each transform of JAX.

A check is a generator that yields cases and returns a sentence for the report. A case holds the arrays that a layer
returns when it runs in a certain way, such as under `jax.jit`. A case also holds the expected arrays. `_subject`
defines the function under test and compares cases; `_derivatives` and `_consistency` define the checks; `_checkers`
runs them, and makes the report.
"""

from ._checkers import assert_equivalent, check_layer, gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

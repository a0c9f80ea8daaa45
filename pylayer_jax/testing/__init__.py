"""Checks of layers for a test suite: against numerical gradients, against a reference, and under each transform.

A check is a generator of cases, which returns a sentence about its cases. A case holds the arrays from one way to run a
layer, and the arrays that they must equal; `_compare` compares the two. `check_layer` runs the table of checks in
`_check_layer`; `gradcheck`, `gradgradcheck` and `assert_equivalent` run some checks, on a function or on its gradient.

Each module imports only modules before it in this list: `_compare`, `_tensor_function`, `_subject`, `_gradients`,
`_runs`, `_forward_mode`, `_gradcheck`, `_check_layer`.
"""

from ._check_layer import check_layer
from ._gradcheck import assert_equivalent, gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

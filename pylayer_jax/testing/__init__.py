"""Checks a layer against numerical gradients, against a reference, and under each transform of JAX.

A check is a generator that yields cases and returns a sentence for the report. A case holds the arrays that a layer
returns in one way to run it, and the expected arrays; `_compare` compares both. `check_layer` runs the table of checks
in `_check_layer`. `gradcheck`, `gradgradcheck` and `assert_equivalent` run some of these checks.

Each module imports only modules before it in this list: `_compare`, `_tensor_function`, `_subject`, `_gradients`,
`_runs`, `_forward_mode`, `_gradcheck`, `_check_layer`.
"""

from ._check_layer import check_layer
from ._gradcheck import assert_equivalent, gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

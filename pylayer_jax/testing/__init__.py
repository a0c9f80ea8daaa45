"""Checks of layers for a test suite: against numerical gradients, against a reference, and under each transform.

A check is a generator of cases, and ends with a sentence about them. A case is what one way to run a layer gives, beside
what it must equal; one function compares them, with a tolerance. `check_layer` runs a table of checks; `gradcheck`,
`gradgradcheck` and `assert_equivalent` run some rows of it, on a function or on its gradient.

The modules, each of which imports only those above it:

- `_internals`: what the checkers use of the rest of the package;
- `_compare`: a case, a tolerance, and the comparison;
- `_tensor_function`: a function at its arguments, as a function of the tensors in them;
- `_subject`: such a function, or its gradient, with its results in eager mode;
- `_other_values`: other values of the arguments, at which errors show that the given ones may hide;
- `_gradients`, `_runs`, `_transforms`, `_forward_mode`: the checks;
- `_gradcheck`: `gradcheck`, `gradgradcheck` and `assert_equivalent`;
- `_report`: a row per check, shown as it is done, and the hints below the table;
- `_check_layer`: the table of all checks.
"""

from ._check_layer import check_layer
from ._gradcheck import assert_equivalent, gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

"""Checks of layers for a test suite: against numerical gradients, against a reference, and under each transform.

The modules, each of which imports only those above it:

- `_comparison`: arrays against expected ones, and the errors of the checkers;
- `_flat_function`: a function at its arguments, as a function of a list of tensors;
- `_runs`: its gradients in every way in which JAX may compute them, and the detection of leaked tracers;
- `_other_values`: other values of the arguments, at which errors show that the given ones may hide;
- `_central_differences`: numerical derivatives; `_numerical_gradients`: gradients against these, for `_gradcheck`;
- `_equivalence`: outputs and derivatives against those of a reference in plain JAX;
- `_layer_under_test`: a layer with its results in eager mode, and the comparison of runs with these: runs under jit,
  vmap, scan and other transforms come from `_transforms`, those of other cotangents from `_linear`, those where other
  gradients are taken from `_as_constant`, with the help of `_hidden_tensors`. `_forward_mode` compares tangents;
- `_report`: the table of results, and the hints below it; `_progress` shows them as they come;
- `_check_layer`: the table of all properties.
"""

from ._check_layer import check_layer
from ._equivalence import assert_equivalent
from ._gradcheck import gradcheck, gradgradcheck

__all__ = ["assert_equivalent", "check_layer", "gradcheck", "gradgradcheck"]

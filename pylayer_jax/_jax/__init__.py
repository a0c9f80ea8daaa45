"""This subpackage contains all code that depends on the internals of JAX. Its modules do not depend on layers.

- `traces` imports the names of JAX that may move between versions. It finds the active traces, and discovers the
  classes of tracers from tracers that JAX makes.
- `types` has functions for types of arrays.
- `jaxprs` stages a function to a jaxpr, evaluates a part of a jaxpr, and reads JAX's source information.
- `rule_function` defines two primitives: a function with its own rule, and a linear map with its own transpose. It has
  the rules for batches, checkpoints, dead code and `checkify`, and functions that return their operands.
- `host_call` defines a function of NumPy arrays as an operation.
- `linearity` proves that a jaxpr is linear.
"""

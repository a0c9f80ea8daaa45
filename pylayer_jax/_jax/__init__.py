"""This subpackage contains all code that depends on the internals of JAX. Its modules do not depend on layers.

- `imports` imports the names of JAX that may move between versions.
- `tracers` finds the active traces, and learns the classes of tracers from tracers that JAX makes.
- `types` has functions for types of arrays, and `masks` has functions for lists with masks.
- `jaxprs` stages a function to a jaxpr, and evaluates a part of a jaxpr.
- `primitives` registers the primitives of this package.
- `rule_function` defines two primitives: a function with its own rule, and a linear map with its own transpose.
- `identities` defines functions that return their operands, but change how JAX transforms these operands.
- `transparency` registers the rules by which checkpoints, dead code elimination and `checkify` see a function's code.
- `linearity` proves that a jaxpr is linear.
"""

"""All code that depends on the internals of JAX. No module here knows about layers.

- `imports`: names of JAX that may move between versions.
- `tracers`: the active traces, and the classes of tracers, which are read from tracers that JAX makes.
- `types`, `masks`: types of arrays; lists with masks.
- `jaxprs`: staging a function to a jaxpr, and evaluating a part of it.
- `primitives`: how a primitive of this package is registered.
- `rule_function`: a function with its rule, and a linear map with its transpose: the two primitives of the package.
- `linearity`: the proof that a jaxpr is linear.
"""

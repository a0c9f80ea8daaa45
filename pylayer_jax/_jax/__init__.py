"""Everything that knows how JAX works inside. No module here knows what a layer is.

- `imports`: names of JAX that may move between versions.
- `tracers`: the active traces and the classes of tracers, learned by looking.
- `types`, `masks`: types of arrays; lists with masks.
- `jaxprs`: staging a function to a jaxpr, and evaluating a part of it.
- `primitives`: how a primitive of ours is registered.
- `rule_function`: a function with its rule, and a linear map with its transpose: the two primitives of the package.
- `linearity`: the proof that a jaxpr is linear.
"""

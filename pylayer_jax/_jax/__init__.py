"""Imports and helpers that depend on JAX's internals.

- `imports`: the only importer of names of JAX that may move between versions.
- `probes`: the classes of tracers and traces, learned from what a traced function sees.
- `tracers`: facts about tracers, and about the traces that are active.
- `mapped_axes`: which values `jax.vmap` maps, and along which axes.
- `types`: shapes, dtypes, weak types, shardings; zeros of a type.
- `masks`: lists of values and masks.
- `jaxprs`: making jaxprs, reading and changing them.
- `define_primitive`: entering a primitive into the rule tables of JAX; mapping a function as a batching rule does.
- `rule_function`: a function with its rule.
- `linear_map`: a linear map with its transpose.
- `undecided_mode`: a rule of its own for reverse mode, where JAX makes one jaxpr for both modes.
- `custom_vjp`: functions with a rule for reverse mode; `run_log`: what each of their runs leaves.
- `identity_primitives`: primitives that compute nothing.
- `host_calls`: the primitive that runs a function on the host.
"""

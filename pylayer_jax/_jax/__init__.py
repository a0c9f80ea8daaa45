"""All code that depends on the internals of JAX. It does not depend on layers.

`traces` imports the names that JAX may move; `types` and `jaxprs` build on it. `rule_function` and `host_call` define
the primitives of this package, `transparency` how JAX's transformations treat a `rule_function`. `linearity` proves
that a jaxpr is linear.
"""

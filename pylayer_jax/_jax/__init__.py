"""This subpackage contains all code that depends on the internals of JAX. Its modules do not depend on layers.

`traces` imports the names that JAX may move, and `types` and `jaxprs` build on it. `rule_function` and `host_call`
define the primitives of this package, `transparency` defines how JAX's transformations treat a `rule_function`, and
`linearity` proves that a jaxpr is linear.
"""

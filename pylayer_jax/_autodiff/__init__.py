"""One call of a layer, and its derivatives of every order.

- `errors`: errors of derivatives that do not exist.
- `linearity`: a proof that a jaxpr is linear in some of its inputs.
- `transpose`: the transpose of a `backward`, or of a `forward` that a `backward` applies.
- `derivative`: the derivative of one run, with the batches and the packing that were laid on it.
- `tangent_map`: that derivative as one linear operation.
- `call`: one call of `apply`, as it travels through JAX.
- `saved_state`: the non-array state that `forward` saved.
- `run_forward`, `backward_rule`: running the methods of the class.
- `residuals`: the arrays that JAX keeps, packed and named.
- `intermediate_tangents`: tangents of the tensors that `forward` saved and that are neither inputs nor outputs.
- `refs`: arguments that are a `jax.Ref`.
- `staged_call`, `staged_call_batching`, `staged_call_rules`: a call with its `forward` as a jaxpr, and the primitive of
  that name, which makes the rule hold at every order (NOTE [orders]).
- `forward_rule`: running a layer that is differentiated; both bindings share it (NOTE [two bindings]).
- `custom_vjp`, `forward_mode_call`: the two bindings.
"""

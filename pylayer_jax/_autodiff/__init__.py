"""One call of a layer, and its derivatives of every order.

- `refusals`: errors of derivatives that do not exist.
- `linearity`: a proof that a jaxpr is linear in some of its inputs.
- `transpose`: the transpose of a `backward`, or of a `forward` that a `backward` applies.
- `derivative`: the derivative as one linear operation, *tangent_map*; and for a batch.
- `call`: one call of `apply`, as it travels through JAX.
- `saved_state`: everything that a run of `forward` left for `backward`.
- `forward`, `backward`: running the methods of the class.
- `residuals`: the arrays that JAX keeps, packed and named.
- `intermediates`: tangents of the tensors that `forward` saved and that are neither inputs nor outputs.
- `staged_call`, `staged_call_batching`, `staged_call_rules`: a call with its `forward` as a jaxpr, and the primitive of
  that name, which makes the rule hold at every order (NOTE [orders]).
- `differentiate`: the part that both bindings share (NOTE [two bindings]).
- `custom_vjp`, `eager_call`: the two bindings.
"""

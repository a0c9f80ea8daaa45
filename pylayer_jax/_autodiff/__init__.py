"""One call of a layer, and its derivatives of every order.

NOTE [orders]
`jax.custom_vjp` differentiates the body of its forward rule the second time, so that a custom rule holds at first order
only. Here a layer is a function with its rule (`_jax.rule_function`), which holds at every order:

    run:   inputs -> outputs, intermediates        by `forward`, whose context records what it keeps
    rule:  values = run(inputs)                    the same function, so that the rule holds at the next order too
           residuals = what `backward` needs, taken from the inputs and the values
           tangents of the outputs       = tangent map of (residuals; tangents of the inputs)
           tangents of the intermediates = code of `forward`, at (inputs, outputs; their tangents)

The tangent map is linear in the tangents and knows its transpose, which is `backward` (`tangent_map`). What JAX sees:

- **First order, reverse mode.** In front stands the `jax.custom_vjp` function of the class. Its forward rule calls the
  function above and keeps the residuals; its backward rule runs `backward`. On concrete values, which nobody else
  differentiates, the forward rule calls `forward` itself.
- **Second order.** The forward rule is code that an outer differentiation goes through. It finds the one equation of
  the function, and asks for its rule: the tangents of the residuals are those of outputs by the rule, of inputs by what
  the caller has done, of intermediates by the code. Then it goes through the body of `backward`. The rule has called
  the same function on its primals, and so on for each order.
- **Forward mode.** The function without a `jax.custom_vjp` function in front: the tangent map is evaluated, which
  transposes `backward` (`transpose_backward`, after a proof by `linearity`) or runs the `jvp` of the class. The same
  where `jax.jvp` differentiates a derivative, and within a `backward`, which JAX may transpose.
- **vmap.** The same function of vmap(run) and vmap(rule). A class with its own `vmap` has another run for a batch.

A residual is told by its source, since the derivatives differ. Objects are compared in the jaxpr, where each argument
has a variable of its own, and where JAX returns the operand of a no-op such as `x.reshape(x.shape)`:

- an input is handed on by the caller and keeps its own derivative, also where it is returned;
- an output carries the rule; of one object that is returned twice, the last counts. An output that is marked
  non-differentiable is a constant;
- any other tensor is an intermediate: code of `forward`, of the inputs and of the outputs that carry the rule.

`forward` becomes a jaxpr where it is differentiated under a trace (`stage_forward`). Host code, which cannot be traced,
runs on the numbers below an eager differentiation (`host_forward`); what it computed apart from its outputs has no
derivative, and asking for one is an error. A call that takes a `jax.Ref` is a plain `jax.custom_vjp` (`ref_call`).

Tried and left: a nested `jax.custom_vjp` has no forward mode over it; a `jax.custom_jvp` loses its rule in a scan with
jax 0.10; without a `jax.custom_vjp` in front, for every class, an eager gradient takes half as many Python calls again.

The modules, ground first:

- `linearity`: a proof that a jaxpr is linear in some of its inputs.
- `transpose_backward`: the transpose of a `backward`, or of a `forward` that a `backward` applies; errors.
- `layer_call`: one call of `apply`, as it travels through JAX.
- `saved_state`: the non-array state that `forward` saved.
- `run_forward`, `run_backward`: running the methods of the class.
- `pack_residuals`: the arrays that JAX keeps, packed and named.
- `summed_cotangents`: a warning where `backward` adds up over devices what JAX has added up.
- `tangent_map`, `code_tangents`: the two kinds of tangents.
- `own_vmap`, `ref_call`, `host_forward`: what is different for a class with a `vmap`, for a Ref, for host code.
- `stage_forward`: `forward` as a function with its rule.
- `layer_rule`: a layer as a function with its rule, and the `jax.custom_vjp` function in front of it.
"""

"""The methods that a user writes on a class: one module for each, with the values that it takes and returns.

- `apply_descriptor`: the method that users call, with the signature and the types of `forward`.
- `arguments`: the arguments of `forward`, bound to its signature.
- `context`: the `ctx` that carries values from `forward` to `backward`.
- `outputs`: the outputs of `forward`, and the cotangents for `backward`.
- `fitting`: gradients and tangents, in the shapes and dtypes that they must have.
- `gradients`: the gradients that `backward` returned, matched to the arguments.
- `tangents`: the tangents that `jvp` gets, and those that it returned.
- `batches`: the batch that `vmap` gets, and the outputs that it returned.
- `declarations`: the flags and names of a class, checked when it is made.
- `mistakes`: warnings and errors for a forgotten return, and for parameters too few or too many.
- `once_differentiable`: the decorator for a `backward` without a derivative.

Nothing in here knows how JAX differentiates. Each module checks values that a user gave, and raises errors about them.
"""

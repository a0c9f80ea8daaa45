"""Pytrees: arguments, outputs and saved values of any structure.

- `partition`: tensors and statics, separated.
- `opaque`: Python objects that travel in a treedef.
- `changes`: whether a container was changed in place.
- `habits`: names of tensors of torch and Paddle, and what to write in JAX.
- `messages`: how error messages show values.
- `matching`: a pytree that a user returned, laid along another.
- `closures`: traced values hidden inside functions and objects.
"""

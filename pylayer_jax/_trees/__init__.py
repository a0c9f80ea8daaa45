"""Pytrees: arguments, outputs and saved values of any structure.

- `partition`: tensors and statics, separated.
- `opaque`: Python objects that travel in a treedef.
- `changes`: whether a container was changed in place.
- `hints`: how to write code that ended in an error of Python or JAX.
- `messages`: how error messages show values.
- `matching`: a pytree that a user returned, laid along another.
- `closures`: traced values hidden inside functions and objects.
"""

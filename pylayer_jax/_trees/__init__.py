"""Pytrees: arguments, outputs and saved values of any structure.

- `partition`: tensors and statics, separated.
- `opaque`: Python objects that travel in a treedef.
- `changes`: whether a container was changed in place.
- `hints`: what to write in place of code that ended in an error.
- `messages`: how error messages show values.
- `matching`: a pytree that a user returned, laid along another.
- `closures`: traced values hidden inside functions and objects.
"""

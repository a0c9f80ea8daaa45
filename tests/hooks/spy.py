"""A pair of hooks that counts its calls, and arrays, for the tests of this folder."""

from __future__ import annotations

import jax.numpy as jnp

from pylayer_jax import saved_tensors_hooks

A = jnp.linspace(0.5, 2.0, 6).reshape(2, 3)
B = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
X = jnp.array([0.2, -0.4, 0.9])


class Spy:
    """A pair that logs what it sees, and hides the values in between."""

    def __init__(self, **flags):
        self.log = []
        self.hooks = saved_tensors_hooks(self.pack, self.unpack, **flags)

    def pack(self, x):
        self.log.append("pack")
        return {"hidden": x * 2} if jnp.issubdtype(x.dtype, jnp.floating) else x

    def unpack(self, packed):
        self.log.append("unpack")
        return packed["hidden"] / 2 if isinstance(packed, dict) else packed

    def counts(self):
        return self.log.count("pack"), self.log.count("unpack")

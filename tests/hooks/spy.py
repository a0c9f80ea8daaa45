"""A pair of hooks that counts its calls, and what the tests of this folder do with a pair."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pylayer_jax import saved_tensors_hooks
from tests.kit import modes
from tests.kit.layers import Tanh
from tests.kit.transforms import FIRST_ORDER, FORWARD_OVER_REVERSE, SAME_AS, SECOND_ORDER

# A `with` block at top level that packs nothing warns: see test_origins.py.
IDLE = pytest.mark.filterwarnings("ignore:.* 0 tensors packed:UserWarning")
# A limit that cannot be kept warns: see test_limit.py.
AT_LEAST = pytest.mark.filterwarnings("ignore:recompute_saved. .* the least:UserWarning")

A = jnp.linspace(0.5, 2.0, 6).reshape(2, 3)
B = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)
X = jnp.array([0.2, -0.4, 0.9])

# The eager gradient, and the two orders of jit and grad.
GRADIENTS = [*modes.GRADIENTS.values()]


class Held:
    """A packed tensor: an object with a NumPy array, which a WeakSet can hold."""

    def __init__(self, x):
        self.x = np.array(x)


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


def noting(seen, note=lambda x: x.shape, **flags):
    """A pair that changes nothing, and adds the shape, or another note, of each tensor to a list."""

    def pack(x):
        seen.append(note(x))
        return (x,)

    return saved_tensors_hooks(pack, lambda packed: packed[0], **flags)


def in_block(hooks, f):
    def block(*args):
        with hooks:
            return f(*args)

    return block


def is_matrix(x):
    return x.ndim > 1


def tanh_sum(x):
    return Tanh.apply(x).sum()


def tanh_slope(x):
    return 1 - jnp.tanh(x) ** 2


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def relative_error(found, expected, at_least=0.0):
    """Return the norm of the error of a tree over that of the expected one, or over `at_least`."""
    found, expected = (np.concatenate([np.ravel(g) for g in jax.tree.leaves(tree)]) for tree in (found, expected))
    return float(np.linalg.norm(found - expected) / max(at_least, np.linalg.norm(expected)))


def bytes_held(pullback):
    return sum({id(x): x.nbytes for x in jax.tree.leaves(pullback)}.values())


def assert_close(found, expected, tolerance):
    """Assert that the largest error is small next to the largest entry."""
    assert found.dtype == expected.dtype
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def temporary_bytes(f, *args):
    compiled = jax.jit(jax.grad(f, tuple(range(len(args))))).lower(*args).compile()
    return compiled.memory_analysis().temp_size_in_bytes


# Each from a scalar function and its arguments to numbers.
TRANSFORMS = {**FIRST_ORDER, **SECOND_ORDER, **FORWARD_OVER_REVERSE}


def without_hooks(f, args):
    """The numbers that a transform gives for `f`, by its name: compiled once for all that give the same."""

    @functools.cache
    def compiled(name):
        return jax.jit(lambda *args: TRANSFORMS[name](f, args))(*args)

    return lambda name: compiled(SAME_AS[name])

"""A character transformer on English text, as people train it.

Its activation, norm and loss are functions with a gradient of their own, in each of the ways to write one.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax import PyLayer

from .results import BY_HAND, PYLAYER

Array = jax.Array
Params = dict[str, Any]


class Parts(NamedTuple):
    """The functions of a model that have a gradient of their own, in one way to write them."""

    activation: Callable[[Array], Array]
    norm: Callable[[Array], Array]  # each row to mean 0 and variance 1
    loss: Callable[[Array, Array], Array]  # from logits [..., classes] and integer targets [...] to losses [...]


class Transformer(NamedTuple):
    """A transformer that predicts the next character; pre-norm, causal, without biases."""

    depth: int
    width: int = 64
    heads: int = 4
    length: int = 64
    batch: int = 32
    characters: int = 96

    def init(self) -> Params:
        wide = self.width
        sizes = {"q": (wide, wide), "k": (wide, wide), "v": (wide, wide), "out": (wide, wide)}
        sizes |= {"up": (wide, 4 * wide), "down": (4 * wide, wide)}
        keys = iter(jax.random.split(jax.random.key(0), 3 + len(sizes)))

        def normal(*shape: int) -> Array:
            return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

        return {
            "embedding": normal(self.characters, wide),
            "position": normal(self.length, wide),
            "head": normal(wide, self.characters),
            "blocks": {name: normal(self.depth, *shape) for name, shape in sizes.items()},
        }

    def data(self) -> Array:
        """Characters [batch, length + 1] of Python's own documentation."""
        text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
        numbers = np.clip(np.frombuffer(text, np.uint8).astype(np.int32) - 31, 0, self.characters - 1)
        starts = np.random.default_rng(0).integers(0, len(numbers) - self.length - 1, (self.batch, 1))
        return jnp.asarray(numbers[starts + np.arange(self.length + 1)])

    def loss(self, parts: Parts, scan: bool) -> Callable[..., Array]:
        """The mean loss as a function of parameters and characters [batch, length + 1].

        `scan`: whether the blocks run in a scan over layers; otherwise in a Python loop.
        """

        def run(x: Array, w: Params) -> Array:
            h = parts.norm(x)
            q, k, v = (self._split(h @ w[name]) for name in ("q", "k", "v"))
            scores = jnp.einsum("bhqd,bhkd->bhqk", q, k) / q.shape[-1] ** 0.5
            scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e30)
            mixed = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, axis=-1), v)
            x = x + mixed.swapaxes(1, 2).reshape(x.shape) @ w["out"]
            return x + parts.activation(parts.norm(x) @ w["up"]) @ w["down"]

        def loss(params: Params, characters: Array) -> Array:
            x = params["embedding"][characters[:, :-1]] + params["position"]
            if scan:
                x = jax.lax.scan(lambda x, w: (run(x, w), None), x, params["blocks"])[0]
            else:
                for i in range(self.depth):
                    x = run(x, jax.tree.map(lambda w, i=i: w[i], params["blocks"]))
            return jnp.mean(parts.loss(parts.norm(x) @ params["head"], characters[:, 1:]))

        return loss

    def _split(self, x: Array) -> Array:
        return x.reshape(*x.shape[:2], self.heads, self.width // self.heads).swapaxes(1, 2)


# -- the same maths, once -------------------------------------------------------------------------


def _gelu(x: Array) -> tuple[Array, tuple[Array, ...]]:
    t = jnp.tanh(0.7978845608 * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + t), (x, t)


def _gelu_gradient(kept: tuple[Array, ...], dy: Array) -> Array:
    x, t = kept
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * 0.7978845608 * (1 + 0.134145 * x**2))


def _norm(x: Array) -> tuple[Array, tuple[Array, ...]]:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-6)
    return centred * scale, (centred * scale, scale)


def _norm_gradient(kept: tuple[Array, ...], dy: Array) -> Array:
    y, scale = kept
    return scale * (dy - jnp.mean(dy, axis=-1, keepdims=True) - y * jnp.mean(dy * y, axis=-1, keepdims=True))


def _cross_entropy(logits: Array, targets: Array) -> tuple[Array, tuple[Array, ...]]:
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    return (total - picked)[..., 0], (jnp.exp(logits - total), targets)


def _cross_entropy_gradient(kept: tuple[Array, ...], dy: Array) -> Array:
    probabilities, targets = kept
    return dy[..., None] * (probabilities - jax.nn.one_hot(targets, probabilities.shape[-1]))


# -- in each of the ways to write it --------------------------------------------------------------


Run = Callable[..., tuple[Array, Any]]  # what comes out, and what is kept for the gradient
Gradient = Callable[[Any, Array], Array]


def _of_parts(way: Callable[[Run, Gradient], Any]) -> Callable[[], Parts]:
    """Return the function that makes all parts anew in this way, so that no cache of JAX has seen them."""
    pairs = (_gelu, _gelu_gradient), (_norm, _norm_gradient), (_cross_entropy, _cross_entropy_gradient)
    return lambda: Parts(*(way(run, gradient) for run, gradient in pairs))


@_of_parts
def pylayer(run: Run, gradient: Gradient) -> Any:
    class Layer(PyLayer):
        @staticmethod
        def forward(ctx, *args):
            y, kept = run(*args)
            ctx.save_for_backward(*kept)
            return y

        @staticmethod
        def backward(ctx, dy):
            return gradient(ctx.saved_tensor(), dy)

    return Layer.apply


@_of_parts
def custom_vjp(run: Run, gradient: Gradient) -> Any:
    function = jax.custom_vjp(lambda *args: run(*args)[0])
    none_for_targets = [None] if run is _cross_entropy else []
    function.defvjp(run, lambda kept, dy: (gradient(kept, dy), *none_for_targets))
    return function


WAYS = {PYLAYER: pylayer, BY_HAND: custom_vjp}

"""Pieces of random programs that also read arrays from outside, which are differentiated too."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax import Function, PyLayer
from tests.kit.layers import layer

SHAPE = (4, 8)
W = np.cos(np.arange(64.0)).reshape(8, 8) * 0.3
MASK = np.arange(32).reshape(SHAPE) % 3 > 0


class Outside(NamedTuple):
    """Arrays that a program gets beside its first argument."""

    ws: Any  # stacked weights, (3, 8, 8)
    b: Any  # (8,)
    key: Any
    tokens: Any  # (4,) integers from 0 to 7


def outside(seed: int, is_typed_key: bool = True) -> Outside:
    rng = np.random.default_rng(seed)
    ws, b = jnp.asarray(rng.normal(size=(3, 8, 8)) * 0.4, float), jnp.asarray(1 + 0.3 * rng.normal(size=8), float)
    key = (jax.random.key if is_typed_key else jax.random.PRNGKey)(seed)
    return Outside(ws, b, key, jnp.asarray(rng.integers(0, 8, 4), jnp.int32))


# Stacks of weights, as functions of the outside arrays and of a value of the program.
VIEWS = {
    "ws": lambda o, a: o.ws,
    "transposed": lambda o, a: o.ws.transpose(0, 2, 1),
    "narrow": lambda o, a: o.ws.astype(jnp.bfloat16),
    "part": lambda o, a: o.ws[1:],
    "reversed": lambda o, a: o.ws[::-1],
    "reshaped": lambda o, a: o.ws.reshape(-1, 8)[4:20].reshape(2, 8, 8),
    "from b": lambda o, a: jnp.broadcast_to(o.b * 0.1, (3, 8, 8)),
    "gathered": lambda o, a: o.ws[jnp.argsort(a.sum(-1))[:3] % 3],
    "by token": lambda o, a: jnp.take(o.ws, o.tokens[:2] % 3, axis=0),
    "sliced": lambda o, a: lax.dynamic_slice_in_dim(o.ws, jnp.argmax(a[0]) % 2, 2),
    "computed": lambda o, a: jnp.tanh(o.ws),
}


class NamedDense(PyLayer):
    """Layer that names some of what it saves."""

    saved_names = ("named", None, "y")

    @staticmethod
    def forward(ctx, x, w):
        y = jnp.tanh(x @ w)
        ctx.save_for_backward(x, w, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, w, y = ctx.saved_tensors
        dh = dy * (1 - y**2)
        return dh @ w.T, x.T @ dh


class Several(PyLayer):
    """Layer with three outputs, of which programs use one. The cotangents of the others are None."""

    saved_names = True

    @staticmethod
    def forward(ctx, x, b):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(jnp.sin(x), jnp.cos(x), b)
        return jnp.sin(x) * b, jnp.cos(x), jnp.argmax(x)

    @staticmethod
    def backward(ctx, dy, dc, _):
        s, c, b = ctx.saved_tensors
        parts = [d for d in (dy is not None and dy * b * c, dc is not None and -dc * s) if d is not False]
        return sum(parts), None if dy is None else dy * s


class Tree(PyLayer):
    """Layer of a dict with a static entry, that returns a dict with one."""

    @staticmethod
    def forward(ctx, parameters, x):
        ctx.h, ctx.x, ctx.w = x @ parameters["w"] + parameters["b"], x, parameters["w"]
        return {"y": jnp.tanh(ctx.h), "h": ctx.h * 2, "mode": parameters["mode"]}

    @staticmethod
    def backward(ctx, d):
        dh = d["y"] * (1 - jnp.tanh(ctx.h) ** 2) + 2 * d["h"]
        return {"w": ctx.x.T @ dh, "b": dh.sum(0), "mode": None}, dh @ ctx.w.T


def root(x):
    square = 1 + x * x
    return lax.fori_loop(0, jnp.where(square.max() < 100, 8, 12), lambda _, y: 0.5 * (y + square / y), square)


Newton = layer(root, lambda x, dy: dy * x * lax.rsqrt(1 + x * x), Function, "Newton", plain=True)  # a while loop


@jax.custom_jvp
def softened(x):
    return jnp.logaddexp(x, 0.0)


softened.defjvp(lambda primals, tangents: (softened(*primals), tangents[0] * jax.nn.sigmoid(primals[0])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ruled_dense(scale, x, w, tokens):
    return jnp.tanh(x @ w) * scale + tokens[:, None]


def ruled_backward(scale, saved, dy):
    x, w, h = saved
    dh = dy * scale * (1 - h**2)
    return dh @ w.T.astype(dh.dtype), (x.T @ dh).astype(w.dtype), None


ruled_dense.defvjp(lambda scale, x, w, n: (ruled_dense(scale, x, w, n), (x, w, jnp.tanh(x @ w))), ruled_backward)


@jax.jit
def dense(x, w):
    return jax.jit(jax.nn.gelu)(jax.jit(jnp.matmul)(x, w)) + x


@jax.jit
def with_unused(x, w):
    h = x @ w
    return {"h": jax.nn.silu(h), "unused": jnp.exp(h), "largest": h.argmax(-1)}


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, jnp.float32(0.7), x.shape), x / 0.7, 0)


def noise(key, shape=SHAPE):
    return jax.random.normal(key, shape, jnp.float32)


def halvings(x):
    start = lax.stop_gradient(jnp.abs(x)), 0
    return lax.while_loop(lambda s: (s[0].max() > 0.5) & (s[1] < 9), lambda s: (s[0] * 0.5, s[1] + 1), start)[1]


def index(x, n):
    return (jnp.abs(x.sum()) * 3).astype(jnp.int32) % n


def swiglu(x, w):
    low, high = jnp.split(x @ w, 2, axis=-1)
    return jnp.concatenate([jax.nn.silu(low) * high, low], axis=-1)


def cross_entropy(x, tokens):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), tokens[:, None], axis=-1) * x


def layer_norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-2) * scale


def convolved(x, w):
    kernel = w[:3, :1].T[None].astype(x.dtype)
    return lax.conv_general_dilated(x[:, None], kernel, (1,), "SAME")[:, 0]


BRANCHES = [lambda x, w: jnp.tanh(x @ w), lambda x, w: x * 0.5, lambda x, w: jax.nn.gelu(x) + w[:4]]
# From two values, a stack of weights and the outside arrays to an array.
PIECES = {
    "affine": lambda a, b, s, o: a @ s[0] + o.b,
    "normed": lambda a, b, s, o: layer_norm(a, o.b),
    "condition": lambda a, b, s, o: lax.cond(a[0, 0] < 0.3, *BRANCHES[:2], a, s[0]),
    "closed condition": lambda a, b, s, o: lax.cond(b.mean() < a.mean(), lambda: a @ s[1], lambda: b * o.b),
    "branches": lambda a, b, s, o: lax.switch(index(a, 3), BRANCHES, a, s[0]),
    "branch of a token": lambda a, b, s, o: lax.switch(o.tokens[0] % 3, BRANCHES, b, s[1]),
    "halved": lambda a, b, s, o: a * halvings(b),
    "counted": lambda a, b, s, o: a + lax.fori_loop(0, o.tokens[1], lambda _, c: jnp.sin(c), lax.stop_gradient(b)),
    "fori": lambda a, b, s, o: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ s[i]) + b, a),
    "mapped rows": lambda a, b, s, o: lax.map(lambda row: jnp.tanh(row @ s[0]) * o.b, a),
    "batches of rows": lambda a, b, s, o: lax.map(lambda row: jax.nn.silu(row @ s[0]), a, batch_size=2),
    "each weight": lambda a, b, s, o: jax.vmap(lambda w: jax.nn.gelu(a @ w))(s).mean(0),
    "dropped": lambda a, b, s, o: jnp.sin(dropout(a, o.key)),
    "noisy": lambda a, b, s, o: jnp.tanh(a + noise(jax.random.fold_in(o.key, 1))) * noise(jax.random.split(o.key)[0]),
    "permuted": lambda a, b, s, o: jax.random.permutation(o.key, a) * b,
    "random condition": lambda a, b, s, o: lax.cond(jax.random.bernoulli(o.key), *BRANCHES[:2], a, s[1]),
    "NamedDense": lambda a, b, s, o: NamedDense.apply(a, s[0]),
    "first of Several": lambda a, b, s, o: Several.apply(a, o.b)[0] * b,
    "second of Several": lambda a, b, s, o: Several.apply(a, b)[1] @ s[0],
    "Tree": lambda a, b, s, o: Tree.apply({"w": s[0], "b": o.b, "mode": "text"}, a)["y"],
    "Newton": lambda a, b, s, o: Newton.apply(a),
    "scan of layers": lambda a, b, s, o: lax.scan(lambda c, w: (NamedDense.apply(c, w), c[0]), a, s)[0],
    "softened": lambda a, b, s, o: softened(a @ s[0]) * b,
    "ruled dense": lambda a, b, s, o: ruled_dense(0.5, a, s[0], o.tokens),
    "jitted dense": lambda a, b, s, o: dense(dense(a, s[0]), s[1]),
    "unused entry": lambda a, b, s, o: with_unused(a, s[0])["h"] * o.b,
    "named dense": lambda a, b, s, o: checkpoint_name(jax.nn.gelu(checkpoint_name(a @ s[0], "named")), "y") + a,
    "embedded": lambda a, b, s, o: s[0][o.tokens] * a,
    "one-hot": lambda a, b, s, o: jax.nn.one_hot(o.tokens, 8, dtype=a.dtype) @ s[0] + a,
    "along": lambda a, b, s, o: jnp.take_along_axis(a, jnp.argsort(b, -1), -1) * o.b,
    "routed": lambda a, b, s, o: jnp.einsum("nd,ndk->nk", a, s[jnp.argmax(a[:, :2], -1)]),
    "cross entropy": lambda a, b, s, o: cross_entropy(a @ s[0], o.tokens),
    "scattered": lambda a, b, s, o: a.at[o.tokens % 4].add(jnp.sin(b)).at[0].set(o.b),
    "swiglu": lambda a, b, s, o: swiglu(a, s[0]) + b,
    "rolled": lambda a, b, s, o: a * jnp.cos(o.b) + jnp.roll(b, 1, -1) * jnp.sin(o.b),
    "window": lambda a, b, s, o: lax.dynamic_slice(jnp.concatenate([a, jnp.tanh(b)]), (o.tokens[0] % 4, 0), SHAPE),
    "convolved": lambda a, b, s, o: jnp.tanh(convolved(a, s[0])),
    "narrow dense": lambda a, b, s, o: jax.nn.gelu(a.astype(jnp.bfloat16) @ s[0].astype(jnp.bfloat16)),
    "attention over ws": lambda a, b, s, o: jax.nn.softmax((a @ s[0]) @ (b @ s[1]).T) @ b + a,
    "solved": lambda a, b, s, o: jnp.linalg.solve(3 * jnp.eye(8, dtype=a.dtype) + s[0] @ s[0].T.astype(a.dtype), a.T).T,
    "log of sums": lambda a, b, s, o: a - jax.nn.logsumexp(a, -1, keepdims=True) * jnp.prod(1 + 0.1 * b, -1)[:, None],
    "running": lambda a, b, s, o: lax.cummax(a, 1) + lax.associative_scan(jnp.multiply, jax.nn.sigmoid(b), axis=1),
    "sorted pairs": lambda a, b, s, o: lax.sort((a, jnp.sin(b)), num_keys=1)[1] * o.b,
}


def layers(f, a, b, s, o):
    for w in s:
        a = a + f(a @ w)
    return a


def conditions(f, a, b, s, o):
    for i in range(len(s)):
        a = lax.cond(a[i, 0] < 0.3, lambda x, w: f(x @ w), lambda x, w: x, a, s[i])
    return a


def nested_scans(f, a, b, s, o):
    def body(c, w):
        return f(lax.scan(lambda c, w: (jnp.tanh(c @ w), None), c, s)[0]) @ w + o.b, c.mean()

    return lax.scan(body, a, s[:2])[0]


def called_twice(f, a, b, s, o):
    g = jax.jit(lambda x, w: (f(x) @ w, x.sum()))
    return g(a, s[0])[0] + g(b, s[1])[0]


CHECKPOINTS = jax.checkpoint_policies
# The same, from a function of one array first.
OUTER = {
    "layers": layers,
    "conditions": conditions,
    "condition on f": lambda f, a, b, s, o: lax.cond(a[0, 0] < b.mean(), lambda x, w: f(x) @ w, BRANCHES[2], a, s[0]),
    "branches of f": lambda f, a, b, s, o: lax.switch(index(a, 3), [f, lambda x: f(x @ s[0]), jnp.sin], b),
    "scan over ws": lambda f, a, b, s, o: lax.scan(lambda c, w: (c + f(c @ w), c[0]), a, s)[0],
    "indexed scan": lambda f, a, b, s, o: lax.scan(lambda c, i: (f(c) @ s[i], c), a, jnp.arange(2), reverse=True)[1][1],
    "unrolled scan": lambda f, a, b, s, o: lax.scan(lambda c, w: (f(c) @ w + b, None), a, s, unroll=2)[0],
    "scan of conditions": lambda f, a, b, s, o: lax.scan(
        lambda c, w: (lax.cond(c[0, 0] < 0.3, lambda: f(c) @ w, lambda: c * o.b), None), a, s
    )[0],
    "nested scans": nested_scans,
    "scan over keys": lambda f, a, b, s, o: lax.scan(
        lambda c, k: (f(dropout(c, k)), None), a, jax.random.split(o.key, 2)
    )[0],
    "counted loop": lambda f, a, b, s, o: lax.fori_loop(0, 2, lambda i, c: f(c @ s[i]) + b, a),
    "map": lambda f, a, b, s, o: lax.map(f, jnp.stack([a, b * 0.5])).sum(0),
    "vmap over ws": lambda f, a, b, s, o: jax.vmap(lambda w: f(a @ w))(s).mean(0),
    "vmap over keys": lambda f, a, b, s, o: jax.vmap(lambda k: f(dropout(a, k)))(jax.random.split(o.key, 2)).sum(0),
    "jit with w": lambda f, a, b, s, o: jax.jit(lambda x, w: f(x) @ w)(a, s[0]),
    "called twice": called_twice,
    "remat of names": lambda f, a, b, s, o: jax.checkpoint(
        lambda x, w: f(x @ w), policy=CHECKPOINTS.save_only_these_names("named")
    )(a, s[0]),
    "remat of products": lambda f, a, b, s, o: jax.checkpoint(f, policy=CHECKPOINTS.dots_saveable)(a @ s[0]),
    "beside": lambda f, a, b, s, o: a * o.b + lax.stop_gradient(f(b)),
}

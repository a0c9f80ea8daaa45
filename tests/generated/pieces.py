"""Pieces of random programs: operations, code that reads arrays from outside, and code that contains functions."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pylayer_jax import Function, PyLayer
from tests.kit.layers import ForwardTanh, Multiply, Tanh, layer

SHAPE = (4, 8)
W = np.cos(np.arange(64.0)).reshape(8, 8).astype(np.float32) * np.float32(0.3)  # float64: jax 0.12 mixes its modes up


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


def root(x):
    square = 1 + x * x
    return lax.fori_loop(0, jnp.where(square.max() < 100, 8, 12), lambda _, y: 0.5 * (y + square / y), square)


Newton = layer(root, lambda x, dy: dy * x * lax.rsqrt(1 + x * x), Function, "Newton", plain=True)  # a while loop


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


def dropout(x, key):
    return jnp.where(jax.random.bernoulli(key, jnp.float32(0.7), x.shape), x / 0.7, 0)


def noise(key):
    return jax.random.normal(key, SHAPE, jnp.float32)


def swiglu(x, w):
    low, high = jnp.split(x @ w, 2, axis=-1)
    return jnp.concatenate([jax.nn.silu(low) * high, low], axis=-1)


def cross_entropy(x, tokens):
    return -jnp.take_along_axis(jax.nn.log_softmax(x), tokens[:, None], axis=-1) * x


def layer_norm(x, scale):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-2) * scale


# -- operations of one or two values --------------------------------------------------------------------


class Clipped(Function):
    """A clipping rule that compares its output with its limits, and keeps both of its operands."""

    @staticmethod
    def forward(ctx, x):
        y = jnp.clip(x, x.mean(), 0.8)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        return jnp.where(x == y, dy * (1 + y), 0)


@jax.custom_vjp
def largest(x):
    return jnp.where(x == x.max(), x, 0.5 * x)


largest.defvjp(lambda x: (largest(x), (x, x.max())), lambda saved, dy: (dy * jnp.where(saved[0] == saved[1], 1, 0.5),))


UNARY = {
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "softmax": jax.nn.softmax,
    "matmul": lambda x: x @ W,
    "moved": lambda x: x.reshape(2, 2, 8).transpose(1, 0, 2).reshape(SHAPE)[::-1] * 0.5,
    "cube": lambda x: 0.1 * x**3,
    "named": lambda x: checkpoint_name(x * jnp.cos(x), "named"),
    "renamed": lambda x: checkpoint_name(jnp.sin(x), "named").reshape(8, 4).reshape(SHAPE),
    "Tanh": Tanh.apply,
    "ForwardTanh": ForwardTanh.apply,
    "stopped": lambda x: x - lax.stop_gradient(x.max(-1, keepdims=True)) * 0.5,
    "sorted": lambda x: jnp.sort(x, -1),
    "gathered": lambda x: x[jnp.array([2, 0, 3, 3])],
    "erf": lax.erf,
    "expm1": lambda x: jnp.expm1(-jnp.abs(x)),
    "log": lambda x: jnp.log(0.1 + x**2),
    "log1p": lambda x: jnp.log1p(jnp.exp(-x)),
    "rsqrt": lambda x: x * lax.rsqrt(0.1 + x * x),
    "fast sin": lambda x: jnp.sin(20 * x),
    "power": lambda x: (0.1 + jnp.abs(x)) ** 1.7,
    "power of a square": lambda x: (0.5 * x**2) ** 4,
    "powers": lambda x: (1 + x * x) ** jnp.tanh(x),
    "abs": jnp.abs,
    "relu": jax.nn.relu,
    "elu": jax.nn.elu,
    "massive channel": lambda x: jax.nn.sigmoid(x * jnp.array([300.0, *[1.0] * 7], x.dtype)) * x,
    "clamp": lambda x: jnp.clip(jnp.sin(x), -0.5, 0.5) * x,
    "rounded": lambda x: x - lax.stop_gradient(x - jnp.round(4 * x) / 4) * 0.5,
    "floor": lambda x: x * jnp.floor(2 * jnp.sin(x)),
    "remainder": lambda x: x * (2 * x % 1),
    "integers": lambda x: x * (3 * x).astype(jnp.int32),
    "narrow": lambda x: jnp.sin(x).astype(jnp.bfloat16).astype(x.dtype) * x,
    "row": lambda x: x * jnp.exp(x[:1]) + x[:, :1],
    "concatenated": lambda x: jnp.concatenate([jnp.sin(x[:, :4]), x[:, 4:] ** 2], axis=-1),
    "layer norm": lambda x: jax.nn.standardize(x, epsilon=0.1) * jnp.cos(jnp.arange(8.0)).astype(x.dtype),
    "dropout": lambda x: jnp.where(jax.random.bernoulli(jax.random.key(3), jnp.float32(0.7), SHAPE), x, 0) * jnp.sin(x),
    "jitted": jax.jit(lambda x: jnp.sin(x) * jax.nn.silu(x) - jnp.tanh(x) ** 2),
    "pooled": lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3), (1, 1), "SAME"),
    "one hot": lambda x: x * jax.nn.one_hot(x.argmax(-1), x.shape[-1], dtype=x.dtype) + 0.3 * x,
    "top": lambda x: jnp.repeat(lax.top_k(x, 2)[0], 4, axis=-1) * x,
    "is largest": lambda x: x * (x == x.max(-1, keepdims=True)) + 0.5 * x,
    "masked attention": lambda x: jax.nn.softmax(jnp.where(jnp.tri(len(x), dtype=bool), x @ x.T, -1e9)) @ x,
    "Clipped": Clipped.apply,
    "custom rule": largest,
}
BINARY = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "divide": lambda a, b: a / (1 + b**2),
    "Multiply": Multiply.apply,
    "product": lambda a, b: a @ b.T @ a * 0.2,
    "chosen": lambda a, b: jnp.where(a > b, a, b * 2),
    "scaled": lambda a, b: a * b.mean(),
    "subtract": lambda a, b: a - b * 0.5,
    "larger": lambda a, b: jnp.maximum(a, b),
    "gated": lambda a, b: jax.nn.silu(a) * b,
    "residual": lambda a, b: a + jax.nn.gelu(b) * 0.3,
    "distance": lambda a, b: jnp.sqrt((a - b) ** 2 + 0.01),
}
# Rules and operations that decide by what they saved, in a larger share.
DECIDES = ["Clipped", "custom rule", "is largest", "pooled", "one hot", "top"]


def scan(f):
    weights = np.linspace(0.5, 1.0, 3)
    return lambda a, b: lax.scan(lambda c, w: (jnp.tanh(f(c) * w) + 0.1 * b, c[0]), a, weights)[0]


def vmap(f):
    return lambda a, b: jax.vmap(lambda x: f(x) * b)(jnp.stack([a, a * 0.5])).sum(0)


# Code that contains a function of one array, as a function of two arrays.
CONTAINERS = {
    "scan": scan,
    "vmap": vmap,
    "remat": lambda f: lambda a, b: jax.checkpoint(f)(a),
    "cond": lambda f: lambda a, b: lax.cond(b.sum() > 0, f, jnp.sin, a),
    "jit": lambda f: lambda a, b: jax.jit(f)(a),
}


# -- code that reads arrays from outside, which are differentiated too --------------------------------------


BRANCHES = [lambda x, w: jnp.tanh(x @ w), lambda x, w: x * 0.5, lambda x, w: jax.nn.gelu(x) + w[:4]]
# From two values, a stack of weights and the outside arrays to an array.
PIECES = {
    "affine": lambda a, b, s, o: a @ s[0] + o.b,
    "normed": lambda a, b, s, o: layer_norm(a, o.b),
    "condition": lambda a, b, s, o: lax.cond(a[0, 0] < 0.3, *BRANCHES[:2], a, s[0]),
    "branches": lambda a, b, s, o: lax.switch((jnp.abs(a.sum()) * 3).astype(jnp.int32) % 3, BRANCHES, a, s[0]),
    "counted": lambda a, b, s, o: a + lax.fori_loop(0, o.tokens[1], lambda _, c: jnp.sin(c), lax.stop_gradient(b)),
    "fori": lambda a, b, s, o: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ s[i]) + b, a),
    "mapped rows": lambda a, b, s, o: lax.map(lambda row: jnp.tanh(row @ s[0]) * o.b, a),
    "batches of rows": lambda a, b, s, o: lax.map(lambda row: jax.nn.silu(row @ s[0]), a, batch_size=2),
    "each weight": lambda a, b, s, o: jax.vmap(lambda w: jax.nn.gelu(a @ w))(s).mean(0),
    "dropped": lambda a, b, s, o: jnp.sin(dropout(a, o.key)),
    "noisy": lambda a, b, s, o: jnp.tanh(a + noise(jax.random.fold_in(o.key, 1))) * noise(jax.random.split(o.key)[0]),
    "random condition": lambda a, b, s, o: lax.cond(jax.random.bernoulli(o.key), *BRANCHES[:2], a, s[1]),
    "NamedDense": lambda a, b, s, o: NamedDense.apply(a, s[0]),
    "Newton": lambda a, b, s, o: Newton.apply(a),
    "scan of layers": lambda a, b, s, o: lax.scan(lambda c, w: (NamedDense.apply(c, w), c[0]), a, s)[0],
    "ruled dense": lambda a, b, s, o: ruled_dense(0.5, a, s[0], o.tokens),
    "jitted dense": lambda a, b, s, o: dense(dense(a, s[0]), s[1]),
    "embedded": lambda a, b, s, o: s[0][o.tokens] * a,
    "along": lambda a, b, s, o: jnp.take_along_axis(a, jnp.argsort(b, -1), -1) * o.b,
    "routed": lambda a, b, s, o: jnp.einsum("nd,ndk->nk", a, s[jnp.argmax(a[:, :2], -1)]),
    "cross entropy": lambda a, b, s, o: cross_entropy(a @ s[0], o.tokens),
    "scattered": lambda a, b, s, o: a.at[o.tokens % 4].add(jnp.sin(b)).at[0].set(o.b),
    "swiglu": lambda a, b, s, o: swiglu(a, s[0]) + b,
    "window": lambda a, b, s, o: lax.dynamic_slice(jnp.concatenate([a, jnp.tanh(b)]), (o.tokens[0] % 4, 0), SHAPE),
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
    "scan over ws": lambda f, a, b, s, o: lax.scan(lambda c, w: (c + f(c @ w), c[0]), a, s)[0],
    "indexed scan": lambda f, a, b, s, o: lax.scan(lambda c, i: (f(c) @ s[i], c), a, jnp.arange(2), reverse=True)[1][1],
    "scan with b": lambda f, a, b, s, o: lax.scan(lambda c, _: (f(c) * jnp.sin(9 * b), None), a, None, length=2)[0],
    "branch with b": lambda f, a, b, s, o: lax.cond(
        a[0, 0] < 0.3, lambda a, b: f(a) * jnp.exp(b), lambda a, b: a, a, b
    ),
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
    "jit with w": lambda f, a, b, s, o: jax.jit(lambda x, w: f(x) @ w)(a, s[0]),
    "called twice": called_twice,
    "remat of names": lambda f, a, b, s, o: jax.checkpoint(
        lambda x, w: f(x @ w), policy=CHECKPOINTS.save_only_these_names("named")
    )(a, s[0]),
    "remat of products": lambda f, a, b, s, o: jax.checkpoint(f, policy=CHECKPOINTS.dots_saveable)(a @ s[0]),
    "beside": lambda f, a, b, s, o: a * o.b + lax.stop_gradient(f(b)),
}

"""The demo: real handwritten digits, classified by a network whose gradients are PyLayers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pylayer_jax._layer import PyLayer
from pylayer_jax._report.report import saved_tensors_report
from pylayer_jax._report.table import SavedTensorsReport

WIDTHS = (64, 128, 64, 10)
BITS = 4
BATCH = 64
BACKBONE_GRADIENT = 0.5


class Swish(PyLayer):
    """x * sigmoid(x). Only the input is saved."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array) -> jax.Array:
        ctx.save_for_backward(x)
        return x * jax.nn.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        (x,) = ctx.saved_tensor()
        s = jax.nn.sigmoid(x)
        return dy * s * (1 + x * (1 - s))


class Quantize(PyLayer):
    """Rounds to a grid whose step is learned (LSQ, Esser et al. 2020, equations 1 to 3).

    Inside the grid, rounding passes the gradient straight through. The gradient of the step is the change by rounding
    and clipping, times a factor that keeps the updates of the step small.
    """

    @staticmethod
    def forward(ctx: Any, x: jax.Array, step: jax.Array, low: int, high: int, factor: float) -> jax.Array:
        ctx.save_for_backward(x, step)
        ctx.grid = (low, high, factor)
        return jnp.round(jnp.clip(x / step, low, high)) * step

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, step = ctx.saved_tensor()
        low, high, factor = ctx.grid
        q = x / step
        inside = (q >= low) & (q <= high)
        change = jnp.where(inside, jnp.round(q) - q, jnp.clip(q, low, high))
        return jnp.where(inside, dy, 0.0), factor * jnp.sum(dy * change)


class ScaleGradient(PyLayer):
    """The identity, with its gradient multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array, factor: float) -> jax.Array:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        return ctx.factor * dy


def _round_straight_through(x: jax.Array) -> jax.Array:
    return x + jax.lax.stop_gradient(jnp.round(x) - x)


def _plain_quantize(x: jax.Array, step: jax.Array, low: int, high: int, factor: float) -> jax.Array:
    scaled = factor * step + jax.lax.stop_gradient((1 - factor) * step)
    return _round_straight_through(jnp.clip(x / scaled, low, high)) * scaled


def _plain_scale(x: jax.Array, factor: float) -> jax.Array:
    return factor * x + jax.lax.stop_gradient((1 - factor) * x)


@dataclasses.dataclass(frozen=True)
class Layers:
    """The three functions of the network besides its products with matrices."""

    swish: Callable[..., jax.Array]
    quantize: Callable[..., jax.Array]
    scale: Callable[..., jax.Array]


PYLAYERS = Layers(Swish.apply, Quantize.apply, ScaleGradient.apply)
PLAIN = Layers(jax.nn.swish, _plain_quantize, _plain_scale)

Parameters = list[dict[str, jax.Array]]


def new_parameters(key: jax.Array) -> Parameters:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    parameters: Parameters = []
    for k, fan_in, fan_out in zip(keys, WIDTHS, WIDTHS[1:], strict=False):
        weight = jax.random.normal(k, (fan_in, fan_out)) * (2 / fan_in) ** 0.5
        # LSQ starts from this step: twice the mean size, divided by the root of the largest level.
        step = 2 * jnp.mean(jnp.abs(weight)) / (2 ** (BITS - 1) - 1) ** 0.5
        parameters.append({"weight": weight, "bias": jnp.zeros(fan_out), "step": step})
    return parameters


def loss(parameters: Parameters, images: jax.Array, labels: jax.Array, layers: Layers) -> jax.Array:
    """Mean cross entropy; images [batch, 64] in 0..1, labels [batch] in 0..9."""
    return jnp.mean(-jnp.take_along_axis(jax.nn.log_softmax(_logits(parameters, images, layers)), labels[:, None], 1))


def _logits(parameters: Parameters, images: jax.Array, layers: Layers) -> jax.Array:
    low, high = -(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1
    x = images
    for i, p in enumerate(parameters):
        if i == len(parameters) - 1:
            x = layers.scale(x, BACKBONE_GRADIENT)
        weight = layers.quantize(p["weight"], p["step"], low, high, (p["weight"].size * high) ** -0.5)
        x = x @ weight + p["bias"]
        if i < len(parameters) - 1:
            x = layers.swish(x)
    return x


@dataclasses.dataclass
class Result:
    """The results of the demo."""

    accuracy: float  # on the test images
    gradient_error: float  # the largest difference to plain JAX, relative to the largest gradient
    saved: SavedTensorsReport


def train(epochs: int, seed: int, progress: bool) -> Result:
    """Train on three quarters of the 1,797 digits, compare the gradients with plain JAX, and count the saved bytes.

    Raises:
        ImportError: if optax, scikit-learn or tqdm is not installed; the extra named `demo` installs them.
    """
    import optax
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm

    digits: Any = load_digits()
    split: Any = train_test_split(
        digits.data.astype("float32") / 16, digits.target.astype("int32"), random_state=seed, stratify=digits.target
    )
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    parameters = new_parameters(jax.random.key(seed))
    steps = epochs * (len(images) // BATCH)
    optimizer: Any = optax.adamw(optax.cosine_decay_schedule(3e-3, steps), weight_decay=1e-4)
    state: Any = optimizer.init(parameters)

    @jax.jit
    def update(parameters: Parameters, state: Any, images: jax.Array, labels: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(parameters, images, labels, PYLAYERS)
        changes, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, changes), state, value

    key = jax.random.key(seed + 1)
    for _ in (bar := tqdm(range(epochs), desc="training", unit="epoch", disable=not progress)):
        key, shuffle = jax.random.split(key)
        order = jax.random.permutation(shuffle, len(images))
        value = jnp.zeros(())
        for first in range(0, len(images) - BATCH + 1, BATCH):
            batch = order[first : first + BATCH]
            parameters, state, value = update(parameters, state, images[batch], labels[batch])
        bar.set_postfix(loss=f"{float(value):.4f}")

    guess = jnp.argmax(_logits(parameters, test_images, PYLAYERS), axis=1)
    batch = (images[:BATCH], labels[:BATCH])
    saved = saved_tensors_report(loss, parameters, *batch, PYLAYERS)
    return Result(float(jnp.mean(guess == test_labels)), _gradient_error(parameters, *batch), saved)


def _gradient_error(parameters: Parameters, images: jax.Array, labels: jax.Array) -> float:
    ours, plain = (
        jax.jit(jax.grad(lambda p, layers=layers: loss(p, images, labels, layers)))(parameters)
        for layers in (PYLAYERS, PLAIN)
    )
    pairs = list(zip(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(plain), strict=True))
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)

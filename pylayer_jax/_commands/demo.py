"""The demo: real handwritten digits, classified by a network whose gradients are PyLayers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._layer import PyLayer
from pylayer_jax._report.report import saved_tensors_report
from pylayer_jax._report.table import SavedTensorsReport
from pylayer_jax.packers import quantize_saved

WIDTHS = (64, 128, 64, 10)
BITS = 4
BATCH = 64
BACKBONE_GRADIENT = 0.5
PACKED_BITS = 8


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
    packed_accuracy: float  # of the same training with packed tensors
    packed: SavedTensorsReport


def run(epochs: int, seed: int, progress: bool) -> Result:
    """Train on three quarters of the 1,797 digits, compare the gradients with plain JAX, and count the saved bytes.

    Raises:
        ImportError: if optax, scikit-learn or tqdm is not installed; the extra named `demo` installs them.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    split: Any = train_test_split(
        digits.data.astype("float32") / 16, digits.target.astype("int32"), random_state=seed, stratify=digits.target
    )
    images, test_images, labels, test_labels = map(jnp.asarray, split)

    @jax.jit
    def accuracy(parameters: Parameters) -> jax.Array:
        return jnp.mean(jnp.argmax(_logits(parameters, test_images, PYLAYERS), axis=1) == test_labels)

    packed_loss = quantize_saved(PACKED_BITS)(loss)
    parameters, packed_parameters = (
        _train(each, images, labels, epochs, seed, title if progress else None)
        for each, title in ((loss, "training"), (packed_loss, f"training, {PACKED_BITS}-bit saved tensors"))
    )
    batch = (images[:BATCH], labels[:BATCH])
    return Result(
        float(accuracy(parameters)),
        float(jax.jit(lambda parameters: _gradient_error(parameters, *batch))(parameters)),
        saved_tensors_report(loss, parameters, *batch, PYLAYERS),
        float(accuracy(packed_parameters)),
        saved_tensors_report(packed_loss, parameters, *batch, PYLAYERS),
    )


def _train(
    loss: Callable[..., jax.Array], images: jax.Array, labels: jax.Array, epochs: int, seed: int, title: str | None
) -> Parameters:
    """The parameters after so many passes over the images; with a title, there is a progress bar."""
    import optax
    from tqdm import tqdm

    steps = len(images) // BATCH
    # One vector, so that there is one update to compile.
    optimizer: Any = optax.flatten(optax.adamw(optax.cosine_decay_schedule(3e-3, epochs * steps), weight_decay=1e-4))

    @jax.jit
    def start(key: jax.Array) -> Any:
        parameters = new_parameters(key)
        return parameters, optimizer.init(parameters)

    @jax.jit
    def epoch(trained: Any, batches: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
        def update(trained: Any, batch: jax.Array) -> Any:
            parameters, state = trained
            value, gradients = jax.value_and_grad(loss)(parameters, images[batch], labels[batch], PYLAYERS)
            changes, state = optimizer.update(gradients, state, parameters)
            return (optax.apply_updates(parameters, changes), state), value

        return jax.lax.scan(update, trained, batches)

    trained = start(jax.random.key(seed))
    rng = np.random.default_rng(seed)
    for _ in (bar := tqdm(range(epochs), desc=title, unit="epoch", disable=title is None)):
        batches = rng.permutation(len(images))[: steps * BATCH].reshape(steps, BATCH)
        trained, values = epoch(trained, batches, images, labels)
        bar.set_postfix(loss=f"{float(values[-1]):.4f}")
    return trained[0]


def _gradient_error(parameters: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    ours, plain = (jax.tree_util.tree_leaves(jax.grad(loss)(parameters, images, labels, x)) for x in (PYLAYERS, PLAIN))
    differences = [jnp.max(jnp.abs(a - b)) for a, b in zip(ours, plain, strict=True)]
    return jnp.max(jnp.stack(differences)) / jnp.max(jnp.stack([jnp.max(jnp.abs(b)) for b in plain]))

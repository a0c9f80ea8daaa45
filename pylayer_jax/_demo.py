"""Demo that trains a classifier of handwritten digits, whose activations and quantizer are layers of this package."""

from __future__ import annotations

import functools
import itertools
import textwrap
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from pylayer_jax import PyLayer, saved_tensors_report
from pylayer_jax.packers import quantize_saved

WIDTHS = (64, 128, 64, 10)
BITS = 4
LOW, HIGH = -(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1  # the lowest and the highest level of a quantized weight
BATCH = 64
ACCURACY = 0.95  # every seed that was tried reaches it in 10 epochs
GRADIENT_ERROR = 1e-5


class Swish(PyLayer):
    """Layer that computes x * sigmoid(x) and saves only x."""

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
    """Layer that rounds x to a multiple of `step`, clipped to LOW and HIGH. Clipped values get no gradient."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array, step: float) -> jax.Array:
        ctx.save_for_backward(x)
        ctx.step = step
        return jnp.round(jnp.clip(x / step, LOW, HIGH)) * step

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        q = ctx.saved_tensor()[0] / ctx.step
        return jnp.where((q >= LOW) & (q <= HIGH), dy, 0.0)


def _plain_quantize(x: jax.Array, step: float) -> jax.Array:
    q = jnp.clip(x / step, LOW, HIGH)
    return (q + jax.lax.stop_gradient(jnp.round(q) - q)) * step


Layers = tuple[Callable[..., jax.Array], Callable[..., jax.Array]]  # the activation and the quantizer of the network
LAYERS: Layers = Swish.apply, Quantize.apply
PLAIN: Layers = jax.nn.swish, _plain_quantize  # the same functions in plain JAX, with the same gradients
Parameters = list[tuple[jax.Array, jax.Array]]  # the weight and the bias of each matrix product


def new_parameters(key: jax.Array) -> Parameters:
    layers = zip(jax.random.split(key, len(WIDTHS) - 1), itertools.pairwise(WIDTHS), strict=True)
    return [(jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, jnp.zeros(n)) for k, (m, n) in layers]


def logits(parameters: Parameters, images: jax.Array, layers: Layers = LAYERS) -> jax.Array:
    x, (swish, quantize) = images, layers
    for i, (weight, bias) in enumerate(parameters):
        x = swish(x) if i else x
        x = x @ quantize(weight, len(weight) ** -0.5) + bias
    return x


def loss(parameters: Parameters, images: jax.Array, labels: jax.Array, layers: Layers = LAYERS) -> jax.Array:
    """Return the mean cross entropy of images [batch, 64], between 0 and 1, and labels [batch], from 0 to 9."""
    log_probabilities = jax.nn.log_softmax(logits(parameters, images, layers))
    return jnp.mean(-jnp.take_along_axis(log_probabilities, labels[:, None], 1))


def train(
    loss: Callable[..., jax.Array], images: jax.Array, labels: jax.Array, epochs: int, seed: int, title: str | None
) -> Parameters:
    import optax
    from tqdm import tqdm

    steps = len(images) // BATCH
    schedule = optax.cosine_decay_schedule(3e-3, epochs * steps)
    optimizer: Any = optax.flatten(optax.adamw(schedule, weight_decay=1e-4))  # `flatten` compiles one update

    def update(trained: Any, batch: jax.Array) -> Any:
        parameters, state = trained
        value, gradients = jax.value_and_grad(loss)(parameters, images[batch], labels[batch])
        changes, state = optimizer.update(gradients, state, parameters)
        return (optax.apply_updates(parameters, changes), state), value

    epoch = jax.jit(functools.partial(jax.lax.scan, update))
    parameters = jax.jit(new_parameters)(jax.random.key(seed))
    trained = parameters, jax.jit(optimizer.init)(parameters)
    rng = np.random.default_rng(seed)
    # `disable=None`: no bar where the output is a file or a pipe
    for _ in (bar := tqdm(range(epochs), desc=title, unit="epoch", disable=None if title else True)):
        batches = rng.permutation(len(images))[: steps * BATCH].reshape(steps, BATCH)
        trained, values = epoch(trained, batches)
        bar.set_postfix(loss=f"{float(values[-1]):.4f}")
    return trained[0]


def run(epochs: int, seed: int, progress: bool) -> bool:
    """Train on three quarters of the 1,797 digits, print the results, and return whether they meet the goals."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    start = time.perf_counter()
    digits: Any = load_digits()
    split: Any = train_test_split(
        digits.data.astype("float32") / 16, digits.target.astype("int32"), random_state=seed, stratify=digits.target
    )
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    batch = images[:BATCH], labels[:BATCH]

    def test_accuracy(parameters: Parameters) -> float:
        return float(jnp.mean(jnp.argmax(logits(parameters, test_images), axis=1) == test_labels))

    parameters = train(loss, images, labels, epochs, seed, "training" if progress else None)
    gradient = jax.jit(jax.grad(loss), static_argnames="layers")
    ours, plain = (ravel_pytree(gradient(parameters, *batch, layers=layers))[0] for layers in (LAYERS, PLAIN))
    error = float(jnp.max(jnp.abs(ours - plain)) / jnp.max(jnp.abs(plain)))
    accuracy = test_accuracy(parameters)
    has_learned, is_right = accuracy >= ACCURACY, error <= GRADIENT_ERROR
    answer = {True: "yes", False: "NO"}
    print(f"Test accuracy: {accuracy:.1%} with {BITS}-bit weights (at least {ACCURACY:.0%}: {answer[has_learned]})")
    print(
        f"Gradients against the same model in plain JAX: largest relative difference {error:.1e} "
        f"(at most {GRADIENT_ERROR:.0e}: {answer[is_right]})"
    )
    report = saved_tensors_report(loss, parameters, *batch)
    print(f"Saved for backward, for {BATCH} images:", textwrap.indent(str(report), "  "), sep="\n")

    packed_loss = quantize_saved(8)(loss)
    parameters = train(packed_loss, images, labels, epochs, seed, "training, 8-bit saved tensors" if progress else None)
    packed_bytes = saved_tensors_report(packed_loss, parameters, *batch).total_bytes
    print(
        f"The same training with 8-bit saved tensors: test accuracy {test_accuracy(parameters):.1%}; "
        f"{packed_bytes:,} bytes are kept instead of {report.total_bytes:,}"
    )
    print(f"Time for the data, the trainings and the comparisons: {time.perf_counter() - start:.1f} s")
    return is_right and has_learned

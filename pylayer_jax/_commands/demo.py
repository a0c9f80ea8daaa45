"""The demo: real handwritten digits, classified by a network whose gradients are PyLayers."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pylayer_jax._layer import PyLayer
from pylayer_jax._report.report import saved_tensors_report
from pylayer_jax.packers import quantize_saved

WIDTHS = (64, 128, 64, 10)
BITS = 4
LOW, HIGH = -(2 ** (BITS - 1)), 2 ** (BITS - 1) - 1  # the levels of a quantized weight
BATCH = 64
BACKBONE_GRADIENT = 0.5
PACKED_BITS = 8

ACCURACY = 0.95
ENOUGH_EPOCHS = 10  # after these, the network reached this accuracy with every seed that was tried
GRADIENT_ERROR = 1e-5


# The layers of the network, and the same functions in plain JAX.


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
    def forward(ctx: Any, x: jax.Array, step: jax.Array, factor: float) -> jax.Array:
        ctx.save_for_backward(x, step)
        ctx.factor = factor
        return jnp.round(jnp.clip(x / step, LOW, HIGH)) * step

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, step = ctx.saved_tensor()
        q = x / step
        inside = (q >= LOW) & (q <= HIGH)
        change = jnp.where(inside, jnp.round(q) - q, jnp.clip(q, LOW, HIGH))
        return jnp.where(inside, dy, 0.0), ctx.factor * jnp.sum(dy * change)


class ScaleGradient(PyLayer):
    """The identity, with its gradient multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array, factor: float) -> jax.Array:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        return ctx.factor * dy


def _plain_scale_gradient(x: jax.Array, factor: float) -> jax.Array:
    return factor * x + jax.lax.stop_gradient((1 - factor) * x)


def _plain_quantize(x: jax.Array, step: jax.Array, factor: float) -> jax.Array:
    step = _plain_scale_gradient(step, factor)
    q = jnp.clip(x / step, LOW, HIGH)
    return (q + jax.lax.stop_gradient(jnp.round(q) - q)) * step


PYLAYERS = (Swish.apply, Quantize.apply, ScaleGradient.apply)
PLAIN = (jax.nn.swish, _plain_quantize, _plain_scale_gradient)


# The network.

Parameters = list[dict[str, jax.Array]]


def new_parameters(key: jax.Array) -> Parameters:
    keys = jax.random.split(key, len(WIDTHS) - 1)
    parameters: Parameters = []
    for k, fan_in, fan_out in zip(keys, WIDTHS, WIDTHS[1:], strict=False):
        weight = jax.random.normal(k, (fan_in, fan_out)) * (2 / fan_in) ** 0.5
        step = 2 * jnp.mean(jnp.abs(weight)) / HIGH**0.5  # where LSQ starts
        parameters.append({"weight": weight, "bias": jnp.zeros(fan_out), "step": step})
    return parameters


def logits(parameters: Parameters, images: jax.Array, layers: Any = PYLAYERS) -> jax.Array:
    swish, quantize, scale_gradient = layers
    x = images
    for i, p in enumerate(parameters):
        if i == len(parameters) - 1:
            x = scale_gradient(x, BACKBONE_GRADIENT)
        x = x @ quantize(p["weight"], p["step"], (p["weight"].size * HIGH) ** -0.5) + p["bias"]
        if i < len(parameters) - 1:
            x = swish(x)
    return x


def loss(parameters: Parameters, images: jax.Array, labels: jax.Array, layers: Any = PYLAYERS) -> jax.Array:
    """Mean cross entropy; images [batch, 64] in 0..1, labels [batch] in 0..9."""
    log_probabilities = jax.nn.log_softmax(logits(parameters, images, layers))
    return jnp.mean(-jnp.take_along_axis(log_probabilities, labels[:, None], 1))


def train(
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
            value, gradients = jax.value_and_grad(loss)(parameters, images[batch], labels[batch])
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


def gradient_error(parameters: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The largest difference to the gradients of plain JAX, relative to the largest of them."""
    ours, plain = (jax.grad(loss)(parameters, images, labels, layers) for layers in (PYLAYERS, PLAIN))
    difference = jax.tree.map(jnp.subtract, ours, plain)
    largest, scale = (
        jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(tree)])) for tree in (difference, plain)
    )
    return largest / scale


# Two layers whose second derivative tells a rule that holds at every order from one that is used once.


class Round(PyLayer):
    """Rounds, and lets the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array) -> jax.Array:
        return jnp.round(x)

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        return dy


class SteepTanh(PyLayer):
    """tanh, with twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: jax.Array) -> jax.Array:
        y = jnp.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: jax.Array) -> jax.Array:
        (y,) = ctx.saved_tensor()
        return 2 * dy * (1 - y**2)


@jax.custom_vjp
def plain_round(x: jax.Array) -> jax.Array:
    return jnp.round(x)


@jax.custom_vjp
def plain_steep_tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


plain_round.defvjp(lambda x: (jnp.round(x), None), lambda _, dy: (dy,))
plain_steep_tanh.defvjp(lambda x: (y := jnp.tanh(x), y), lambda y, dy: (2 * dy * (1 - y**2),))


class Example(NamedTuple):
    """One function in two ways, and its second derivative at a point."""

    title: str
    x: float
    by_rule: float  # worked out by hand: 6 * round(x), and -8 * y * (1 - y**2) of y = tanh(x)
    layer: Callable[[Any], Any]
    plain: Callable[[Any], Any]  # by a hand-written jax.custom_vjp


EXAMPLES = (
    Example("round(x)³, straight-through", 1.3, 6.0, lambda x: Round.apply(x) ** 3, lambda x: plain_round(x) ** 3),
    Example("tanh(x), its gradient doubled", 0.3, -2.132724, SteepTanh.apply, plain_steep_tanh),
)


def second(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return jax.grad(jax.grad(function))


def run(epochs: int, seed: int, progress: bool) -> bool:
    """Train on three quarters of the 1,797 digits, print what came of it, and tell if the claims hold.

    The network may miss its accuracy after too few epochs.

    Raises:
        ImportError: if optax, scikit-learn or tqdm is not installed; the extra named `demo` installs them.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    began = time.perf_counter()
    digits: Any = load_digits()
    split: Any = train_test_split(
        digits.data.astype("float32") / 16, digits.target.astype("int32"), random_state=seed, stratify=digits.target
    )
    images, test_images, labels, test_labels = map(jnp.asarray, split)
    packed_loss = quantize_saved(PACKED_BITS)(loss)
    parameters, packed_parameters = (
        train(each, images, labels, epochs, seed, title if progress else None)
        for each, title in ((loss, "training"), (packed_loss, f"training, {PACKED_BITS}-bit saved tensors"))
    )

    @jax.jit
    def test_accuracy(parameters: Parameters) -> jax.Array:
        return jnp.mean(jnp.argmax(logits(parameters, test_images), axis=1) == test_labels)

    accuracy, packed_accuracy = float(test_accuracy(parameters)), float(test_accuracy(packed_parameters))
    batch = (images[:BATCH], labels[:BATCH])
    error = float(jax.jit(lambda parameters: gradient_error(parameters, *batch))(parameters))
    saved, packed = (saved_tensors_report(each, parameters, *batch) for each in (loss, packed_loss))
    seconds = [(float(second(each.layer)(each.x)), float(second(each.plain)(each.x))) for each in EXAMPLES]

    learned, right = accuracy >= ACCURACY, error <= GRADIENT_ERROR
    too_few = not learned and epochs < ENOUGH_EPOCHS
    goal = f"at least {ACCURACY:.0%}: {_yes(learned)}"
    if too_few:
        goal = f"too few epochs to judge: {ACCURACY:.0%} needs about {ENOUGH_EPOCHS}"
    print(f"Test accuracy: {accuracy:.1%} with {BITS}-bit weights ({goal})")
    print(
        f"Gradients against the same model in plain JAX: largest relative difference {error:.1e} "
        f"(at most {GRADIENT_ERROR:.0e}: {_yes(right)})"
    )
    print(f"Saved for backward, for {BATCH} images:")
    print(textwrap.indent(str(saved), "  "))
    print(
        f"The same training with {PACKED_BITS}-bit saved tensors: test accuracy {packed_accuracy:.1%}; "
        f"{packed.total_bytes:,} bytes are kept in place of {saved.total_bytes:,}"
    )
    print("Second derivatives, which use the backward of the layer too:")
    for example, (by_layer, by_plain) in zip(EXAMPLES, seconds, strict=True):
        title = f"{example.title} at {example.x}"
        print(f"  {title:37} PyLayer {by_layer:7.4f}   plain custom_vjp {by_plain:7.4f}")
        right = right and abs(by_layer - example.by_rule) <= 1e-4
    print(f"Time for the data, the training, the comparison and the report: {time.perf_counter() - began:.1f} s")
    return right and (learned or too_few)


def _yes(fact: bool) -> str:
    return "yes" if fact else "NO"

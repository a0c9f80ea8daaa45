"""The same custom gradients in each way that JAX, equinox, torch and Paddle have for them.

notebooks/comparison.md compares the ways in a table. `COLUMNS` has one function for each column, which returns a `Way`;
tests/documents/test_comparison.py computes every cell from it.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify

from pylayer_jax import saved_tensors_report
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Steep, SteepBothWays, layer


class Way(NamedTuple):
    """One way to write a custom gradient: functions of one array, each with the gradient that its field names."""

    steep_tanh: Callable[[Any], Any]  # tanh with twice its gradient, computed from the saved output
    round: Callable[[Any], Any]  # rounding whose gradient passes straight through
    swish: Callable[[Any, Callable[[], Any]], Any]  # saves an intermediate; calls the function once per `forward`
    clipped: Callable[[Any], Any]  # the identity, whose backward clips its cotangent to [-1, 1]
    doubled: Callable[[Any], Any]  # twice the entry "w" of a dict that also holds a text
    sin_of_two: Callable[[Any, list[Any]], Any] | None  # sin of (sin, cos); appends the cotangent of cos to the list
    product: Callable[[Any], Any]  # the product of two matrices in one array, under the name "product"
    checked_log: Callable[[Any], Any]  # log of a number that `checkify.check` checks
    log: Callable[[Any], Any]
    sin_and_exp: Callable[[Any], Any]  # returns (sin(x), exp(x))
    # The same function, with what one has to add first for a transformation, and the name of that.
    for_vmap: tuple[str, Callable[[Any], Any]] | None = None
    for_jvp: tuple[str, Callable[[Any], Any]] | None = None
    for_hessian: tuple[str, Callable[[Any], Any]] | None = None
    logs: Callable[[Any], Any] | None = None  # returns what a backward logged, here the cotangent itself
    packs: Callable[[], bool] | None = None  # whether less is kept in a block that packs


class Rule(NamedTuple):
    """A function of x and its gradient, for every way that has a rule for cotangents."""

    run: Callable[[Any], tuple[Any, Any]]  # from x to the value and an intermediate
    keep: Callable[[Any, Any, Any], Any]  # from x, the value and the intermediate to what is saved
    gradient: Callable[[Any, Any], Any]  # from what was saved and the cotangent
    outputs: int = 1


def named_product(matrices: Any) -> Any:
    return checkpoint_name(matrices[0] @ matrices[1], "product")


def checked_log(x: Any) -> Any:
    checkify.check(jnp.all(x > 0), "not positive")
    return jnp.log(x)


def sin_and_exp(x: Any) -> Any:
    return jnp.sin(x), jnp.exp(x)


PRODUCT = Rule(lambda x: (named_product(x), None), lambda x, *_: x, lambda x, dy: jnp.stack([dy @ x[1].T, x[0].T @ dy]))
CHECKED_LOG = Rule(lambda x: (checked_log(x), None), lambda x, *_: x, lambda x, dy: dy / x)
LOG = Rule(lambda x: (jnp.log(x), None), lambda x, *_: x, lambda x, dy: dy / x)
SIN_AND_EXP = Rule(
    lambda x: (sin_and_exp(x), None), lambda x, *_: x, lambda x, dy: dy[0] * jnp.cos(x) + dy[1] * jnp.exp(x), 2
)
STEEP_TANH = Rule(lambda x: (jnp.tanh(x), None), lambda x, y, _: y, lambda y, dy: 2 * dy * (1 - y**2))


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + jnp.exp(-x))


def _of_rules(made: Callable[[Rule], Callable[[Any], Any]], **more: Any) -> Way:
    """Return the way in which `made` makes functions of rules; `more` are further fields."""

    def swish(x, count):
        def run(x):
            count()
            s = _sigmoid(x)
            return x * s, s

        def gradient(saved, dy):
            x, s = saved
            return dy * s * (1 + x * (1 - s))

        return made(Rule(run, lambda x, _, s: (x, s), gradient))(x)

    def sin_of_two(x, seen):
        def gradient(x, dy):
            seen.append(dy[1])
            return dy[0] * jnp.cos(x)

        return made(Rule(lambda x: ((jnp.sin(x), jnp.cos(x)), None), lambda x, *_: x, gradient, outputs=2))(x)[0]

    def nothing(*_):
        return None

    return Way(
        made(STEEP_TANH),
        made(Rule(lambda x: (jnp.round(x), None), nothing, lambda _, dy: dy)),
        swish,
        made(Rule(lambda x: (x * 1, None), nothing, lambda _, dy: jnp.clip(dy, -1, 1))),
        made(Rule(lambda tree: (2 * tree["w"], None), nothing, lambda _, dy: {"w": 2 * dy, "name": None})),
        sin_of_two,
        made(PRODUCT),
        made(CHECKED_LOG),
        made(LOG),
        made(SIN_AND_EXP),
        **more,
    )


def pylayer() -> Way:
    """Return layers of this package."""

    def made(rule):
        def forward(ctx, x):
            ctx.set_materialize_grads(rule is SIN_AND_EXP)
            y, intermediate = rule.run(x)
            ctx.save_for_backward(rule.keep(x, y, intermediate))
            return y

        def backward(ctx, *dy):
            (saved,) = ctx.saved_tensor()
            return rule.gradient(saved, dy if rule.outputs > 1 else dy[0])

        return layer(forward, backward).apply

    def logging_backward(ctx, dy):
        ctx.log[...] = dy
        return 3 * dy

    Logging = layer(lambda ctx, log, x: setattr(ctx, "log", log) or 3 * x, logging_backward)

    def logs(x):
        log = jax.new_ref(jnp.zeros_like(x))
        jax.grad(lambda x: Logging.apply(log, x))(x)
        return log[...]

    def packs():
        x = jnp.ones((64, 64))

        def loss(x):
            return Steep.apply(2 * x).sum()

        before, after = saved_tensors_report(loss, x), saved_tensors_report(cast_saved()(loss), x)
        return after.total_bytes < before.total_bytes

    return _of_rules(made, for_jvp=("`forward_mode = True`", SteepBothWays.apply), logs=logs, packs=packs)


def _custom_vjp(again: bool) -> Way:
    """Return `jax.custom_vjp`, whose fwd rule computes the function again, or calls it, as JAX documents it."""

    def made(rule):
        function = jax.custom_vjp(lambda x: rule.run(x)[0])

        def fwd(x):
            y, intermediate = rule.run(x)  # which the function does not return
            y = y if again else function(x)
            return y, rule.keep(x, y, intermediate)

        function.defvjp(fwd, lambda saved, dy: (rule.gradient(saved, dy),))
        return function

    return _of_rules(made, logs=_custom_vjp_logs)


def _custom_vjp_logs(x: Any) -> Any:
    function = jax.custom_vjp(lambda x: 3 * x)
    function.defvjp_with_logs(lambda x: (function(x), None), lambda _, dy: ((3 * dy,), {"cotangent": dy}))
    return jax.vjp(function, x)[1].with_logs(jnp.ones_like(x))[1]["cotangent"]


def custom_jvp() -> Way:
    """Return `jax.custom_jvp`, which gives the tangent; JAX transposes it for reverse mode."""

    def made(function, rule):
        """Return a function with a rule from its argument, its value and a tangent to the tangent of its value."""
        wrapped = jax.custom_jvp(function)

        @wrapped.defjvp
        def _(primals, tangents):
            y = wrapped(*primals)
            return y, rule(*primals, y, *tangents)

        return wrapped

    def swish(x, count):
        def sigmoid(x):
            count()
            return _sigmoid(x)

        def rule(x, _, dx):
            s = sigmoid(x)
            return dx * s * (1 + x * (1 - s))

        return made(lambda x: x * sigmoid(x), rule)(x)

    return Way(
        made(jnp.tanh, lambda x, y, dx: 2 * dx * (1 - y**2)),
        made(lambda x: jnp.round(x), lambda x, y, dx: dx),
        swish,
        made(lambda x: x * 1, lambda x, y, dx: jnp.clip(dx, -1, 1)),
        made(lambda tree: 2 * tree["w"], lambda tree, y, d: 2 * d["w"]),
        None,  # a rule for tangents meets no cotangents
        made(named_product, lambda x, y, dx: dx[0] @ x[1] + x[0] @ dx[1]),
        made(checked_log, lambda x, y, dx: dx / x),
        made(jnp.log, lambda x, y, dx: dx / x),
        made(sin_and_exp, lambda x, y, dx: (dx * jnp.cos(x), dx * jnp.exp(x))),
    )


def hijax() -> Way:
    """Return primitives of `jax.experimental.hijax` (jax 0.12)."""
    base: Any = importlib.import_module("jax.experimental.hijax").HiPrim

    def primitive(rule):
        class Primitive(base):
            def __init__(self, x):
                self.in_avals = (jax.tree.map(jax.typeof, x),)
                self.out_aval = self.in_avals[0] if rule.outputs == 1 else self.in_avals * rule.outputs
                self.params = {}
                super().__init__()

            def expand(self, x):
                return rule.run(x)[0]

            def vjp_fwd(self, _nonzeros, x):
                y = self(x)
                return y, rule.keep(x, y, rule.run(x)[1])  # the intermediate is computed again, as for jax.custom_vjp

            def vjp_bwd_retval(self, saved, dy):
                return (rule.gradient(saved, dy),)

        return Primitive

    SteepTanh = primitive(STEEP_TANH)

    class WithJvp(SteepTanh):
        def jvp(self, primals, tangents):
            y = self(*primals)
            return y, 2 * tangents[0] * (1 - y**2)

    class WithBatch(SteepTanh):
        def batch(self, _axis, args, dims):
            return type(self)(args[0])(args[0]), dims[0]

    class WithBoth(WithJvp, WithBatch):
        pass

    class Logging(SteepTanh):
        def vjp_bwd_retval_logs(self, _, dy):
            return (3 * dy,), {"cotangent": dy}

    def applied(kind):
        return lambda x: kind(x)(x)

    def logs(x):
        return jax.vjp(applied(Logging), x)[1].with_logs(jnp.ones_like(x))[1]["cotangent"]

    return _of_rules(
        lambda rule: applied(primitive(rule)),
        for_vmap=("`batch`", applied(WithBatch)),
        for_jvp=("`jvp`", applied(WithJvp)),
        for_hessian=("`jvp` and `batch`", applied(WithBoth)),
        logs=logs,
    )


def equinox() -> Way:
    """Return `equinox.filter_custom_vjp`, its fwd rule as in the documentation of equinox."""
    eqx: Any = importlib.import_module("equinox")

    def made(rule):
        function = eqx.filter_custom_vjp(lambda x: rule.run(x)[0])

        def fwd(_perturbed, x):
            y = function(x)
            return y, rule.keep(x, y, rule.run(x)[1])

        function.def_fwd(fwd)
        function.def_bwd(lambda saved, dy, _perturbed, x: rule.gradient(saved, dy))
        return function

    return _of_rules(made)


COLUMNS: dict[str, Callable[[], Way]] = {
    "`PyLayer`": pylayer,
    "`custom_vjp`, fwd calls f": lambda: _custom_vjp(again=False),
    "`custom_vjp`, fwd inlines f": lambda: _custom_vjp(again=True),
    "`custom_jvp`": custom_jvp,
    "hijax": hijax,
    "equinox": equinox,
}


class Example(NamedTuple):
    """A second derivative of the README and its picture."""

    title: str
    field: str  # of `Way`
    x: float
    power: int
    by_hand: float  # 6 * round(x), and -8 * y * (1 - y**2) of y = tanh(x)

    def of(self, way: Way) -> Callable[[Any], Any]:
        return lambda x: getattr(way, self.field)(x) ** self.power

    def second(self, way: Way) -> Callable[[Any], Any]:
        return jax.grad(jax.grad(self.of(way)))


EXAMPLES = (
    Example("round(x)³, straight-through", "round", 1.3, 3, 6.0),
    Example("tanh(x), its gradient doubled", "steep_tanh", 0.3, 1, -2.132724),
)

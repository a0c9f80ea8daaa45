"""The same custom gradients in each way that JAX, equinox, torch and Paddle have for them.

notebooks/beside.md compares the ways in a table. `COLUMNS` has one function for each column, which returns a `Way`;
tests/documents/test_beside.py computes every cell from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pylayer_jax import PyLayer, saved_tensors_report
from pylayer_jax.packers import cast_saved
from tests.kit.layers import Steep, SteepBothWays


class Way(NamedTuple):
    """One way to write a custom gradient: functions of one array, each with the gradient that its field names."""

    steep_tanh: Callable[[Any], Any]  # tanh with twice its gradient, computed from the saved output
    round: Callable[[Any], Any]  # rounding whose gradient passes straight through
    swish: Callable[
        [Any, Callable[[], Any]], Any
    ]  # saves an intermediate; calls the function once per run of `forward`
    clipped: Callable[[Any], Any]  # the identity, whose backward clips its cotangent to [-1, 1]
    doubled: Callable[[Any], Any]  # twice the entry "w" of a dict that also holds a text
    sin_of_two: Callable[[Any, list[Any]], Any] | None  # sin of (sin, cos); appends the cotangent of cos to the list
    # The same function, with what one has to add first for a transformation, and the name of that.
    for_vmap: tuple[str, Callable[[Any], Any]] | None = None
    for_jvp: tuple[str, Callable[[Any], Any]] | None = None
    for_hessian: tuple[str, Callable[[Any], Any]] | None = None
    logs: Callable[[Any], Any] | None = None  # returns what a backward logged, here the cotangent itself
    packs: Callable[[], bool] | None = None  # whether less is kept in a block that packs


def _sigmoid(count: Callable[[], Any]) -> Callable[[Any], Any]:
    """Return the sigmoid, which calls `count` each time."""

    def sigmoid(x):
        count()
        return 1 / (1 + jnp.exp(-x))

    return sigmoid


def documented() -> Way:
    """Return `jax.custom_vjp` as JAX documents it: the fwd rule calls the decorated function."""
    return _custom_vjp(lambda decorated, _: decorated)


def computes_again() -> Way:
    """Return `jax.custom_vjp` with a fwd rule that computes the function anew."""
    return _custom_vjp(lambda _, computed: computed)


def _custom_vjp(chosen: Callable[[Any, Any], Any]) -> Way:
    """Return `jax.custom_vjp`; the fwd rule calls the one that `chosen` takes: the decorated function, or its code."""

    def function(compute, keep, rule):
        made = jax.custom_vjp(compute)
        in_fwd = chosen(made, compute)

        def fwd(x):
            y = in_fwd(x)
            return y, keep(x, y)

        made.defvjp(fwd, lambda saved, dy: (rule(saved, dy),))
        return made

    def swish(x, count):
        sigmoid = _sigmoid(count)
        made = jax.custom_vjp(lambda x: x * sigmoid(x))

        def fwd(x):
            s = sigmoid(x)  # the decorated function returns only y, so that the intermediate is computed beside it
            return chosen(made, lambda x: x * s)(x), (x, s)

        made.defvjp(fwd, lambda saved, dy: (dy * saved[1] * (1 + saved[0] * (1 - saved[1])),))
        return made(x)

    return Way(
        function(jnp.tanh, lambda x, y: y, lambda y, dy: 2 * dy * (1 - y**2)),
        function(lambda x: jnp.round(x), lambda x, y: None, lambda _, dy: dy),  # jnp.round has a second parameter
        swish,
        *_small_custom_vjp_functions(),
        logs=_custom_vjp_logs,
    )


def _small_custom_vjp_functions() -> tuple[Any, Any, Any]:
    @jax.custom_vjp
    def clipped(x):
        return x * 1

    clipped.defvjp(lambda x: (clipped(x), None), lambda _, dy: (jnp.clip(dy, -1, 1),))

    @jax.custom_vjp
    def doubled(tree):
        return 2 * tree["w"]

    doubled.defvjp(lambda tree: (doubled(tree), None), lambda _, dy: ({"w": 2 * dy, "name": None},))

    def sin_of_two(x, seen):
        @jax.custom_vjp
        def function(x):
            return jnp.sin(x), jnp.cos(x)

        def bwd(x, dy):
            seen.append(dy[1])
            return (dy[0] * jnp.cos(x),)

        function.defvjp(lambda x: (function(x), x), bwd)
        return function(x)[0]

    return clipped, doubled, sin_of_two


def _custom_vjp_logs(x: Any) -> Any:
    function = jax.custom_vjp(lambda x: 3 * x)
    function.defvjp_with_logs(lambda x: (function(x), None), lambda _, dy: ((3 * dy,), {"cotangent": dy}))
    return jax.vjp(function, x)[1].with_logs(jnp.ones_like(x))[1]["cotangent"]


def custom_jvp() -> Way:
    """Return `jax.custom_jvp`, which gives the tangent; JAX transposes it for reverse mode."""

    @jax.custom_jvp
    def steep_tanh(x):
        return jnp.tanh(x)

    @steep_tanh.defjvp
    def _(primals, tangents):
        y = steep_tanh(*primals)
        return y, 2 * tangents[0] * (1 - y**2)

    @jax.custom_jvp
    def straight_through(x):
        return jnp.round(x)

    straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[0]))

    def swish(x, count):
        sigmoid = _sigmoid(count)

        @jax.custom_jvp
        def function(x):
            return x * sigmoid(x)

        @function.defjvp
        def _(primals, tangents):
            s = sigmoid(*primals)
            return function(*primals), tangents[0] * s * (1 + primals[0] * (1 - s))

        return function(x)

    @jax.custom_jvp
    def clipped(x):
        return x * 1

    clipped.defjvp(lambda primals, tangents: (clipped(*primals), jnp.clip(tangents[0], -1, 1)))

    @jax.custom_jvp
    def doubled(tree):
        return 2 * tree["w"]

    doubled.defjvp(lambda primals, tangents: (doubled(*primals), 2 * tangents[0]["w"]))

    return Way(steep_tanh, straight_through, swish, clipped, doubled, None)  # a rule for tangents meets no cotangents


def hijax() -> Way:
    """Return primitives of `jax.experimental.hijax` (jax 0.12)."""
    primitive: Any = importlib.import_module("jax.experimental.hijax").HiPrim

    class OfOne(primitive):
        def __init__(self, x, **params):
            self.in_avals = (jax.typeof(x),)
            self.out_aval = self.in_avals[0]
            self.params = params
            super().__init__()

    class SteepTanh(OfOne):
        def expand(self, x):
            return jnp.tanh(x)

        def vjp_fwd(self, _nonzeros, x):
            y = self(x)
            return y, y

        def vjp_bwd_retval(self, y, dy):
            return (2 * dy * (1 - y**2),)

    class WithJvp(SteepTanh):
        def jvp(self, primals, tangents):
            y = self(*primals)
            return y, 2 * tangents[0] * (1 - y**2)

    class WithBatch(SteepTanh):
        def batch(self, _axis, args, dims):
            return type(self)(args[0])(args[0]), dims[0]

    class WithBoth(WithJvp, WithBatch):
        pass

    class Round(OfOne):
        def expand(self, x):
            return jnp.round(x)

        def vjp_fwd(self, _nonzeros, x):
            return self(x), None

        def vjp_bwd_retval(self, _, dy):
            return (dy,)

    class Swish(OfOne):
        def expand(self, x):
            self.count()
            return x / (1 + jnp.exp(-x))

        def vjp_fwd(self, _nonzeros, x):
            self.count()  # the intermediate is computed again, as for jax.custom_vjp
            return self(x), (x, 1 / (1 + jnp.exp(-x)))

        def vjp_bwd_retval(self, saved, dy):
            x, s = saved
            return (dy * s * (1 + x * (1 - s)),)

    class Clipped(Round):
        def expand(self, x):
            return x * 1

        def vjp_bwd_retval(self, _, dy):
            return (jnp.clip(dy, -1, 1),)

    class Doubled(primitive):
        def __init__(self, tree):
            self.in_avals = (jax.tree.map(jax.typeof, tree),)
            self.out_aval = self.in_avals[0]["w"]
            self.params = {}
            super().__init__()

        def expand(self, tree):
            return 2 * tree["w"]

        def vjp_fwd(self, _nonzeros, tree):
            return self(tree), None

        def vjp_bwd_retval(self, _, dy):
            return ({"w": 2 * dy, "name": None},)

    class SinCos(primitive):
        def __init__(self, x, seen):
            self.in_avals = (jax.typeof(x),)
            self.out_aval = (jax.typeof(x), jax.typeof(x))
            self.params = {}
            self.seen = seen
            super().__init__()

        def expand(self, x):
            return jnp.sin(x), jnp.cos(x)

        def vjp_fwd(self, _nonzeros, x):
            return self(x), x

        def vjp_bwd_retval(self, x, dy):
            self.seen.append(dy[1])
            return (dy[0] * jnp.cos(x),)

    class Logging(Round):
        def vjp_bwd_retval_logs(self, _, dy):
            return (3 * dy,), {"cotangent": dy}

    def logs(x):
        return jax.vjp(lambda x: Logging(x)(x), x)[1].with_logs(jnp.ones_like(x))[1]["cotangent"]

    def applied(kind):
        return lambda x: kind(x)(x)

    return Way(
        applied(SteepTanh),
        applied(Round),
        lambda x, count: Swish(x, count=count)(x),
        applied(Clipped),
        applied(Doubled),
        lambda x, seen: SinCos(x, seen)(x)[0],
        for_vmap=("`batch`", applied(WithBatch)),
        for_jvp=("`jvp`", applied(WithJvp)),
        for_hessian=("`jvp` and `batch`", applied(WithBoth)),
        logs=logs,
    )


def equinox() -> Way:
    """Return `equinox.filter_custom_vjp`, its fwd rule as in the documentation of equinox."""
    eqx: Any = importlib.import_module("equinox")

    def function(forward, saved, backward):
        made = eqx.filter_custom_vjp(forward)

        def fwd(_perturbed, x):
            return made(x), saved(made, x)

        def bwd(saved, dy, _perturbed, x):
            return backward(saved, dy)

        made.def_fwd(fwd)
        made.def_bwd(bwd)
        return made

    def swish(x, count):
        sigmoid = _sigmoid(count)

        return function(
            lambda x: x * sigmoid(x),
            lambda _, x: (x, sigmoid(x)),
            lambda saved, dy: dy * saved[1] * (1 + saved[0] * (1 - saved[1])),
        )(x)

    def sin_of_two(x, seen):
        def backward(x, dy):
            seen.append(dy[1])
            return dy[0] * jnp.cos(x)

        return function(lambda x: (jnp.sin(x), jnp.cos(x)), lambda _, x: x, backward)(x)[0]

    return Way(
        function(jnp.tanh, lambda made, x: made(x), lambda y, dy: 2 * dy * (1 - y**2)),
        function(jnp.round, lambda made, x: None, lambda _, dy: dy),
        swish,
        function(lambda x: x * 1, lambda made, x: None, lambda _, dy: jnp.clip(dy, -1, 1)),
        function(lambda tree: 2 * tree["w"], lambda made, x: None, lambda _, dy: {"w": 2 * dy, "name": None}),
        sin_of_two,
    )


class Round(PyLayer):
    """Rounding that passes the gradient straight through."""

    @staticmethod
    def forward(ctx, x):
        return jnp.round(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


def pylayer() -> Way:
    """Return layers of this package."""

    class Swish(PyLayer):
        @staticmethod
        def forward(ctx, x, count):
            count()
            s = 1 / (1 + jnp.exp(-x))
            ctx.save_for_backward(x, s)
            return x * s

        @staticmethod
        def backward(ctx, dy):
            x, s = ctx.saved_tensor()
            return dy * s * (1 + x * (1 - s))

    class Clipped(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, dy):
            return jnp.clip(dy, -1, 1)

    class Doubled(PyLayer):
        @staticmethod
        def forward(ctx, tree):
            return 2 * tree["w"]

        @staticmethod
        def backward(ctx, dy):
            return {"w": 2 * dy, "name": None}

    class SinCos(PyLayer):
        @staticmethod
        def forward(ctx, x, seen):
            ctx.set_materialize_grads(False)
            ctx.seen, ctx.x = seen, x
            return jnp.sin(x), jnp.cos(x)

        @staticmethod
        def backward(ctx, dsin, dcos):
            ctx.seen.append(dcos)
            return dsin * jnp.cos(ctx.x)

    class Logging(PyLayer):
        @staticmethod
        def forward(ctx, log, x):
            ctx.log = log
            return 3 * x

        @staticmethod
        def backward(ctx, dy):
            ctx.log[...] = dy
            return 3 * dy

    def sin_of_two(x, seen):
        class Appending:  # a list on ctx is copied for each run of `backward`; an object is kept as it is
            append = staticmethod(seen.append)

        return SinCos.apply(x, Appending)[0]

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

    return Way(
        Steep.apply,
        Round.apply,
        Swish.apply,
        Clipped.apply,
        Doubled.apply,
        sin_of_two,
        for_jvp=("`forward_mode = True`", SteepBothWays.apply),
        logs=logs,
        packs=packs,
    )


COLUMNS: dict[str, Callable[[], Way]] = {
    "`PyLayer`": pylayer,
    "`custom_vjp`, documented": documented,
    "`custom_vjp`, computes again": computes_again,
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

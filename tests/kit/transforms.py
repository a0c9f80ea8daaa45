"""Tables of JAX transforms. A transform takes a scalar function and its arguments, and returns numbers to compare.

    FIRST_ORDER["scan_of_remat"](f, args)    # jax.jit(jax.grad(g))(*args), where g calls jax.checkpoint(f) in a scan

`compare(case, "scan_of_remat")` compares these numbers of a layer with those of its reference.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .case import Case

Function = Callable[..., jax.Array]


@dataclasses.dataclass(frozen=True)
class Transform:
    """A transform of a table, and how it is tested."""

    run: Callable[..., Any]  # from a scalar function and its arguments to numbers
    slow: bool = False  # whether it runs operation by operation; then it is tested with the main layers only
    covered: bool = False  # whether other transforms cover it; then it is tested with the main layers only
    same_as: str = ""  # the transform of the same table whose expected numbers it has, which is often itself

    def __call__(self, f: Function, args: Sequence[Any], *derivative: Any) -> Any:
        return self.run(f, args, *derivative)


FIRST_ORDER: dict[str, Transform] = {}
SECOND_ORDER: dict[str, Transform] = {}
FORWARD_OVER_REVERSE: dict[str, Transform] = {}
# These transforms take a third argument: `pushed` (forward mode) for a layer, or the default `along` (reverse mode),
# by which `expected` computes the same numbers for the reference.
FORWARD: dict[str, Transform] = {}

# The layers that are tested under all transforms. Other layers are not tested under those that are slow or covered.
MAIN_CASES = {"DoubledTanh", "SavedIntermediate", "Trees", "AskedLinear"}
# A bare `python -m pytest` tests the main layers under all transforms, and the other layers under these.
CORE_TRANSFORMS = {"jit_of_grad", "jit_of_grad_of_grad", "jvp_of_grad"}
_EXPECTED: dict[tuple[str, Callable[..., Any], str], Any] = {}


def marks(transform: str, case: str) -> list[pytest.MarkDecorator]:
    """Return the markers of a test of a layer of the registry under a transform of the tables below."""
    found: list[pytest.MarkDecorator] = []
    if transform in SLOW:
        found.append(pytest.mark.slow)
    if case not in MAIN_CASES and transform not in CORE_TRANSFORMS:
        found.append(pytest.mark.every_pair)
    return found


def is_tested(transform: str, case: str) -> bool:
    """Return whether this layer of the registry is tested under this transform."""
    return case in MAIN_CASES or transform not in SLOW | COVERED


def register(table: dict[str, Transform], name: str, run: Callable[..., Any], same_as: str = "", **options: Any) -> Any:
    """Add a transform to a table, with the options of `Transform`. By default it is `same_as` itself."""
    table[name] = Transform(run, same_as=same_as or name, **options)
    return run


def registered(table: dict[str, Transform], **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds a function to a table, under the name of the function."""
    return lambda run: register(table, run.__name__, run, **options)


def expected(case: Case, name: str) -> Any:
    """Return the numbers of a transform of the reference, compiled once for all transforms with the same numbers."""
    source = SAME_AS[name]
    key = case.name, case.reference, source
    if key not in _EXPECTED:
        f, run = scalar(case.reference, case.linear_loss), TRANSFORMS[source]
        _EXPECTED[key] = jax.jit(lambda *args: run(f, args))(*case.args)
    return _EXPECTED[key]


def floats(args: Sequence[Any]) -> tuple[int, ...]:
    """Return the positions of the arguments that are differentiated."""
    return tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))


def gradient(f: Function, args: Sequence[Any]) -> Callable[..., Any]:
    return jax.grad(f, floats(args))


def batched(args: Sequence[Any], size: int) -> list[jax.Array]:
    """Return a batch of arguments, whose floating-point arrays differ a little from example to example."""
    chosen = floats(args)
    factors = np.float32(1 - 0.1 * np.arange(size))
    stacked = [jnp.broadcast_to(a, (size, *a.shape)) for a in args]
    return [a * factors.reshape(size, *[1] * (a.ndim - 1)) if k in chosen else a for k, a in enumerate(stacked)]


# -- containers: each maps a function and its arguments to another function ---------------------------------


def _scanned(f, args):
    chosen = floats(args)

    def loss(*args):
        def body(carry, scale):
            total, first = carry
            scaled = [first if i == 0 else a * scale if i in chosen else a for i, a in enumerate(args)]
            return (total + f(*scaled), first * scale), None

        (total, _), _ = jax.lax.scan(body, (jnp.zeros(()), args[0]), jnp.array([1.0, 0.8]))
        return total

    return loss


def _conditional(f, args):
    return lambda *a: jax.lax.cond(jnp.sum(a[0]) < 1e3, f, lambda *a: jnp.zeros(()), *a)


def _jitted(f, args):
    return jax.jit(f)


def _remat(f, args):
    return jax.checkpoint(f)


def _mapped(f, args):
    return lambda *a: jax.vmap(f)(*a).sum()


def _mapped_over_the_first(f, args):
    return lambda *a: jax.vmap(f, in_axes=(0, *[None] * (len(args) - 1)))(*a).sum()


def _mesh():
    return jax.make_mesh((4,), ("i",), axis_types=(AxisType.Auto,))


def _sharded(f, args):
    spec = PartitionSpec("i")
    mapped = jax.shard_map(
        lambda *a: f(*(x[0] for x in a))[None], mesh=_mesh(), in_specs=(spec,) * len(args), out_specs=spec
    )
    return lambda *a: mapped(*a).sum()


def along(f: Function, args: Sequence[Any]) -> Function:
    """Return the derivative of f along a fixed direction, by reverse mode. Its gradient has second derivatives of f."""
    chosen, directions = floats(args), _directions(args)

    def slope(*a):
        return sum(jnp.sum(g * d) for g, d in zip(jax.grad(f, chosen)(*a), directions, strict=True))

    return slope


def pushed(f: Function, args: Sequence[Any]) -> Function:
    """Return the derivative of f along the direction of `along`, by forward mode."""

    def slope(*a):
        return jax.jvp(*of_positions(f, floats(a), a), _directions(args))[1]

    return slope


def _directions(args: Sequence[Any]) -> list[jax.Array]:
    return [np.cos(np.arange(args[i].size, dtype=np.float32)).reshape(args[i].shape) for i in floats(args)]


def of_positions(f: Function, positions: Sequence[int], args: Sequence[Any]) -> tuple[Function, list[Any]]:
    """Return `f` as a function of the arguments at some positions, and these arguments."""

    def g(*chosen):
        replaced = dict(zip(positions, chosen, strict=True))
        return f(*(replaced.get(i, a) for i, a in enumerate(args)))

    return g, [args[i] for i in positions]


def _two_outputs(f: Function) -> Function:
    return lambda *args: jnp.stack([f(*args), f(*args) * 2])


def hessian(f: Function, args: Sequence[Any]) -> Callable[..., Any]:
    return jax.hessian(f, floats(args))


# -- transforms that are made of containers ------------------------------------------------------------------

DERIVATIVE = "derivative"  # in a transform of FORWARD, stands for `along` or `pushed`


def transformed(run: Any, *around: Any, size: int = 0) -> Callable[..., Any]:
    """Return the transform that applies `run` to a function inside the containers `around`, the last one innermost.

    `transformed(jax.jit, gradient, _scanned)(f, args)` is `jax.jit(g)(*args)`, where `g` is the gradient of
    `_scanned(f, args)`. With a `size`, the arguments are a batch of that many examples.
    """

    def transform(f, args, derivative=along):
        for contain in reversed(around):
            f = (derivative if contain == DERIVATIVE else contain)(f, args)
        return run(f)(*(batched(args, size) if size else args))

    return transform


def over_the_first(transform: Any) -> Any:
    """Return `transform` for a batch of the first argument, with the same other arguments for all examples."""
    return lambda f, args, *derivative: transform(f, [batched(args, 3)[0], *args[1:]], *derivative)


def in_a_batch(f: Function) -> Function:
    return jax.jit(jax.vmap(f))


# Under jit, `compiled(_scanned)` computes the gradient of `_scanned(f, args)`; `value_compiled(_scanned)`, its value.
# `eagerly` and `value_eagerly` do the same operation by operation.
value_eagerly = functools.partial(transformed, lambda f: f)
value_compiled = functools.partial(transformed, jax.jit)
eagerly = functools.partial(transformed, lambda f: f, gradient)
compiled = functools.partial(transformed, jax.jit, gradient)
compiled_batch = functools.partial(transformed, in_a_batch, gradient, size=4)


register(FIRST_ORDER, "grad", eagerly(), same_as="jit_of_grad")
register(FIRST_ORDER, "jit_of_grad", compiled())
register(FIRST_ORDER, "grad_of_jit", eagerly(_jitted), same_as="jit_of_grad")
register(FIRST_ORDER, "vmap_of_grad", compiled_batch(), covered=True)
register(FIRST_ORDER, "eager_vmap", transformed(jax.vmap, gradient, size=4), slow=True, same_as="vmap_of_grad")
register(FIRST_ORDER, "grad_of_vmap", compiled(_mapped, size=4), covered=True, same_as="vmap_of_grad")
register(FIRST_ORDER, "scan", eagerly(_scanned), slow=True, same_as="jit_of_scan")
register(FIRST_ORDER, "jit_of_scan", compiled(_scanned), covered=True)
register(FIRST_ORDER, "scan_of_remat", compiled(_scanned, _remat), same_as="jit_of_scan")
register(FIRST_ORDER, "cond", eagerly(_conditional), slow=True, same_as="jit_of_grad")
register(FIRST_ORDER, "jit_of_cond_and_remat", compiled(_conditional, _remat), same_as="jit_of_grad")
register(FIRST_ORDER, "remat", eagerly(_remat), slow=True, same_as="jit_of_grad")
register(FIRST_ORDER, "shard_map", compiled(_sharded, size=4), same_as="vmap_of_grad")
register(FIRST_ORDER, "eager_shard_map", eagerly(_sharded, size=4), slow=True, same_as="vmap_of_grad")
register(FIRST_ORDER, "eager", value_eagerly(), covered=True)
register(FIRST_ORDER, "grad_of_vmap_of_the_first", over_the_first(compiled(_mapped_over_the_first)))


@registered(FIRST_ORDER, slow=True)
def jacrev(f, args):
    return jax.jacrev(_two_outputs(f), floats(args))(*args)


@registered(FIRST_ORDER, slow=True)
def vjp_called_twice(f, args):
    value, pull = jax.vjp(f, *args)
    first, second = pull(jnp.ones_like(value)), pull(jnp.full_like(value, -2.0))
    return [(first[i], second[i]) for i in floats(args)]


@registered(FIRST_ORDER, covered=True, same_as="vmap_of_grad")
def named_sharding(f, args):
    placed = jax.device_put(batched(args, 4), NamedSharding(_mesh(), PartitionSpec("i")))
    return jax.jit(gradient(_mapped(f, args), args))(*placed)


@registered(FIRST_ORDER, covered=True, same_as="jit_of_grad")
def ahead_of_time(f, args):
    return jax.jit(gradient(f, args)).lower(*args).compile()(*args)


@registered(FIRST_ORDER, covered=True, same_as="jit_of_grad")
def export_with_vjp(f, args):
    exported = jax.export.export(jax.jit(f))(*args)
    restored = jax.export.deserialize(exported.serialize(vjp_order=1))
    return gradient(restored.call, args)(*args)


@registered(FIRST_ORDER, covered=True, same_as="jit_of_grad")
def checking_leaks(f, args):
    with jax.checking_leaks():
        return compiled()(f, args)


@registered(FIRST_ORDER, slow=True, same_as="jit_of_grad")
def debug_nans(f, args):
    with jax.debug_nans(True):
        eagerly()(f, args)
        return compiled()(f, args)


register(SECOND_ORDER, "grad_of_grad", eagerly(along), covered=True, same_as="jit_of_grad_of_grad")
register(SECOND_ORDER, "jit_of_grad_of_grad", compiled(along))
register(SECOND_ORDER, "grad_of_grad_of_jit", eagerly(along, _jitted), slow=True, same_as="jit_of_grad_of_grad")
register(SECOND_ORDER, "vmap_of_grad_of_grad", compiled_batch(along), covered=True)
register(SECOND_ORDER, "grad_of_vmap_of_grad", compiled(_mapped, along, size=4), same_as="vmap_of_grad_of_grad")
register(SECOND_ORDER, "second_order_in_scan", compiled(along, _scanned))
register(
    SECOND_ORDER, "second_order_in_cond_and_remat", compiled(along, _conditional, _remat), same_as="jit_of_grad_of_grad"
)
register(SECOND_ORDER, "second_order_in_shard_map", compiled(along, _sharded, size=4), same_as="vmap_of_grad_of_grad")


register(FORWARD_OVER_REVERSE, "hessian", value_eagerly(hessian), slow=True, same_as="jit_of_hessian")
register(FORWARD_OVER_REVERSE, "jit_of_hessian", value_compiled(hessian), covered=True)
register(FORWARD_OVER_REVERSE, "hessian_of_scan", value_compiled(hessian, _scanned))


@registered(FORWARD_OVER_REVERSE)
def jvp_of_grad(f, args):
    # Jitted here; the entry `hessian` runs the same derivative operation by operation.
    g, primals = of_positions(gradient(f, args), floats(args), args)
    return jax.jit(lambda *p: jax.jvp(g, p, tuple(jnp.sin(3 * x) for x in p))[1])(*primals)


# -- forward mode: the reference has the same numbers by reverse mode -----------------------------------


register(FORWARD, "jvp", value_eagerly(DERIVATIVE), slow=True, same_as="jit_of_jvp")
register(FORWARD, "jit_of_jvp", value_compiled(DERIVATIVE), covered=True)
register(FORWARD, "vmap_of_jvp", transformed(in_a_batch, DERIVATIVE, size=3), slow=True)
register(
    FORWARD, "jvp_of_vmap_of_the_first", over_the_first(value_compiled(DERIVATIVE, _mapped_over_the_first)), slow=True
)
register(FORWARD, "jvp_of_scan", value_compiled(DERIVATIVE, _scanned))
register(
    FORWARD, "jvp_of_cond_and_remat", value_compiled(DERIVATIVE, _conditional, _remat), slow=True, same_as="jit_of_jvp"
)
register(FORWARD, "jvp_of_jvp", value_compiled(DERIVATIVE, DERIVATIVE), covered=True)
register(FORWARD, "grad_of_jvp", compiled(DERIVATIVE))
register(FORWARD, "eager_grad_of_jvp", eagerly(DERIVATIVE), slow=True, same_as="grad_of_jvp")


@registered(FORWARD, slow=True, same_as="jit_of_jvp")
def linearize(f, args, _):  # in forward mode always
    g, primals = of_positions(f, floats(args), args)
    return jax.linearize(g, *primals)[1](*_directions(args))


@registered(FORWARD)
def jvp_of_vmap(f, args, derivative=along):
    return value_compiled(DERIVATIVE, _mapped)(f, batched(args, 3), derivative)


@registered(FORWARD, slow=True)
def jacfwd(f, args, derivative=along):
    jacobian = jax.jacrev if derivative is along else jax.jacfwd
    return jax.jit(jacobian(_two_outputs(f), floats(args)))(*args)


TRANSFORMS = FIRST_ORDER | SECOND_ORDER | FORWARD_OVER_REVERSE | FORWARD
SLOW = {name for name, transform in TRANSFORMS.items() if transform.slow}
COVERED = {name for name, transform in TRANSFORMS.items() if transform.covered}
# For each transform, the one of the same table whose expected numbers it has.
SAME_AS = {name: transform.same_as for name, transform in TRANSFORMS.items()}


def scalar(function: Callable[..., Any], linear: bool) -> Function:
    """Return the loss sum(weights * y) over the float outputs y of a function, whose cotangents are constants.

    If not `linear`, the loss is sum(weights * sin(y)), so that the cotangents depend on the outputs.
    """

    def loss(*args):
        total = jnp.zeros(())
        for leaf in jax.tree_util.tree_leaves(function(*args)):
            if jnp.issubdtype(leaf.dtype, jnp.floating):
                weights = 1 + 0.5 * np.sin(np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape)
                total += jnp.sum(weights * (leaf if linear else jnp.sin(leaf)))
        return total

    return loss


def assert_same(ours: Any, expected: Any) -> None:
    assert jax.tree_util.tree_structure(ours) == jax.tree_util.tree_structure(expected)
    for a, b in zip(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def compare(case: Case, name: str) -> None:
    """Compare the numbers of a layer under a transform with those of its reference."""
    run = TRANSFORMS[name]
    if name in FORWARD_OVER_REVERSE and case.forward_over_reverse:
        with pytest.raises(TypeError, match=case.forward_over_reverse):
            run(scalar(case.layer, linear=False), case.args)
        return
    slope = [pushed] if name in FORWARD else []
    assert_same(run(scalar(case.layer, case.linear_loss), case.args, *slope), expected(case, name))

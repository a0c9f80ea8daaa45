"""`check_parallel`: a sharded function beside the unsharded one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pylayer_jax._jax.tracers import NEEDS_VALUES
from pylayer_jax._jax.types import has_tangent, is_key
from pylayer_jax._trees.partition import is_tensor
from pylayer_jax.parallel._axes import as_varying

from ._comparison import Comparison, MismatchError, error_of, exact, rounded_otherwise
from ._flat_function import FlatFunction, flat_function

__tracebackhide__ = True  # pytest hides the frames of this module

_ROUNDINGS = 3  # runs on values that are rounded otherwise: in one run, errors of an entry may cancel


def check_parallel(
    fun: Callable[..., Any],
    reference: Callable[..., Any],
    args: Sequence[Any],
    *,
    mesh: Any = None,
    in_specs: Any = None,
    out_specs: Any = None,
    check_vma: bool = True,
    orders: Sequence[int] = (0, 1),
    rtol: float | None = None,
    atol: float | None = None,
    seed: int = 0,
) -> None:
    """Compare a function that runs on several devices with the same function on one device: outputs and gradients.

        check_parallel(jax.shard_map(mlp, mesh=mesh, in_specs=ins, out_specs=out), whole_mlp, (x, a, b))
        check_parallel(mlp, whole_mlp, (x, a, b), mesh=mesh, in_specs=ins, out_specs=out)

    In the first form `fun` is a function of whole arrays: a `jax.shard_map`, or a jitted function of arrays with any
    shardings. It is differentiated from outside, with `jax.grad` around the `shard_map`. In the second form `fun` is
    the function of the shards of one device, and it is differentiated there, with `jax.grad` inside of the mapped
    function. With check_vma=True a function is right in both forms, or in none. With check_vma=False it is right in
    one: `parallel.replicated_input` and `replicated_output` belong to the first form only.

    Every copy that devices hold of a replicated output or gradient is compared. Gradients are those of all arguments,
    for random cotangents of all outputs. Everything is computed under `jax.jit`, unless it needs concrete values.

    A mesh axis of one device hides mistakes along it. On CPU, XLA_FLAGS=--xla_force_host_platform_device_count=4 gives
    four devices. Take arguments that differ from entry to entry: equal shards hide mistakes too.

    Args:
        fun: a layer class or a function of whole arrays; with `in_specs`, of the shards of one device.
        reference: the function of the same `args`, whole and on one device, in plain JAX. It returns the same tensors,
            in any containers.
        args: any pytrees, as a tuple: whole arrays, with any shardings, on devices of this process.
        mesh, in_specs, out_specs, check_vma: as in `jax.shard_map`, for a function of the shards of one device.
        orders: the orders of differentiation to compare, from 0 to 3: 0 compares outputs, 1 gradients, 2 gradients of
            gradients. Lower orders are compared on the way.
        rtol: relative tolerance; the square root of the machine epsilon by default.
        atol: absolute tolerance; by default as in `assert_equivalent`.
        seed: seed of the cotangents.

    Raises:
        AssertionError: if the functions differ. The message names the output or argument, the index, both values, and
            the mistake that explains them, if there is one.
        TypeError, ValueError: if there is nothing to compare, if `fun` runs on one device, or if an argument lies on
            devices of other processes.
    """
    name, flat = flat_function("check_parallel", fun, args)
    flat_reference = flat_function("check_parallel", reference, args)[1]
    if not orders or any(order not in range(4) for order in orders):
        raise ValueError(f"check_parallel: expected orders from 0 to 3, got {tuple(orders)}.")
    if (in_specs is None) != (out_specs is None) or (in_specs is None and mesh is not None):
        raise TypeError(
            "check_parallel: expected in_specs and out_specs, for a function of the shards of one device, or none of "
            "mesh, in_specs and out_specs, for a function of whole arrays."
        )
    ours = flat if in_specs is None else _of_shards(flat, mesh, in_specs, out_specs, check_vma)
    plain = flat_reference.with_tensors([_on_one_device(x) for x in flat_reference.tensors])
    comparison, rng = Comparison(rtol, atol, right="the reference", per_entry=True), np.random.default_rng(seed)
    arguments: list[str] = []  # whose gradients are compared
    for order in range(max(orders) + 1):
        inside = "inside, with check_vma" if check_vma else "inside"
        kind = "values" if not order else "outside" if in_specs is None else inside
        try:
            outputs, expected = _compare(ours, plain, comparison, arguments, kind)
        except MismatchError as error:
            raise error_of(name, order, error) from None
        if order < max(orders):
            cotangents = plain.random_cotangents(expected, rng)
            if not cotangents:
                raise ValueError(f"{name}: there is no gradient, since no output holds floating-point numbers.")
            ours = ours.grad_function({k: jax.device_put(w, outputs[k].sharding) for k, w in cotangents.items()})
            arguments, plain = plain.names, plain.grad_function(cotangents)


def _compare(
    ours: FlatFunction | _OfShards, plain: FlatFunction, comparison: Comparison, arguments: list[str], kind: str
) -> tuple[list[Any], list[Any]]:
    """Compare what two functions return, which are gradients of `arguments` or outputs."""
    outputs, our_noise = _run(ours)
    expected, noise = _run(plain)
    if len(outputs) != len(expected):
        raise MismatchError(f"{len(outputs)} tensors are returned, but {len(expected)} by {comparison.right}.")
    if all(len(y.sharding.device_set) == 1 for y in outputs):
        raise ValueError(
            "check_parallel: it ran on one device, where no mistake between devices shows. Give a mesh of several; on "
            "CPU, set XLA_FLAGS=--xla_force_host_platform_device_count=4 before JAX starts."
        )
    for i, (y, right) in enumerate(zip(outputs, expected, strict=True)):
        label = f"the gradient of {arguments[i]}" if arguments else f"output {i}"
        larger = np.fmax(noise[i], our_noise[i]) if y.shape == right.shape else noise[i]
        _compare_copies(comparison, y, right, label, larger, kind)
    return outputs, expected


def _run(function: FlatFunction | _OfShards) -> tuple[list[Any], list[np.ndarray]]:
    """The outputs, and how far rounding may move each entry: of sums that cancel, devices leave another rest."""

    def moved(seed: int) -> list[Any]:
        rest = iter(rounded_otherwise([x for x in function.tensors if has_tangent(x)], seed))
        return [next(rest) if has_tangent(x) else x for x in function.tensors]

    points = [function.tensors, *map(moved, range(_ROUNDINGS))]
    try:
        jitted = jax.jit(lambda tensors: function.with_tensors(tensors).run())
        outputs, *others = map(jitted, points)
    except NEEDS_VALUES:
        outputs, *others = (function.with_tensors(tensors).run() for tensors in points)
    noise = [
        np.max([4 * np.abs(exact(y) - exact(other[i])) for other in others], 0) if has_tangent(y) else np.zeros(y.shape)
        for i, y in enumerate(outputs)
    ]
    return outputs, noise


def _on_one_device(x: Any) -> Any:
    if is_key(x):
        return jax.random.wrap_key_data(jnp.asarray(np.asarray(jax.random.key_data(x))), impl=jax.random.key_impl(x))
    return jnp.asarray(np.asarray(x))


# -- functions of the shards of one device --------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _OfShards:
    """A function of the shards of one device, from arrays to arrays, with the whole arrays that it is applied to."""

    local: Callable[[list[Any]], list[Any]]
    tensors: list[Any]
    in_specs: list[Any]
    out_specs: list[Any]
    mesh: Any
    check_vma: bool

    def with_tensors(self, tensors: list[Any]) -> _OfShards:
        return dataclasses.replace(self, tensors=tensors)

    def run(self) -> list[Any]:
        """The whole outputs."""
        return _mapped(self.local, self.mesh, self.in_specs, self.out_specs, self.check_vma)(self.tensors)

    def grad_function(self, cotangents: dict[int, Any]) -> _OfShards:
        """The function from tensors and cotangents to gradients, which each device computes of its own shards."""
        count = len(self.tensors)
        wanted = [i for i, x in enumerate(self.tensors) if has_tangent(x)]

        def local(tensors: list[Any]) -> list[Any]:
            def run(values: list[Any]) -> list[Any]:
                given = dict(enumerate(tensors[:count])) | dict(zip(wanted, values, strict=True))
                outputs = self.local(list(given.values()))
                # out_specs may cut a replicated output, so that its cotangents vary.
                return [as_varying(outputs[k], _axes_of(self.out_specs[k])) for k in cotangents]

            return jax.vjp(run, [tensors[i] for i in wanted])[1](tensors[count:])[0]

        in_specs = [*self.in_specs, *(self.out_specs[k] for k in cotangents)]
        return _OfShards(
            local,
            [*self.tensors, *cotangents.values()],
            in_specs,
            [in_specs[i] for i in wanted],
            self.mesh,
            self.check_vma,
        )


def _of_shards(flat: FlatFunction, mesh: Any, in_specs: Any, out_specs: Any, check_vma: bool) -> _OfShards:
    args = flat.skeleton.fill(flat.tensors)
    prefix = tuple(in_specs) if isinstance(in_specs, list) else in_specs
    specs = [
        spec for spec, leaf in zip(_of_each_leaf(prefix, args), jax.tree.leaves(args), strict=True) if is_tensor(leaf)
    ]

    tensors = flat.tensors
    if mesh is not None:  # in a mesh of explicit axes, JAX wants its arrays cut as in_specs say
        tensors = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(tensors, specs, strict=True)]

    def local(tensors: list[Any]) -> Any:
        return flat.function(*flat.skeleton.fill(tensors))

    outputs = jax.eval_shape(_mapped(local, mesh, specs, out_specs, check_vma), tensors)
    leaves = lambda tensors: jax.tree.leaves(local(tensors))  # noqa: E731
    return _OfShards(leaves, tensors, specs, _of_each_leaf(out_specs, outputs), mesh, check_vma)


def _mapped(local: Callable[..., Any], mesh: Any, in_specs: list[Any], out_specs: Any, check_vma: bool) -> Any:
    return jax.shard_map(local, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, check_vma=check_vma)


def _of_each_leaf(specs: Any, tree: Any) -> list[Any]:
    found = jax.tree.leaves(jax.tree.broadcast(specs, tree, is_leaf=_is_spec), is_leaf=_is_spec)
    return [PartitionSpec() if spec is None else spec for spec in found]


def _is_spec(node: Any) -> bool:
    return node is None or isinstance(node, PartitionSpec)


def _axes_of(spec: Any) -> tuple[str, ...]:
    """The mesh axes along which a spec cuts an array."""
    entries = [(entry,) if isinstance(entry, str) else entry or () for entry in spec]
    return tuple(name for entry in entries for name in entry)


# -- what several devices hold of one array -------------------------------------------------------


def _compare_copies(
    comparison: Comparison, got: jax.Array, expected: jax.Array, name: str, noise: np.ndarray, kind: str
) -> None:
    """Compare every copy of an array. The message names the mistake that explains a difference, if there is one."""
    if is_key(got) and is_key(expected):
        got, expected = jax.random.key_data(got), jax.random.key_data(expected)
    copies = _copies(got)
    differ = len({copy.tobytes() for copy in copies.values()}) > 1
    for devices, copy in copies.items():
        try:
            comparison.of_arrays(copy, expected, f"{name} on {devices}" if differ else name, noise)
        except MismatchError as error:
            if differ:
                advice = f"The copies of the devices differ. {_NOT_REPLICATED[kind]}"
            else:
                advice = _about_factor(copy, exact(expected), len(got.sharding.device_set), kind)
            raise MismatchError(f"{error} {advice}".rstrip()) from None


def _copies(x: jax.Array) -> dict[str, np.ndarray]:
    """Each copy of an array that the devices hold, by their names: without check_vma, replicated shards may differ."""
    copies: dict[int, np.ndarray] = {}
    devices: dict[int, list[str]] = {}
    for shard in x.addressable_shards:
        # NumPy takes no element of a narrow dtype, such as bfloat16, from an array of JAX.
        copies.setdefault(shard.replica_id, np.empty(x.shape, x.dtype))[shard.index] = np.asarray(shard.data)
        devices.setdefault(shard.replica_id, []).append(str(shard.device))
    return {", ".join(devices[i]): copies[i] for i in sorted(copies)}


def _about_factor(got: np.ndarray, expected: np.ndarray, devices: int, kind: str) -> str:
    """The likely mistake, if all entries are wrong by the same factor, which is a number of devices."""
    sizes = [n for n in range(devices, 1, -1) if devices % n == 0]
    for factor, label in [*((n, f"{n} times") for n in sizes), *((1 / n, f"1/{n} of") for n in sizes)]:
        slack = 0.01 * factor * np.max(np.abs(expected), initial=0.0)
        if got.shape == expected.shape and np.all(np.abs(exact(got) - factor * expected) <= slack):
            return f"It is {label} the right value everywhere. {_FACTORS[kind, factor > 1]}"
    return ""


_NOT_REPLICATED = {
    "values": "Is parallel.reduce_from or parallel.gather_from missing?",
    "inside": "Is parallel.copy_to missing, where the argument meets values that vary?",
    "inside, with check_vma": "",
    "outside": "",
}
_SUMMED_ALREADY = (
    "Is a layer an identity whose backward is a psum? Under jax.shard_map with check_vma, JAX sums the cotangent of a "
    "shared value already: use pylayer_jax.parallel.copy_to, or jax.lax.pcast in forward."
)
_COPY_TO = "Is parallel.copy_to missing? parallel.replicated_input is for jax.grad around the shard_map."
_FACTORS = {
    ("values", True): "Does it add up a value that each device has already (reduce_from of a replicated one)?",
    ("values", False): "Is parallel.reduce_from missing, or is a mean taken of parts that need a sum?",
    ("outside", True): f"{_SUMMED_ALREADY} Without check_vma: is parallel.replicated_input missing?",
    ("outside", False): "Without check_vma: is parallel.replicated_output missing, or parallel.copy_to where the "
    "argument meets values that vary?",
    ("inside", True): "Is it added up twice? parallel.replicated_output is for jax.grad around the shard_map, and "
    "jax.lax.psum without check_vma is its own transpose, where parallel.reduce_from is right.",
    ("inside", False): _COPY_TO,
    ("inside, with check_vma", True): f"{_SUMMED_ALREADY} Or is it added up twice? parallel.replicated_output is for "
    "jax.grad around the shard_map.",
    ("inside, with check_vma", False): _COPY_TO,
}

"""A tensor on several devices, on the host: each shard by itself, in the process that holds it.

NOTE [shards on the host]
A hook on the host sees one shard at a time where another process holds a part of the tensor, and in compiled programs:
a callback for the whole tensor would gather it on the first device. Several devices that hold the same shard pack it
once per process in eager mode, and each for itself in a compiled program, where devices share nothing on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pylayer_jax._jax.types import as_arrays, mesh_axes_of, typeof

# -- concrete arrays ------------------------------------------------------------------------------


def local_shards(array: jax.Array) -> list[np.ndarray]:
    """The distinct shards of an array in this process."""
    data = {shard.device: shard.data for shard in array.addressable_shards}
    return [np.asarray(data[devices[0]]) for devices in _devices_by_shard(array.shape, array.sharding)]


def from_local_shards(shards: Sequence[Any], shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """The array whose distinct shards in this process are given, in the order of `local_shards`."""
    by_shard = zip(as_arrays(shards), _devices_by_shard(shape, sharding), strict=True)
    arrays = [jax.device_put(shard, device) for shard, devices in by_shard for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _devices_by_shard(shape: tuple[int, ...], sharding: Any) -> list[list[Any]]:
    """The devices of this process, grouped by the shard that they hold."""
    groups: dict[Any, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        groups.setdefault(str(index), []).append(device)  # slices cannot be hashed before Python 3.12
    return list(groups.values())


# -- traced values --------------------------------------------------------------------------------


class ShardLayout(NamedTuple):
    """How the devices of a mesh divide a traced tensor. Each of them runs a function on its own piece."""

    piece: jax.ShapeDtypeStruct  # the type of the pieces
    mesh: Any
    names: tuple[str, ...]  # the axes of the mesh that no enclosing shard_map has; none on one device
    spec: PartitionSpec

    @classmethod
    def of(cls, tensor: Any) -> Self:
        """The layout of a tensor.

        Explicit axes tell it. The sharding along automatic axes is chosen by the compiler, later: there the first axis
        of the mesh cuts the first axis of the tensor that it divides, and each other one the last, as the axes of a
        batch and of features usually are. The compiler moves what it had placed otherwise.
        """
        sharding, shape = typeof(tensor).sharding, tensor.shape
        mesh = sharding.mesh
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        names = tuple(name for name, kind in kinds.items() if kind != jax.sharding.AxisType.Manual)
        whole = cls(jax.ShapeDtypeStruct(shape, tensor.dtype), mesh, (), PartitionSpec())
        if math.prod(mesh.shape[name] for name in names) == 1:
            return whole
        cuts = mesh_axes_of(sharding, tensor.ndim)
        automatic = [name for name in names if kinds[name] == jax.sharding.AxisType.Auto]
        for i, name in enumerate(automatic):
            order = range(tensor.ndim) if i == 0 else reversed(range(tensor.ndim))
            fits = (axis for axis in order if not cuts[axis] and shape[axis] % mesh.shape[name] == 0)
            if (axis := next(fits, None)) is not None:
                cuts[axis] = (name,)
        lengths = (n // math.prod(mesh.shape[name] for name in cut) for n, cut in zip(shape, cuts, strict=True))
        layout = cls(jax.ShapeDtypeStruct(tuple(lengths), tensor.dtype), mesh, names, PartitionSpec(*cuts))
        return layout if layout._is_allowed(tensor) else whole

    def number_pieces(self, function: Callable[[Any], Any], tensor: Any) -> jax.Array:
        """The scalar that a function returns for a tensor on one device; or one for the piece of each device."""
        if not self.names:
            return function(tensor)
        return self._map(lambda x: function(x)[None], self.spec, PartitionSpec(self.names))(tensor)

    def join_pieces(self, function: Callable[[Any], Any], numbers: Any) -> jax.Array:
        """The tensor whose pieces a function returns for such scalars."""
        if not self.names:
            return function(numbers)
        return self._map(lambda x: function(x[0]), PartitionSpec(self.names), self.spec)(numbers)

    def _map(self, function: Callable[[Any], Any], in_spec: PartitionSpec, out_spec: PartitionSpec) -> Any:
        # Devices that hold the same shard number it differently, which the types of shard_map would refuse.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_spec,
            out_specs=out_spec,
            axis_names=set(self.names),
            check_vma=False,
        )

    def _is_allowed(self, tensor: Any) -> bool:
        """Whether JAX allows a shard_map over these axes here.

        It does not while `jax.vmap` maps an axis of an array that one of them cuts, even of a tensor that has no part
        in it, or has one of them as its `spmd_axis_name`. The hooks then see the whole tensor, on one device.
        """
        numbers = PartitionSpec(self.names)
        try:
            self._map(lambda _: np.zeros(1, np.uint32), self.spec, numbers)(tensor)
        except ValueError:
            return False
        return True

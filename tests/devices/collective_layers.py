"""Layers of tensor, sequence and data parallel training, for the devices of one mesh axis.

P and a number name a Paddle PyLayer, T and a number a torch Function of the list that the layers are taken from. The
originals change tensors in place (P1 its cotangent, P2 and T2 their input); here they are plain values.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pylayer_jax import Function, PyLayer

# -- groups -----------------------------------------------------------------------------------------


class Group:
    """The ranks along a mesh axis: a live object, which JAX knows nothing about.

    As in Paddle and torch, every rank has a value of its own, also of a sum. With `shared`, for check_vma=True
    alone, JAX is told that a sum is one value, so that it has one cotangent as well.
    """

    def __init__(self, axis, size, shared=False):
        self.axis, self.size, self.shared = axis, size, shared

    @property
    def rank(self):
        return jax.lax.axis_index(self.axis)

    def own(self, x):
        """A value that all ranks share, as one for each of them: so that their cotangents differ, and can be summed."""
        return jax.lax.pcast(x, self.axis, to="varying") if self.shared else x

    def all_reduce(self, x):
        return self._of_each(jax.lax.psum(x, self.axis))

    def all_max(self, x):
        # JAX has no derivative of pmax, and a maximum that is subtracted needs none.
        return self._of_each(jax.lax.pmax(jax.lax.stop_gradient(x), self.axis))

    def _of_each(self, total):
        return total if self.shared else jax.lax.pcast(total, self.axis, to="varying")

    def all_gather(self, x):
        return list(jax.lax.all_gather(x, self.axis))

    def concatenate(self, x, dim=0):
        return jnp.concatenate(self.all_gather(x), dim)

    def chunk(self, x, dim=0):
        size = x.shape[dim] // self.size
        return jax.lax.dynamic_slice_in_dim(x, self.rank * size, size, dim)

    def reduce_scatter(self, x, dim=0):
        return jax.lax.psum_scatter(x, self.axis, scatter_dimension=dim % x.ndim, tiled=True)

    def exchange(self, x):
        return jax.lax.all_to_all(x, self.axis, 0, 0, tiled=True)


AXIS, RANKS = "ranks", 4
WORLD: Group | None = Group(AXIS, RANKS)  # what some layers use without asking; None before initialisation

# -- Paddle -----------------------------------------------------------------------------------------


class Identity(PyLayer):
    """P1: the gradient is summed over the ranks; a live object on an attribute, and nothing saved."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return group.own(tensor)

    @staticmethod
    def backward(ctx, dy):
        return ctx.group.all_reduce(dy)


class AllReduce(PyLayer):
    """P2: a sum whose gradient is not summed."""

    @staticmethod
    def forward(ctx, tensor, group, use_calc_stream, use_model_parallel):
        ctx.ring_id = 0 if use_model_parallel else 1
        return group.all_reduce(tensor)

    @staticmethod
    def backward(ctx, dy):
        assert ctx.ring_id == 0
        return dy


def of_world(there, back):
    """P3 to P6: one collective of the global group forward, another backward, and ctx unused."""

    class Layer(PyLayer):
        @staticmethod
        def forward(ctx, x):
            return there(WORLD, x)

        @staticmethod
        def backward(ctx, dy):
            return back(WORLD, dy)

    return Layer


Scatter = of_world(Group.chunk, Group.concatenate)  # P3: the own part of what all ranks have
Gather = of_world(Group.concatenate, Group.chunk)  # P4: its backward takes the own part without a sum
AllGather = of_world(Group.concatenate, Group.reduce_scatter)  # P5: as P4, with the sum
ReduceScatter = of_world(Group.reduce_scatter, Group.concatenate)  # P6: the transpose of P5


class ExpertsGather(PyLayer):
    """P11. All ranks run one program, so that `rank` is an integer tensor here: a slot, left out of the result."""

    @staticmethod
    def forward(ctx, inp, rank, world_size, group):
        ctx.args = rank, inp.shape[0]
        return group.concatenate(inp)

    @staticmethod
    def backward(ctx, dy):
        rank, count = ctx.args
        return jax.lax.dynamic_slice_in_dim(dy, rank * count, count)


class ExpertsSlice(PyLayer):
    """P12: the counterpart of P11."""

    @staticmethod
    def forward(ctx, inp, rank, world_size, group):
        ctx.args = world_size, group
        count = inp.shape[0] // world_size
        return jax.lax.dynamic_slice_in_dim(inp, rank * count, count)

    @staticmethod
    def backward(ctx, dy):
        world_size, group = ctx.args
        assert group.size == world_size
        return group.concatenate(dy)


class GatherEach(PyLayer):
    """P25: one output per rank, or a tuple of one where there is no group."""

    @staticmethod
    def forward(ctx, x):
        return (x,) if WORLD is None else tuple(WORLD.all_gather(x))

    @staticmethod
    def backward(ctx, *grads):
        if len(grads) == 1:
            return grads[0]
        return WORLD.all_reduce(jnp.stack(grads))[WORLD.rank]


# -- torch ------------------------------------------------------------------------------------------


def region(there, back, *dim):
    """T1 to T5 and T7 to T9: one collective forward, another backward."""

    class Layer(Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return there(group, x, *dim)

        @staticmethod
        def backward(ctx, grad_output):
            return back(ctx.group, grad_output, *dim), None

    return Layer


CopyToRegion = region(Group.own, Group.all_reduce)  # T1
ReduceFromRegion = region(Group.all_reduce, lambda group, g: g)  # T2
ScatterToRegion = region(Group.chunk, Group.concatenate, -1)  # T3
GatherFromRegion = region(Group.concatenate, Group.chunk, -1)  # T4
ScatterToSequence = region(Group.chunk, Group.concatenate, 0)  # T5
ReduceScatterToSequence = region(Group.reduce_scatter, Group.concatenate, 0)  # T7
AllGatherFromRegion = region(Group.concatenate, Group.reduce_scatter, -1)  # T8
ReduceScatterToRegion = region(Group.reduce_scatter, Group.concatenate, -1)  # T9


class GatherFromSequence(Function):
    """T6: backward branches on a flag. Split sizes are equal, as ranks of one program have arrays of one shape."""

    @staticmethod
    def forward(ctx, x, group, tensor_parallel_output_grad=True, output_split_sizes=None, use_global_buffer=False):
        ctx.group, ctx.summed, ctx.sizes = group, tensor_parallel_output_grad, output_split_sizes
        return group.concatenate(x)

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.summed:
            return ctx.group.reduce_scatter(grad_output), None, None, None, None
        assert ctx.sizes is None
        return ctx.group.chunk(grad_output), None, None, None, None


class AllToAll(Function):
    """T10: the group comes first, and backward applies the class itself with the sizes swapped.

    Equal sizes alone: XLA has no ragged all-to-all for CPUs.
    """

    @staticmethod
    def forward(ctx, group, x, output_split_sizes, input_split_sizes):
        ctx.group, ctx.output_split_sizes, ctx.input_split_sizes = group, output_split_sizes, input_split_sizes
        assert output_split_sizes in (None, [1] * group.size)
        return group.exchange(x)

    @staticmethod
    def backward(ctx, *grad_output):
        return None, AllToAll.apply(ctx.group, *grad_output, ctx.input_split_sizes, ctx.output_split_sizes), None, None

"""Defines rows in which `Function` behaves as torch.autograd.Function does, and each difference between them."""

import numpy as np

from tests.kit.case import numpy_grid as grid
from tests.kit.oracle import Table, X, Y

from .after_torch import layers

TABLE = Table()


def no_setup(ctx, inputs, output):
    """Define a `setup_context` that saves nothing, for a forward without a context."""


# -- the context and backward -----------------------------------------------------------------------


def noting_needs(of, style):
    def run(x, gain, y, z=None, name="none"):
        return gain * x * y if z is None else gain * x * y + z

    def setup(ctx, inputs, output):  # where defaults that were not passed count
        ctx.has_z = len(inputs) > 3 and inputs[3] is not None
        of.note(ctx.needs_input_grad)

    def backward(ctx, dy):
        of.note(ctx.needs_input_grad)
        return (dy, None, dy * 2, dy * 3 if ctx.has_z else None, None)[: len(ctx.needs_input_grad)]

    if style == "setup_context":
        return of.function(run, backward, setup_context=setup).apply
    return getattr(of, style)(lambda ctx, *args: setup(ctx, args, None) or run(*args), backward).apply


for args, *subsets in (((X, 0.7, Y), (0,), (0, 2)), ((X, 0.7, Y, X * 2, "named"), (2,), (0, 3))):
    for wrt in subsets:
        for style in ("layer", "function", "setup_context"):
            # In a traced forward each tensor may need a gradient.
            @TABLE.add(*args, label=f"{style}-{len(args)}{wrt}", wrt=wrt, modes=("eager",))
            def needs_input_grad(of, style=style):
                return noting_needs(of, style)


@TABLE.add()
def cotangent_that_never_arrives(of):
    stopped = of.function(lambda ctx, x: x * 2, lambda ctx, dy: (None,))
    return lambda x: stopped.apply(of.text(layers).MulConstant.apply(x, 2.5)) + of.sin(x)


def product_rule(ctx, dy):
    x, y = ctx.saved_tensors
    return dy * y, dy * x


@TABLE.add(X, Y)
def saved_twice(of):
    def forward(ctx, x, y):
        ctx.save_for_backward(y)
        ctx.save_for_backward(x, y)
        return x * y

    return of.function(forward, product_rule).apply


@TABLE.add(X, Y)
def surplus_nones(of):
    return of.function(of.saving(lambda x, y: x * y), lambda ctx, dy: (*product_rule(ctx, dy), None, None)).apply


# Of a product of the input, as torch refuses to change a leaf in place before it looks at anything else.
for name, record, their, our, match in (
    ("save_for_backward", lambda ctx, x: ctx.save_for_backward(3), TypeError, TypeError, "save_for_backward"),
    ("save_for_forward", lambda ctx, x: ctx.save_for_forward(3), AssertionError, TypeError, "save_for_forward"),
    ("mark_dirty", lambda ctx, x: ctx.mark_dirty(x), RuntimeError, ValueError, "mark_dirty"),
):

    @TABLE.differ(label=name, theirs=their, ours=our, match=match)
    def recorded_in_vain(of, record=record):
        layer = of.function(lambda ctx, x: record(ctx, x) or x * 2, lambda ctx, dy: dy * 2)
        return lambda x: layer.apply(x * 1)


# torch looks at what is saved only if it is needed.
@TABLE.differ(orders=0, wrt=(), theirs=[2 * X], ours=TypeError, match="save_for_backward")
def number_saved_though_nothing_is_differentiated(of):
    return of.function(lambda ctx, x: ctx.save_for_backward(3) or x * 2, lambda ctx, dy: dy * 2).apply


@TABLE.differ(theirs=[1], ours=ValueError, match="tensor")
def no_tensor_among_the_outputs(of):
    layer = of.function(lambda ctx, x: "text", lambda ctx, dy: dy)
    return lambda x: (layer.apply(x), x)


# torch does not see them; here they are tensors of the argument, with a gradient of their own.
@TABLE.differ(theirs=[1], ours=[3])
def tensors_in_a_list(of):
    layer = of.function(lambda ctx, values: values[0] * 2, lambda ctx, dy: ([dy * 2],))
    return lambda x: (layer.apply([x]), x)


@TABLE.differ(theirs=NotImplementedError, ours=NotImplementedError)
def no_backward(of):
    return of.function(lambda ctx, x: x * 2).apply


ROWS = grid(3, 4)


def slope(of, f):
    return lambda x: (of.grad(f)(x) * of.cos(of.tensor(np.arange(4, dtype=np.float32)))).sum()


# Of a scalar function of a row, and of rows.
TRANSFORMS = {
    "vmap": lambda of, f: of.vmap(f),
    "vmap_over_another_axis": lambda of, f: lambda x: of.vmap(f, 1)(x.T),
    "vmap_of_grad": lambda of, f: of.vmap(of.grad(f)),
    "vmap_of_grad_of_grad": lambda of, f: of.vmap(of.grad(slope(of, f))),
    "vmap_of_jacrev": lambda of, f: of.vmap(of.jacrev(lambda x: of.stack([f(x), f(x * 2)]))),
}


def product_with_a_rule(of):
    def setup(ctx, inputs, output):
        x, y, ctx.gain = inputs
        ctx.save_for_backward(x, y)

    def backward(ctx, dy):
        x, y = ctx.saved_tensors
        return y * ctx.gain * dy, x * ctx.gain * dy, None

    def front(x, dim):
        return x if dim is None else of.moveaxis(x, dim, 0)

    def vmap(info, in_dims, x, y, gain):
        of.note((info.batch_size, tuple(in_dims)))
        result = layer.apply(front(x, in_dims[0]), front(y, in_dims[1]), gain)
        return of.moveaxis(result, 0, -1), result.ndim - 1

    layer = of.function(lambda x, y, gain: x * y * gain, backward=backward, setup_context=setup, vmap=vmap)
    return layer


LOSSES = {
    "rule": lambda of, x: product_with_a_rule(of).apply(x, x, 0.7),
    "generated": lambda of, x: of.text(layers).Normalize.apply(x)[0],
}

for transform, run in TRANSFORMS.items():
    for name, value in LOSSES.items():

        @TABLE.add(ROWS, orders=0, label=f"{transform}-{name}")
        def under_a_transform(of, run=run, value=value):
            return run(of, lambda x: of.bent(value(of, x)))


AXES = {0: ROWS, 1: ROWS.T.copy(), None: ROWS[0]}
for in_dims in ((0, 0), (1, None), (None, 0), (1, 0)):

    @TABLE.add(AXES[in_dims[0]], 2 * AXES[in_dims[1]], orders=0, label=str(in_dims))
    def what_the_rule_for_vmap_gets(of, in_dims=in_dims):
        return lambda x, y: of.vmap(lambda x, y: product_with_a_rule(of).apply(x, y, 0.7), in_dims)(x, y)


# torch asks for a rule; here forward and backward are traced, and need none.
@TABLE.differ(orders=0, wrt=(), theirs=RuntimeError, ours=[X**3, 3 * X**2])
def no_rule_for_vmap(of):
    return of.vmap(of.text(layers).Cube.apply)


# torch.func asks for setup_context; here both styles meet every transform.
@TABLE.differ(orders=0, wrt=(), theirs=RuntimeError, ours=[np.exp(X)])
def context_that_forward_fills_under_transforms(of):
    exp = of.function(of.saving(of.exp), lambda ctx, dy: dy * of.exp(ctx.saved_tensors[0]))
    return of.vmap(of.grad(lambda x: exp.apply(x).sum()))


# torch differentiates what vmap does, and so may lose the custom gradient; here it is backward, batched.
@TABLE.differ(orders=0, wrt=(), theirs=[3], ours=[2])
def gradient_of_a_batch(of):
    rules = {"setup_context": no_setup, "vmap": lambda info, in_dims, x: (x * 3, 0)}
    layer = of.function(lambda x: x * 2, backward=lambda ctx, dy: dy * 2, **rules)
    return of.grad(lambda x: of.vmap(layer.apply)(x).sum())


@TABLE.differ(orders=0, wrt=(), theirs=RuntimeError, ours=RuntimeError, match="generate_vmap_rule")
def both_rules_for_vmap(of):
    rules = {"setup_context": no_setup, "vmap": lambda info, in_dims, x: (x * 2, 0), "generate_vmap_rule": True}
    return of.vmap(of.function(lambda x: x * 2, **rules).apply)


DX, DY = np.cos(X), 2 * Y


@TABLE.add(X, Y, DX, DY, orders=0)
def jvp(of):
    def first(x, y):
        z, *statics = of.text(layers).SinProduct.apply(x, y, 0.7)
        of.note(statics)
        return z

    return lambda x, y, dx, dy: of.jvp(first, (x, y), (dx, dy))


@TABLE.differ(orders=0, wrt=(), theirs=NotImplementedError, ours=TypeError)
def no_rule_for_forward_mode(of):
    layer = of.function(lambda x: x * 2, backward=lambda ctx, dy: dy * 2, setup_context=no_setup)
    return lambda x: of.jvp(layer.apply, (x,), (x * 1,))

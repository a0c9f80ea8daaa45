"""Defines layers with the same results in Paddle, torch and this package, also under saved-tensor hooks."""

import numpy as np

from tests.kit.oracle import Table, X, Y, Z

SHARED = Table()


@SHARED.add()
@SHARED.add(label="alone", used=(1,))
def integer_and_bool_outputs(of):
    layer = of.layer(lambda ctx, x: (of.cast(x * 10, "int32"), x * 2, x > 0), lambda ctx, di, dy, db: dy * 2)
    return lambda x: (*layer.apply(x), x * 3)


@SHARED.add(X, np.array([2, 3], np.int32))
def integer_input(of):
    return of.layer(lambda ctx, x, n: x * of.cast(n, "float32"), lambda ctx, dy: (dy * 2, None)).apply


@SHARED.add(X, Y, wrt=(0,))
def input_that_needs_no_gradient_returned_beside(of):
    return of.layer(lambda ctx, x, y: (of.sin(x), y * 1), lambda ctx, dx, dy: (dx * 2, None)).apply


def doubled_tanh(of):
    def forward(ctx, x):
        y = of.tanh(x)
        ctx.save_for_backward(y)
        return y

    def backward(ctx, dy):
        (y,) = of.saved(ctx)
        return 2 * dy * (1 - y * y)

    return of.layer(forward, backward)


@SHARED.add(orders=3)
def saved_output(of):
    return doubled_tanh(of).apply


@SHARED.add(orders=3)
def saved_input(of):
    return of.layer(of.saving(of.sin), lambda ctx, dy: 2 * dy * of.cos(of.saved(ctx)[0])).apply


def product(of, first=1, second=1):
    """Layer that saves its inputs, and reads the saved tensors once; the factors multiply its gradients."""

    def backward(ctx, dy):
        a, b = of.saved(ctx)
        return dy * b * first, dy * a * second

    return of.layer(of.saving(lambda a, b: a * b), backward)


@SHARED.add(X, Y)
def input_and_output_on_attributes(of):
    def forward(ctx, x, y):
        z = of.tanh(x) * y
        ctx.factor, ctx.kept = 3, {"input": (x, None), "output": [z]}
        return z

    def backward(ctx, dz):
        x, z = ctx.kept["input"][0], ctx.kept["output"][0]
        return dz * z * ctx.factor, dz * of.sin(x)

    return of.layer(forward, backward).apply


@SHARED.add(X, Y)
def two_inputs(of):
    return product(of, 2, 3).apply


@SHARED.add()
def one_tensor_passed_twice(of):
    layer = two_inputs(of)
    return lambda x: layer(x, x)


@SHARED.add(X, Y)
def none_for_an_input(of):
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        return a * b

    return of.layer(forward, lambda ctx, dy: (None, dy * of.saved(ctx)[0])).apply


for used in ((0,), (1,), (0, 1)):

    @SHARED.add(label=str(used), used=used)
    def two_outputs(of):
        def backward(ctx, dy, dz):
            (x,) = of.saved(ctx)
            return dy * x * 2 + of.cast(dz, "float32").sum(0) * 3

        return of.layer(of.saving(lambda x: (x * x, of.cast(of.stack([x, x]), "float16"))), backward).apply

    for dialect in ("layer", "function"):

        @SHARED.add(label=f"{dialect}-{used}", used=used)
        def two_outputs_not_materialized(of, dialect=dialect):
            def forward(ctx, x):
                ctx.set_materialize_grads(False)
                return x * x, of.sin(x)

            def backward(ctx, dy, dz):
                return (0 if dy is None else dy * 2) + (0 if dz is None else dz * 3)

            return getattr(of, dialect)(forward, backward).apply


@SHARED.add()
@SHARED.add(label="alone", used=(0, 2))
def marked_output(of):
    """Layer with a marked output. Its gradient does not depend on a cotangent, which shows whether backward ran."""

    def forward(ctx, x):
        y, z = x * 2, of.sin(x)
        ctx.mark_non_differentiable(y)
        return y, z

    layer = of.layer(forward, lambda ctx, dy, dz: of.ones_like(dz) * 7 + dz)
    return lambda x: (*layer.apply(x), x * 3)


@SHARED.add()
def every_output_marked(of):
    def forward(ctx, x):
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y

    layer = of.layer(forward, lambda ctx, dy: of.ones_like(dy))
    return lambda x: (layer.apply(x), x * 3)


@SHARED.add(orders=3)
def itself_inside_backward(of):
    layer = of.layer(of.saving(lambda x: of.sin(x)), lambda ctx, dy: dy * layer.apply(of.saved(ctx)[0]))
    return layer.apply


@SHARED.add(np.array(0.7, np.float32), np.zeros((0, 2), np.float32))
def scalars_and_empty_tensors(of):
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return of.sin(x), y * 2

    return of.layer(forward, lambda ctx, dx, dy: (dx * of.saved(ctx)[0], dy * 3)).apply


@SHARED.add(Z, orders=1)
def complex_numbers(of):
    def backward(ctx, dy):
        return dy * 2 * of.conj(of.saved(ctx)[0])

    return of.layer(of.saving(lambda z: z * z), backward, complex_convention="paddle").apply


@SHARED.add(X, Y, wrt=(0,), modes=("eager",))  # under a trace each input may need one
def flags_that_a_method_reads_of_its_arguments(of):
    def forward(ctx, x, y):
        of.note([of.needs_gradient(ctx, place, tensor) for place, tensor in enumerate((x, y))])
        return of.sin(x) + y

    return of.layer(forward, lambda ctx, dy: (dy * 3, None)).apply


def noting_what_is_saved(of, save, read):
    def forward(ctx, x):
        if save is not None:
            ctx.save_for_backward(*save(x))
        return x * 2

    def backward(ctx, dy):
        of.note(read(ctx))
        return dy * 3

    return of.layer(forward, backward).apply


# -- under hooks, with the number of calls of each hook: packs and unpacks ---------------------------

HOOKS = Table()


# Paddle packs all the same.
@HOOKS.count(orders=0, wrt=(), theirs={"paddle": (2, 0), "torch": (0, 0)}, ours=(0, 0))
def without_differentiation(of):
    layer = product(of)

    def fourth_power(x):
        square = layer.apply(x, x)
        return square * square

    return of.hooked(fourth_power)


@SHARED.add(X, Y, orders=1)
def what_hooks_get_and_when(of):
    def pack(x):
        of.note(("pack", x))
        return {"hidden": x}

    def unpack(kept):
        of.note(("unpack", kept))
        return kept["hidden"]

    return of.hooked(product(of).apply, pack, unpack)


def read_twice(of):
    def backward(ctx, dy):
        return dy * of.saved(ctx)[1], dy * of.saved(ctx)[0]

    return of.layer(of.saving(lambda a, b: a * b), backward).apply


def layer_inside(of):
    inner = product(of)
    forward = of.saving(lambda x: inner.apply(x, x) * 1)
    return of.layer(forward, lambda ctx, dy: 2 * dy * of.saved(ctx)[0]).apply


# The arguments, the calls there and here, and what runs in the block.
for name, args, theirs, ours, run in (
    ("product", (X, Y), (2, 2), (2, 2), lambda of: of.multiply),
    ("exp", (X,), (1, 1), (1, 1), lambda of: of.exp),
    ("saved input", (X, Y), (2, 2), (2, 2), lambda of: product(of).apply),
    ("saved output", (X,), (1, 1), (1, 1), lambda of: doubled_tanh(of).apply),
    ("not asked for", (X,), (1, 0), (1, 0), lambda of: of.layer(of.saving(of.sin), lambda ctx, dy: dy * 3).apply),
    # An operation packs a tensor once here, and once per use there; if it is read twice, it is unpacked once here.
    ("square", (X,), (2, 2), (1, 1), lambda of: lambda x: x * x),
    ("two operations", (X, Y), (4, 4), (4, 4), lambda of: lambda x, y: (x * y, y * x)),
    ("one tensor twice", (X,), (2, 2), (1, 1), lambda of: lambda x: product(of).apply(x, x)),
    ("read twice", (X, Y), (2, 4), (2, 2), read_twice),
    # Operations inside forward save nothing that anyone could ask for, but Paddle packs them.
    ("layer inside a layer", (X,), {"paddle": (3, 1), "torch": (1, 1)}, (1, 1), layer_inside),
):

    @HOOKS.count(*args, theirs=theirs, ours=ours, label=name)
    def calls_of_hooks(of, run=run):
        return of.hooked(run(of))


@HOOKS.count(X, Y, wrt=(0,), theirs={"paddle": (2, 2), "torch": (1, 1)}, ours=(1, 1))
def one_factor_needs_a_gradient(of):
    return of.hooked(of.multiply)

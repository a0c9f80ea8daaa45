"""Small functions, each about one rule."""

from __future__ import annotations


def define(xp):
    class SeenNeeds(xp.Function):
        """Notes `needs_input_grad` as backward sees it."""

        seen = []

        @staticmethod
        def forward(ctx, x, gain, y, z=None, name="none"):
            ctx.save_for_backward(x, y)
            ctx.gain, ctx.count = gain, len(ctx.needs_input_grad)
            return gain * x * y if z is None else gain * x * y + z

        @staticmethod
        def backward(ctx, grad_output):
            SeenNeeds.seen.append(ctx.needs_input_grad)
            x, y = ctx.saved_tensors
            return (ctx.gain * y * grad_output, None, ctx.gain * x * grad_output, grad_output, None)[: ctx.count]

    class SeenNeedsSetup(xp.Function):
        """The same in the other style, where defaults that were not passed count."""

        seen = []

        @staticmethod
        def forward(x, gain, y, z=None, name="none"):
            return gain * x * y if z is None else gain * x * y + z

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, ctx.gain, y, z, ctx.name = inputs
            ctx.biased = z is not None
            ctx.save_for_backward(x, y)

        @staticmethod
        def backward(ctx, grad_output):
            SeenNeedsSetup.seen.append(ctx.needs_input_grad)
            x, y = ctx.saved_tensors
            grad_z = grad_output if ctx.biased else None
            return ctx.gain * y * grad_output, None, ctx.gain * x * grad_output, grad_z, None

    class SeenCotangents(xp.Function):
        """Notes which cotangents backward got."""

        materialize = False
        seen = []

        @staticmethod
        def forward(ctx, x):
            ctx.set_materialize_grads(SeenCotangents.materialize)
            return x * 2, x * 3

        @staticmethod
        def backward(ctx, first, second):
            SeenCotangents.seen.append((first is not None, second is not None))
            total = None
            if first is not None:
                total = first * 2
            if second is not None:
                total = second * 3 if total is None else total + second * 3
            return total

    class NoGradient(xp.Function):
        """Stops what comes back by returning None."""

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return None

    class WithStatics(xp.Function):
        """None and statics among the outputs; backward gets one entry for each."""

        seen = []

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x, None, "text", 3, xp.sin(x)

        @staticmethod
        def backward(ctx, *grads):
            WithStatics.seen.append(tuple(g is None for g in grads))
            (x,) = ctx.saved_tensors
            return 2 * x * grads[0] + xp.cos(x) * grads[4]

    def function(name, forward, backward, rule="backward"):
        return type(name, (xp.Function,), {"forward": staticmethod(forward), rule: staticmethod(backward)})

    def saving(f, save=lambda *args: args):
        def forward(ctx, *args):
            ctx.save_for_backward(*save(*args))
            return f(*args)

        return forward

    # A cube that keeps its slope, which is neither an input nor an output.
    SavedIntermediate = function(
        "SavedIntermediate",
        saving(lambda x: x * x * x, lambda x: (3 * x * x,)),
        lambda ctx, dy: dy * ctx.saved_tensors[0],
    )

    def product_rule(ctx, dy):
        x, y = ctx.saved_tensors
        return dy * y, dy * x

    # More entries than arguments, all of them None.
    SurplusNones = function(
        "SurplusNones", saving(lambda x, y: x * y), lambda ctx, dy: (*product_rule(ctx, dy), None, None)
    )

    # `vjp` is another name of `backward`.
    CalledVjp = function("CalledVjp", saving(lambda x: x * x), lambda ctx, dy: 2 * ctx.saved_tensors[0] * dy, "vjp")

    OnceOnly = function(
        "OnceOnly",
        saving(lambda x: x * x * x),
        xp.once_differentiable(lambda ctx, dy: 3 * ctx.saved_tensors[0] ** 2 * dy),
    )

    class SavedTwice(xp.Function):
        """The last call of save_for_backward wins."""

        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            ctx.save_for_backward(x, y)
            return x * y

        backward = staticmethod(product_rule)

    # One entry for two arguments, a gradient too many, a list, which is one entry and no gradient.
    TooFew = function("TooFew", lambda ctx, x, y: x * y, lambda ctx, dy: dy)
    SurplusGradient = function("SurplusGradient", lambda ctx, x: x * 2, lambda ctx, dy: (dy, dy))
    ListOfGradients = function("ListOfGradients", lambda ctx, x, y: x * y, lambda ctx, dy: [dy, dy])

    # A gradient that the input does not broadcast to, and one for an argument that is no tensor.
    WrongShape = function("WrongShape", lambda ctx, x: x * 2, lambda ctx, dy: xp.concatenate([dy, dy]))
    GradientForStatic = function("GradientForStatic", lambda ctx, x, gain: x * gain, lambda ctx, dy: (dy, dy))

    # What is no tensor is saved; what is not returned is marked as dirty.
    SavedNumber = function("SavedNumber", lambda ctx, x: ctx.save_for_backward(3) or x * 2, lambda ctx, dy: dy * 2)
    DirtyAndLost = function("DirtyAndLost", lambda ctx, x: ctx.mark_dirty(x) or x * 2, lambda ctx, dy: dy * 2)

    class WithoutJvp(xp.Function):
        """Reverse mode alone."""

        @staticmethod
        def forward(x):
            return x * 2

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 2

    return locals()

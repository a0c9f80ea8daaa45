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

    class SavedIntermediate(xp.Function):
        """A cube that keeps its slope, which is neither an input nor an output."""

        @staticmethod
        def forward(ctx, x):
            slope = 3 * x * x
            ctx.save_for_backward(slope)
            return x * x * x

        @staticmethod
        def backward(ctx, grad_output):
            (slope,) = ctx.saved_tensors
            return grad_output * slope

    class SavedTwice(xp.Function):
        """The last call of save_for_backward wins."""

        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(y)
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad_output):
            x, y = ctx.saved_tensors
            return grad_output * y, grad_output * x

    class SurplusNones(xp.Function):
        """More entries than arguments, all of them None."""

        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx, grad_output):
            x, y = ctx.saved_tensors
            return grad_output * y, grad_output * x, None, None

    class CalledVjp(xp.Function):
        """`vjp` is another name of `backward`."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def vjp(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return 2 * x * grad_output

    class TooFew(xp.Function):
        """One entry for two arguments."""

        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output

    class SurplusGradient(xp.Function):
        """A gradient too many."""

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output, grad_output

    class ListOfGradients(xp.Function):
        """A list is one entry, and no gradient."""

        @staticmethod
        def forward(ctx, x, y):
            return x * y

        @staticmethod
        def backward(ctx, grad_output):
            return [grad_output, grad_output]

    class WrongShape(xp.Function):
        """A gradient that the input does not broadcast to."""

        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return xp.concatenate([grad_output, grad_output])

    class GradientForStatic(xp.Function):
        """A gradient for an argument that is no tensor."""

        @staticmethod
        def forward(ctx, x, gain):
            return x * gain

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output, grad_output

    class SavedNumber(xp.Function):
        """Saves what is no tensor."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(3)
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 2

    class DirtyAndLost(xp.Function):
        """Marks as dirty what it does not return."""

        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 2

    class OnceOnly(xp.Function):
        """Must not be differentiated twice."""

        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x * x

        @staticmethod
        @xp.once_differentiable
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return 3 * x * x * grad_output

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

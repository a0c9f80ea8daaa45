"""Losses."""

from __future__ import annotations


def define(xp):
    class AuxLossScaler(xp.Function):
        """T61: hands its input on; the scale of the second gradient is an attribute of the class."""

        scale = None

        @staticmethod
        def forward(ctx, output, aux_loss):
            ctx.save_for_backward(aux_loss)
            return output

        @staticmethod
        def backward(ctx, grad_output):
            (aux_loss,) = ctx.saved_tensors
            scale = 1 if AuxLossScaler.scale is None else AuxLossScaler.scale
            return grad_output, xp.ones_like(aux_loss) * scale

        @staticmethod
        def set_loss_scale(scale):
            AuxLossScaler.scale = scale

    NEVER = -1e30

    class CTC(xp.Function):
        """T64: the gradient is computed together with the loss, and saved; class 0 is the blank."""

        @staticmethod
        def forward(ctx, acts, labels, act_lens, label_lens):
            steps, batch, classes = acts.shape
            logp = xp.log_softmax(acts, -1)
            behind_blanks = xp.stack([xp.zeros_like(labels), labels], -1).reshape(batch, -1)
            path = xp.pad(behind_blanks, 0, 1)
            states = xp.arange(path.shape[1])
            inside = states < 2 * label_lens[:, None] + 1
            two_back = xp.pad(path, 2, 0)[:, :-2]
            skips = (path != 0) & (path != two_back) & (states >= 2)
            ends = inside & (states >= 2 * label_lens[:, None] - 1)
            emitted = xp.stack([xp.take_along_dim(logp[t], path, 1) for t in range(steps)])

            def never(x, allowed):
                return xp.where(allowed, x, NEVER)

            def behind(x, by):
                return xp.pad(x, by, 0, NEVER)[:, : x.shape[1]]

            def ahead(x, by):
                return xp.pad(x, 0, by, NEVER)[:, by:]

            alphas = [never(emitted[0], inside & (states < 2))]
            for t in range(1, steps):
                a = alphas[-1]
                ways = xp.stack([a, behind(a, 1), never(behind(a, 2), skips)])
                alphas.append(never(xp.logsumexp(ways, 0) + emitted[t], inside))
            last = xp.stack(alphas)[act_lens - 1, xp.arange(batch)]
            loss = -xp.logsumexp(never(last, ends), -1)

            betas = [None] * steps
            for t in reversed(range(steps)):
                at_end = never(xp.zeros(path.shape), ends)
                if t == steps - 1:
                    betas[t] = at_end
                    continue
                b = never(betas[t + 1] + emitted[t + 1], inside)
                ways = xp.stack([b, ahead(b, 1), ahead(never(b, skips), 2)])
                betas[t] = xp.where((act_lens == t + 1)[:, None], at_end, xp.logsumexp(ways, 0))
            occupied = xp.exp(xp.stack(alphas) + xp.stack(betas) + loss[:, None])
            by_class = (xp.cast(xp.one_hot(path, classes), acts.dtype) * occupied[..., None]).sum(-2)
            alive = xp.cast(xp.arange(steps)[:, None] < act_lens, acts.dtype)
            ctx.save_for_backward((xp.exp(logp) - by_class) * alive[..., None])
            return loss

        @staticmethod
        @xp.once_differentiable
        def backward(ctx, grad_output):
            (grads,) = ctx.saved_tensors
            return grads * grad_output[None, :, None], None, None, None

    return locals()

"""Losses, ported from torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pylayer_jax import Function, once_differentiable


class AuxLossScaler(Function):
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
        return grad_output, jnp.ones_like(aux_loss) * scale

    @staticmethod
    def set_loss_scale(scale):
        AuxLossScaler.scale = scale


NEVER = -1e30


class CTC(Function):
    """T64: the gradient is computed together with the loss, and saved; class 0 is the blank."""

    @staticmethod
    def forward(ctx, acts, labels, act_lens, label_lens):
        steps, batch, _ = acts.shape
        logp = jax.nn.log_softmax(acts, -1)
        path = jnp.zeros((batch, 2 * labels.shape[1] + 1), dtype=jnp.int32)
        path = path.at[:, 1::2].set(labels)
        states = jnp.arange(path.shape[1])
        inside = states < 2 * label_lens[:, None] + 1
        two_back = jnp.pad(path, ((0, 0), (2, 0)))[:, :-2]
        skips = (path != 0) & (path != two_back) & (states >= 2)
        ends = inside & (states >= 2 * label_lens[:, None] - 1)
        emitted = jnp.stack([jnp.take_along_axis(logp[t], path, 1) for t in range(steps)])

        def never(x, allowed):
            return jnp.where(allowed, x, jnp.asarray(NEVER))

        def behind(x, by):
            return jnp.pad(x, ((0, 0), (by, 0)), constant_values=NEVER)[:, : x.shape[1]]

        def ahead(x, by):
            return jnp.pad(x, ((0, 0), (0, by)), constant_values=NEVER)[:, by:]

        alphas = [never(emitted[0], inside & (states < 2))]
        for t in range(1, steps):
            a = alphas[-1]
            ways = jnp.stack([a, behind(a, 1), never(behind(a, 2), skips)])
            alphas.append(never(jax.nn.logsumexp(ways, 0) + emitted[t], inside))
        last = jnp.stack(alphas)[act_lens - 1, jnp.arange(batch)]
        loss = -jax.nn.logsumexp(never(last, ends), -1)

        betas = [None] * steps
        for t in reversed(range(steps)):
            at_end = never(jnp.zeros(path.shape), ends)
            if t == steps - 1:
                betas[t] = at_end
                continue
            b = never(betas[t + 1] + emitted[t + 1], inside)
            ways = jnp.stack([b, ahead(b, 1), ahead(never(b, skips), 2)])
            betas[t] = jnp.where((act_lens == t + 1)[:, None], at_end, jax.nn.logsumexp(ways, 0))
        occupied = jnp.exp(jnp.stack(alphas) + jnp.stack(betas) + loss[:, None])
        examples = jnp.arange(batch)[:, None]
        by_class = jnp.zeros_like(logp).at[:, examples, path].add(occupied)
        alive = (jnp.arange(steps)[:, None] < act_lens).astype(acts.dtype)
        ctx.save_for_backward((jnp.exp(logp) - by_class) * alive[..., None])
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (grads,) = ctx.saved_tensors
        return grads * grad_output[None, :, None], None, None, None

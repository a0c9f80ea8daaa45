"""Losses, as real torch ones."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional


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
        return grad_output, torch.ones_like(aux_loss) * scale

    @staticmethod
    def set_loss_scale(scale):
        AuxLossScaler.scale = scale


NEVER = -1e30


class CTC(Function):
    """T64: the gradient is computed together with the loss, and saved; class 0 is the blank."""

    @staticmethod
    def forward(ctx, acts, labels, act_lens, label_lens):
        steps, batch, _ = acts.shape
        logp = torch.log_softmax(acts, -1)
        path = torch.zeros((batch, 2 * labels.shape[1] + 1), dtype=torch.int64)
        path[:, 1::2] = labels
        states = torch.arange(path.shape[1])
        inside = states < 2 * label_lens[:, None] + 1
        two_back = functional.pad(path, (2, 0))[:, :-2]
        skips = (path != 0) & (path != two_back) & (states >= 2)
        ends = inside & (states >= 2 * label_lens[:, None] - 1)
        emitted = torch.stack([logp[t].gather(1, path) for t in range(steps)])

        def never(x, allowed):
            return torch.where(allowed, x, torch.tensor(NEVER))

        def behind(x, by):
            return functional.pad(x, (by, 0), value=NEVER)[:, : x.shape[1]]

        def ahead(x, by):
            return functional.pad(x, (0, by), value=NEVER)[:, by:]

        alphas = [never(emitted[0], inside & (states < 2))]
        for t in range(1, steps):
            a = alphas[-1]
            ways = torch.stack([a, behind(a, 1), never(behind(a, 2), skips)])
            alphas.append(never(torch.logsumexp(ways, 0) + emitted[t], inside))
        last = torch.stack(alphas)[act_lens - 1, torch.arange(batch)]
        loss = -torch.logsumexp(never(last, ends), -1)

        betas = [None] * steps
        for t in reversed(range(steps)):
            at_end = never(torch.zeros(path.shape), ends)
            if t == steps - 1:
                betas[t] = at_end
                continue
            b = never(betas[t + 1] + emitted[t + 1], inside)
            ways = torch.stack([b, ahead(b, 1), ahead(never(b, skips), 2)])
            betas[t] = torch.where((act_lens == t + 1)[:, None], at_end, torch.logsumexp(ways, 0))
        occupied = torch.exp(torch.stack(alphas) + torch.stack(betas) + loss[:, None])
        by_class = torch.zeros_like(logp).scatter_add(2, path.expand(steps, -1, -1), occupied)
        alive = (torch.arange(steps)[:, None] < act_lens).to(acts.dtype)
        ctx.save_for_backward((logp.exp() - by_class) * alive[..., None])
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (grads,) = ctx.saved_tensors
        return grads * grad_output[None, :, None], None, None, None

"""The gated delta rule for training, out of batched matrix products that autograd follows. Runs wherever PyTorch does.

Within a chunk of 64 tokens everything is a product of small matrices; between chunks a state of one matrix per head goes
from chunk to chunk. (Flash-linear-attention's kernels are faster, but refuse their backward pass for some versions of
Triton on Hopper GPUs.) Serving has kernels of its own, in weft/kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


class InverseOfUnitLower(torch.autograd.Function):
    """(1 + A)^-1 of strictly lower triangular matrices: (1 - A)(1 + A^2)(1 + A^4)... ends, since A^64 is nothing."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        one = torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
        inverse, power = one - a, a @ a
        for _ in range(4):
            inverse = torch.baddbmm(inverse, inverse, power)
            power = power @ power
        inverse = torch.baddbmm(inverse, inverse, power)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, upstream: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.mT
        return -(turned @ upstream @ turned)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    **_: object,
) -> tuple[Tensor, None]:
    """Of [rows, tokens, heads, size], decays `g` (their logarithm) and `beta` of [rows, tokens, heads]; no state before.

    Takes what transformers' function takes, and stands in for it.
    """
    rows, tokens, heads, size = value.shape
    assert tokens % CHUNK == 0
    assert use_qk_l2norm_in_kernel
    kind = value.dtype
    with torch.autocast(value.device.type, enabled=False):
        q, k, v = (_chunks(x.float()) for x in (F.normalize(query.float(), dim=-1) * size**-0.5, unit(key), value))
        beta, g = (x.float().transpose(1, 2).reshape(-1, CHUNK, 1) for x in (beta, g))
        out = _chunked(q, k, v, g.cumsum(1), beta, rows * heads)
    return out.view(rows, heads, tokens, size).transpose(1, 2).to(kind), None


def unit(x: Tensor) -> Tensor:
    return F.normalize(x.float(), dim=-1)


def _chunks(x: Tensor) -> Tensor:
    """[rows, tokens, heads, size] -> [rows * heads * chunks, CHUNK, size]"""
    return x.transpose(1, 2).reshape(-1, CHUNK, x.shape[-1])


def _chunked(q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor, sequences: int) -> Tensor:
    """`total`: the decays of a chunk summed up to each token, [chunks, CHUNK, 1]."""
    later = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).triu(1)
    between = (total - total.mT).masked_fill(later, float("-inf")).exp()
    seen = (q @ k.mT) * between
    a = ((k @ k.mT) * between * beta).tril(-1)
    inverse = InverseOfUnitLower.apply(a)
    fade = total.exp()
    u, w = inverse @ (v * beta), inverse @ (k * (beta * fade))
    last = total[:, -1:]
    kept = (k * (last - total).exp()).mT
    one = torch.eye(k.shape[-1], device=k.device, dtype=k.dtype)
    before = _states(last.exp() * one - kept @ w, kept @ u, sequences)
    return torch.baddbmm(seen @ u, torch.baddbmm(q * fade, seen, w, alpha=-1), before)


def _states(factor: Tensor, added: Tensor, sequences: int) -> Tensor:
    """The state before each chunk: state = factor @ state + added, chunk by chunk."""
    factors, addeds = (x.view(sequences, -1, *x.shape[1:]).unbind(1) for x in (factor, added))
    states = [torch.zeros_like(addeds[0])]
    for each, more in zip(factors[:-1], addeds[:-1]):
        states.append(torch.baddbmm(more, each, states[-1]))
    return torch.stack(states, 1).flatten(0, 1)

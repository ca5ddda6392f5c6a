"""The gated delta rule for training, out of batched matrix products that autograd follows. Runs wherever PyTorch does.

Within a chunk of 64 tokens everything is a product of small matrices; a state of one matrix per head goes from chunk to
chunk. (The kernels of flash-linear-attention are faster, but with some versions of Triton on Hopper GPUs
their backward pass is wrong, and refuses to run.) Serving has kernels of its own, in weft/kernels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = True,
    **_: object,
) -> tuple[Tensor, None]:
    """Of [rows, tokens, heads, size], `g` (logarithms of decays) and `beta` of [rows, tokens, heads]; no state before.

    Takes what transformers' function takes, and stands in for it. Several heads of values may share one of keys.
    Products are of the inputs' kind, decays in float32.
    """
    rows, tokens, heads, size = value.shape
    assert tokens % CHUNK == 0
    assert use_qk_l2norm_in_kernel
    query, key = (x.repeat_interleave(heads // x.shape[2], 2) for x in (query, key))
    with torch.autocast(value.device.type, enabled=False):
        q, k, v = (_chunks(x) for x in (unit(query, size**-0.5), unit(key), value))
        total = _chunks(g.float().unsqueeze(-1)).cumsum(1)
        out = _chunked(q, k, v, total, _chunks(beta.to(value.dtype).unsqueeze(-1)), rows * heads)
    return out.view(rows, heads, tokens, size).transpose(1, 2), None


def unit(x: Tensor, length: float = 1.0) -> Tensor:
    """Vectors of that length: a norm of the mean square, whose kernel is one pass, and a factor."""
    size = x.shape[-1]
    return F.rms_norm(x, (size,), x.new_full((size,), length * size**-0.5), 1e-6 / size)


def _chunks(x: Tensor) -> Tensor:
    """[rows, tokens, heads, size] -> [rows * heads * chunks, CHUNK, size]"""
    return x.transpose(1, 2).reshape(-1, CHUNK, x.shape[-1])


def _chunked(q: Tensor, k: Tensor, v: Tensor, total: Tensor, beta: Tensor, sequences: int) -> Tensor:
    """`total`: the decays of a chunk summed up to each token, [chunks, CHUNK, 1]."""
    later = torch.full((CHUNK, CHUNK), float("-inf"), device=q.device).triu(1)
    between = (total - total.mT).add_(later).exp_().to(q.dtype)
    seen = (q @ k.mT) * between
    weighed = k * beta
    inverse = InverseOfUnitLower.apply((weighed @ k.mT) * between)
    fade = total.exp().to(q.dtype)
    u, w = inverse @ (v * beta), inverse @ (weighed * fade)
    last = total[:, -1:]
    kept = (k * (last - total).exp().to(q.dtype)).mT
    one = torch.eye(k.shape[-1], device=k.device)
    before = _states(last.exp() * one - kept @ w, (kept @ u).float(), sequences).to(q.dtype)
    return torch.baddbmm(seen @ u, torch.baddbmm(q * fade, seen, w, alpha=-1), before)


def _states(factor: Tensor, added: Tensor, sequences: int) -> Tensor:
    """The state before each chunk: state = factor @ state + added, chunk by chunk."""
    factors, addeds = (x.view(sequences, -1, *x.shape[1:]).unbind(1) for x in (factor, added))
    states = [torch.zeros_like(addeds[0])]
    for each, more in zip(factors[:-1], addeds[:-1]):
        states.append(torch.baddbmm(more, each, states[-1]))
    return torch.stack(states, 1).flatten(0, 1)


class InverseOfUnitLower(torch.autograd.Function):
    """(1 + A)^-1, where A is what a matrix has below its diagonal. By substitution: a series of powers explodes."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        if a.is_cuda:
            from weft_training.substitution import inverse as substituted

            inverse = substituted(a)
        else:
            one = torch.eye(a.shape[-1]).expand_as(a)
            below = a.float().tril(-1)
            inverse = torch.linalg.solve_triangular(below + one, one, upper=False, unitriangular=True).to(a.dtype)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ upstream @ inverse.mT).tril_(-1)

"""Sizes that the kernels' buffers have room for (C++ has the same), and a check of a model's layers against them."""

from __future__ import annotations

from weft.kernels.states import SCALES
from weft.memory.spec import CODES, AttentionMemory, MemorySpec, RecurrentMemory

# Tokens of a cell; size of a head's keys, values and states; taps of a convolution.
MOST_TOKENS, MOST_SIZE, MOST_WIDTH = 256, 512, 8


def declines(group: str, spec: MemorySpec) -> str | None:
    """Return why a group of operations has no C++ kernels for a model with this memory; None if it has."""
    if spec.cell > MOST_TOKENS:
        return f"cells of {spec.cell} tokens, at most {MOST_TOKENS} are supported"
    if group == "attention":
        own = attentions(spec, latent=False)
        return too_large("attention heads", [memory.head_dim for memory in own], MOST_SIZE)
    if group == "latent_attention":
        return "there is no kernel for latent attention" if attentions(spec, latent=True) else None
    recurrent = [memory for memory in spec.memories if isinstance(memory, RecurrentMemory)]
    if group == "causal_conv":
        return too_large("convolutions", [memory.conv_width for memory in recurrent], MOST_WIDTH)
    if group in ("ssd", "gated_delta", "channel_delta"):
        # Parts that lie by head in tails.
        sizes = [part.shape[-1] for memory in recurrent for part in memory.tail if len(part.shape) == 2]
        return too_large("heads or states of recurrent layers", sizes, MOST_SIZE)
    return None


# Groups of operations by the names of the states that they keep.
STATES = {"conv": "causal_conv", "ssm": "ssd", "delta": "gated_delta", "channel_delta": "channel_delta"}


def groups_of(spec: MemorySpec) -> set[str]:
    """Return the groups of operations that the mixers of a model with this memory call, and that of coded pages."""
    names = {part.name for memory in spec.memories if isinstance(memory, RecurrentMemory) for part in memory.state}
    kinds = {"attention": False, "latent_attention": True}
    of_states = {STATES[name] for name in names - {SCALES}}
    coded = {"coded_attention" for memory in attentions(spec, latent=False) if memory.dtype in CODES}
    return of_states | coded | {group for group, latent in kinds.items() if attentions(spec, latent)}


def attentions(spec: MemorySpec, latent: bool) -> list[AttentionMemory]:
    """Return the memories of attention layers, with latent pages or with keys and values."""
    found = [memory for memory in spec.memories if isinstance(memory, AttentionMemory)]
    return [memory for memory in found if (memory.latent is not None) == latent]


def too_large(what: str, sizes: list[int], most: int) -> str | None:
    largest = max(sizes, default=0)
    return f"{what} of {largest}, at most {most} are supported" if largest > most else None

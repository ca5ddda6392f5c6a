"""Sizes that the kernels' buffers have room for (C++ has the same), and which models keep to them."""

from __future__ import annotations

from weft.memory.spec import AttentionMemory, Memory, MemorySpec

# Of a cell; of a head's keys, values and states; taps of a convolution.
MOST_TOKENS, MOST_SIZE, MOST_WIDTH = 256, 512, 8


def fits(spec: MemorySpec) -> bool:
    return spec.cell <= MOST_TOKENS and all(map(_fits, spec.memories))


def _fits(memory: Memory) -> bool:
    if isinstance(memory, AttentionMemory):
        return memory.head_dim <= MOST_SIZE
    # What lies head by head in tails; a convolution may have any number of channels.
    sizes = [part.shape[-1] for part in memory.tail if len(part.shape) == 2]
    return memory.conv_width <= MOST_WIDTH and max(sizes, default=0) <= MOST_SIZE

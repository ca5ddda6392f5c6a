"""What models of some well-known shapes must remember, for planning and simulation without loading any of them."""

from __future__ import annotations

from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory


def recurrent(window: tuple[int, int], matrix: tuple[int, ...] = (), inputs: int = 0) -> RecurrentMemory:
    """A layer with a convolution (width, channels) and, unless it is only that, a matrix state in float32.

    `inputs` is how many numbers a token of the open cell leaves in the tail beside the convolution's.
    """
    width, channels = window
    state = [Part("conv", (width - 1, channels), "bfloat16")]
    tail = [Part("conv", (channels,), "bfloat16")]
    if matrix:
        state.append(Part("matrix", matrix, "float32"))
        tail.append(Part("inputs", (inputs,), "float32"))
    return RecurrentMemory(tuple(state), tuple(tail), width)


PRESETS: dict[str, MemorySpec] = {
    # 10 short convolutions and 6 attention layers: a state weighs as much as 7 tokens of KV.
    "lfm2-1.2b": MemorySpec((recurrent((3, 2048)),) * 10 + (AttentionMemory(8, 64, "bfloat16"),) * 6),
    # 18 Gated DeltaNets and 6 attention layers: 3,100 tokens.
    "qwen3-next-mini": MemorySpec(
        (recurrent((4, 8192), (32, 128, 128), 6176),) * 18 + (AttentionMemory(2, 256, "bfloat16"),) * 6
    ),
    # 27 Mamba2 layers and 4 attention layers: 8,800 tokens.
    "nemotron-nano-9b": MemorySpec(
        (recurrent((4, 12288), (128, 80, 128), 11392),) * 27 + (AttentionMemory(8, 128, "bfloat16"),) * 4
    ),
    # Attention only: every cell is a place to start from, for free.
    "llama-8b": MemorySpec((AttentionMemory(8, 128, "bfloat16"),) * 32),
}

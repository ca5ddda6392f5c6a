"""How much each eviction policy lets be reused when memory is short, on made-up traffic and without any device.

    python -m benchmarks.eviction

Conversations of several turns over a few common instructions, mixed with long prompts that never come back. Prints the
share of prompt tokens that came from the cache; the device computes nothing, so only decisions are compared.
"""

from __future__ import annotations

import argparse
from random import Random

import numpy as np

from benchmarks.planner import InstantDevice
from weft.base.config import EngineConfig
from weft.base.sampling import SamplingParams
from weft.engine.loop import Engine
from weft.engine.request import Request
from weft.memory.spec import AttentionMemory, MemorySpec, Part, RecurrentMemory

POLICIES = ("value", "lru", "flops")
ANSWER = 8


def spec(state_in_tokens: int) -> MemorySpec:
    """A model whose state costs as much as so many tokens of keys and values."""
    attention = AttentionMemory(2, 64, "bfloat16")
    state = Part("state", (state_in_tokens * attention.bytes_per_token // 4,), "float32")
    return MemorySpec((attention, RecurrentMemory((state,), (Part("u", (16,), "float32"),), conv_width=1)))


def traffic(random: Random, turns: int) -> list[list[int]]:
    """Prompts in order of arrival. A conversation's next prompt holds its last, the answer and a new message."""

    def text(length: int) -> list[int]:
        return [random.randrange(8, 50_000) for _ in range(length)]

    instructions = [text(random.randint(200, 1500)) for _ in range(6)]
    open_conversations: list[list[int]] = []
    prompts = []
    for _ in range(turns):
        if random.random() < 0.15:
            prompts.append(text(random.randint(1000, 4000)))
            continue
        if len(open_conversations) < 40 or random.random() < 0.25:
            open_conversations.append(list(random.choice(instructions)))
        conversation = random.choice(open_conversations)
        conversation += text(random.randint(30, 200))
        prompts.append(list(conversation))
        conversation += [7] * ANSWER
        if len(conversation) > 4000:
            open_conversations.remove(conversation)
    return prompts


def reused(model: MemorySpec, prompts: list[list[int]], policy: str, memory_tokens: int) -> tuple[float, int]:
    """The share of prompt tokens that came from the cache, and how many snapshots found no room."""
    memory_bytes = memory_tokens * model.page_bytes // model.cell
    config = EngineConfig(memory_bytes=memory_bytes, max_sequences=4, max_length=8192, eviction=policy)
    engine = Engine(model, InstantDevice(), config)
    for prompt in prompts:
        engine.add(Request(np.array(prompt, np.int32), SamplingParams(max_tokens=ANSWER)))
        while not engine.idle:
            engine.step()
    counts = engine.ledger.cache.counts
    return counts.tokens_cached / sum(map(len, prompts)), counts.captures_skipped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=600)
    options = parser.parse_args()
    prompts = traffic(Random(0), options.turns)
    print(f"{len(prompts)} prompts of {sum(map(len, prompts)) / len(prompts):.0f} tokens on average")
    print(f"{'state':>12} {'memory':>12} " + " ".join(f"{policy:>8}" for policy in POLICIES))
    for state_in_tokens in (8, 256, 2048):
        for memory_tokens in (32_000, 64_000, 128_000):
            shares = [reused(spec(state_in_tokens), prompts, policy, memory_tokens)[0] for policy in POLICIES]
            row = " ".join(f"{share:8.1%}" for share in shares)
            print(f"{state_in_tokens:>5} tokens {memory_tokens:>6} tokens {row}", flush=True)


if __name__ == "__main__":
    main()

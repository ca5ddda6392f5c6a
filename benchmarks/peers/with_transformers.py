"""Driver of transformers: `generate` with its default cache and scaled_dot_product_attention.

python -m benchmarks.peers.with_transformers JOB RESULT
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.peers.checkpoints import PAD
from benchmarks.peers.work import Job, drive


class Clock:
    """Streamer that records when each token arrives."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Transformers:
    def __init__(self, job: Job) -> None:
        warnings.filterwarnings("ignore")
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(job.threads)
        self.version = transformers.__version__
        self.settings = "generate, sdpa, batch padded on the left"
        dtype = getattr(torch, job.precision)
        self.model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=dtype, attn_implementation="sdpa")
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = PAD

    def single(self, prompt: list[int], answer: int) -> tuple[list[int], float]:
        clock = Clock()
        tokens = self._generate([prompt], answer, streamer=clock)
        # The first call passes the prompt.
        return tokens[0], clock.times[-1] - clock.times[1]

    def crowd(self, prompts: list[list[int]], answer: int) -> list[list[int]]:
        return self._generate(prompts, answer)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], answer: int, **more: Any) -> list[list[int]]:
        longest = max(map(len, prompts))
        padded = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        found = self.model.generate(
            padded, attention_mask=mask, max_new_tokens=answer, min_new_tokens=answer, do_sample=False, **more
        )
        return found[:, longest:].tolist()


if __name__ == "__main__":
    drive(Transformers)

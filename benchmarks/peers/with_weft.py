"""Driver of Weft: its offline API, `weft.LLM`.

python -m benchmarks.peers.with_weft JOB RESULT
"""

from __future__ import annotations

import time

import weft
from benchmarks.peers.work import Job, drive


class Weft:
    def __init__(self, job: Job) -> None:
        self.version = weft.__version__
        self.settings = "weft.LLM, default options without drafts"
        options = {"threads": job.threads, "memory": "2GiB", "draft": "off"}
        self.llm = weft.LLM(job.checkpoint, dtype=job.precision, progress=False, **options)

    def single(self, prompt: list[int], answer: int) -> tuple[list[int], float]:
        times, tokens = [], []
        for chunk in self.llm.stream(prompt, _greedy(answer)):
            times.append(time.perf_counter())
            tokens = chunk.result.token_ids if chunk.result is not None else tokens
        return list(tokens), times[-1] - times[0]

    def crowd(self, prompts: list[list[int]], answer: int) -> list[list[int]]:
        return [list(result.token_ids) for result in self.llm.generate(prompts, _greedy(answer), use_tqdm=False)]


def _greedy(answer: int) -> weft.SamplingParams:
    return weft.SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)


if __name__ == "__main__":
    drive(Weft)

"""The progress bar of a generation: prompts done, tokens per second, share of cached prompt tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from weft.offline.asking import OpenPrompt

SECONDS_BETWEEN = 0.2


class Progress:
    def __init__(self, total: int, shown: bool) -> None:
        # Show a bar on a terminal only.
        self._bar = tqdm(total=total, unit="prompt", desc="generating", disable=None if shown else True, leave=False)
        self._started = self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def show(self, asked: Sequence[OpenPrompt]) -> None:
        now = time.monotonic()
        if self._bar.disable or now - self._last < SECONDS_BETWEEN:
            return
        self._last = now
        answers = [answer.followed for each in asked for answer in each.answers]
        tokens = sum(each.generated for each in answers)
        done = [each for each in answers if each.finish is not None]
        prompt = sum(len(each.request.prompt) for each in done)
        cached = sum(each.report.cached_tokens for each in done)
        self._bar.n = sum(each.ended for each in asked)
        self._bar.set_postfix_str(f"{tokens / (now - self._started):.0f} tok/s, {cached / max(1, prompt):.0%} cached")

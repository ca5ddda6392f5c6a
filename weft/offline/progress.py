"""The progress bar of a generation: prompts done, tokens per second, share of cached prompt tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from tqdm import tqdm

from weft.answers.followed import FollowedAnswer
from weft.offline.result import Result

SECONDS_BETWEEN = 0.2


class Watched(Protocol):
    """An open request."""

    @property
    def result(self) -> Result | None: ...

    @property
    def followed(self) -> FollowedAnswer: ...


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

    def show(self, requests: Sequence[Watched]) -> None:
        now = time.monotonic()
        if self._bar.disable or now - self._last < SECONDS_BETWEEN:
            return
        self._last = now
        done = [request.result for request in requests if request.result is not None]
        tokens = sum(request.followed.generated for request in requests)
        prompt = sum(len(result.prompt_token_ids) for result in done)
        cached = sum(result.cached_tokens for result in done)
        self._bar.n = len(done)
        self._bar.set_postfix_str(f"{tokens / (now - self._started):.0f} tok/s, {cached / max(1, prompt):.0%} cached")

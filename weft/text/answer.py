"""The answer of one sequence as it grows: takes tokens, yields text that may be shown, and knows why it ended.

The engine ends an answer at stop tokens and lengths. Stop strings are detected only here; the caller must then end the
engine's sequence.
"""

from __future__ import annotations

from collections.abc import Collection

from weft.base.sampling import SamplingParams
from weft.text.detokenizer import Detokenizer
from weft.text.stops import StopStrings


class Answer:
    """`tokens` are all sampled tokens; `text` is the part that may be shown, without what follows a stop."""

    def __init__(
        self, params: SamplingParams, detokenizer: Detokenizer | None, stop_tokens: Collection[int] = ()
    ) -> None:
        self.tokens: list[int] = []
        self.stop_reason: str | int | None = None
        self._pieces: list[str] = []
        self._params = params
        self._detokenizer = detokenizer
        self._stop_tokens = stop_tokens
        self._stops = StopStrings(params.stop, params.include_stop)
        self._is_plain = detokenizer is not None and not params.stop

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, so that no more tokens are needed."""
        return self._stops.found is not None

    def feed(self, token: int) -> str:
        """Process a sampled token; return the text that it makes certain."""
        self.tokens.append(token)
        if self._is_plain and token not in self._stop_tokens:
            assert self._detokenizer is not None
            return self._show(self._detokenizer.feed(token))
        ends_here = token in self._stop_tokens and len(self.tokens) > self._params.min_tokens
        if ends_here and token in self._params.stop_token_ids:
            self.stop_reason = token
        if self._detokenizer is None or self.stopped or (ends_here and not self._params.include_stop):
            return ""
        text = self._detokenizer.feed(token)
        if len(self.tokens) <= self._params.min_tokens:
            return self._show(self._stops.skip(text))
        return self._show(self._watch(text))

    def finish(self) -> str:
        """Return the text that was still held back: no token follows."""
        if self._detokenizer is None or self.stopped:
            return ""
        text = self._watch(self._detokenizer.flush())
        return self._show(text if self.stopped else text + self._stops.flush())

    def _watch(self, text: str) -> str:
        shown = self._stops.feed(text)
        if self._stops.found is not None:
            self.stop_reason = self._stops.found
        return shown

    def _show(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

"""Follows one request from the engine's outputs to its answer, for HTTP and for `LLM`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.engine.events import FinishReason, Output, PromptScores, Report
from weft.engine.request import Request
from weft.text.answer import Answer
from weft.text.detokenizer import Detokenizer

# The largest unsigned integer of 64 bits.
MOST = (1 << 64) - 1


@dataclass(slots=True)
class Piece:
    """What some outputs added to the answer at `index`. The last piece has the reason for its end.

    `stops_engine`: a stop string ended the answer, so the engine must end its sequence.
    """

    index: int
    text: str
    outputs: list[Output]
    finish: FinishReason | None = None
    stops_engine: bool = False


class FollowedAnswer:
    """A request and its answer so far. `index` is its place among the answers of one call.

    With log-probabilities or digests, `outputs` has all outputs with a token, and `text_ends[i]` is the length of the
    text after the i-th of them. `report` is complete when the engine has ended the sequence. `scored_by` is the answer
    whose request scores the prompt: this one, or another to the same prompt.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer | None, index: int = 0) -> None:
        self.index = index
        self.request = request
        self.answer = Answer(request.params, detokenizer, request.stop_tokens)
        self.report = Report()
        self.scored_by = self
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.error_field: str | None = None
        self.outputs: list[Output] = []
        self.text_ends: list[int] = []
        self._length = 0
        self._is_scored = request.params.logprobs is not None or request.params.logits_digest

    def take(self, outputs: Iterable[Output]) -> Piece:
        """Process outputs of the engine. Those after the answer's end are ignored."""
        texts: list[str] = []
        new: list[Output] = []
        stops_engine = False
        for output in outputs:
            if self.finish is None and output.token is not None:
                texts.append(self._add(output, output.token))
                new.append(output)
            if output.finish is not None:
                texts.append(self._end(output))
                stops_engine = False
            elif self.finish is None and self.answer.stopped:
                self.finish = FinishReason.STOP
                stops_engine = True
        return Piece(self.index, "".join(texts), new, self.finish, stops_engine)

    def _add(self, output: Output, token: int) -> str:
        text = self.answer.feed(token)
        if self._is_scored:
            self._length += len(text)
            self.text_ends.append(self._length)
            self.outputs.append(output)
        return text

    def _end(self, output: Output) -> str:
        """Finish the answer, unless a stop string already has; return the text that was still held back."""
        if self.finish is not None:
            return ""
        text = self.answer.finish()
        self.finish = FinishReason.STOP if self.answer.stopped else output.finish
        self.error, self.error_field = output.error, output.error_field
        return text

    @property
    def prompt_scores(self) -> PromptScores:
        return self.scored_by.report.prompt_scores

    def begins(self, count: int, shift: int = 0) -> list[int]:
        """Return the positions in the text where the last `count` tokens begin. Needs log-probabilities."""
        first = len(self.text_ends) - count
        ends = self.text_ends[max(first - 1, 0) : len(self.text_ends) - 1]
        return [shift + end for end in ([0, *ends] if first <= 0 else ends)]

    @property
    def cut(self) -> bool:
        """Return whether the caller's stop string or stop token ended the answer."""
        return self.answer.stop_reason is not None

    @property
    def generated(self) -> int:
        return len(self.answer.tokens)


def digests_of(followed: FollowedAnswer) -> list[str]:
    """Return the digests of the logits of each token, in hexadecimal."""
    return [f"{output.digest & MOST:016x}" for output in followed.outputs if output.digest is not None]

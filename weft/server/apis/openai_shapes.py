"""What OpenAI's two older APIs share: usage, log-probabilities, finish reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from weft.answers.followed import FollowedAnswer
from weft.engine.events import FinishReason, Output, PromptScores, Report
from weft.server.texts.schemas import PromptDetails, Usage
from weft.text.tokenizer import Tokenizer


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []
    drafted: bool | UnsetType = UNSET  # an extension: `true` for a draft that was accepted


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities, one entry per token; the first token of a prompt has none."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True):
    """`rank` is known for the most likely tokens only."""

    logprob: float
    rank: int | None
    decoded_token: str


# By token id; the first token of a prompt has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """Return a token's text; without a tokenizer, its id."""
    if tokenizer is None:
        return f"token_id:{token}"
    return tokenizer.bytes_of(token).decode(errors="replace")


def token_bytes(tokenizer: Tokenizer | None, token: int) -> list[int] | None:
    return None if tokenizer is None else list(tokenizer.bytes_of(token))


def chat_logprobs(tokenizer: Tokenizer | None, outputs: Sequence[Output]) -> ChatLogprobs:
    return ChatLogprobs([_chat_logprob(tokenizer, output) for output in outputs if output.logprob is not None])


def _chat_logprob(tokenizer: Tokenizer | None, output: Output) -> TokenLogprob:
    assert output.token is not None
    assert output.logprob is not None
    top = [
        TopLogprob(token_text(tokenizer, token), logprob, token_bytes(tokenizer, token))
        for token, logprob in output.top or ()
    ]
    text, raw = token_text(tokenizer, output.token), token_bytes(tokenizer, output.token)
    return TokenLogprob(text, output.logprob, raw, top, output.drafted or UNSET)


def text_logprobs(tokenizer: Tokenizer | None, outputs: Sequence[Output], offsets: Sequence[int]) -> TextLogprobs:
    """Return log-probabilities as lists. `offsets` are the positions in the text where each token begins."""
    shown = [output for output in outputs if output.logprob is not None]
    return TextLogprobs(
        list(offsets[: len(shown)]),
        [output.logprob for output in shown],
        [token_text(tokenizer, output.token or 0) for output in shown],
        [_top_by_text(tokenizer, output.token or 0, output.logprob or 0.0, output.top or ()) for output in shown],
    )


def _top_by_text(
    tokenizer: Tokenizer | None, token: int, logprob: float, top: Sequence[tuple[int, float]]
) -> dict[str, float] | None:
    """Return the most likely tokens, and the chosen one even if it is not among them."""
    if not top:
        return None
    found = {token_text(tokenizer, each): value for each, value in reversed(top)}
    return {token_text(tokenizer, token): logprob} | dict(reversed(found.items()))


def prompt_logprobs(tokenizer: Tokenizer | None, sequence: FollowedAnswer, count: int) -> PromptLogprobs:
    """Return a prompt's log-probabilities in vLLM's form: each token, and the `count` most likely at its position."""
    prompt, scores = sequence.request.prompt.tolist(), sequence.prompt_scores
    found: PromptLogprobs = [None]
    for token, score in zip(prompt[1:], scores):
        ranked = [(each, logprob, rank) for rank, (each, logprob) in enumerate(score.top, start=1)]
        own = next((entry for entry in ranked if entry[0] == token), (token, score.logprob, None))
        entries = dict.fromkeys([own, *ranked[:count]])
        found.append({each: PromptLogprob(value, rank, token_text(tokenizer, each)) for each, value, rank in entries})
    return found


def echoed_logprobs(
    tokenizer: Tokenizer | None, prompt: Sequence[int], scores: PromptScores, count: int
) -> TextLogprobs:
    """Return the log-probabilities of an echoed prompt; its first token has none."""
    texts = [token_text(tokenizer, token) for token in prompt]
    offsets = [0]
    for text in texts[:-1]:
        offsets.append(offsets[-1] + len(text))
    tops: list[dict[str, float] | None] = [None]
    tops += [
        _top_by_text(tokenizer, token, score.logprob, score.top[:count]) for token, score in zip(prompt[1:], scores)
    ]
    return TextLogprobs(offsets, [None, *(score.logprob for score in scores)], texts, tops)


def joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        first.top_logprobs + second.top_logprobs,
    )


def finish_word(finish: FinishReason) -> str:
    """Return the finish reason. OpenAI has "stop" and "length"; "abort" is an extension."""
    return str(finish)


def miss_of(report: Report) -> dict[str, Any] | None:
    """Return why not more was cached, in tokens and in words."""
    if report.miss is None:
        return None
    miss = report.miss
    return {
        "reason": str(miss.reason),
        "why": miss.sentence,
        "reusable_tokens": miss.reusable,
        "matched_tokens": miss.kv_matched,
        "lost_tokens": miss.tokens_lost,
    }


def recomputed(report: Report) -> int:
    """Return how many tokens the cache knew, and had to be computed again for lack of a state."""
    return 0 if report.miss is None else max(0, report.miss.kv_matched - report.miss.cached)


def usage_of(sequences: Sequence[FollowedAnswer], per_prompt: int, reasoning: int | None = None) -> Usage:
    """Return the usage of a generation; `per_prompt` sequences share a prompt, which counts once."""
    firsts = sequences[::per_prompt]
    prompt = sum(len(each.request.prompt) for each in firsts)
    generated = sum(each.generated for each in sequences)
    names = ("cached_tokens", "loaded_tokens", "disk_tokens", "remote_tokens")
    cached, loaded, disk, remote = (sum(getattr(each.report, name) for each in firsts) for name in names)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=generated,
        total_tokens=prompt + generated,
        prompt_tokens_details=PromptDetails(
            cached_tokens=cached,
            loaded_tokens=loaded or None,
            disk_tokens=disk or None,
            remote_tokens=remote or None,
            recomputed_tokens=sum(recomputed(each.report) for each in firsts) or None,
            miss=miss_of(firsts[0].report),
        ),
        completion_tokens_details=completion_details(sequences, reasoning),
    )


def completion_details(sequences: Sequence[FollowedAnswer], reasoning: int | None) -> dict[str, int] | None:
    """Return OpenAI's details, and as extensions the drafts that were verified, the accepted ones and their rows."""
    details = {} if reasoning is None else {"reasoning_tokens": reasoning}
    drafts = [each.report.drafts for each in sequences]
    if any(each.request.prediction is not None for each in sequences):
        accepted = sum(each.predicted_accepted for each in drafts)
        details["accepted_prediction_tokens"] = accepted
        details["rejected_prediction_tokens"] = sum(each.predicted for each in drafts) - accepted
    if proposed := sum(each.proposed for each in drafts):
        details["draft_tokens"] = proposed
        details["accepted_draft_tokens"] = sum(each.accepted for each in drafts)
        details["draft_steps"] = sum(each.rows for each in drafts)
    return details or None

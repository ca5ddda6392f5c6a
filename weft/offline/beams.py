"""Beam search over single steps of an engine: beams are prompts that share their beginnings through the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from weft.base.errors import InvalidField
from weft.base.sampling import MAX_LOGPROBS
from weft.offline.asking import AnyPrompt
from weft.offline.result import BeamSearchOutput, BeamSearchSequence, Result, TokenScore
from weft.offline.sampling import BeamSearchParams, GenerationParams
from weft.text.tokenizer import Tokenizer

# Each beam proposes twice as many tokens as beams are kept, so that enough are left when some of them end.
WIDEST = MAX_LOGPROBS // 2


class Generates(Protocol):
    """What a search asks of an `LLM`."""

    tokenizer: Tokenizer | None
    end_tokens: frozenset[int]

    def generate(
        self, prompts: Sequence[AnyPrompt], sampling_params: GenerationParams, use_tqdm: bool
    ) -> list[Result]: ...


@dataclass(slots=True)
class BeamSearch:
    """The beams of one prompt: those that grow, and those that have ended."""

    prompt: str | None
    prompt_tokens: list[int]
    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence]


def search(
    llm: Generates, prompts: Sequence[AnyPrompt], params: BeamSearchParams, progress: bool = False
) -> list[BeamSearchOutput]:
    """Return the likeliest answers to each prompt, best first."""
    if not 1 <= params.beam_width <= WIDEST:
        raise InvalidField("beam_width", f"must be an integer from 1 to {WIDEST}, got {params.beam_width!r}")
    # Also computes the prompts, so that all beams find them in the cache.
    found = llm.generate(prompts, GenerationParams(max_tokens=0), use_tqdm=False)
    searches = [
        BeamSearch(each.prompt, each.prompt_token_ids, [BeamSearchSequence(each.prompt_token_ids, [])], [])
        for each in found
    ]
    step = GenerationParams(max_tokens=1, temperature=0.0, logprobs=2 * params.beam_width, detokenize=False)
    ends = frozenset() if params.ignore_eos else llm.end_tokens
    for _ in range(params.max_tokens):
        growing = [beam for each in searches for beam in each.beams]
        if not growing:
            break
        results = iter(llm.generate([beam.tokens for beam in growing], step, use_tqdm=progress))
        for each in searches:
            grown = [(beam, next(results).logprobs) for beam in each.beams]
            _keep_best(each, [more for beam, scores in grown for more in _longer(beam, scores)], params, ends)
    return [_output(llm, each, params) for each in searches]


def _longer(beam: BeamSearchSequence, scores: list[TokenScore] | None) -> Iterator[BeamSearchSequence]:
    """Yield a beam with each of the likeliest next tokens."""
    assert scores, "a step has one token with scores"
    for token, logprob in scores[0].top:
        yield replace(
            beam,
            tokens=[*beam.tokens, token],
            logprobs=[*beam.logprobs, scores[0]],
            cum_logprob=beam.cum_logprob + logprob,
        )


def _keep_best(
    search: BeamSearch, found: list[BeamSearchSequence], params: BeamSearchParams, ends: frozenset[int]
) -> None:
    for beam in found:
        if beam.tokens[-1] in ends:
            search.ended.append(replace(beam, finish_reason="stop", stop_reason=beam.tokens[-1]))
    growing = [beam for beam in found if beam.tokens[-1] not in ends]
    growing.sort(key=lambda beam: -beam.cum_logprob)
    search.beams = growing[: params.beam_width]


def _output(llm: Generates, search: BeamSearch, params: BeamSearchParams) -> BeamSearchOutput:
    """Return the best beams, with their texts."""
    start = len(search.prompt_tokens)

    def rank(beam: BeamSearchSequence) -> float:
        """Return the score, lower for better ones; an end token does not count as part of the length."""
        length = len(beam.tokens) - start - (beam.finish_reason == "stop")
        return -beam.cum_logprob / float(max(length, 1) ** params.length_penalty)

    def shown(beam: BeamSearchSequence) -> BeamSearchSequence:
        is_cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = beam.tokens[:-1] if is_cut else beam.tokens
        text = (
            None
            if llm.tokenizer is None
            else llm.tokenizer.decode(tokens[start:], skip_special=not params.include_stop_str_in_output)
        )
        return replace(beam, tokens=tokens, text=text)

    found = sorted([*search.ended, *(replace(beam, finish_reason="length") for beam in search.beams)], key=rank)
    kept = [shown(beam) for beam in found[: params.beam_width]]
    return BeamSearchOutput(search.prompt, search.prompt_tokens, kept)

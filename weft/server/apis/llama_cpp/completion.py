"""POST /completion and /infill, as in llama.cpp's server."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer, Piece
from weft.base.errors import InvalidField
from weft.engine.events import FinishReason, Output
from weft.server.apis.delivery import deliver
from weft.server.apis.llama_cpp.bodies import (
    FIELD_NAMES,
    InfillRequest,
    LlamaCompletionRequest,
    LlamaFields,
    completion_prompts,
    infill_prompts,
)
from weft.server.apis.openai_shapes import token_bytes, token_text
from weft.server.front import AskedPrompt, Front, new_name
from weft.server.generation import Generation
from weft.server.http.sse import event
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.prompt_builder import Prompt
from weft.server.texts.schemas import sampling_params

Object = dict[str, Any]
LLAMA_COMPLETION = BodyReader("llama_completion", LlamaCompletionRequest, completion_prompts)
INFILL = BodyReader("infill", InfillRequest, infill_prompts)


async def complete(front: Front, request: Request) -> Response:
    body, prompts = await front.read_prompts(request, LLAMA_COMPLETION)
    return await answered(front, request, LlamaAnswer(front, body, prompts, isinstance(body.prompt, list)))


async def infill(front: Front, request: Request) -> Response:
    body, prompts = await front.read_prompts(request, INFILL)
    return await answered(front, request, LlamaAnswer(front, body, prompts))


async def answered(front: Front, request: Request, answer: LlamaAnswer) -> Response:
    body = answer.body
    generation = await front.generate(
        answer.asked,
        request.state.tenant,
        name=new_name("completion-"),
        cache_salt=body.cache_salt,
        priority=body.priority,
        retain=body.retain,
        form=body.form(front.limits),
    )
    events = answer.events(generation) if body.stream else None
    # Streams of this API have no closing mark.
    return await deliver(front, request, generation, events, lambda: answer.whole(generation), done=b"")


class LlamaAnswer:
    """Shapes the answers to one request; `many` if it has a list of prompts."""

    def __init__(self, front: Front, body: LlamaFields, prompts: list[Prompt], many: bool = False) -> None:
        self.front = front
        self.body = body
        self.many = many
        self.began = time.perf_counter()
        self.asked = [self._asked(prompt) for prompt in prompts]

    def _asked(self, prompt: Prompt) -> AskedPrompt:
        body, front = self.body, self.front
        try:
            most = front.max_tokens(body.max_tokens, len(prompt.tokens), "n_predict")
            params = sampling_params(
                body.common(), front.limits, most, body.n_probs or None, scored="n_probs", suggested=front.suggested
            )
        except InvalidField as error:
            raise InvalidField(FIELD_NAMES.get(error.field or "", error.field or ""), error.complaint) from None
        return AskedPrompt(prompt, params)

    def whole(self, generation: Generation) -> Object | list[Object]:
        found = [
            self._end(generation, each, each.answer.text, each.answer.tokens, each.outputs)
            for each in generation.sequences
        ]
        return found if self.many else found[0]

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        async for piece in generation:
            generation.check(piece)
            sequence = generation.sequences[piece.index]
            if piece.finish is None:
                yield event(self._piece(sequence, piece))
            else:
                # The last event has the whole prompt, so it may take long.
                end = partial(self._end, generation, sequence, piece.text, tokens_of(piece), piece.outputs)
                yield event(await self.front.run_off_loop(generation.size, end))

    def _piece(self, sequence: FollowedAnswer, piece: Piece) -> Object:
        found: Object = {
            "index": piece.index,
            "content": piece.text,
            "tokens": tokens_of(piece),
            "stop": False,
            "id_slot": piece.index,
            "tokens_predicted": sequence.generated,
            "tokens_evaluated": len(sequence.request.prompt),
        }
        return found | self._probabilities(piece.outputs)

    def _end(
        self, generation: Generation, sequence: FollowedAnswer, text: str, tokens: list[int], outputs: list[Output]
    ) -> Object:
        """Return the last event of an answer, or the whole one."""
        assert sequence.finish is not None
        word = sequence.answer.stop_reason
        stopped = "word" if isinstance(word, str) else "eos"
        prompt = sequence.request.prompt.tolist()
        found: Object = {
            "index": sequence.index,
            "content": text,
            "tokens": tokens if self.body.return_tokens or self.body.stream else [],
            "id_slot": sequence.index,
            "stop": True,
            "model": self.front.model_name,
            "tokens_predicted": sequence.generated,
            "tokens_evaluated": len(prompt),
            "tokens_cached": sequence.report.cached_tokens,
            "generation_settings": self._settings(sequence),
            "prompt": "" if self.front.tokenizer is None else self.front.tokenizer.decode(prompt, skip_special=False),
            "has_new_line": "\n" in sequence.answer.text,
            "truncated": False,
            "stop_type": {FinishReason.STOP: stopped, FinishReason.LENGTH: "limit"}.get(sequence.finish, "none"),
            "stopping_word": word if isinstance(word, str) else "",
            "timings": self._timings(generation, sequence),
        }
        return found | self._probabilities(outputs)

    def _settings(self, sequence: FollowedAnswer) -> Object:
        params = sequence.request.params
        same = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "seed", "ignore_eos")
        found = {name: getattr(params, name) for name in same}
        return found | {
            "n_predict": params.max_tokens,
            "repeat_penalty": params.repetition_penalty,
            "stop": list(params.stop),
            "n_probs": params.logprobs or 0,
            "stream": bool(self.body.stream),
        }

    def _timings(self, generation: Generation, sequence: FollowedAnswer) -> Object:
        now = time.perf_counter()
        first = generation.first_token_seconds or now
        cached = sequence.report.cached_tokens
        computed, predicted = len(sequence.request.prompt) - cached, sequence.generated
        prompt_ms = max(0.0, first - self.began - generation.queued_seconds) * 1000
        predicted_ms = max(0.0, now - first) * 1000
        return {
            "cache_n": cached,
            "prompt_n": computed,
            "prompt_ms": prompt_ms,
            "prompt_per_second": per_second(computed, prompt_ms),
            "predicted_n": predicted,
            "predicted_ms": predicted_ms,
            "predicted_per_second": per_second(predicted, predicted_ms),
        }

    def _probabilities(self, outputs: list[Output]) -> Object:
        if not self.body.n_probs:
            return {}
        scored = [output for output in outputs if output.token is not None and output.logprob is not None]
        return {
            "completion_probabilities": [
                self._entry(each.token or 0, each.logprob or 0.0)
                | {"top_logprobs": [self._entry(token, logprob) for token, logprob in each.top or ()]}
                for each in scored
            ]
        }

    def _entry(self, token: int, logprob: float) -> Object:
        tokenizer = self.front.tokenizer
        return {
            "id": token,
            "token": token_text(tokenizer, token),
            "bytes": token_bytes(tokenizer, token),
            "logprob": logprob,
        }


def tokens_of(piece: Piece) -> list[int]:
    return [output.token for output in piece.outputs if output.token is not None]


def per_second(count: int, milliseconds: float) -> float:
    return count / milliseconds * 1000 if milliseconds else 0.0

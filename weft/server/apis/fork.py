"""POST /v1/fork: go on with an answer from any of its tokens, several times and with other sampling values.

The answer runs, or it was stored. A fork's prompt is its tokens, so nothing is rendered or tokenized again.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from weft.answers.followed import FollowedAnswer
from weft.base.errors import InvalidField
from weft.base.tenants import tenant_digest
from weft.engine.events import Output
from weft.server.access.auth import Tenant
from weft.server.apis.delivery import deliver
from weft.server.apis.openai_shapes import ChatLogprobs, chat_logprobs, miss_of
from weft.server.front import AskedPrompt, Front, new_name
from weft.server.generation import Generation
from weft.server.http.sse import event
from weft.server.stored.answers import StoredAnswer, as_bytes, as_tokens
from weft.server.texts.bodies import check_count, read
from weft.server.texts.prompt_builder import Prompt
from weft.server.texts.schemas import Count, SamplingFields, sampling_params
from weft.text.prompts import Tokens


class ForkRequest(SamplingFields, kw_only=True):
    """`at`: how many tokens of the answer to keep; default: all so far. `choice`: which answer, if there are several.

    `choices` are sampling values, one for each fork; what one does not set is the body's own.
    """

    id: Annotated[str, Meta(min_length=1, max_length=128)]
    choice: Count = 0
    at: Count | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    choices: Annotated[list[SamplingFields], Meta(min_length=1)] | None = None
    max_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    stream: bool | None = None
    store: bool | None = None


@dataclass(frozen=True, slots=True)
class Past:
    """An answer to go on with: its prompt, its tokens so far, and the request's own salt."""

    prompt: Tokens
    answer: Tokens
    salt: bytes
    cache_salt: str | None


async def fork(front: Front, request: Request) -> Response:
    body = await read(request, ForkRequest, front.receiving)
    answer = ForkedAnswer(front, body, request.state.tenant)
    generation = await answer.start()
    events = answer.events(generation) if body.stream else None
    return await deliver(front, request, generation, events, lambda: answer.whole(generation))


def past_of(front: Front, body: ForkRequest, tenant: Tenant) -> Past:
    """Return the answer that a body names: one that runs, or a stored or retained one, of the same tenant."""
    for generation in front.generations:
        if body.id in generation.names and generation.tenant == tenant:
            sequence = _chosen(generation.sequences, body.choice)
            request, done = sequence.request, np.array(sequence.answer.tokens, np.int32)
            before = request.known[len(request.prompt) :]
            # What the tenant's salt does not begin with is the request's own; a stored fork must keep it.
            own = request.salt.removeprefix(tenant.salt).decode() or None
            return Past(request.prompt, np.concatenate([before, done]), request.salt, own)
    return stored_past(front, body.id, body.choice, tenant)


def stored_past(front: Front, name: str, choice: int, tenant: Tenant) -> Past:
    """Return a stored answer, or a retained prompt with its answer, of a tenant. Raises a 404."""
    kept = front.retained if front.stored is None or not front.stored.knows(name, tenant) else front.stored
    found = kept.find(name, tenant)
    answer = as_tokens(_chosen(found.answers, choice))
    return Past(found.prompt, answer, tenant.salted(found.cache_salt), found.cache_salt)


def _chosen(answers: list[Any], choice: int) -> Any:
    if choice >= len(answers):
        raise InvalidField("choice", f"must be less than {len(answers)}, the number of its answers, got {choice}")
    return answers[choice]


def merged(body: SamplingFields, choice: SamplingFields) -> SamplingFields:
    """Return one fork's sampling values: its own, and the body's where it has none."""
    names = SamplingFields.__struct_fields__
    own = {name: getattr(choice, name) for name in names if getattr(choice, name) is not None}
    shared = {name: getattr(body, name) for name in names}
    return SamplingFields(**{**shared, **own})


class ForkedAnswer:
    def __init__(self, front: Front, body: ForkRequest, tenant: Tenant) -> None:
        self.front = front
        self.body = body
        self.tenant = tenant
        self.name = new_name("fork_")
        self.created = int(time.time())
        self.past = past_of(front, body, tenant)
        self.at = len(self.past.answer) if body.at is None else body.at
        if self.at > len(self.past.answer):
            raise InvalidField(
                "at", f"must be at most {len(self.past.answer)}, the answer's tokens so far, got {self.at}"
            )
        if body.cache_salt is not None:
            raise InvalidField("cache_salt", "must not be set: a fork has the salt of its answer")
        if body.choices is not None and body.n not in (None, len(body.choices)):
            raise InvalidField("n", f"must be the number of choices, {len(body.choices)}, got {body.n}")
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidField("top_logprobs", "needs logprobs=true")
        if body.store and front.stored is None:
            raise InvalidField("store", "needs a server with --responses-memory")
        self.n = body.n or len(body.choices or (None,))

    async def start(self) -> Generation:
        check_count("n", self.n, self.front.limits.n, 1)
        past, answered = self.past, np.ascontiguousarray(self.past.answer[: self.at])
        most = self.front.max_tokens(self.body.max_tokens, len(past.prompt) + self.at)
        samplings = [merged(self.body, each) for each in self.body.choices or [SamplingFields()]]
        shared = self.n if self.body.choices is None else 1
        prompt = Prompt(past.prompt)
        asked = [AskedPrompt(prompt, self._params(each, most), shared, "at", answered=answered) for each in samplings]
        return await self.front.generate(
            asked,
            self.tenant,
            name=self.name,
            salt=past.salt,
            priority=self.body.priority,
            retain=self.body.retain,
            skip_special=self.body.skip_special_tokens is not False,
            keeps_answer=bool(self.body.store),
        )

    def _params(self, fields: SamplingFields, most: int) -> Any:
        self.front.builder.ban(fields)
        logprobs = (self.body.top_logprobs or 0) if self.body.logprobs else None
        return sampling_params(
            fields,
            self.front.limits,
            most,
            logprobs=logprobs,
            scored="top_logprobs",
            suggested=self.front.suggested,
            before=self.at,
        )

    def _logprobs(self, outputs: list[Output]) -> dict[str, ChatLogprobs]:
        return {"logprobs": chat_logprobs(self.front.tokenizer, outputs)} if self.body.logprobs else {}

    # response -------------------------------------------------------------------------------------------------------

    def whole(self, generation: Generation) -> dict[str, Any]:
        if self.body.store:
            self._keep(generation)
        choices = [
            {
                "index": each.index,
                "text": each.answer.text,
                "token_ids": each.answer.tokens,
                "finish_reason": str(each.finish),
                **self._logprobs(each.outputs),
            }
            for each in generation.sequences
        ]
        return {
            "id": self.name,
            "object": "fork",
            "created": self.created,
            "model": self.front.model_name,
            "forked": {"id": self.body.id, "choice": self.body.choice, "at": self.at},
            "choices": choices,
            "usage": self._usage(generation.sequences),
        }

    def _usage(self, sequences: list[FollowedAnswer]) -> dict[str, Any]:
        """Return the cost: what each fork had to compute before its first token."""
        known, prompt = len(self.past.prompt) + self.at, len(self.past.prompt)
        cached = [each.report.cached_tokens for each in sequences]
        generated = sum(each.generated for each in sequences)
        exact = bool(self.front.backend.info.settings.get("exact"))
        found = {
            "prompt_tokens": known,
            "completion_tokens": generated,
            "total_tokens": known + generated,
            "cached_tokens": cached,
            "computed_tokens": [known - each for each in cached],
            "recomputed_tokens": sum(known - each for each in cached),
            "miss": miss_of(sequences[0].report),
        }
        if exact:
            # An exact answer is computed again as it was generated: token by token.
            found["decoded_again_tokens"] = [known - max(prompt, each) for each in cached]
        return found

    def _keep(self, generation: Generation) -> None:
        assert self.front.stored is not None
        before = self.past.answer[: self.at].tolist()
        self.front.stored.add(
            StoredAnswer(
                id=self.name,
                tenant=tenant_digest(self.tenant.salt),
                model=self.front.model_name,
                created=float(self.created),
                cache_salt=self.past.cache_salt,
                tokens=as_bytes(self.past.prompt),
                answers=[as_bytes([*before, *each.answer.tokens]) for each in generation.sequences],
            )
        )

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        async for piece in generation:
            generation.check(piece)
            tokens = [output.token for output in piece.outputs]
            finish = None if piece.finish is None else str(piece.finish)
            yield event(
                {
                    "id": self.name,
                    "index": piece.index,
                    "text": piece.text,
                    "token_ids": tokens,
                    "finish_reason": finish,
                    **self._logprobs(piece.outputs),
                }
            )
        yield event({key: value for key, value in self.whole(generation).items() if key != "choices"})

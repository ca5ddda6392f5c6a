"""POST /v1/embeddings, /v1/score, /v1/rerank and /classify, their other paths, and Ollama's /api/embed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from weft.answers.pair_scores import PairScorer
from weft.answers.vectors import embedding, probabilities, prompt_named, prompt_tokens, vector_of, vector_params
from weft.base.sampling import SamplingParams
from weft.engine.events import Report
from weft.server.access.rates import Used
from weft.server.apis.ollama.answers import nanoseconds
from weft.server.apis.vectors import answers
from weft.server.apis.vectors.bodies import CLASSIFY, EMBEDDING, OLLAMA_EMBED, OLLAMA_EMBEDDING, RERANK, SCORE
from weft.server.apis.vectors.computing import computed
from weft.server.front import Front
from weft.server.http.errors import json_response
from weft.server.texts.prompt_builder import Prompt
from weft.server.texts.schemas import CacheFields

# Numbers of vectors that cost as much to encode as a character.
ENCODED = 2


async def embed(front: Front, request: Request) -> Response:
    body, prompts = await front.read_prompts(request, EMBEDDING)
    asked = texts_asked(front, prompts, body.prompt_name, are_texts=isinstance(body.input, str))
    reports, used = await computed(front, request, body, asked, "input")

    def answer() -> answers.EmbeddingAnswer:
        found = [embedding(front.vectors, vector_of(report), body.dimensions) for report in reports]
        return answers.embeddings(front, found, used, body.encoding_format == "base64")

    return await shaped(front, reports, answer)


async def ollama_embed(front: Front, request: Request) -> Response:
    began = time.perf_counter()
    body, prompts = await front.read_prompts(request, OLLAMA_EMBED)
    reports, used = await computed(front, request, body, texts_asked(front, prompts), "input")

    def answer() -> answers.Object:
        # Ollama's are always normalised.
        found = [embedding(front.vectors, vector_of(report), body.dimensions, True) for report in reports]
        return {
            "model": front.model_name,
            "embeddings": [each.tolist() for each in found],
            "total_duration": nanoseconds(time.perf_counter() - began),
            "load_duration": 0,
            "prompt_eval_count": used.prompt,
        }

    return await shaped(front, reports, answer)


async def ollama_embedding(front: Front, request: Request) -> Response:
    body, prompts = await front.read_prompts(request, OLLAMA_EMBEDDING)
    reports, _ = await computed(front, request, body, texts_asked(front, prompts), "prompt")
    found = [embedding(front.vectors, vector_of(report)).tolist() for report in reports]
    return json_response({"embedding": found[0] if found else []})


async def classify(front: Front, request: Request) -> Response:
    body, prompts = await front.read_prompts(request, CLASSIFY)
    facts = front.vectors
    asked = [(prompt, vector_params(facts, len(prompt.tokens))) for prompt in prompts]
    reports, used = await computed(front, request, body, asked, "input")
    found = [probabilities(facts, vector_of(report)) for report in reports]
    return json_response(answers.classes(front, found, facts.labels, used))


async def score(front: Front, request: Request) -> Response:
    body, prompts = await front.read_prompts(request, SCORE)
    count = len(body.documents or ())
    found, used = await scored(front, request, body, prompts, count, "documents")
    return json_response(answers.scores(front, found, used))


async def rerank(front: Front, request: Request) -> Response:
    return await ranked(front, request, shows_documents=True)


async def rerank_v2(front: Front, request: Request) -> Response:
    """Cohere's second version, whose responses have no documents."""
    return await ranked(front, request, shows_documents=False)


async def ranked(front: Front, request: Request, shows_documents: bool) -> Response:
    body, prompts = await front.read_prompts(request, RERANK)
    shows = shows_documents if body.return_documents is None else body.return_documents
    texts = [each if isinstance(each, str) else each.text for each in body.documents]
    found, used = await scored(front, request, body, prompts, len(texts), "documents")
    size = sum(map(len, texts)) if shows else 0

    def answer() -> Response:
        return json_response(answers.ranking(front, found, texts if shows else None, body.top_n, used))

    return await front.run_off_loop(size, answer)


def texts_asked(
    front: Front, prompts: Sequence[Prompt], prompt_name: str | None = None, are_texts: bool = True
) -> list[tuple[Prompt, SamplingParams]]:
    """Return what to ask for embeddings of prompts, some of whose tokens may be those of the model's own prompt."""
    facts, before = front.vectors, prompt_named(front.vectors, prompt_name) if are_texts else ""
    count = 0 if not before or facts.counts_prompts else prompt_tokens(front.need_tokenizer(), before)
    return [(each, vector_params(facts, len(each.tokens), count)) for each in prompts]


async def scored(
    front: Front, request: Request, body: CacheFields, prompts: Sequence[Prompt], count: int, field: str
) -> tuple[list[float], Used]:
    """Return the scores of pairs, whose prompts these are, and what they used."""
    scorer = PairScorer(front.vectors, front.need_tokenizer())
    tokens = [prompt.tokens for prompt in prompts]
    asked = [(Prompt(each), params) for each, params in scorer.asked(tokens)]
    reports, used = await computed(front, request, body, asked, field)
    return [each.score for each in scorer.scores(count, tokens, reports)], used


async def shaped(front: Front, reports: Sequence[Report], answer: Callable[[], Any]) -> Response:
    """Return an answer with a vector for each report as JSON. Encoding many is long work."""
    size = len(reports) * front.vectors.size // ENCODED
    return await front.run_off_loop(size, lambda: json_response(answer()))

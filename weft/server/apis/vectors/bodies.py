"""Bodies about vectors, of OpenAI's, Ollama's, Cohere's, Jina's and vLLM's clients, and how they become prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft.answers.pair_scores import INSTRUCTION, Pair, PairScorer, pairs_of
from weft.answers.vectors import (
    check_dimensions,
    need_classes,
    need_embeddings,
    prompt_named,
    prompt_tokens,
    snapshot_of,
)
from weft.base.errors import InvalidField
from weft.server.apis.ollama.bodies import OllamaOptions
from weft.server.apis.openai_completions import as_prompts
from weft.server.texts.body_reader import BodyReader
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import CacheFields, TokenId
from weft.text.prompts import checked_tokens

Texts = str | list[str | TokenId | list[TokenId]]
Dimensions = Annotated[int, Meta(ge=1, le=1 << 20)]
Keep = Annotated[int, Meta(ge=-1)]
Top = Annotated[int, Meta(ge=1)]
Instruction = Annotated[str, Meta(max_length=1 << 14)]


class EmbeddingRequest(CacheFields, kw_only=True):
    """OpenAI's. `prompt_name` is one of the model's prompts, which goes before each text."""

    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    truncate_prompt_tokens: Keep | None = None
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    user: str | None = None


class OllamaEmbedRequest(CacheFields, kw_only=True):
    """Ollama's `/api/embed`. Texts that do not fit are cut unless `truncate` is false."""

    model: str
    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingRequest(CacheFields, kw_only=True):
    """Ollama's older `/api/embeddings`."""

    model: str
    prompt: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class ClassifyRequest(CacheFields, kw_only=True):
    input: Texts
    model: str | None = None
    truncate_prompt_tokens: Keep | None = None
    user: str | None = None


class ScoreRequest(CacheFields, kw_only=True):
    """vLLM's, older and newer names. One first text is paired with all second ones."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    model: str | None = None
    instruction: Instruction | None = None
    user: str | None = None


class RankedText(msgspec.Struct, kw_only=True):
    text: str


class RerankRequest(CacheFields, kw_only=True):
    """Cohere's and Jina's. `max_tokens_per_doc` cuts the ends of documents."""

    query: str
    documents: list[str | RankedText]
    model: str | None = None
    top_n: Top | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Top | None = None
    instruction: Instruction | None = None
    user: str | None = None


# what is embedded -----------------------------------------------------------------------------------------------------


def encoded(
    builder: PromptBuilder, texts: Sequence[str | list[int]], field: str, keep: int | None, name: str | None = None
) -> list[Prompt]:
    """Return texts and token ids as prompts, the texts after the model's prompt of this name."""
    before = prompt_named(builder.vectors, name)
    if name is not None and not all(isinstance(each, str) for each in texts):
        raise InvalidField("prompt_name", "goes before texts; put its tokens before token ids yourself")
    whole = [before + each if isinstance(each, str) else each for each in texts]
    kept = builder.kept_tokens(keep, 0)
    found = builder.encode(whole, field, kept, builder.limits.inputs)
    count = prompt_tokens(builder.need_tokenizer(), before) if before else 0
    for prompt in found:
        builder.check_tokens(len(prompt.tokens), field)
        if count and len(prompt.tokens) == kept and not builder.vectors.counts_prompts:
            raise InvalidField(field, f"with the model's prompt must have fewer than {kept} tokens, or it would be cut")
    return [
        Prompt(prompt.tokens, snapshot_of(count if isinstance(each, str) else 0, len(prompt.tokens)))
        for each, prompt in zip(texts, found, strict=True)
    ]


def embedding_prompts(builder: PromptBuilder, body: EmbeddingRequest) -> list[Prompt]:
    builder.check_model(body.model)
    need_embeddings(builder.vectors)
    check_dimensions(builder.vectors, body.dimensions)
    inputs = as_prompts(body.input, "input")
    texts = [each for each in inputs if isinstance(each, str)]
    if texts and len(texts) != len(inputs):
        raise InvalidField("input", "must be texts or lists of token ids, not a mixture")
    # Which of the two it was still shows.
    body.input = "" if texts else []
    return encoded(builder, inputs, "input", body.truncate_prompt_tokens, body.prompt_name)


def ollama_prompts(builder: PromptBuilder, body: OllamaEmbedRequest) -> list[Prompt]:
    """Check a body and take its texts out of it; without any, the body only asks to load the model."""
    builder.check_model(body.model)
    need_embeddings(builder.vectors)
    check_dimensions(builder.vectors, body.dimensions)
    (body.options or OllamaOptions()).check(builder.facts.room)
    texts = [body.input] if isinstance(body.input, str) else body.input or []
    body.input = None
    return encoded(builder, texts, "input", None if body.truncate is False else -1) if any(texts) else []


def ollama_prompt(builder: PromptBuilder, body: OllamaEmbeddingRequest) -> list[Prompt]:
    builder.check_model(body.model)
    need_embeddings(builder.vectors)
    (body.options or OllamaOptions()).check(builder.facts.room)
    text, body.prompt = body.prompt, None
    return encoded(builder, [text], "prompt", -1) if text else []


def classified_prompts(builder: PromptBuilder, body: ClassifyRequest) -> list[Prompt]:
    builder.check_model(body.model)
    need_classes(builder.vectors)
    found = encoded(builder, as_prompts(body.input, "input"), "input", body.truncate_prompt_tokens)
    body.input = ""
    return found


# what is scored -------------------------------------------------------------------------------------------------------


def score_pairs(body: ScoreRequest) -> list[Pair]:
    """Return the pairs of texts of a body, by whichever names it has them."""
    first, second = body.text_1, body.text_2
    names = ("text_1", "text_2")
    if first is None and second is None:
        first, second, names = body.queries, body.documents, ("queries", "documents")
    if first is None or second is None:
        raise InvalidField(names[0], f"and {names[1]} must be given")
    return pairs_of(first, second, names)


def rerank_pairs(body: RerankRequest) -> list[Pair]:
    return [(body.query, each if isinstance(each, str) else each.text) for each in body.documents]


def pair_prompts(builder: PromptBuilder, pairs: Sequence[Pair], instruction: str | None, field: str) -> list[Prompt]:
    """Return the prompts that score pairs, of bounded texts."""
    if not 0 < len(pairs) <= builder.limits.inputs:
        raise InvalidField(field, f"must have 1 to {builder.limits.inputs} texts, got {len(pairs)}")
    for query, document in pairs:
        builder.check_size(len(query) + len(document), field)
    scorer = PairScorer(builder.vectors, builder.need_tokenizer(), instruction or INSTRUCTION)
    found = scorer.texts(pairs)
    for tokens in found:
        # A word of the answer may follow.
        builder.check_tokens(len(tokens) + 1, field)
    return [Prompt(checked_tokens(tokens, builder.facts.vocab_size, field)) for tokens in found]


def score_prompts(builder: PromptBuilder, body: ScoreRequest) -> list[Prompt]:
    """Check a body and take its pairs out of it. `documents` keeps their number."""
    builder.check_model(body.model)
    pairs = score_pairs(body)
    found = pair_prompts(builder, pairs, body.instruction, "text_2" if body.text_2 is not None else "documents")
    body.text_1 = body.text_2 = body.queries = None
    body.documents = [""] * len(pairs)
    return found


def rerank_prompts(builder: PromptBuilder, body: RerankRequest) -> list[Prompt]:
    """Check a body and return the prompts of its documents, which stay because the response repeats them."""
    builder.check_model(body.model)
    pairs = rerank_pairs(body)
    if body.max_tokens_per_doc is not None:
        pairs = [(query, builder.first_tokens(text, body.max_tokens_per_doc)) for query, text in pairs]
    found = pair_prompts(builder, pairs, body.instruction, "documents")
    body.query = ""
    return found


PARTS = {"options": OllamaOptions}
EMBEDDING = BodyReader("embedding", EmbeddingRequest, embedding_prompts)
OLLAMA_EMBED = BodyReader("ollama_embed", OllamaEmbedRequest, ollama_prompts, parts=PARTS)
OLLAMA_EMBEDDING = BodyReader("ollama_embedding", OllamaEmbeddingRequest, ollama_prompt, parts=PARTS)
CLASSIFY = BodyReader("classify", ClassifyRequest, classified_prompts)
SCORE = BodyReader("score", ScoreRequest, score_prompts, kept=("documents",))
RERANK = BodyReader("rerank", RerankRequest, rerank_prompts, kept=("documents",))
READERS = (EMBEDDING, OLLAMA_EMBED, OLLAMA_EMBEDDING, CLASSIFY, SCORE, RERANK)

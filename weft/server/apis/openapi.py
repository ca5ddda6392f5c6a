"""The OpenAPI document, generated from the structs that decode the bodies, so that the two cannot differ."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from weft import __version__
from weft.server.apis.anthropic_messages import CountRequest, MessagesRequest
from weft.server.apis.anthropic_route import CountAnswer, MessageAnswerBody
from weft.server.apis.control import AbortAnswer, AbortRequest, FlushAnswer
from weft.server.apis.fork import ForkRequest
from weft.server.apis.llama_cpp.bodies import InfillRequest, LlamaCompletionRequest
from weft.server.apis.native import GenerateAnswer, GenerateRequest
from weft.server.apis.ollama.bodies import OllamaChatRequest, OllamaGenerateRequest
from weft.server.apis.ollama.models import ShowRequest
from weft.server.apis.openai_chat import ChatAnswer, ChatRequest
from weft.server.apis.openai_completions import CompletionAnswer, CompletionRequest
from weft.server.apis.openai_responses import ResponsesRequest
from weft.server.apis.tokens import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from weft.server.apis.vectors.answers import ClassAnswer, EmbeddingAnswer, RerankAnswer, ScoreAnswer
from weft.server.apis.vectors.bodies import (
    ClassifyRequest,
    EmbeddingRequest,
    OllamaEmbeddingRequest,
    OllamaEmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from weft.server.batches.routes import CreateBatch
from weft.server.batches.store import StoredBatch, StoredFile
from weft.server.http.errors import AnthropicErrorAnswer, ErrorAnswer, OllamaErrorAnswer, is_anthropic, is_ollama
from weft.server.tracing.records import RequestRecord

Object = dict[str, Any]
Answers = Object | list[Object]

# path, method, summary, request body, response
OPERATIONS: tuple[tuple[str, str, str, Any, Any], ...] = (
    ("/v1/models", "get", "List the served model", None, Object),
    ("/v1/completions", "post", "Continue a text or token ids", CompletionRequest, CompletionAnswer),
    ("/v1/chat/completions", "post", "Generate the next message of a conversation", ChatRequest, ChatAnswer),
    ("/v1/responses", "post", "Generate a response with OpenAI's newer API", ResponsesRequest, Object),
    ("/v1/responses/{name}", "get", "Show a stored response", None, Object),
    ("/v1/responses/{name}", "delete", "Remove a stored response", None, Object),
    ("/v1/responses/{name}/input_items", "get", "List what a stored response was given", None, Object),
    ("/v1/fork", "post", "Go on with a running or stored answer from any of its tokens", ForkRequest, Object),
    ("/v1/prefixes/{name}", "get", "A stored response or a retained prompt as a signed file", None, str),
    ("/v1/prefixes", "post", "Take a signed file into the cache; needs the admin key", None, Object),
    ("/v1/messages", "post", "Generate a message with Anthropic's API", MessagesRequest, MessageAnswerBody),
    ("/v1/messages/count_tokens", "post", "Count the tokens of a conversation", CountRequest, CountAnswer),
    ("/v1/embeddings", "post", "Embed texts or token ids", EmbeddingRequest, EmbeddingAnswer),
    ("/v1/score", "post", "Score pairs of texts", ScoreRequest, ScoreAnswer),
    ("/score", "post", "Same as /v1/score", ScoreRequest, ScoreAnswer),
    ("/v1/rerank", "post", "Rank documents by how well they answer a query", RerankRequest, RerankAnswer),
    ("/rerank", "post", "Same as /v1/rerank", RerankRequest, RerankAnswer),
    ("/v2/rerank", "post", "Same as /v1/rerank, without documents (Cohere)", RerankRequest, RerankAnswer),
    ("/classify", "post", "Classify texts with a model's class head", ClassifyRequest, ClassAnswer),
    ("/api/embed", "post", "Embed texts (Ollama)", OllamaEmbedRequest, Object),
    ("/api/embeddings", "post", "Embed a text (Ollama's older route)", OllamaEmbeddingRequest, Object),
    ("/tokenize", "post", "Convert texts and conversations to token ids", TokenizeRequest, TokenizeAnswer),
    ("/detokenize", "post", "Convert token ids to text", DetokenizeRequest, DetokenizeAnswer),
    ("/generate", "post", "Generate text (native API)", GenerateRequest, GenerateAnswer | list[GenerateAnswer]),
    ("/api/chat", "post", "Generate the next message of a conversation (Ollama)", OllamaChatRequest, Object),
    ("/api/generate", "post", "Continue a text, or answer it (Ollama)", OllamaGenerateRequest, Object),
    ("/api/tags", "get", "List the served model (Ollama)", None, Object),
    ("/api/ps", "get", "List the loaded models (Ollama)", None, Object),
    ("/api/show", "post", "Facts about the model (Ollama)", ShowRequest, Object),
    ("/api/version", "get", "The version of Ollama whose API this is", None, Object),
    *((f"/api/{name}", "post", "Not supported (Ollama)", None, Object) for name in ("pull", "push", "create", "copy")),
    ("/api/delete", "delete", "Not supported (Ollama)", None, Object),
    ("/api/v0/models", "get", "List the served model (LM Studio)", None, Object),
    ("/api/v0/chat/completions", "post", "Same as /v1/chat/completions (LM Studio)", ChatRequest, ChatAnswer),
    ("/api/v0/completions", "post", "Same as /v1/completions (LM Studio)", CompletionRequest, CompletionAnswer),
    ("/api/v0/embeddings", "post", "Same as /v1/embeddings (LM Studio)", EmbeddingRequest, EmbeddingAnswer),
    ("/completion", "post", "Continue a text or token ids (llama.cpp)", LlamaCompletionRequest, Answers),
    ("/completions", "post", "Same as /completion", LlamaCompletionRequest, Answers),
    ("/infill", "post", "Fill in the text between two others (llama.cpp)", InfillRequest, Object),
    ("/props", "get", "Defaults and facts about the model (llama.cpp)", None, Object),
    ("/slots", "get", "Running and waiting requests of the caller's key (llama.cpp)", None, list[Object]),
    ("/v1/files", "get", "List the files of the caller's key", None, Object),
    ("/v1/files", "post", "Keep a file for a batch: a multipart form", None, StoredFile),
    ("/v1/files/{name}", "get", "Facts about a file", None, StoredFile),
    ("/v1/files/{name}", "delete", "Delete a file", None, Object),
    ("/v1/files/{name}/content", "get", "The content of a file", None, str),
    ("/v1/batches", "get", "List the batches of the caller's key", None, Object),
    ("/v1/batches", "post", "Answer the requests of a file", CreateBatch, StoredBatch),
    ("/v1/batches/{name}", "get", "The state of a batch", None, StoredBatch),
    ("/v1/batches/{name}/cancel", "post", "Cancel a batch", None, StoredBatch),
    ("/abort_request", "post", "Abort requests by id", AbortRequest, AbortAnswer),
    ("/flush_cache", "post", "Drop all cached prefixes that no running sequence uses", None, FlushAnswer),
    ("/server_info", "get", "Settings and counters", None, Object),
    ("/model_info", "get", "Facts about the model", None, Object),
    ("/health", "get", "Report whether the engine runs", None, Object),
    ("/health_generate", "get", "Report whether the engine can generate a token", None, Object),
    ("/ping", "get", "Report whether the engine runs", None, Object),
    ("/ping", "post", "Report whether the engine runs", None, Object),
    ("/docs", "get", "This document as a page", None, str),
    ("/v1/usage", "get", "What each key used, by day", None, Object),
    ("/version", "get", "The server's version", None, Object),
    ("/load", "get", "The number of requests in progress", None, Object),
    ("/metrics", "get", "Counters and gauges for Prometheus", None, str),
    ("/cache", "get", "The largest shared prefixes in the cache", None, Object),
    ("/cache/outline", "get", "The branches of the cache, for a picture", None, Object),
    ("/debug/events", "get", "A stream of what requests and steps do", None, Object),
    ("/debug/requests/{name}", "get", "What became of a request", None, RequestRecord),
    ("/cache", "delete", "Drop cached prefixes of a tenant, below a key, or all, from all tiers", None, Object),
)
STREAMED: tuple[str, ...] = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/fork",
    "/v1/messages",
    "/generate",
)
STREAMED += ("/api/v0/completions", "/api/v0/chat/completions", "/completion", "/completions", "/infill")
STREAMED += ("/debug/events",)


@cache
def document(title: str) -> dict[str, Any]:
    kinds = [kind for *_, body, answer in OPERATIONS for kind in (body, answer) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*kinds, ErrorAnswer, AnthropicErrorAnswer, OllamaErrorAnswer], ref_template="#/components/schemas/{name}"
    )
    found = iter(schemas)
    paths: dict[str, Any] = {}
    for path, method, about, body, answer in OPERATIONS:
        request = None if body is None else next(found)
        operation = _operation(path, about, request, None if answer is None else next(found))
        if path in paths:
            operation["operationId"] += f"_{method}"
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Weft serving {title}", "version": __version__},
        "security": [{"key": []}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, about: str, body: dict[str, Any] | None, answer: dict[str, Any] | None) -> dict[str, Any]:
    kind = "text/plain" if path == "/metrics" else "application/json"
    content: dict[str, Any] = {kind: {"schema": answer}}
    if path in ("/api/chat", "/api/generate"):
        content["application/x-ndjson"] = {"schema": {"type": "string"}}
    if path in STREAMED:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    failure = "AnthropicErrorAnswer" if is_anthropic(path) else "ErrorAnswer"
    failure = "OllamaErrorAnswer" if is_ollama(path) else failure
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{failure}"}}}
    operation: dict[str, Any] = {
        "summary": about,
        "operationId": path.strip("/").replace("/", "_"),
        "responses": {
            "200": {"description": "The response", "content": content},
            "4XX": {"description": "What is wrong with the request", "content": error},
            "503": {"description": "The engine has stopped", "content": error},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return operation

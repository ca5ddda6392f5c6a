"""docs/api.md and the bodies that are decoded say the same, and every documented field is sent by some test."""

from __future__ import annotations

import re

import msgspec
import pytest

from tests.support.fences import ROOT
from weft.server.apis.anthropic_messages import (
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    MessageBlock,
    MessagesRequest,
    OutputConfig,
    Thinking,
)
from weft.server.apis.control import AbortRequest
from weft.server.apis.llama_cpp.bodies import ExtraFile, InfillRequest, LlamaCompletionRequest
from weft.server.apis.native import GenerateRequest, NativeSampling
from weft.server.apis.ollama.bodies import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from weft.server.apis.openai_chat import ChatRequest
from weft.server.apis.openai_completions import CompletionRequest
from weft.server.apis.openai_responses import InputItem, ResponsesRequest
from weft.server.apis.tokens import DetokenizeRequest, TokenizeRequest
from weft.server.settings import Limits
from weft.server.texts.openai_messages import ChatMessage

BODIES = (
    ChatRequest,
    ChatMessage,
    CompletionRequest,
    ResponsesRequest,
    InputItem,
    GenerateRequest,
    NativeSampling,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
    MessagesRequest,
    AnthropicMessage,
    MessageBlock,
    AnthropicTool,
    AnthropicToolChoice,
    Thinking,
    OutputConfig,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    LlamaCompletionRequest,
    InfillRequest,
    ExtraFile,
)
PAGE = (ROOT / "docs" / "api.md").read_text()
TESTS = "".join(
    path.read_text() for path in (ROOT / "tests").rglob("*http*.py") if path.name != "test_http_documents.py"
)
# Taken for the sake of clients that send them; nothing could be tested but that they are taken.
IGNORED = {"user", "metadata", "store", "service_tier"}
FIELDS = sorted({field.encode_name for body in BODIES for field in msgspec.structs.fields(body)})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_documented_and_sent_by_a_test(name):
    assert f"`{name}`" in PAGE, f"docs/api.md does not tell of {name}"
    sent = re.search(rf"""["']{name}["']|\b{name}=""", TESTS)
    assert sent or name in IGNORED, f"no test sends {name}"


def test_documented_bounds_are_those_in_force():
    limits = Limits()
    told = PAGE[PAGE.index("Bounds (") :]
    for number in (limits.prompts, limits.n, limits.sequences, limits.logprobs, limits.stops, limits.tools):
        assert str(number) in told
    for number in (limits.stop_characters, limits.biases, limits.messages, limits.regex_characters):
        assert f"{number:,}" in told

"""Bodies of llama.cpp's routes, and what they mean in terms of the other routes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.base.errors import InvalidField
from weft.server.apis.openai_completions import as_prompts
from weft.server.settings import Limits
from weft.server.texts.bodies import check_items
from weft.server.texts.grammars import Form, from_grammar, from_json, only
from weft.server.texts.prompt_builder import Prompt, PromptBuilder
from weft.server.texts.schemas import CacheFields, Penalty, SamplingFields, Seed, TokenId

# The window of llama.cpp's repetition penalty if a client sets none.
USUAL_WINDOW = 64
# Files beside the one that is filled in.
MAX_FILES = 64
MAX_FILE_NAME = 512
Bias = Annotated[float, Meta(ge=-100, le=100)] | bool


class LlamaFields(CacheFields, kw_only=True):
    """Sampling and stopping under llama.cpp's names."""

    stream: bool | None = None
    n_predict: Annotated[int, Meta(ge=-2, le=1 << 31)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 24)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: list[tuple[TokenId, Bias]] | dict[TokenId, Bias] | bool | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    n_probs: Annotated[int, Meta(ge=0)] | None = None
    return_tokens: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of the answer; negative numbers mean all that fit."""
        return None if self.n_predict is None or self.n_predict < 0 else self.n_predict

    @property
    def _biases(self) -> Iterable[tuple[int, float | bool]]:
        given = self.logit_bias
        return given.items() if isinstance(given, dict) else given if isinstance(given, list) else ()

    def common(self) -> SamplingFields:
        """Return the same parameters under the names of the other routes."""
        same = ["temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop", "ignore_eos"]
        return SamplingFields(
            **{name: getattr(self, name) for name in same},
            repetition_penalty=1.0 if self.repeat_last_n == 0 else self.repeat_penalty,
            # -1 is a random seed.
            seed=None if self.seed == -1 else self.seed,
            # `false` bans a token.
            logit_bias={token: -100.0 if bias is False else bias for token, bias in self._biases} or None,
        )

    def form(self, limits: Limits) -> Form | None:
        grammar = from_grammar("grammar", self.grammar or None, limits)
        return only([grammar, from_json("json_schema", self.json_schema or None, limits)])

    def check(self) -> None:
        if (self.repeat_penalty or 1) != 1 and self.repeat_last_n not in (None, -1, 0, USUAL_WINDOW):
            raise InvalidField("repeat_last_n", "must be -1 or 0: repeat_penalty counts all tokens or none")
        if self.logit_bias is True or any(bias is True for _, bias in self._biases):
            raise InvalidField("logit_bias", "must have pairs of a token id and a number, or of a token id and false")


# Names of the fields in other APIs.
FIELD_NAMES = {"repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}


class LlamaCompletionRequest(LlamaFields, kw_only=True):
    prompt: str | list[str | int | list[int]]


class ExtraFile(msgspec.Struct, kw_only=True):
    text: str
    filename: Annotated[str, Meta(max_length=MAX_FILE_NAME)] | None = None


class InfillRequest(LlamaFields, kw_only=True):
    """`prompt` is the beginning of what is filled in."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None


def completion_prompts(builder: PromptBuilder, body: LlamaCompletionRequest) -> list[Prompt]:
    """Check a body and take its prompts out of it; the rest still shows whether they were a list."""
    body.check()
    prompts = as_prompts(body.prompt)
    many = isinstance(body.prompt, list) and not any(isinstance(each, int) for each in body.prompt)
    body.prompt = [""] if many else ""
    return builder.encode(prompts, "prompt")


def infill_prompts(builder: PromptBuilder, body: InfillRequest) -> list[Prompt]:
    """Check a body and take its texts out of it."""
    body.check()
    check_items("input_extra", body.input_extra, MAX_FILES)
    files = [(each.filename or f"file{place}", each.text) for place, each in enumerate(body.input_extra or ())]
    found = builder.infill(body.input_prefix, body.input_suffix, files, body.prompt or "", "input_suffix")
    body.input_prefix, body.input_suffix, body.input_extra, body.prompt = "", "", None, None
    return [found]

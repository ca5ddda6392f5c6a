"""The table of body fields: what each generating route does with every field name.

A route *understands* the fields of the struct that decodes its body. `RULES` are all others that clients of other
servers send: *refused* where ignoring them would change the answer, *ignored* where it would not. The rest is unknown.
docs/api.md shows this table (`field_reference.py` writes it).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal

import msgspec

from weft.base.errors import InvalidField
from weft.base.logs import is_plain
from weft.server.texts.bodies import parsed

log = logging.getLogger("weft.server")

# Names of the body readers, and the paths that clients know. `sampling_params` is an object in bodies of /generate,
# `options` one in bodies of Ollama's routes.
PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "response": "/v1/responses",
    "message": "/v1/messages",
    "generate": "/generate",
    "sampling_params": "sampling_params",
    "ollama_chat": "/api/chat",
    "ollama_generate": "/api/generate",
    "options": "options",
    "llama_completion": "/completion",
    "infill": "/infill",
}
EVERY = tuple(PATHS)
TEXT = ("chat", "completion")
OPENAI = (*TEXT, "response")
NATIVE = ("generate", "sampling_params")
ANTHROPIC = ("message",)
OLLAMA = ("ollama_chat", "ollama_generate")
OPTIONS = ("options",)
LLAMA = ("llama_completion", "infill")

# Bounds of what a request can make the server remember and log.
MAX_NAME = 64
MAX_NAMES = 8
MAX_REMEMBERED = 256
MAX_NEUTRAL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Rule:
    """Treatment of a field that a route does not use. `neutral` are values that would change nothing."""

    name: str
    treatment: Literal["refused", "ignored"]
    about: str
    routes: tuple[str, ...]
    neutral: tuple[Any, ...] = ()


def refused(names: str, about: str, routes: tuple[str, ...] = EVERY, neutral: tuple[Any, ...] = ()) -> list[Rule]:
    return [Rule(name, "refused", about, routes, neutral) for name in names.split()]


def ignored(names: str, about: str, routes: tuple[str, ...] = EVERY) -> list[Rule]:
    return [Rule(name, "ignored", about, routes) for name in names.split()]


FORMS = (
    "response_format structured_outputs guided_json guided_regex guided_choice guided_grammar regex ebnf json_schema"
)
OTHER_MAXIMA = "n_predict num_predict max_length"
MAXIMA = "max_length max_tokens max_new_tokens max_completion_tokens max_output_tokens"
MACHINE = "num_keep num_batch num_gpu main_gpu num_thread low_vram f16_kv use_mmap use_mlock numa vocab_only"
MACHINE += " logits_all embedding_only"
NOT_HERE = "is not supported on this route; use /v1/completions or /v1/chat/completions"
NO_CODE = "no code of a request is run; use `logit_bias`, `bad_words`, `allowed_token_ids` or a grammar"
BEAMS = "beam search is not supported; use `n` for several answers"
NO_MEDIA = "only text is supported"

RULES: tuple[Rule, ...] = (
    # how tokens are chosen
    *refused("typical_p typical tfs_z tfs", "use `top_p` or `min_p`", neutral=(1,)),
    *refused("top_a epsilon_cutoff eta_cutoff", "use `top_p` or `min_p`", neutral=(0,)),
    *refused("top_n_sigma", "use `top_p` or `min_p`", neutral=(0, -1)),
    *refused("mirostat mirostat_mode dynatemp_range smoothing_factor", "use `temperature`", neutral=(0,)),
    *ignored("mirostat_tau mirostat_eta", "only change `mirostat`"),
    *ignored("dynatemp_exponent smoothing_curve", "only change `dynatemp_range` and `smoothing_factor`"),
    *refused("dry_multiplier no_repeat_ngram_size", "use `frequency_penalty` or `bad_words`", neutral=(0,)),
    *ignored("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers", "only change `dry_multiplier`"),
    *refused("xtc_probability", "use `temperature`", neutral=(0,)),
    *ignored("xtc_threshold", "only changes `xtc_probability`"),
    *refused("encoder_repetition_penalty", "use `repetition_penalty`", neutral=(1,)),
    *refused("repeat_penalty", "use `repetition_penalty`", (*OPENAI, *ANTHROPIC, *NATIVE), neutral=(1,)),
    *ignored("repeat_last_n", "only changes `repeat_penalty`", (*OPENAI, *ANTHROPIC, *NATIVE)),
    *refused("repetition_penalty", "use `repeat_penalty`", (*OPTIONS, *LLAMA), neutral=(1,)),
    *refused("penalize_newline penalize_nl", "penalties count every token", (*OPTIONS, *LLAMA), neutral=(True,)),
    *refused("guidance_scale cfg_scale", "is not supported", neutral=(1,)),
    *refused("negative_prompt", "is not supported"),
    *refused("do_sample", "use `temperature`: 0 is greedy", neutral=(True,)),
    *refused("samplers sampler_order", "the order of filters is fixed: `temperature`, `min_p`, `top_k`, `top_p`"),
    *refused("logits_processors logits_processor custom_logit_processor custom_params", NO_CODE),
    *refused("use_beam_search early_stopping", BEAMS),
    *refused("length_penalty num_beams num_beam_groups", BEAMS, neutral=(1,)),
    *refused("diversity_penalty", BEAMS, neutral=(0,)),
    *refused("best_of", "ranking answers is not supported; use `n`", ("response", *NATIVE), neutral=(1,)),
    *refused("bad_words allowed_token_ids", NOT_HERE, NATIVE),
    *refused("frequency_penalty presence_penalty", NOT_HERE, ANTHROPIC, neutral=(0,)),
    *refused("repetition_penalty", NOT_HERE, ANTHROPIC, neutral=(1,)),
    *refused("min_p", NOT_HERE, ANTHROPIC, neutral=(0,)),
    *refused("logit_bias bad_words allowed_token_ids seed", NOT_HERE, ANTHROPIC),
    # when to stop
    *refused(f"{OTHER_MAXIMA} max_new_tokens max_output_tokens", "use `max_tokens`", TEXT),
    *refused(f"{OTHER_MAXIMA} max_new_tokens max_completion_tokens max_output_tokens", "use `max_tokens`", ANTHROPIC),
    *refused(
        f"{OTHER_MAXIMA} max_new_tokens max_tokens max_completion_tokens", "use `max_output_tokens`", ("response",)
    ),
    *refused(
        f"{OTHER_MAXIMA} max_tokens max_completion_tokens max_output_tokens",
        "use `sampling_params.max_new_tokens`",
        NATIVE,
    ),
    *refused("num_ctx", "the server sets the context: `--max-length`", (*OPENAI, *ANTHROPIC, *NATIVE, *LLAMA)),
    *refused("n_ctx", "the server sets the context: `--max-length`"),
    *refused(f"{MAXIMA} n_predict", "use `options.num_predict`", (*OLLAMA, *OPTIONS)),
    *refused(f"{MAXIMA} num_predict", "use `n_predict`", LLAMA),
    *refused("n_keep n_discard", "a prompt that does not fit is refused", LLAMA, neutral=(0,)),
    *refused("t_max_predict_ms", "use `n_predict`", LLAMA, neutral=(0,)),
    *refused("n_indent", "use a grammar", LLAMA, neutral=(0,)),
    *refused("stop_regex", "use `stop`"),
    *refused("stop_sequences", "use `stop`", (*OPENAI, *NATIVE)),
    *refused("stop stop_token_ids ignore_eos min_tokens", "use `stop_sequences`", ANTHROPIC),
    *refused("min_new_tokens", "use `min_tokens`", OPENAI),
    *refused("min_tokens", "use `sampling_params.min_new_tokens`", NATIVE),
    *refused("no_stop_trim", "use `include_stop_str_in_output`", OPENAI),
    *refused("include_stop_str_in_output", "use `sampling_params.no_stop_trim`", NATIVE),
    *refused("sampling_seed", "use `seed`", OPENAI),
    *refused("seed", "use `sampling_params.sampling_seed`", NATIVE),
    *refused("sampling_params", "put its fields into the body itself", OPENAI),
    # the form of the answer
    *refused(FORMS + " grammar", "use `text.format`", ("response",)),
    *refused("grammar guided_grammar", "use `sampling_params.ebnf`", NATIVE),
    *refused("guided_json response_format structured_outputs", "use `sampling_params.json_schema`", NATIVE),
    *refused("guided_regex guided_choice", "use `sampling_params.regex`", NATIVE),
    *refused("structural_tag guided_whitespace_pattern", "use a grammar"),
    *refused("format", "use `response_format`", TEXT),
    *ignored("guided_decoding_backend", "there is one"),
    *refused("functions", "use `tools`", OPENAI),
    *refused("function_call", "use `tool_choice`", OPENAI),
    *refused("verbosity", "ask for it in a message", OPENAI, neutral=("medium",)),
    *refused("max_tool_calls", "no tool is called by the server", OPENAI),
    *refused(FORMS + " grammar output_format", "use `output_config.format`", ANTHROPIC),
    *refused("reasoning_effort", "use `output_config.effort`", ANTHROPIC),
    *refused("container mcp_servers", "nothing is run or stored by the server", ANTHROPIC),
    *refused("context_management", "remove messages yourself", ANTHROPIC, neutral=({"edits": []}, {})),
    *refused("response_format structured_outputs json_schema grammar", "use `format`", OLLAMA),
    *refused("response_format structured_outputs", "use `json_schema` or `grammar`", LLAMA),
    # the prompt
    *refused("template", "start the server with `--chat-template FILE`", OLLAMA),
    *refused("prompt suffix system raw", "use `messages`, or /api/generate", ("ollama_chat",)),
    *refused("messages tools", "use /api/chat", ("ollama_generate",)),
    *refused("context", "send the conversation to /api/chat", OLLAMA),
    *refused("truncate shift", "a conversation that does not fit is refused", OLLAMA, neutral=(False,)),
    *refused("width height steps", "only text is generated", OLLAMA),
    *refused("messages", "use /v1/chat/completions", LLAMA),
    *refused("multimodal_data lora", "only text and the model itself are supported", LLAMA),
    *refused("prompt", "use `messages`", ("chat",)),
    *refused("messages", "use /v1/chat/completions", ("completion", "generate")),
    *refused("suffix", "put it into the prompt", ("completion",)),
    *refused("echo", "the answer has only the new message", ("chat", "response")),
    *refused("echo", "put the prompt before the answer yourself", NATIVE),
    *refused("chat_template", "start the server with `--chat-template FILE`"),
    *refused("documents", "put them into a message"),
    *refused("options", "put its fields into the body itself", OPENAI),
    *refused("system", "use a message with the role `system`", TEXT),
    *refused("enable_thinking thinking", "use `chat_template_kwargs`, such as `enable_thinking`", OPENAI),
    *refused("reasoning", "use `reasoning_effort` or `chat_template_kwargs`", ("chat",)),
    *refused("think", "use `chat_template_kwargs`, such as `enable_thinking`", OPENAI),
    *refused("thinking_token_budget", "use `chat_template_kwargs`, if the template has a budget"),
    *refused(
        "add_special_tokens", "send token ids for another start of the prompt", ("completion", "generate"), (True,)
    ),
    *refused("add_special_tokens", "the chat template writes special tokens", ("chat", "response"), (False,)),
    *refused("truncation_side", "the end of the prompt is kept", neutral=("left",)),
    *refused("prompt_embeds input_embeds", "send text or token ids"),
    *refused("lora_path lora_request lora_id", "adapters are not supported"),
    *refused("modalities", NO_MEDIA, neutral=(["text"],)),
    *refused("audio image_data audio_data video_data", NO_MEDIA),
    *ignored("mm_processor_kwargs", "only text is supported"),
    *refused("web_search_options", "nothing is fetched", OPENAI),
    *refused("session_params", "sessions are not kept; send the whole prompt"),
    *refused("conversation prompt messages", "send `input`, or `previous_response_id`", ("response",)),
    *refused("background", "nothing runs in the background; wait for the response or stream it", ("response",)),
    *refused("truncate_prompt_tokens continue_final_message add_generation_prompt", NOT_HERE, ("response", "generate")),
    *refused("reasoning_effort", "use `reasoning.effort`", ("response",)),
    *refused("chat_template_kwargs reasoning_effort", "use /v1/chat/completions", ("completion", *NATIVE)),
    *refused("chat_template_kwargs", "use `thinking`", ANTHROPIC),
    # what the response reports
    *refused("n", "use /v1/chat/completions for several answers", ("response",), neutral=(1,)),
    *refused("n", NOT_HERE, ANTHROPIC, neutral=(1,)),
    *refused("logprobs top_logprobs prompt_logprobs", NOT_HERE, ANTHROPIC),
    *refused("logprobs", "use `include` and `top_logprobs`", ("response",)),
    *refused("logprobs top_logprobs", "use `return_logprob` and `top_logprobs_num`", NATIVE),
    *refused("top_logprobs", "use `logprobs`", ("completion",)),
    *refused("prompt_logprobs", "use `return_logprob` and `logprob_start_len` of /generate", ("response", *NATIVE)),
    *refused("return_logprob top_logprobs_num logprob_start_len", "use `logprobs` and `prompt_logprobs`", OPENAI),
    *refused("token_ids_logprob return_hidden_states return_routed_experts return_entropy", "is not supported"),
    *refused("return_tokens_as_token_ids return_token_ids", "use /v1/completions", ("response", *NATIVE)),
    *refused("return_tokens_as_token_ids", "use `return_token_ids`", TEXT),
    *refused("include_reasoning", "reasoning is an item of its own", ("response",), neutral=(True,)),
    *refused("separate_reasoning", "start the server with `--reasoning-parser none`", neutral=(True,)),
    *refused("stream_reasoning", "reasoning is streamed as it grows", neutral=(True,)),
    *refused("detokenize spaces_between_special_tokens", "answers are texts, with these spaces", neutral=(True,)),
    *refused("kv_transfer_params vllm_xargs", "is not supported"),
    *refused("n", "use /v1/chat/completions for several answers", (*OLLAMA, *LLAMA), neutral=(1,)),
    *refused("logprobs", "use `n_probs`", LLAMA),
    *refused("post_sampling_probs timings_per_token return_progress", "is not supported", LLAMA),
    *refused("min_keep", "is not supported", LLAMA, neutral=(0,)),
    # about the request, not the answer
    *ignored(MACHINE, "the server decides", OPTIONS),
    *ignored("model", "it only says which of several models answers", LLAMA),
    *ignored("response_fields", "every field is sent", LLAMA),
    *ignored("user store", "nothing is stored", (*TEXT, *NATIVE)),
    *ignored("metadata", "nothing is stored", (*TEXT, *ANTHROPIC, *NATIVE)),
    *ignored("safety_identifier service_tier custom_labels log_metrics no_logs", "keys identify clients"),
    *ignored("prompt_cache_key prompt_cache_retention cache_prompt", "every prompt is cached"),
    *ignored("prediction", "it only speeds up /v1/chat/completions", ("completion", "response", *ANTHROPIC, *NATIVE)),
    *ignored("draft", "it changes only the speed, of OpenAI's routes", (*ANTHROPIC, *NATIVE)),
    *ignored("request_id rid", "send the header `x-request-id`", OPENAI),
    *ignored("request_id conversation_id", "use `rid`", NATIVE),
    *ignored("keep_alive", "only Ollama's routes have it", (*OPENAI, *ANTHROPIC, *NATIVE, *LLAMA)),
    *ignored("id_slot slot_id data_parallel_rank", "every request has what it needs"),
    *ignored("bootstrap_host bootstrap_port bootstrap_room", "there is one engine"),
    *ignored("model", "it only says which of several models answers", NATIVE),
    *ignored("stream_options", "the last event has the usage", ("response", *NATIVE)),
    *ignored("stream_interval", "every token is sent at once"),
)


@cache
def understood(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


@cache
def rules_of(route: str) -> Mapping[str, Rule]:
    """Return a route's rules by field. One without rules of its own has those of all routes."""
    return {rule.name: rule for rule in RULES if route in rule.routes or (route not in PATHS and rule.routes == EVERY)}


_object = msgspec.json.Decoder(dict[str, msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def check_fields(
    data: bytes, route: str, kind: type[msgspec.Struct], parts: Mapping[str, type[msgspec.Struct]], strict: bool
) -> list[str]:
    """Refuse fields by the table; return the first unknown ones, which `strict` refuses too.

    `data` is a body that was decoded to `kind`. `parts` are the objects in it whose fields are in the table. Values are
    not looked into, except short ones of refused fields.
    """
    given = parsed(_object, data)
    unknown = _check(given, route, kind, parts, strict, "")
    for name, part in parts.items():
        raw = bytes(given.get(name, b"null")).strip()
        if raw != b"null":
            for each in parsed(_objects, raw) if raw.startswith(b"[") else [parsed(_object, raw)]:
                unknown += _check(each, name, part, {}, strict, f"{name}.")
    return unknown[:MAX_NAMES]


def _check(
    given: Mapping[str, msgspec.Raw],
    route: str,
    kind: type[msgspec.Struct],
    parts: Mapping[str, type[msgspec.Struct]],
    strict: bool,
    where: str,
) -> list[str]:
    known, rules = understood(kind), rules_of(route)
    unknown: list[str] = []
    for name, raw in given.items():
        if name in known:
            continue
        rule = rules.get(name)
        home = next((part for part, fields in parts.items() if name in understood(fields)), None)
        if home is not None and not _is_neutral(raw, ()):
            raise InvalidField(where + name, f"is not supported here; put it into {home}")
        if rule is not None and rule.treatment == "refused" and not _is_neutral(raw, rule.neutral):
            raise InvalidField(where + name, complaint(rule))
        if rule is None and home is None:
            if strict:
                raise InvalidField(where + shown(name), f"is not a field of this route{hint(name, kind)}")
            if len(unknown) < MAX_NAMES:
                unknown.append(where + name[: MAX_NAME + 1])
    return unknown


def complaint(rule: Rule) -> str:
    about = rule.about.replace("`", "")
    return about if about.startswith("is ") else f"is not supported; {about}"


def _is_neutral(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    """Return whether a value would change nothing: null, one of `neutral`, or nothing at all. Long ones would."""
    text = bytes(raw)
    if len(text) > MAX_NEUTRAL_BYTES:
        return False
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    if neutral:
        return value is None or value in neutral
    return value is None or value is False or value in ("", [], {})


def shown(name: str) -> str:
    """Return a name from a client as a short printable text.

    >>> shown("tempratur"), shown("a\\nb"), shown("a key=b"), len(shown("x" * 1000))
    ('tempratur', "'a\\\\nb'", "'a key=b'", 67)
    """
    short = name if len(name) <= MAX_NAME else name[:MAX_NAME] + "..."
    return short if is_plain(short) else ascii(short)


def hint(name: str, kind: type[msgspec.Struct]) -> str:
    near = get_close_matches(name[:MAX_NAME], understood(kind), n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


class UnknownFields:
    """Logs each unknown field once, and remembers a bounded number of names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(
        self, names: list[str], route: str, kind: type[msgspec.Struct], parts: Mapping[str, type[msgspec.Struct]]
    ) -> None:
        for name in names:
            if name in self._seen or len(self._seen) > MAX_REMEMBERED:
                continue
            self._seen.add(name)
            if len(self._seen) > MAX_REMEMBERED:
                log.warning("%d unknown fields were logged; further ones are ignored silently", MAX_REMEMBERED)
                return
            part = next((part for part in parts if name.startswith(f"{part}.")), "")
            meant = hint(name.removeprefix(f"{part}."), parts.get(part, kind))
            where = PATHS.get(route, route)
            log.warning("%s: ignoring the unknown field %s%s (--strict-fields refuses it)", where, shown(name), meant)

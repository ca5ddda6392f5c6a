"""Options of `weft bench`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weft.base.errors import InvalidOption
from weft.base.options import option
from weft.cli.options import argument

KINDS = ("random", "generated-shared-prefix", "multi-turn", "long-document", "trace")
FORMS = ("auto", "tokens", "text", "chat")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to send, to which server, and at what rate."""

    url: str = argument(
        "URL of any OpenAI-compatible server; unix:PATH for a Unix socket; default: http://127.0.0.1:8000",
        default="http://127.0.0.1:8000",
    )
    api_key: str | None = option(None, "API key of the server; better: WEFT_API_KEY")
    model: str | None = option(None, "the server's name of the model; default: the first one that it lists")
    workload: str = option("random", "kind of traffic to send", KINDS)
    form: str = option("auto", "prompts as token ids, text or messages; auto: chat for multi-turn, else tokens", FORMS)
    prompts: int = option(100, "number of requests or conversations; for a trace, the maximum")
    input_length: int = option(256, "tokens of a prompt, question or turn")
    output_length: int = option(64, "tokens of an answer")
    spread: float = option(0.0, "vary lengths up and down by this share, 0 to 1")
    groups: int = option(8, "number of different prefixes or documents")
    prefix_length: int = option(1024, "tokens shared by the prompts of a group")
    document_length: int = option(8192, "tokens of a document")
    turns: int = option(4, "questions in a conversation")
    trace: str | None = option(None, "trace file in Mooncake's format")
    trace_speed: float = option(1.0, "speed-up factor of the trace's arrivals")
    trace_scale: float = option(1.0, "factor applied to all lengths of the trace")
    vocabulary: int = option(256, "draw token ids below this number")
    request_rate: float = option(0.0, "requests per second (Poisson arrivals); 0: all at once, or the trace's arrivals")
    concurrency: int = option(0, "maximum concurrent requests; 0: unlimited")
    ignore_eos: bool = option(True, "request answers of full length, if the server supports it")
    temperature: float = option(0.0, "0 is greedy, higher is more varied")
    warmup: int = option(1, "requests sent before measuring; they share no prefix with the others")
    timeout_seconds: float = option(3600.0, "seconds after which a request counts as failed")
    seed: int = option(0, "seed of prompts and arrivals")
    json: str | None = option(None, "also write all results to this file")
    progress: bool = option(True, "show a progress bar on a terminal")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if choices and value not in choices:
                raise InvalidOption(each.name, f"must be one of {', '.join(choices)}, got {value!r}")
        for name in ("prompts", "input_length", "output_length", "groups", "prefix_length", "document_length", "turns"):
            self._at_least(name, 1)
        for name in ("request_rate", "concurrency", "warmup", "temperature"):
            self._at_least(name, 0)
        self._at_least("vocabulary", 2)
        for name in ("trace_speed", "trace_scale", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise InvalidOption(name, f"must be positive, got {getattr(self, name)}")
        if not 0 <= self.spread <= 1:
            raise InvalidOption("spread", f"must be from 0 to 1, got {self.spread}")
        if self.workload == "multi-turn" and self.form == "tokens":
            raise InvalidOption(
                "form", "must be chat or text for multi-turn: token ids cannot carry the server's answers"
            )
        if (self.workload == "trace") != (self.trace is not None):
            raise InvalidOption("trace", "and --workload trace must be given together")

    def _at_least(self, name: str, low: int) -> None:
        if not getattr(self, name) >= low:
            raise InvalidOption(name, f"must be at least {low}, got {getattr(self, name)}")

    @property
    def shape(self) -> str:
        """The resolved form of the prompts."""
        if self.form != "auto":
            return self.form
        return "chat" if self.workload == "multi-turn" else "tokens"

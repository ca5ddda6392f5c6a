"""The options of `weft bench`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weft.base.errors import OptionError
from weft.base.options import option

KINDS = ("random", "generated-shared-prefix", "multi-turn", "long-document", "trace")
FORMS = ("auto", "tokens", "text", "chat")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to send, to whom and how fast."""

    url: str = option("http://127.0.0.1:8000", "the server, any that speaks OpenAI's API; unix:PATH for a Unix socket")
    api_key: str | None = option(None, "key of the server; also from WEFT_API_KEY")
    model: str | None = option(None, "name of the model there; without, the first that the server lists")
    workload: str = option("random", "what is sent", KINDS)
    form: str = option("auto", "prompts as token ids, text or messages; auto: chat for multi-turn, else tokens", FORMS)
    prompts: int = option(100, "how many requests, or conversations; of a trace, at most so many")
    input_length: int = option(256, "tokens of a prompt, of a question or of a turn")
    output_length: int = option(64, "tokens of an answer")
    spread: float = option(0.0, "lengths vary by this share up and down, 0 to 1")
    groups: int = option(8, "how many different prefixes or documents")
    prefix_length: int = option(1024, "tokens that the prompts of a group share")
    document_length: int = option(8192, "tokens of a document")
    turns: int = option(4, "questions in a conversation")
    trace: str | None = option(None, "a trace file in Mooncake's format")
    trace_speed: float = option(1.0, "play the trace's arrivals so many times faster")
    trace_scale: float = option(1.0, "multiply all lengths of the trace by this")
    vocabulary: int = option(256, "token ids are drawn below this")
    request_rate: float = option(0.0, "arrivals a second, at random (Poisson); 0: all at once, or as the trace says")
    concurrency: int = option(0, "requests under way at most; 0: no bound")
    ignore_eos: bool = option(True, "ask for answers of full length, where the server can")
    temperature: float = option(0.0, "0 takes the likeliest token; higher is more varied")
    warmup: int = option(1, "requests before the clock starts, that share nothing with the others")
    timeout_seconds: float = option(3600.0, "give a request up after this time")
    seed: int = option(0, "seed of prompts and arrivals")
    json: str | None = option(None, "also write everything measured to this file")
    progress: bool = option(True, "show a progress bar on a terminal")

    def __post_init__(self) -> None:
        for each in fields(self):
            value, choices = getattr(self, each.name), each.metadata["choices"]
            if choices and value not in choices:
                raise OptionError(f"{each.name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("prompts", "input_length", "output_length", "groups", "prefix_length", "document_length", "turns"):
            self._at_least(name, 1)
        for name in ("request_rate", "concurrency", "warmup", "temperature"):
            self._at_least(name, 0)
        self._at_least("vocabulary", 2)
        for name in ("trace_speed", "trace_scale", "timeout_seconds"):
            if not getattr(self, name) > 0:
                raise OptionError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 <= self.spread <= 1:
            raise OptionError(f"spread must be from 0 to 1, got {self.spread}")
        if self.workload == "multi-turn" and self.form == "tokens":
            raise OptionError("form tokens cannot carry the answers of multi-turn; choose chat or text")
        if (self.workload == "trace") != (self.trace is not None):
            raise OptionError("trace needs --workload trace, and that workload a trace file")

    def _at_least(self, name: str, low: int) -> None:
        if not getattr(self, name) >= low:
            raise OptionError(f"{name} must be at least {low}, got {getattr(self, name)}")

    @property
    def shape(self) -> str:
        """The form of the prompts, decided."""
        if self.form != "auto":
            return self.form
        return "chat" if self.workload == "multi-turn" else "tokens"

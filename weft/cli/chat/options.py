"""Options of `weft chat`."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.options import Options, option
from weft.cli.options import argument


@dataclass(frozen=True, kw_only=True)
class ChatOptions(Options):
    """Options of `weft chat`: its own, then the engine's."""

    model: str | None = argument("model folder or hub id, or the model's name at --url; default: weft-small")
    url: str | None = option(
        None, "chat with this OpenAI-compatible server, such as http://127.0.0.1:8000 or unix:/run/weft.sock"
    )
    api_key: str | None = option(None, "API key of that server; better: WEFT_API_KEY")
    system: str | None = option(None, "system message to start the conversation with")
    max_tokens: int = option(512, "maximum tokens of an answer")
    temperature: float | None = option(
        None, "0 is greedy, higher is more varied; default: the model's generation_config.json"
    )
    stats: bool = option(True, "print tokens per second and the cached share of the prompt after every answer")
    # Off by default, because questions may be private.
    history: str | None = option(None, "keep the history of questions in this file; default: until the program ends")

"""What a server knows of its models beside their engines: names, aliases, and what lists show of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.base.errors import InvalidField, RequestError
from weft.server.apis import control, lm_studio
from weft.server.apis.ollama import models as ollama
from weft.server.front import Front
from weft.server.http.receiving import Receiving
from weft.server.metrics.registry import Metrics
from weft.server.settings import ServerSettings
from weft.server.stored.answers import StoredAnswers
from weft.server.texts.prompt_builder import LATEST

Object = dict[str, Any]
# Names that an error lists.
SHOWN_NAMES = 10


@dataclass(slots=True)
class ListedModel:
    """A model in the lists. `metrics` last through its loads; `cards` are those of the last one."""

    name: str
    weights_bytes: int
    aliases: tuple[str, ...]
    metrics: Metrics = field(default_factory=Metrics)
    cards: dict[str, Object] = field(default_factory=dict)

    def loaded(self, front: Front) -> None:
        """Remember what lists show of the model, for when it is not loaded."""
        self.cards = {
            "openai": control.model_card(front),
            "ollama": ollama.card(front),
            "lm_studio": lm_studio.card(front),
            "running": {"context_length": front.room},
        }


class Catalogue:
    """All models in the order of the command line; the first one answers requests that name none.

    It stands in for a front where a route needs no model.
    """

    def __init__(
        self, weights_bytes: Mapping[str, int], settings: ServerSettings, stored: StoredAnswers | None = None
    ) -> None:
        self.settings = settings
        self.stored = stored
        self.receiving = Receiving(settings.limits)
        self.limits = settings.limits
        self.model_name = "weft"
        self._names: dict[str, str] = {name: name for name in weights_bytes} | dict(settings.aliases)
        self.entries = {
            name: ListedModel(name, size, aliases_of(settings, name)) for name, size in weights_bytes.items()
        }

    @property
    def default(self) -> str:
        return next(iter(self.entries))

    def named(self, asked: str | None) -> str:
        """Return the model that a request names; Ollama's clients may add a tag."""
        if asked is None:
            return self.default
        found = self._names.get(asked) or self._names.get(asked.removesuffix(LATEST))
        if found is None:
            names = [*self.entries][:SHOWN_NAMES]
            more = f" and {len(self.entries) - SHOWN_NAMES} more" if len(self.entries) > SHOWN_NAMES else ""
            shown = ", ".join(map(repr, names)) + more
            raise InvalidField("model", f"{asked!r:.80} does not exist; this server has {shown}", 404, NOT_FOUND)
        return found

    def settings_of(self, name: str) -> Mapping[str, Any]:
        """Return what a model's own settings replace in those of the server."""
        return {"model_name": name, "aliases": tuple((alias, name) for alias in self.entries[name].aliases)}


NOT_FOUND = "model_not_found"


def aliases_of(settings: ServerSettings, name: str) -> tuple[str, ...]:
    return tuple(alias for alias, model in settings.aliases if model == name)


def not_loaded(name: str) -> RequestError:
    return RequestError(f"model {name!r} is not loaded; a request to generate loads it", 409, code="model_not_loaded")

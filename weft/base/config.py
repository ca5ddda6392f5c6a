"""The resolved engine settings: no "auto", and no `None` that means "choose for me"."""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import InvalidOption

DRAFTS = ("off", "suffix", "mtp", "model")
# Drafts that one row may verify in a step: every tail has room for them.
MOST_DRAFTS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Resolved settings of one engine.

    `depth` is how many steps may be in flight while the next one is planned: 0 or 1. `order` is "fcfs" (first come,
    first served) or "prefix" (longest reusable prefix first, with aging). `eviction` is "value", "lru" or "flops".
    `capture_every` is the distance between snapshots in tokens; 0 derives it from the size of a state. `exact`: every
    token is computed in its canonical form (docs/exact.md); `form` is what its bits depend on, such as the device.
    `revisions` are the numbers of what the model's family and the kernel packages compute: engines with others exchange
    no states.
    `paranoid` audits every step, checks every plan, and fills freed memory with NaN. `host_bytes` is the size of the
    host memory that keeps what the device evicts, `disk_bytes` that of a file which does; 0 is none. `remote`: a store
    that engines share is below them. `draft` is "off",
    "suffix", "mtp" or "model", and `draft_tokens` the most drafts that one row verifies in a step. `draft_bytes` is the
    memory of a draft model or an MTP head, besides `memory_bytes`. Prompt chunks beside decodes are sized so that a
    step takes up to `max_step_ms`, or `max_step_decodes` times as long as its decodes alone if that is more; both 0: no
    bound. `arrivals_bytes` is the host memory for prefixes that prefill engines send, `departures_bytes` that for
    prefixes which this engine sends. `retain_share` is the part of memory that the prefixes retained for one tenant may
    take.
    """

    memory_bytes: int
    max_sequences: int = 64
    max_tokens_per_step: int = 2048
    max_length: int = 4096
    depth: int = 0
    cache: bool = True
    order: str = "fcfs"
    eviction: str = "value"
    capture_every: int = 0
    exact: bool = False
    form: str = ""
    revisions: str = ""
    paranoid: bool = False
    seed: int = 0
    host_bytes: int = 0
    draft: str = "off"
    draft_tokens: int = 0
    draft_bytes: int = 0
    disk_bytes: int = 0
    max_step_ms: float = 0.0
    max_step_decodes: float = 0.0
    remote: bool = False
    arrivals_bytes: int = 0
    departures_bytes: int = 0
    retain_share: float = 0.25

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "max_sequences", "max_tokens_per_step", "max_length"):
            if getattr(self, name) < 1:
                raise InvalidOption(name, f"must be at least 1, got {getattr(self, name)}")
        choices = {"depth": (0, 1), "order": ("fcfs", "prefix"), "eviction": ("value", "lru", "flops"), "draft": DRAFTS}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                known = ", ".join(map(str, allowed))
                raise InvalidOption(name, f"must be one of {known}, got {getattr(self, name)!r}")
        if self.max_tokens_per_step < self.max_sequences:
            raise InvalidOption(
                "max_tokens_per_step",
                f"({self.max_tokens_per_step}) must be at least max_sequences "
                f"({self.max_sequences}), so that every running sequence can decode in a step",
            )
        sizes = ("host_bytes", "disk_bytes", "draft_bytes", "arrivals_bytes", "departures_bytes")
        for name in ("capture_every", *sizes, "max_step_ms", "max_step_decodes"):
            if getattr(self, name) < 0:
                raise InvalidOption(name, f"must not be negative, got {getattr(self, name)}")
        if not 0 <= self.retain_share <= 1:
            raise InvalidOption("retain_share", f"must be from 0 to 1, got {self.retain_share}")
        if not 0 <= self.draft_tokens <= MOST_DRAFTS:
            raise InvalidOption("draft_tokens", f"must be from 0 to {MOST_DRAFTS}, got {self.draft_tokens}")

"""Drafters that are loaded beside a model: a smaller model, or the MTP head of its own checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft import builtin
from weft.base.config import EngineConfig
from weft.base.errors import ModelError
from weft.base.options import Options, draft_of
from weft.device.devices import free_bytes
from weft.drafting.state_lines import StateLines, line_count
from weft.kernels.choosing import Chosen, choose
from weft.memory.spec import MemorySpec
from weft.models.config import checkpoint_config
from weft.models.dtypes import choose_dtype
from weft.models.finding import find_checkpoint
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.models.weights import load_head, load_model
from weft.runner.hidden_states import HiddenStates
from weft.runner.passes import HeadPass, ModelPass
from weft.runner.runner import Runner, model_dtype
from weft.start.assembling import assemble_runner, threads_on
from weft.start.rank_loading import quantising_of
from weft.text.tokenizer import Tokenizer, load_tokenizer, text_place

# Steps whose hidden states may wait for an MTP head.
HIDDEN_STEPS = 2


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, or the MTP head of the model itself."""

    model: CausalModel
    spec: MemorySpec
    chosen: Chosen

    def hidden_states(self, config: EngineConfig, device: str) -> HiddenStates | None:
        """Return memory for the hidden states that a head reads; None for a model of its own."""
        if not isinstance(self.model, MtpHead):
            return None
        lines = StateLines(config.max_sequences, HIDDEN_STEPS * config.max_tokens_per_step)
        return HiddenStates(lines, self.model.width, model_dtype(self.model), device)

    def runner(
        self, config: EngineConfig, device: str, hidden: HiddenStates | None, threads: int, progress: bool
    ) -> Runner:
        """Return the device of a draft model, or of a head that reads hidden states."""
        computes = ModelPass(is_drafter=True) if hidden is None else HeadPass(hidden)
        parts = (self.model, self.spec, config, self.chosen, device, computes)
        return assemble_runner(*parts, threads_on(device, threads), progress)


def load_drafter(
    options: Options,
    tokenizer: Tokenizer | None,
    target: CausalModel,
    chosen: Chosen,
    device: str,
    progress: bool,
) -> CausalModel | None:
    """Return the model that decodes the drafts of an engine with these options, if one does."""
    if draft_of(options) == "model":
        draft = load_draft(options, tokenizer, target, device, progress)
        draft.keep(options.kv_dtype, options.state_dtype)
        return draft
    if draft_of(options) != "mtp":
        return None
    place = builtin.place_of(options.model)
    parts = (options.weights, options.seed, chosen.operations, device, quantising_of(options))
    head = load_head(place, target, model_dtype(target), *parts)
    head.limit = options.draft_vocabulary
    head.keep(options.kv_dtype, options.state_dtype)
    return head


def load_draft(
    options: Options, tokenizer: Tokenizer | None, target: CausalModel, device: str, progress: bool
) -> CausalModel:
    """Load a draft model, if it reads the same token ids as the target."""
    name = options.draft
    folder = find_checkpoint(builtin.place_of(name), options.weights != "dummy")
    refuse_block_drafter(name, checkpoint_config(folder))
    own = load_tokenizer(text_place(folder))
    if (own and own.digest) != (tokenizer and tokenizer.digest):
        raise ModelError(f"draft: {name} must have the tokenizer of the model, and its vocabulary differs")
    dtype = choose_dtype(options.dtype, folder)
    weights = (options.weights, options.seed, free_bytes())
    model, _ = load_model(folder, dtype, device, progress, *weights, activations=options.activations)
    if tokenizer is None and model.vocab_size != target.vocab_size:
        raise ModelError(
            f"draft: {name} must have the vocabulary of the model, but has {model.vocab_size} tokens instead of "
            f"{target.vocab_size}"
        )
    return model


def loaded_draft(model: CausalModel, target: Chosen, device: str, room: int) -> LoadedDraft:
    """Return a drafter with its operations, which on a GPU are those of the target."""
    same = device != "cpu" or isinstance(model, MtpHead)
    chosen = target if same else choose(device, model_dtype(model), model.memories)
    return LoadedDraft(model, MemorySpec(model.memories(chosen.operations), draft_room=room), chosen)


def refuse_block_drafter(name: str, config: Mapping[str, Any]) -> None:
    """Raise if a checkpoint is a drafter that reads the target's hidden states, and no model of its own."""
    architectures = str(config.get("architectures", "")).lower()
    for kind in ("DFlash", "DSpark"):
        if f"{kind.lower()}_config" in config or kind.lower() in architectures:
            raise ModelError(
                f"draft: {name} is a {kind} drafter, which is not supported; pass a model with the same tokenizer, or "
                "--draft suffix"
            )


def kept_bytes(drafter: CausalModel, tokens: int, rows: int) -> int:
    """Return the bytes of the hidden states that are kept for a drafter."""
    if not isinstance(drafter, MtpHead):
        return 0
    return line_count(rows, HIDDEN_STEPS * tokens) * drafter.width * model_dtype(drafter).itemsize

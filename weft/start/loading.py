"""From options to running objects: the model, its tokenizer and chat template, the engine's configuration."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft import __version__, builtin
from weft.base.config import EngineConfig
from weft.base.cores import available_cores
from weft.base.errors import ModelError, OptionError
from weft.base.options import Options, SizingFacts, count, draft_tokens, features, has_room, resolve, saves_prompts
from weft.base.refused import refuse
from weft.base.sampling import SamplingParams
from weft.base.vectors import VectorFacts
from weft.device.devices import choose_device, device_name, free_bytes, read_rate
from weft.drafting.head import DraftHead
from weft.drafting.model import DraftModel
from weft.kernels.choosing import Chosen, begin_compiling, choose, why_not_exact
from weft.kernels.interface import Operations
from weft.memory.capacity import draft_share, least_bytes, longest_alone
from weft.memory.identity import Identity
from weft.memory.ledger import Ledger
from weft.memory.saved.file import SavedModel
from weft.memory.spec import MemorySpec
from weft.models.config import Config, checkpoint_config, text_part
from weft.models.dtypes import choose_dtype
from weft.models.finding import find_checkpoint
from weft.models.identity import identity_of, revisions_of
from weft.models.layers.moe import ExpertLayer
from weft.models.model import CausalModel
from weft.models.mtp import MtpHead
from weft.models.notices import check_length, report_choices, report_parts
from weft.models.pooling import vector_facts
from weft.models.weights import build, has_head, is_quantised, load_model
from weft.runner.cuda.compiling import compile_once
from weft.runner.cuda.gpu_memory import GpuMemory, measure_memory, measure_work
from weft.runner.cuda.recorded import warm_mixers
from weft.runner.passes import KeepingPass, ModelPass
from weft.runner.ranks.leading import LeadingRunner
from weft.runner.ranks.part import LoadedPart
from weft.runner.ranks.processes import RankProcesses
from weft.runner.runner import Runner
from weft.start.assembling import assemble_runner, threads_on
from weft.start.drafters import LoadedDraft, kept_bytes, load_drafter, loaded_draft
from weft.start.exact_costs import decide, family_of
from weft.start.rank_loading import quantising_of, shard_of, spare_bytes, use_share_of
from weft.text.grammar import Grammars
from weft.text.suggestions import suggested_params
from weft.text.template import ChatTemplate, load_template
from weft.text.tokenizer import Tokenizer, end_tokens, find_text_files, load_tokenizer, text_place

log = logging.getLogger("weft")

# What `--draft auto` tries if there is no memory for what it means.
GIVING_WAY = {"mtp": ("mtp", "suffix", "off"), "suffix": ("suffix", "off"), "off": ("off",)}


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything that a serving process holds of a model."""

    model: CausalModel
    spec: MemorySpec
    config: EngineConfig
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    end_tokens: frozenset[int]
    suggested: SamplingParams  # sampling defaults of the model, for requests that set none
    device: str
    chosen: Chosen  # packages that compute its operations
    vectors: VectorFacts  # what embeddings and classes it has
    draft: LoadedDraft | None = None
    disk: Path | None = None  # file of the disk tier
    remote: str | None = None  # address of a remote store
    identity: Identity | None = None  # of the model, for both and for transfers
    others: RankProcesses | None = None  # the other ranks of a model that is cut over several
    reasons: Mapping[str, str] = field(default_factory=dict)  # of each "auto": what it means here, and why
    saves_prompts: bool = False  # prompts go to files, or come from them

    @property
    def saves(self) -> SavedModel | None:
        """What prompts in files are of, if there are any."""
        return SavedModel(self.identity, self.model.vocab_size) if self.saves_prompts and self.identity else None

    @property
    def dtype(self) -> str:
        """The name of the activations' data type."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def placement(self) -> str:
        """The weights' data type and the device, for people to read."""
        return f"{self.dtype} on {device_name(self.device)}"

    def described_device(self, threads: int = 0) -> str:
        """Return the device and the kind of its kernels, for people to read."""
        name = device_name(self.device)
        if self.device == "cpu":
            used = threads or available_cores()
            name = f"cpu, {used} thread{'s' * (used > 1)}"
        return f"{name}, {self.chosen.kernels()}"

    @property
    def measure_rate(self) -> Callable[[], float]:
        """A function that measures how many bytes of its memory the device reads in a second."""
        return partial(read_rate, self.device)

    def runner(self, threads: int = 0, progress: bool = False) -> Runner | LeadingRunner:
        """Return the device that executes the engine's plans. `threads` are a CPU's; 0: all available."""
        free = free_bytes(self.device)
        try:
            if self.others is not None:
                return self._leading_runner(self.others, threads)
            # The model's hidden states are kept if it has a head that reads them.
            states = None if self.draft is None else self.draft.hidden_states(self.config, self.device)
            computes = ModelPass() if states is None else KeepingPass(states)
            parts = (self.model, self.spec, self.config, self.chosen, self.device, computes)
            runner = assemble_runner(*parts, threads_on(self.device, threads), progress)
            runner.tiers.add(self.config, self.disk, self.identity, self.remote)
            return runner
        except (MemoryError, torch.OutOfMemoryError) as error:
            asked, free_gib = (f"{n / 2**30:.1f} GiB" for n in (self.config.memory_bytes, free))
            raise OptionError(
                f"cannot allocate memory of {asked}: {free_gib} are free; pass a smaller --memory"
            ) from error

    def _leading_runner(self, others: RankProcesses, threads: int) -> LeadingRunner:
        try:
            others.join(self.config, self.spec.draft_room, threads)
            part = LoadedPart(
                self.model, self.chosen.operations, self.device, 0, others.ranks, self.identity, self.disk
            )
            runner = part.runner(others.meeting, self.config, self.spec.draft_room, threads)
            others.begin()
            return LeadingRunner(runner, others)
        except BaseException:
            others.close()
            raise

    def draft_model(
        self, runner: Runner | LeadingRunner, threads: int = 0, progress: bool = False
    ) -> DraftModel | None:
        """Return the draft model or MTP head with its own memory, if there is one. `runner` executes the target."""
        if self.draft is None:
            return None
        assert isinstance(runner, Runner), "a model that is cut over ranks has no draft model"
        config, spec, model = self.config, self.draft.spec, self.draft.model
        size, seats, step = config.draft_bytes, config.max_sequences, config.max_tokens_per_step
        ledger = Ledger(
            spec,
            size,
            seats,
            config.max_length,
            cache=config.cache,
            eviction=config.eviction,
            remember_freed=config.paranoid,
        )
        vocab_size = min(model.vocab_size, self.model.vocab_size)
        hidden = runner.placed.computes.states
        executor = self.draft.runner(config, self.device, hidden, threads, progress)
        if hidden is None:
            return DraftModel(ledger, executor, vocab_size, step, config.paranoid)
        assert isinstance(model, MtpHead)
        parts = (hidden.rows, ledger, executor, vocab_size, step, config.paranoid)
        return DraftHead(*parts, frequent_tokens=model.frequent)

    def grammars(self, warm: bool = True) -> Grammars | None:
        """Return the engine's support for structured outputs. `warm`: be ready before the first request."""
        if self.tokenizer is None:
            return None
        grammars = Grammars(self.tokenizer, self.model.vocab_size)
        if warm:
            # A large vocabulary takes a second, which no running request should have to wait.
            threading.Thread(target=grammars.warm, name="weft-grammars", daemon=True).start()
        return grammars


def load(
    options: Options, progress: bool = True, disaggregated: bool = False, others: RankProcesses | None = None
) -> Loaded:
    """Load a model, or the first rank's part of it while other processes load theirs.

    `disaggregated`: prefixes come from or go to other engines, so its identity is computed even without a file.
    `others` are the processes of the other ranks, if they have been started already.
    """
    if options.tensor_parallel == 1:
        return load_model_of(options, progress, None, disaggregated)
    try:
        # Shapes that cannot be cut are refused from the configuration alone, before any rank loads.
        check_shapes(options)
        others = others or RankProcesses(options.tensor_parallel)
        others.load(options, identify=disaggregated)
        return load_model_of(options, progress, others, disaggregated)
    except BaseException:
        if others is not None:
            others.close()
        raise


def check_shapes(options: Options) -> None:
    """Raise if the model cannot be cut over this many ranks."""
    folder = find_checkpoint(builtin.place_of(options.model), options.weights != "dummy")
    config = text_part(checkpoint_config(folder))
    model = build(config, torch.float32, "meta", shard=shard_of(options, 0))
    if options.expert_parallel and not any(isinstance(module, ExpertLayer) for module in model.modules()):
        raise OptionError("expert_parallel needs a mixture of experts, and this model has none; leave it out")
    refuse(features(options, choose_device(options.device)))


def load_model_of(
    options: Options, progress: bool, others: RankProcesses | None, disaggregated: bool = False
) -> Loaded:
    folder = find_checkpoint(builtin.place_of(options.model), options.weights != "dummy")
    report_parts(checkpoint_config(folder))
    # First, because it is quick: a wrong template or tokenizer is reported before the weights are loaded.
    tokenizer, template = load_text(options, folder)
    dtype, device = choose_dtype(options.dtype, folder), choose_device(options.device)
    shard = shard_of(options, 0)
    if others is not None:
        use_share_of(0, others.ranks, device, options.threads)
    given, reasons = options, dtype_reason(options, dtype)
    options = decided(options, folder, device, dtype, disaggregated, reasons)
    exact, stores = options.exact is True, disaggregated or states_leave(options)
    try:
        model, config = load_model(
            folder,
            dtype,
            device,
            progress,
            options.weights,
            options.seed,
            spare_bytes(shard.ranks),
            partial(compile_early, options, folder),
            exact=exact,
            shard=shard,
            identify=stores,
            quantising=quantising_of(options),
            activations=options.activations,
        )
    except torch.OutOfMemoryError as error:
        raise ModelError(f"the weights do not fit into GPU memory: {error}") from error
    model.keep(options.kv_dtype, options.state_dtype)
    chosen = choose(device, dtype, model.memories, exact=exact, activations=options.activations)
    room_for = partial(size, model, config, device, dtype, shard.ranks, given.exact == "auto", progress, chosen)

    def size_with(options: Options) -> Sized:
        return room_for(load_drafter(options, tokenizer, model, chosen, device, progress), options)

    drafts = GIVING_WAY[options.draft] if given.draft == "auto" else (options.draft,)
    wanted = options
    chosen, options, spec, draft, facts = first_that_fits([replace(options, draft=each) for each in drafts], size_with)
    engine_config, sizes = resolve(options, facts)
    reasons |= {**given_up(wanted, options), **sizes}
    report_choices(device, chosen, reasons)
    engine_config = replace(engine_config, revisions=revisions_of(model, engine_config.exact))
    if options.exact:
        engine_config = replace(engine_config, form=form_of(options, device, chosen, engine_config.revisions))
    check_length(model, engine_config.max_length, facts.model_length)
    beside = text_place(folder)
    ends = end_tokens(beside)
    ends |= tokenizer.end_tokens if tokenizer else ends
    text = (tokenizer, template, ends, suggested_params(beside))
    parts = (device, chosen, vector_facts(folder, config, model), draft)
    loaded = Loaded(model, spec, engine_config, *text, *parts, others=others, reasons=reasons)
    if not stores:
        return loaded
    disk = None if options.disk is None else Path(options.disk)
    identity = identity_of(model, config, spec, engine_config.exact, shard)
    return replace(loaded, disk=disk, remote=options.remote, identity=identity, saves_prompts=saves_prompts(options))


def states_leave(options: Options) -> bool:
    """Return whether states outlive the process, so that they need the identity of their model."""
    return options.disk is not None or options.remote is not None or saves_prompts(options)


def dtype_reason(options: Options, dtype: torch.dtype) -> dict[str, str]:
    name = str(dtype).removeprefix("torch.")
    return {"dtype": f"{name}, from the checkpoint"} if options.dtype == "auto" else {}


def decided(
    options: Options,
    folder: Path,
    device: str,
    dtype: torch.dtype,
    disaggregated: bool = False,
    reasons: dict[str, str] | None = None,
) -> Options:
    """Return options without "auto" for `exact`, which a table decides, and then for `draft`, by the checkpoint.

    The reasons are added to `reasons`.
    """
    reasons = {} if reasons is None else reasons
    if options.exact == "auto":
        exact, reason = chosen_exact(options, folder, device, dtype)
        reasons["exact"] = reason
        options = replace(options, exact=exact)
    if options.draft == "auto":
        draft, reason = chosen_draft(options, folder, device, disaggregated)
        reasons["draft"] = f"{draft}: {reason}"
        options = replace(options, draft=draft)
    return options


def chosen_exact(options: Options, folder: Path, device: str, dtype: torch.dtype) -> tuple[bool, str]:
    """Return what `--exact auto` means, and why. Drafts exclude it only if they were asked for."""
    config = text_part(checkpoint_config(folder))
    conflict = "tensor_parallel is not supported with it" if options.tensor_parallel > 1 else None
    if device != "cpu" and options.draft not in ("auto", "off"):
        # On a GPU a model's drafts exclude it, and with others its cost was not measured.
        conflict = f"draft is {options.draft}"
    if device != "cpu" and options.activations == "fp8":
        conflict = "activations are fp8"
    name = str(dtype).removeprefix("torch.")
    exact, reason = decide(device_name(device), family_of(config), name, conflict)
    # Last, because it imports the kernels.
    declined = why_not_exact(device, dtype) if exact else None
    return (exact, reason) if declined is None else (False, f"off: {declined}")


def chosen_draft(options: Options, folder: Path, device: str, disaggregated: bool = False) -> tuple[str, str]:
    """Return the drafter that `--draft auto` means, and why."""
    if options.exact is True and device != "cpu":
        return "off", "with exact answers on a GPU, steps with drafts are not recorded"
    if device == "cpu":
        return "suffix", "on a CPU, an MTP head would cost more than it saves"
    if not has_head(folder, options.weights):
        return "suffix", "the checkpoint has no MTP head that Weft can compute"
    if options.tensor_parallel > 1:
        return "suffix", "the checkpoint's MTP head is not supported over ranks"
    if disaggregated:
        return "suffix", "an MTP head cannot read prompts that another engine has computed"
    return "mtp", "the checkpoint has an MTP head"


def form_of(options: Options, device: str, chosen: Chosen, revisions: str) -> str:
    """Return what the bits of an exact engine depend on besides the model: versions, device, operations, threads."""
    threads = f"{options.threads or available_cores()} threads" if device == "cpu" else ""
    # Where the ring of a tail begins again, sums are split.
    room = f"room for {draft_tokens(options, device)} drafts"
    parts = (__version__, revisions, torch.__version__, device_name(device), threads, room, *chosen.summary())
    return "; ".join(map(str, parts))


def compile_early(options: Options, folder: Path, model: CausalModel, device: str, dtype: torch.dtype) -> None:
    """Start to compile what a model needs while its weights are loaded."""
    if device == "cpu":
        config = text_part(checkpoint_config(folder))
        needed = {
            "moe": any(isinstance(module, ExpertLayer) for module in model.modules()),
            "stored": options.quantize != "off" or is_quantised(folder, config),
            "coded_attention": options.kv_dtype != "auto",
        }
        begin_compiling(model.memories, {group for group, is_needed in needed.items() if is_needed})
        return
    chosen = choose(device, dtype, model.memories, exact=options.exact is True)
    if chosen.are_recorded:
        warm_mixers(model, chosen.operations)


class Sized(NamedTuple):
    """An engine's operations, options and memory, as far as they depend on what a device has room for."""

    chosen: Chosen
    options: Options
    spec: MemorySpec
    draft: LoadedDraft | None
    facts: SizingFacts


def size(
    model: CausalModel,
    config: dict[str, Any],
    device: str,
    dtype: torch.dtype,
    ranks: int,
    is_auto: bool,
    progress: bool,
    chosen: Chosen,
    drafter: CausalModel | None,
    options: Options,
) -> Sized:
    """Try the operations on a GPU (see `tried`), and find the room for a model and its drafter."""
    chosen, options, room = tried(chosen, model, drafter, options, device, dtype, is_auto, progress)
    # Steps of plain PyTorch on a GPU are not measured.
    draft_room = draft_tokens(options, "plain" if device != "cpu" and room is None else device)
    spec = MemorySpec(model.memories(chosen.operations), draft_room=draft_room)
    draft = None if drafter is None else loaded_draft(drafter, chosen, device, draft_room)
    facts = facts_of(spec, config, device, room, None if draft is None else draft.spec, ranks)
    return Sized(chosen, options, spec, draft, facts)


def first_that_fits(attempts: Sequence[Options], size_with: Callable[[Options], Sized]) -> Sized:
    """Return the first of these engines for which there is memory, or else the last one."""
    for options in attempts[:-1]:
        try:
            sized = size_with(options)
        except (torch.OutOfMemoryError, ModelError) as error:
            log.info("draft: not %s: %s", options.draft, error)
            continue
        if has_room(sized.options, sized.facts):
            return sized
        log.info("draft: not %s: memory is too small", options.draft)
        del sized
    return size_with(attempts[-1])


def given_up(wanted: Options, found: Options) -> dict[str, str]:
    """Return the reasons of decisions that a device's memory or kernels have changed."""
    reasons = {}
    if found.draft != wanted.draft:
        reasons["draft"] = f"{found.draft}: there is no memory for {wanted.draft}"
    if found.exact != wanted.exact:
        reasons["exact"] = "off: its kernels fail here"
    return reasons


def tried(
    chosen: Chosen,
    model: CausalModel,
    drafter: CausalModel | None,
    options: Options,
    device: str,
    dtype: torch.dtype,
    is_auto: bool,
    progress: bool,
) -> tuple[Chosen, Options, GpuMemory | None]:
    """Run operations that were chosen for a GPU; if they fail, choose others. Return the room that is left, too.

    `is_auto`: if exact answers were chosen, it was by the table, and they may be given up. Otherwise this raises.
    """
    if not chosen.are_recorded:
        return chosen, options, None
    found = measure(model, drafter, chosen.operations, options, progress)
    if not isinstance(found, str):
        return chosen, options, found
    if options.exact and is_auto:
        log.warning("exact: off: %s", found)
        options, usual = replace(options, exact=False), choose(device, dtype, model.memories)
        return tried(usual, model, drafter, options, device, dtype, is_auto, progress)
    return choose(device, dtype, model.memories, refused=found, exact=options.exact is True), options, None


def measure(
    model: CausalModel, drafter: CausalModel | None, operations: Operations, options: Options, progress: bool = False
) -> GpuMemory | str:
    """Compile the kernels, and find the room on the GPU by running the largest steps; if kernels fail, return why."""
    room = draft_tokens(options, "cuda")
    spec = MemorySpec(model.memories(operations), draft_room=room)
    tokens, rows = (count(n, getattr(options, n), "cuda") for n in ("max_tokens_per_step", "max_sequences"))
    size = (max(tokens, rows), rows)
    try:
        compile_once(model, spec, operations, *size, progress)
        if drafter is None:
            return measure_memory(model, spec, operations, *size, options.memory_fraction)
        own = MemorySpec(drafter.memories(operations), draft_room=room)
        with drafts_may_fail():
            compile_once(drafter, own, operations, *size, progress, drafter=True)
        memory = measure_memory(model, spec, operations, *size, options.memory_fraction)
        with drafts_may_fail():
            work = measure_work(drafter, own, operations, *size, drafter=True)
        return memory.less(work + kept_bytes(drafter, *size))
    except ModelError:
        raise
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"a step of {tokens} tokens does not fit beside the weights; lower max_tokens_per_step ({error})"
        ) from error
    except Exception as error:  # a compiler or a driver may raise anything
        log.debug("GPU kernels failed", exc_info=True)
        return f"the kernels for GPUs fail on {device_name('cuda')}: {_root(error)}"


@contextmanager
def drafts_may_fail() -> Iterator[None]:
    """Raise what a drafter's kernels raise as an error of the drafter: the model itself may run."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a compiler or a driver may raise anything
        raise ModelError(f"drafts cannot be computed on {device_name('cuda')}: {_root(error)}") from error


def _root(error: BaseException) -> str:
    """Return the root cause of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def load_text(options: Options, folder: Path) -> tuple[Tokenizer | None, ChatTemplate | None]:
    if options.tokenizer is not None:
        folder = find_text_files(builtin.place_of(options.tokenizer))
    folder = text_place(folder)
    found = load_tokenizer(folder)
    if found is None and options.tokenizer is not None:
        raise ModelError(f"tokenizer: {folder} has no tokenizer.json")
    if found is None and options.chat_template is not None:
        raise OptionError("chat_template needs a tokenizer, and this model has none; pass --tokenizer too")
    return found, None if found is None else load_template(folder, found.specials, options.chat_template)


def facts_of(
    spec: MemorySpec,
    config: dict[str, Any],
    device: str,
    room: GpuMemory | None,
    draft: MemorySpec | None = None,
    ranks: int = 1,
) -> SizingFacts:
    # Steps of plain PyTorch on a GPU are not measured, and take more memory for each token.
    kind = "plain" if device != "cpu" and room is None else device

    def share(memory: int) -> int:
        return 0 if draft is None else draft_share(spec, draft, memory)

    return SizingFacts(
        device=kind,
        room="" if room is None else str(room),
        # Ranks share the memory of the machine.
        free_bytes=free_bytes(device) // ranks if room is None else room.arena,
        model_length=Config(config).context,
        longest=lambda memory: longest_alone(spec, memory - share(memory)),
        least_bytes=least_bytes(spec) + (0 if draft is None else least_bytes(draft)),
        free_host_bytes=0 if device == "cpu" else free_bytes() // ranks,
        draft_bytes=share,
    )

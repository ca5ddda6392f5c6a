"""Recorded decodes answer as those that are run call by call, whatever their rows were when they were recorded."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from tests.support.drafting.scripted import ScriptedDrafting
from tests.support.models import tiny_model
from tests.support.models.engines import FAMILIES, TINY, Ask, dummy_model, greedy, make_engine, model_of, serve, tokens
from weft import LLM, SamplingParams
from weft.base.config import EngineConfig
from weft.engine.loop import Engine
from weft.kernels.choosing import choose
from weft.kernels.cpu import linear as linears
from weft.kernels.cpu.linear import HAS_BFLOAT16
from weft.kernels.formats.stored import Stored
from weft.kernels.native import calls, library, replay
from weft.kernels.native.calls import RecordedMemory, record
from weft.kernels.native.layouts import DENSE_AND_PANELS
from weft.kernels.native.linear import pack, product
from weft.kernels.weight import Weight
from weft.memory.spec import MemorySpec
from weft.runner.runner import Runner

pytestmark = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")

# Torch computes norms across heads.
COMPUTED = {"olmo_hybrid", "olmo2", "olmo3"}
# Latent attention has no C++ kernel, so nothing is recorded.
UNRECORDED = {"kimi_linear"}
LATENT = "nemotron_h, latent experts, biases, old names of layers"
GROUPED = "nemotron_h, pattern, expert groups, no conv bias"


def crowd(seed):
    """Requests that come, cross cells and end at different times: rows change their number, tails, slots and pages."""
    return [
        Ask(tokens(40 + 23 * index, seed * 10 + index), greedy(26 + 10 * index), step=9 * index) for index in range(4)
    ]


def answers(family, seed=1):
    engine = make_engine(family)
    return [answer.tokens for answer in serve(engine, crowd(seed))], engine._device.eager.compute


@pytest.mark.parametrize("family", [*sorted(FAMILIES), LATENT, GROUPED])
def test_answers_are_the_same_recorded_or_not(monkeypatch, family):
    if family in UNRECORDED:
        assert not isinstance(make_engine(family)._device.eager.compute, replay.Replays)
        return
    found, replays = answers(family)
    assert replays.steps
    recorded = [step for step in replays.steps.values() if step is not None]
    assert bool(recorded) == (family not in COMPUTED), "who is recorded is known"
    monkeypatch.setattr(replay.Replays, "run", lambda self, batch: self.compute(batch))
    assert answers(family)[0] == found


@pytest.mark.parametrize("family", ["gpt_oss", "granite_moe_hybrid", "nemotron_h", "qwen3_next"])
def test_experts_of_16_bits_are_recorded_where_no_units_multiply_them(monkeypatch, family):
    monkeypatch.setattr(linears, "HAS_BFLOAT16", False)
    operations = choose("cpu", torch.bfloat16, model_of(family).memories).operations
    model = dummy_model(TINY[family], torch.bfloat16, operations)
    config = EngineConfig(memory_bytes=16 << 20, max_sequences=4, max_tokens_per_step=96, max_length=128)
    spec = MemorySpec(model.memories(operations))
    runner = Runner(model, spec, config.memory_bytes, config.max_sequences, threads=1, operations=operations)
    serve(Engine(spec, runner, config), [Ask(tokens(9, index), greedy(4)) for index in range(3)])
    assert runner.eager.compute.steps
    assert None not in runner.eager.compute.steps.values()


def test_a_step_that_is_not_renewed_would_show(monkeypatch):
    found, _ = answers("qwen3_5")

    def run(self, batch):
        self.batch.token_ids.copy_(batch.token_ids)
        self.rotary.copy_(batch.rotary_positions)
        calls.replay(self.program)
        return self.hidden

    monkeypatch.setattr(replay.RecordedStep, "run", run)
    assert answers("qwen3_5")[0] != found


def test_whoever_computes_by_torch_is_noticed():
    x, weight = torch.randn(2, 32), pack(torch.randn(8, 32))
    with record(RecordedMemory(1 << 20)) as pure:
        product(x.view(2, 32)[:, :32].unflatten(-1, (2, 16)).flatten(-2), weight, 8).chunk(2, -1)
    assert pure.pure
    assert len(pure.calls) == 1
    for compute in (
        lambda: x + 1,
        lambda: x.clone(),
        lambda: x.add_(0),
        lambda: x[:, ::2].contiguous(),
        lambda: x.sum(),
    ):
        with record(RecordedMemory(1 << 20)) as impure:
            compute()
        assert not impure.pure


@pytest.mark.skipif(not HAS_BFLOAT16, reason="this CPU has no 16-bit units")
def test_packed_weights_are_noticed_too():
    blocks = linears.prepare(Weight.of((torch.randn(24, 16) / 4).bfloat16()), twice=False)
    with record(RecordedMemory(1 << 20)) as recording:
        linears.linear(torch.randn(40, 16).bfloat16(), blocks)
    assert not recording.pure


def test_calls_of_other_threads_are_not_recorded():
    x, weight = torch.randn(1, 32), pack(torch.randn(8, 32))
    with record(RecordedMemory(1 << 20)) as recording:
        other = threading.Thread(target=product, args=(x, weight, 8))
        other.start()
        other.join()
    assert not recording.calls


def test_recordings_keep_to_their_memory(monkeypatch):
    monkeypatch.setattr(replay, "MOST_BYTES", 20_000)
    found, replays = answers("lfm2")
    assert any(step is None for step in replays.steps.values())
    monkeypatch.undo()
    assert answers("lfm2")[0] == found


def test_recordings_of_all_numbers_of_rows_share_their_memory():
    _, replays = answers("qwen3_5")
    assert len(replays.steps) == 3
    assert len({step.hidden.untyped_storage().data_ptr() for step in replays.steps.values()}) == 1
    needed = {}
    for (rows, threads), step in list(replays.steps.items()):
        del replays.steps[rows, threads]
        replays.run(step.batch)
        needed[rows] = replays.memory.taken_bytes
    assert needed[1] < needed[2] < needed[3] < 4 * needed[1], "a step begins where all others do"


def test_memory_of_recordings_is_taken_from_its_start_and_beyond_its_end_there_is_other():
    memory = RecordedMemory(256)
    memory.begin()
    first, second = memory.take((3, 5), torch.float32), memory.take((2, 0), torch.bfloat16)
    third = memory.take([16], torch.int64)
    assert (first.shape, second.shape, memory.taken_bytes) == ((3, 5), (2, 0), 192)
    assert third.data_ptr() == first.data_ptr() + 64
    assert memory.suffices
    beyond = memory.take([65], torch.uint8)
    assert not memory.suffices
    assert beyond.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
    memory.begin()
    assert memory.suffices
    assert memory.take([1], torch.int64).data_ptr() == first.data_ptr()


def test_an_error_while_recording_ends_the_recording():
    with pytest.raises(ValueError, match="stop"), record(RecordedMemory(0)):
        raise ValueError("stop")
    assert getattr(calls._here, "recording", None) is None


def test_rows_of_16_bits_are_recorded_unless_units_of_the_cpu_multiply_them():
    llm = LLM(**tiny_model.OPTIONS, device="cpu", dtype="bfloat16", memory="32MiB")
    asked = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    many = linears.FEW_ROWS[torch.bfloat16] + 1
    for count in (many, 2):
        prompts = [[5 + index, 6, 7, 8] for index in range(count)]
        found = llm.generate(prompts, asked, use_tqdm=False)
        alone = [llm.generate([prompt], asked, use_tqdm=False)[0] for prompt in prompts]
        # Units add in another order, and then rounding decides between some tokens.
        by_units = HAS_BFLOAT16 and 4 * count >= many
        assert by_units or [each.token_ids[0] for each in found] == [each.token_ids[0] for each in alone]
    steps = {rows: step for (rows, _), step in llm.engine._device.eager.compute.steps.items()}
    assert steps[2] is not None
    assert (steps[many] is None) == HAS_BFLOAT16, "oneDNN multiplies this many rows with 16-bit units"


@pytest.mark.thorough
def test_recording_does_not_import_the_compiler_of_torch():
    """That takes longer than a first answer does."""
    program = (
        "import sys; from weft import LLM, SamplingParams; "
        "LLM(progress=False).generate('Hi', SamplingParams(max_tokens=4)); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_drafts_of_16_bits_are_recorded_also_where_units_of_the_cpu_multiply_as_many_rows(monkeypatch):
    """Weights as on such a CPU: panels for few rows, and a layout for more that no recording can hold."""
    if not library.available():
        pytest.skip("needs a compiler")

    def prepare(weight, twice):
        matrix = weight.matrix.detach()
        both = Stored(DENSE_AND_PANELS, (matrix, pack(matrix)), weight.outputs, weight.inputs)
        return Weight((both,), weight.bias) if matrix.numel() else weight

    monkeypatch.setattr(linears, "prepare", prepare)
    monkeypatch.setitem(linears.FEW_ROWS, torch.bfloat16, 4)
    operations = choose("cpu", torch.bfloat16, model_of("qwen3_5").memories).operations
    monkeypatch.setattr(operations, "prepare", prepare, raising=False)
    model = dummy_model(TINY["qwen3_5"], torch.bfloat16, operations)
    config = EngineConfig(memory_bytes=16 << 20, max_sequences=8, max_length=256)
    spec = MemorySpec(model.memories(operations), draft_room=6)
    runner = Runner(model, spec, config.memory_bytes, config.max_sequences, threads=1, operations=operations)
    asks = [Ask(tokens(57, 1), greedy(40))]
    answer = serve(Engine(spec, runner, config), asks)[0].tokens
    # Eight rows without drafts are not recorded, and drafts of as many rows are.
    batch = [Ask(tokens(5, index), greedy(3)) for index in range(8)]
    serve(Engine(spec, runner, config), batch)
    assert runner.eager.compute.steps[8, 1] is None
    drafting = ScriptedDrafting({tuple(asks[0].prompt): answer}, 6, seed=1)
    assert serve(Engine(spec, runner, config, drafting=drafting), asks)[0].tokens == answer
    assert all(rows > linears.FEW_ROWS[torch.bfloat16] for rows, _ in runner.eager.compute.ordered)
    assert runner.eager.compute.ordered
    assert None not in runner.eager.compute.ordered.values()

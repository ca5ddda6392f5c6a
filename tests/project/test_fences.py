"""The project's rules about itself hold. Each test also shows, on a small bad example, that it could fail."""

from __future__ import annotations

import subprocess
import sys
import traceback
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import fences
from tests.support.fences import ROOT, project_files, sources
from tests.support.kernels.masks import masks_are_made_once_a_step
from tests.support.models.engines import Ask, greedy, make_engine, seeded, serve, tokens
from weft.kernels.cpu import sampling
from weft.kernels.cuda.launch import gpus

WEFT = sources()
EVERYTHING = WEFT | sources("tests") | sources("benchmarks")


def test_imports_go_down():
    assert fences.wrong_imports(WEFT, WEFT) == []
    assert len(fences.ORDER) <= 10


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("weft.base.grid", "from weft.memory.spec import Part"),
        ("weft.memory.cache", "from weft.device.store import Store"),
        ("weft.memory.cache", "import weft.engine.loop"),
        ("weft.engine.loop", "from weft.runner import runner"),
        ("weft.engine.loop", "def late():\n    from weft.device import store"),
        ("weft.text.answer", "from weft.memory.misses import Miss"),
        ("weft.kernels.cpu.ssd", "from weft.memory.ledger import Ledger"),
        ("weft.models.lfm2", "from weft.runner.batching import build_batch"),
        ("weft.runner.runner", "import weft.engine.planner\nimport weft.start.loading"),
        ("weft.offline.llm", "from weft.cli.main import main"),
        ("weft.server.app", "def late():\n    from weft.start.loading import load"),
        ("weft.server.app", "from weft.fleet.router import FleetRouter"),
        ("weft.fleet.router", "from weft.server.app import make_app"),
        ("weft.server.app", "from weft.memory.ledger import Ledger"),
        ("weft.transfer.tcp", "from weft.fleet.listener import FleetListener"),
        ("weft.wire.frames", "from weft.backends.codec import FLEET"),
        ("weft.engine.service", "from weft.backends.codec import FLEET"),
        ("weft.cli.serve", "from weft.simulate.engine import SimulatedEngine"),
        ("weft.start.launch", "from weft.ray.replica import Replica"),
    ],
)
def test_an_import_that_goes_up_or_aside_is_seen(module, line):
    assert fences.wrong_imports({module: line}, WEFT)


def test_a_plan_is_built_in_one_place_and_rewritten_only_where_it_is_completed():
    assert fences.plan_rewrites(WEFT) == []
    way = fences.longest_way_of_a_plan(WEFT)
    assert len(way) <= 10, " > ".join(way)


@pytest.mark.parametrize(
    "line",
    [
        "def launch(plan: Plan): return replace(plan, number=1)",
        "def launch(step): return dataclasses.replace(step.plan, number=1)",
        "def launch(rows):\n    found = Plan.build(rows)\n    return found",
        "def launch(rows): return Plan(*rows)",
        "def make(rows) -> Plan: ...\ndef launch(rows):\n    made = make(rows)\n    return replace(made, number=1)",
    ],
)
def test_a_rewritten_plan_is_seen(line):
    assert fences.plan_rewrites({"weft.runner.runner": line})
    harmless = "def launch(plan: Plan): return replace(plan.captures, row=1)"
    assert not fences.plan_rewrites({"weft.runner.runner": harmless})


def test_the_longest_way_of_a_plan_is_followed():
    launch = "def launch(plan: Plan): ..."
    modules = {"weft.a": f"import weft.b\n{launch}", "weft.b": f"import weft.c\n{launch}", "weft.c": launch}
    assert fences.longest_way_of_a_plan(modules | {"weft.d": "import weft.a"}) == ["weft.a", "weft.b", "weft.c"]


def test_nothing_stands_loose_at_the_top():
    assert fences.loose_modules(WEFT) == []
    assert fences.loose_modules(["weft", "weft.loading", "weft.memory.trie"]) == ["weft.loading"]


def test_torch_is_imported_only_where_tensors_are():
    assert fences.heavy_imports(WEFT) == []
    assert fences.heavy_imports({"weft.engine.loop": "def f():\n    import torch.nn"})
    assert fences.heavy_imports({"weft.text.tokenizer": "from safetensors.torch import load"})


def loaded_by(*modules: str) -> set[str]:
    """What stands in `sys.modules` of a fresh process after these imports."""
    code = f"import sys, {', '.join(modules)}; print('\\n'.join(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_parts_without_torch_really_load_none():
    parts = [m for m in WEFT if not any(fences.within(m, with_tensors) for with_tensors in fences.WITH_TENSORS)]
    parts.remove("weft.__main__")
    assert {"weft.memory.ledger", "weft.engine.loop", "weft.text.answer", "weft.cli.main"} <= set(parts)
    assert not loaded_by(*parts) & fences.HEAVY
    assert "torch" in loaded_by("weft.device.upload")


def test_words_of_recurrent_layers_stay_home():
    assert fences.words_away_from_home(WEFT) == []
    for line in ("slot = request.mamba_index", "class ConvState: ...", "# copy the SSM state", "x = delta_of(y)"):
        assert fences.words_away_from_home({"weft.engine.loop": line}), line
        assert not fences.words_away_from_home({"weft.kernels.cpu.ssd": line})
    assert not fences.words_away_from_home({"weft.offline.llm": "class Conversation: ...  # converts a classmethod"})


# Where hardware is at home: operations, the memory of a device, and the runner that records steps of a GPU.
HARDWARE = ("weft.kernels", "weft.device", "weft.runner.cuda")
# What else reads a name that looks like a question to a device, and why it is none.
NO_QUESTIONS = {
    ("weft.base.options", "asks facts.device"): "the name of a device, by which defaults are looked up",
    ("weft.cli.early", "asks options.device"): "the name of a device, which is handed on",
    ("weft.fleet.local", "asks options.device"): "the name of a device, by which replicas share a machine",
    ("weft.start.shares", "asks options.device"): "the name of a device, whose memory models share",
    ("weft.start.loading", "asks options.device"): "the name of a device, which is handed on",
    ("weft.start.loading", "asks self.device"): "the name of a device, which is handed on",
    ("weft.start.rank_loading", "asks options.device"): "the name of a device, which is handed on",
    ("weft.models.dummy", "asks next(iter(own.values())).device"): "random weights are drawn where they lie",
    ("weft.runner.runner", "asks self.device"): "where a step is uploaded to",
    ("weft.runner.eager", "asks placed.device"): "where a step is uploaded to",
    ("weft.runner.eager", "asks self.placed.device"): "where a step is uploaded to",
    ("weft.runner.ranks.part", "asks self.device"): "the name of a device, which is handed on",
}


def questions_away_from_home(modules: dict[str, str]) -> set[tuple[str, str]]:
    """Modules outside hardware's home, each with what it asks or imports."""
    others = {m: text for m, text in modules.items() if not any(fences.within(m, home) for home in HARDWARE)}
    parted = (complaint.partition(" ") for complaint in fences.device_questions(others))
    return {(where.partition(":")[0], what) for where, _, what in parted}


def test_only_hardwares_home_asks_which_device_it_is_on():
    assert questions_away_from_home(WEFT) == set(NO_QUESTIONS)


@pytest.mark.parametrize("line", ["x.is_cuda", "self.store.buffer.device", "from weft.kernels.native import replay"])
def test_a_module_with_an_excuse_may_ask_nothing_else(line):
    for module, _ in NO_QUESTIONS:
        planted = {module: f"{WEFT[module]}\n{line}\n"}
        assert len(questions_away_from_home(planted) - set(NO_QUESTIONS)) >= 1, module


ENGINE = sources("weft/engine") | sources("weft/drafting") | {"weft.memory.plans": WEFT["weft.memory.plans"]}
VERBS = fences.verbs_in((ROOT / "docs/design.md").read_text())


def test_the_engine_uses_the_verbs_of_the_ledger_and_nothing_inside_it():
    assert fences.ledger_insides(ENGINE, VERBS) == []
    used = {node.attr for _, node in fences.ledger_uses(ENGINE)}
    assert VERBS - used == set(), "the page names verbs that the engine does not use"


@pytest.mark.parametrize(
    "line",
    [
        "self.ledger.tiers.choice.ahead_tokens = 3",
        "self._ledger.cache.clear()",
        "def f(ledger):\n    return ledger.hidden",
        "planner.ledger.arena.freed.clear()",
        "self.ledger.computed[seat] = 3",
        "self.ledger.planned[seats] += 1",
        "sequence.lease.returns = True",
        "x = self.ledger.tiers.links",
    ],
)
def test_a_look_into_the_ledger_is_seen(line):
    assert fences.ledger_insides({"weft.engine.loop": line}, VERBS)
    assert not fences.ledger_insides(
        {"weft.engine.loop": "Copier(self.ledger.tiers)\nself.ledger.planned[seat]"}, VERBS
    )


def test_no_module_imports_itself_by_a_detour():
    assert fences.import_circles(WEFT) == []
    one, other = "from weft.memory.b import x", "import weft.memory.a"
    assert fences.import_circles({"weft.memory.a": one, "weft.memory.b": other}) == [["weft.memory.a", "weft.memory.b"]]


def test_every_module_can_be_imported():
    """Without Triton, all but kernels of a GPU."""
    here = [name for name in WEFT if find_spec("triton") or not fences.within(name, "weft.kernels.cuda")]
    found = {name: import_module(name) for name in here if not name.endswith("__main__")}
    assert all(name in sys.modules and module.__name__ == name for name, module in found.items())


@pytest.mark.parametrize(
    "line",
    [
        "if x.is_cuda: pass",
        "y = x.to(weight.device)",
        "free = torch.cuda.mem_get_info()[0]",
        "def late():\n    from weft.kernels.cuda import moe",
        "from weft.kernels.native import library",
        "if library.available(): pass",
    ],
)
def test_a_model_that_asks_for_its_device_is_seen(line):
    assert fences.device_questions({"weft.models.lfm2": line})
    assert not fences.device_questions({"weft.models.weights": "def load(device: torch.device | str): ..."})


def test_the_number_of_a_gpus_multiprocessors_stands_in_the_table_of_gpus():
    assert fences.modules_with_number(WEFT, gpus.H200.multiprocessors) == ["weft.kernels.cuda.launch.gpus"]
    assert fences.modules_with_number({"bad": '"132"\nAT_ONCE = 132', "good": '"""132"""'}, 132) == ["bad"]


def test_files_and_functions_stay_small():
    assert fences.too_large(EVERYTHING) == []
    assert len(WEFT["weft.models.falcon_h1"].splitlines()) <= 130, "the most entangled of the models, once"
    large = [module for module in WEFT if len(WEFT[module].splitlines()) >= 500]
    assert len(large) <= len(WEFT) // 20, large
    assert fences.too_large({"long": "x = 1\n" * 801})
    assert fences.too_large({"long": "class A:\n  def f(self):\n" + "    x = 1\n" * 60})


def test_a_class_name_has_one_meaning_in_the_whole_package():
    assert fences.repeated_class_names(WEFT) == []
    twice = {"weft.a": "class Step: ...", "weft.b": "def f():\n    class Step: ..."}
    assert fences.repeated_class_names(twice) == ["Step is defined in weft.a, weft.b"]
    assert fences.repeated_class_names({"weft.a": "class Step: ...\nclass Step: ..."})


def test_the_project_in_training_is_not_imported():
    assert fences.imports_of_training(EVERYTHING) == []
    assert fences.imports_of_training({"tests.x": "from weft_training.template import JINJA"})


def test_no_test_imports_another():
    assert fences.imports_of_tests(EVERYTHING) == []
    modules = {
        "tests.a.test_x": "",
        "tests.support.y": "",
        "tests.test_z": "from tests.a import test_x\nimport tests.support.y",
    }
    assert fences.imports_of_tests(modules) == ["tests.test_z imports tests.a.test_x"]


def test_tests_lie_in_the_folders_of_what_they_test():
    """Beside them are the rules of the project, and tests of the folders at the top."""
    others = {"project", "support", "benchmarks", "examples"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in project_files(".py", under="tests")}
    folders = {each for each in folders if each.parts and each.parts[0] not in others}
    assert len(folders) > 30
    assert [str(each) for each in folders if not (ROOT / "weft" / each).is_dir()] == []


def test_planted_bugs_patch_public_names_only():
    """A private name may go in any refactoring; what a planted bug replaces is a seam."""
    planted = {name: source for name, source in EVERYTHING.items() if ".test_planted" in name}
    assert len(planted) == 12
    assert fences.private_patches(planted) == []
    assert fences.private_patches({"tests.x": "patch.setattr(Ledger, '_keep', print)"}) == ["tests.x patches _keep"]


def test_every_file_says_what_it_is():
    assert fences.without_header(EVERYTHING) == []
    assert fences.without_header({"silent": "import os"})


def test_no_file_is_ever_executed_or_unpickled():
    assert fences.unsafe(WEFT) == []
    for line in ("import pickle", "from pickle import loads", "torch.load(x)", "def f():\n    eval('1')", "exec('')"):
        assert fences.unsafe({"bad": line}), line
    assert not fences.unsafe({"good": "model.eval()"})


# Calls that look like waiting, each with its reason. Nothing else on the way of a step has any.
NOT_WAITING = {
    ("weft.kernels.cpu.moe", "routed_sum"): "the chosen experts are walked over; on a CPU nothing is in flight",
    ("weft.kernels.cpu.following", "verify_drafts"): "tokens of a CPU, where nothing is in flight",
    ("weft.kernels.cpu.paged_reads", "plan_reads"): "the plan's own arrays, on the host",
    ("weft.kernels.plain.attention", "pages_of"): "the plan's own arrays, on the host",
    ("weft.kernels.cpu.index_building", "stage_decodes"): "the plan's own arrays, on the host",
    ("weft.kernels.cpu.index_building", "stage_group"): "the plan's own arrays, on the host",
    ("weft.kernels.cpu.index_building", "open_cells"): "the plan's own arrays, on the host",
    ("weft.runner.step_sampling", "_draws"): "the plan's own arrays, on the host",
    ("weft.runner.exact", "canonical_passes"): "the plan's own arrays, on the host",
    ("weft.device.download", "Download.arrays"): "the one download of a step, when it lands",
    ("weft.device.host_memory", "HostMemory._measure"): "before the first request",
    ("weft.device.host_memory", "unpin"): "after the last one",
    ("weft.runner.cuda.recorded", "RecordedSteps.record_all"): "before the first request",
    ("weft.runner.cuda.gpu_memory", "measure_memory"): "before the first request",
    ("weft.runner.cuda.gpu_memory", "_peak"): "before the first request",
    ("weft.device.devices", "read_rate"): "a measurement that was asked for, when nothing runs",
}


def test_nothing_on_the_way_of_a_step_is_written_to_wait():
    found = set()
    for package in ("weft.device", "weft.kernels", "weft.models", "weft.runner"):
        found |= fences.waits({m: text for m, text in WEFT.items() if fences.within(m, package)})
    assert found == set(NOT_WAITING)


@pytest.mark.parametrize("call", ["x.item()", "x.tolist()", "x.sum().cpu()", "torch.nonzero(x)", "x.unique()"])
def test_a_call_that_waits_is_seen(call):
    assert fences.waits({"bad": f"import torch\ndef f(x):\n    return {call}"}) == {("bad", "f")}
    assert not fences.waits({"host": f"import numpy\ndef f(x):\n    return {call}"})


def test_no_file_knows_somebodys_machine():
    texts = {
        str(path.relative_to(ROOT)): path.read_text()
        for path in [*fences.project_files(".py", ".md", ".toml", ".svg", ".json", ""), ROOT / ".gitignore"]
    }
    assert ".ci/run" in texts
    assert fences.machine_paths(texts) == []
    assert fences.machine_paths({"bad": "open('/" + "home/me/model')"})
    assert fences.machine_paths({"bad": "see .." + "/shared"})


# Under inference mode `item` comes to the dispatcher as itself, otherwise as `_local_scalar_dense`.
ASKING = {"item", "_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "bincount"}
ASKING |= {"unique_consecutive", "unique_dim", "_unique", "_unique2"}


class Waits(TorchDispatchMode):
    """Remembers which functions of Weft ask for a tensor's values while a plan is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, str]] = set()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        name = function.overloadpacket.__name__
        masked = name in ("index", "index_put", "index_put_") and any(_is_mask(index) for index in args[1])
        repeated = name == "repeat_interleave" and "Tensor" in function._overloadname
        if masked or repeated or name in ASKING:
            self.note()
        return function(*args, **(kwargs or {}))

    def note(self) -> None:
        ours = [f for f in traceback.extract_stack() if Path(f.filename).is_relative_to(ROOT / "weft")]
        self.found.add((fences.module_of(Path(ours[-1].filename)), ours[-1].name) if ours else ("", "nobody of ours"))


def _is_mask(index: object) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype == torch.bool


def launches(family: str, monkeypatch: pytest.MonkeyPatch, depth: int = 1) -> Waits:
    """A mixed workload through an engine whose launches are watched: chunks, decodes, hits, every way of sampling."""
    waits = Waits()
    engine = make_engine(family, max_tokens_per_step=96, depth=depth, paranoid=False)
    runner, launch, tolist = engine._device, engine._device.launch, torch.Tensor.tolist

    def watched(plan):
        # On a CPU these two never reach the dispatcher.
        with waits, pytest.MonkeyPatch.context() as patch:
            for name in ("tolist", "cpu"):
                patch.setattr(torch.Tensor, name, lambda self: waits.note() or tolist(self))
            return launch(plan)

    monkeypatch.setattr(runner, "launch", watched)
    stem = tokens(130, 0)
    serve(
        engine,
        [
            Ask(stem + tokens(40, 1), greedy(20, repetition_penalty=1.2, logit_bias={5: 2.0})),
            Ask(stem + tokens(5, 5), greedy(20, bad_words=((7,), (3, 4), (1, 2, 3)), allowed_token_ids=range(90))),
            Ask(tokens(3, 2), seeded(70, 1, top_p=0.9, top_k=20, min_p=0.01)),
            Ask(stem + tokens(9, 3), seeded(6, 2, min_tokens=2, frequency_penalty=0.2), step=6),
            Ask(tokens(70, 4), greedy(2, prompt_logprobs=1), step=8),
        ],
    )
    assert waits.operations > 1000
    return waits


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5", "falcon_h1", "gemma3"])
def test_nothing_asks_the_device_while_a_plan_is_launched(family, monkeypatch):
    assert launches(family, monkeypatch).found == set()


@pytest.mark.parametrize("family", ["granite_moe_hybrid", "gpt_oss"])
def test_only_the_reference_of_experts_asks_for_their_numbers(family, monkeypatch):
    # What is watched while a step is recorded is handed on by the watch.
    found = launches(family, monkeypatch).found - {("weft.kernels.native.calls", "__torch_dispatch__")}
    assert {(module, name.strip("<>")) for module, name in found} <= {("weft.kernels.cpu.moe", "routed_sum")}
    assert found, "no longer so: take the exception out"


def test_masks_are_made_once_a_step_for_all_layers():
    masks_are_made_once_a_step()


def test_a_launch_that_asks_is_seen(monkeypatch):
    original = sampling.likeliest
    for bug in (lambda x: x.max().item(), lambda x: x.argmax(-1).tolist(), lambda x: x[x > 0], torch.nonzero):

        def asking(logits, bug=bug):
            bug(logits)
            return original(logits)

        with monkeypatch.context() as patch:
            patch.setattr(sampling, "likeliest", asking)
            assert launches("lfm2", patch).found

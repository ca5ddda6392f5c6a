"""Kernels in C++ are compiled once, kept where nobody else can write, and not missed where they cannot be had."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.kernels.operations import gated_delta_memory, ssd_memory
from tests.support.models import tiny_model
from tests.support.servers.held_steps import SECONDS
from weft import LLM, SamplingParams
from weft.base.options import Options
from weft.kernels import early
from weft.kernels.choosing import DECODES
from weft.kernels.formats.stored import Stored
from weft.kernels.native import calls, compiling, library, prebuilt
from weft.kernels.native.limits import declines, groups_of
from weft.kernels.native.stored import pack
from weft.kernels.recurrent import short_conv_memory
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.models.config import checkpoint_config
from weft.models.finding import find_checkpoint
from weft.models.weights import build
from weft.start.loading import compile_early


def forget() -> None:
    for function in (library.library, library.attempt_for):
        function.cache_clear()
    library.Wanted.groups = None


@pytest.fixture
def restarted(monkeypatch):
    """Nothing remembered of earlier attempts; what a test finds is forgotten after it."""
    monkeypatch.delenv(compiling.SWITCH, raising=False)
    forget()
    yield
    forget()


@pytest.fixture
def fresh(restarted, monkeypatch, tmp_path):
    """Nothing compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "weft" / "native"


@pytest.fixture
def one_source(monkeypatch, tmp_path):
    """Have one source, which takes no time; those of the kernels are compiled before the first test."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "one.cpp").write_text('extern "C" int one() { return 1; }')
    monkeypatch.setattr(compiling, "FOLDER", tmp_path / "sources")


needs_compiler = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")


@needs_compiler
def test_a_second_start_finds_what_the_first_compiled(fresh, one_source, monkeypatch):
    assert isinstance(library.load(), ctypes.CDLL)
    assert len(libraries(fresh)) == 1, "compiled sources and scratch files are gone"
    assert fresh.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(compiling, "call", None)
    assert isinstance(library.load(), ctypes.CDLL)


def libraries(folder):
    """Return the kept libraries; nothing else may be there but locks."""
    found = set(folder.iterdir()) - {folder / "lock", folder / "background"}
    assert all(path.suffix == ".so" for path in found), found
    return sorted(found)


def overwrite(path, content):
    """As a new file: this process has the old one mapped."""
    path.unlink()
    path.write_bytes(content)


def cut(content):
    return content[: len(content) // 2]


def rubbish(content):
    return b"\x7fELF rubbish" * 1000


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def emptied(content):
    return b""


@pytest.fixture
def kept(fresh, one_source):
    """A library in the cache folder."""
    library.load()
    (path,) = libraries(fresh)
    return path


def watch_compiler(monkeypatch):
    """Return a list that grows with each source that is compiled."""
    compiled = []
    call = compiling.call

    def watched(command):
        compiled.extend(Path(each).stem for each in command if each.endswith(".cpp"))
        call(command)

    monkeypatch.setattr(compiling, "call", watched)
    return compiled


@needs_compiler
@pytest.mark.parametrize("damage", [cut, rubbish, flipped, emptied])
def test_a_library_that_is_not_whole_is_compiled_again(kept, monkeypatch, caplog, damage):
    content = kept.read_bytes()
    compiled = watch_compiler(monkeypatch)
    overwrite(kept, damage(content))
    with caplog.at_level("WARNING", "weft"):
        assert isinstance(library.load(), ctypes.CDLL)
    assert len(compiled) == 1
    assert f"{kept} is damaged" in caplog.text
    assert libraries(kept.parent) == [kept]
    assert kept.read_bytes() == content
    library.load()
    assert len(compiled) == 1, "the new one is found"


@needs_compiler
def test_a_library_that_another_machine_compiled_is_replaced(kept, monkeypatch, caplog):
    """It is whole and cannot be loaded here, as from a home folder that machines share."""
    overwrite(kept, b"for another kind of machine")
    foreign = kept.rename(kept.with_stem(f"{kept.stem.rpartition('-')[0]}-{prebuilt.checksum(kept)}"))
    with caplog.at_level("WARNING", "weft"):
        assert isinstance(library.load(), ctypes.CDLL)
    assert f"cannot load {foreign}" in caplog.text
    assert libraries(kept.parent) == [kept]


@needs_compiler
def test_starts_at_the_same_time_leave_one_whole_library(kept, monkeypatch):
    content = kept.read_bytes()
    overwrite(kept, cut(content))
    compiled = watch_compiler(monkeypatch)
    with ThreadPoolExecutor(4) as pool:
        assert all(isinstance(each, ctypes.CDLL) for each in pool.map(lambda _: library.load(), range(4)))
    assert len(compiled) == 1
    assert libraries(kept.parent) == [kept]
    assert kept.read_bytes() == content


@needs_compiler
def test_other_flags_and_sources_are_another_library(monkeypatch, tmp_path):
    compiler, source = compiling.find_compiler(), tmp_path / "one.cpp"
    source.write_text("int one() { return 1; }")
    found = {compiling.fingerprint(compiler, [source])}
    source.write_text("int one() { return 2; }")
    found.add(compiling.fingerprint(compiler, [source]))
    monkeypatch.setattr(compiling, "FLAGS", (*compiling.FLAGS, "-g"))
    found.add(compiling.fingerprint(compiler, [source]))
    monkeypatch.setattr(compiling, "processor", lambda: "another")
    found.add(compiling.fingerprint(compiler, [source]))
    assert len(found) == 4


@pytest.fixture
def quick_sources(fresh, monkeypatch, tmp_path):
    """Have a source of one function for each of the kernels', and none that takes any time."""
    folder = tmp_path / "sources"
    folder.mkdir()
    for source in compiling.FOLDER.glob("*.cpp"):
        more = " " * source.stat().st_size
        (folder / source.name).write_text(f'extern "C" int weft_{source.stem}() {{ return 1; }}{more}')
    monkeypatch.setattr(compiling, "FOLDER", folder)
    return {source.stem for source in folder.iterdir()}


@pytest.fixture
def background(monkeypatch):
    """Return the builds that would be completed in the background, in a list."""
    found: list[compiling.KernelBuild] = []
    monkeypatch.setattr(library, "complete_later", found.append)
    return found


@needs_compiler
def test_only_what_a_model_uses_is_compiled_and_more_when_another_needs_it(quick_sources, background, monkeypatch):
    compiled = watch_compiler(monkeypatch)
    attention, mixed = (AttentionMemory(1, 8, "float32"),), (short_conv_memory(4, 3, "float32"),)
    library.use(groups_of(MemorySpec(attention)))
    first = library.library()
    assert compiling.OPTIONAL & set(compiled) == {"attention"}
    assert {"linear", "norm", "replay"} <= set(compiled)
    # A model that needs nothing else finds the same library.
    library.use(groups_of(MemorySpec(attention)))
    assert library.library() is first
    before = len(compiled)
    library.use(groups_of(MemorySpec(attention + mixed)))
    assert library.library() is not first
    assert sorted(compiled) == sorted(quick_sources), "none twice"
    assert len(compiled) > before
    # A start that finds the library of all sources compiles none of its own.
    forget()
    library.use({"ssd"})
    assert isinstance(library.attempt(), ctypes.CDLL)
    assert len(compiled) == len(quick_sources)


@needs_compiler
def test_what_a_model_has_no_kernels_for_is_compiled_in_the_background(quick_sources, background, monkeypatch, fresh):
    compiled = watch_compiler(monkeypatch)
    library.use({"attention"})
    loaded = library.library()
    assert not hasattr(loaded, "weft_ssd")
    assert not libraries_and_objects(fresh)[0]
    [build] = background
    build.complete()
    assert sorted(compiled) == sorted(quick_sources), "none twice"
    assert len(libraries(fresh)) == 1
    forget()
    assert library.library().weft_ssd() == 1
    assert background == [build], "nothing is left to do"


def libraries_and_objects(folder):
    return list(folder.glob("*.so")), list(folder.glob("objects-*/*.o"))


@needs_compiler
@pytest.mark.parametrize("left", [0, 1, 5])
def test_a_start_that_ended_early_leaves_its_work_to_the_next(quick_sources, background, monkeypatch, fresh, left):
    """Whatever was compiled by then, and whatever half a file the compiler left."""
    library.use({"attention"})
    assert isinstance(library.attempt(), ctypes.CDLL)
    objects = libraries_and_objects(fresh)[1]
    for path in objects[left:]:
        path.rename(path.with_suffix(".999"))
    compiled = watch_compiler(monkeypatch)
    forget()
    library.use({"ssd"})
    assert library.library().weft_ssd() == 1
    for each in background:
        each.complete()
    assert len(libraries(fresh)) == 1
    assert len(compiled) == len(quick_sources) - min(left, len(objects))


@needs_compiler
def test_a_function_of_another_model_extends_the_library(quick_sources, background):
    calls.function_of.cache_clear()
    library.use({"attention"})
    assert library.available()
    assert calls.kernel("weft_moe_routing")(b"") is None  # a kernel has no result
    assert library.library().weft_stored() == 1
    calls.function_of.cache_clear()


@needs_compiler
def test_panels_of_stored_formats_extend_a_library_without_their_kernels(quick_sources, background):
    """A matmul would call functions that are not there, and end the process."""
    library.use({"attention"})
    assert library.available()
    assert not hasattr(library.library(), "weft_stored")
    pack(Stored.of(torch.zeros(32, 32)), are_rounded=False)
    assert library.library().weft_stored() == 1


@needs_compiler
@pytest.mark.parametrize(("name", "needed"), [("lfm2-1.2b", set()), ("lfm2-8b-a1b", {"moe"})])
@pytest.mark.parametrize(("quantize", "kv_dtype"), [("off", "fp8"), ("int8", "auto")])
def test_what_options_need_is_compiled_while_weights_load(fresh, one_source, name, needed, quantize, kv_dtype):
    folder, options = find_checkpoint(name, with_weights=False), Options(quantize=quantize, kv_dtype=kv_dtype)
    compile_early(options, folder, build(checkpoint_config(folder), torch.float32, "meta"), "cpu", torch.float32)
    of_options = {"stored"} if quantize != "off" else {"coded_attention"}
    assert library.Wanted.groups & {"coded_attention", "moe", "stored"} == needed | of_options
    assert isinstance(library.attempt(), ctypes.CDLL)


@needs_compiler
def test_one_process_compiles_for_later_starts_and_none_waits_for_it(quick_sources, background, monkeypatch, fresh):
    library.use({"attention"})
    assert library.available()
    compiled = watch_compiler(monkeypatch)
    with compiling.alone(fresh, "background"):
        background[0].complete()
        assert not compiled
        # Another start needs other kernels at once.
        forget()
        library.use({"ssd"})
        assert library.library().weft_ssd() == 1
    assert compiled == ["ssd"]


@needs_compiler
def test_what_all_models_need_is_compiled_before_a_model_is_known(quick_sources, background, monkeypatch, fresh):
    compiled = watch_compiler(monkeypatch)
    early.compile_common()
    assert {"linear", "norm", "replay"} <= set(compiled) <= quick_sources - compiling.OPTIONAL - {"moe_routing"}
    library.use({"attention"})
    assert library.available()
    background[0].complete()
    assert sorted(compiled) == sorted(quick_sources), "none twice"
    early.compile_common()
    assert len(libraries(fresh)) == 1, "nothing is left to do, and nothing else is left there"
    assert len(compiled) == len(quick_sources)


@needs_compiler
def test_a_source_that_another_start_compiles_is_waited_for(quick_sources, background, monkeypatch, fresh):
    compiled, is_compiling, may_end = watch_compiler(monkeypatch), threading.Event(), threading.Event()
    call = compiling.call

    def call_slowly(command):
        call(command)
        if threading.current_thread().name == "early":
            is_compiling.set()
            assert may_end.wait(SECONDS)

    monkeypatch.setattr(compiling, "call", call_slowly)
    first = threading.Thread(target=early.compile_common, name="early")
    first.start()
    assert is_compiling.wait(SECONDS)
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(library.load, frozenset({"attention"}))
        may_end.set()
        assert isinstance(start.result(SECONDS), ctypes.CDLL)
    first.join()
    assert len(set(compiled)) == len(compiled), "none twice"


@needs_compiler
def test_a_start_that_was_faster_leaves_nothing_behind(quick_sources, monkeypatch, fresh):
    needed = early.needed

    def needed_after_another_start(build, groups):
        library.load()
        return needed(build, groups)

    monkeypatch.setattr(early, "needed", needed_after_another_start)
    early.compile_common()
    assert len(libraries(fresh)) == 1


@needs_compiler
@pytest.mark.parametrize("reason", ["off", "shipped", "no compiler", "a GPU"])
def test_nothing_is_compiled_early_where_no_model_would_use_it(quick_sources, monkeypatch, fresh, tmp_path, reason):
    compiled = watch_compiler(monkeypatch)
    monkeypatch.setattr(early, "has_gpu", lambda: reason == "a GPU")
    if reason == "off":
        monkeypatch.setenv(compiling.SWITCH, "0")
    if reason == "shipped":
        monkeypatch.setattr(prebuilt, "find", lambda isa: ("avx2", tmp_path))
    if reason == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    early.begin("auto")
    for thread in threading.enumerate():
        if thread.name == "weft-early":
            thread.join()
    assert not compiled


@needs_compiler
def test_the_longest_sources_are_compiled_first(monkeypatch):
    sizes = [source.stat().st_size for source in compiling.KernelBuild("g++", Path()).sources]
    assert sizes == sorted(sizes, reverse=True)


@needs_compiler
def test_kernels_compile_while_weights_load_and_once(fresh, one_source, monkeypatch):
    compiled, may_end = watch_compiler(monkeypatch), threading.Event()
    call = compiling.call

    def call_later(command):
        assert may_end.wait(SECONDS)
        call(command)

    monkeypatch.setattr(compiling, "call", call_later)
    library.begin({"attention"})
    may_end.set()
    assert isinstance(library.attempt(), ctypes.CDLL)
    assert len(compiled) == 1


def test_progress_is_logged_file_by_file(fresh, quick_sources, background, caplog):
    with caplog.at_level("DEBUG", "weft"):
        library.load()
    count = len(quick_sources)
    assert f"compiling kernels: {count} of {count}" in caplog.text


def test_a_folder_that_others_can_write_to_is_not_used(fresh):
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert compiling.cache_folder() is None
    fresh.chmod(0o700)
    assert compiling.cache_folder() == fresh


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    assert compiling.cache_folder() is None


@pytest.mark.parametrize("broken", ["no compiler", "rubbish", "compile error", "not loadable"])
def test_without_a_library_one_warning_says_why_and_torch_computes(fresh, monkeypatch, tmp_path, broken):
    if broken == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif broken == "rubbish":
        (tmp_path / "compiler").write_bytes(b"rubbish")
        (tmp_path / "compiler").chmod(0o700)
        monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    elif broken == "compile error":
        monkeypatch.setattr(compiling, "FLAGS", ("-no-such-flag",))
    else:
        monkeypatch.setattr(compiling, "call", lambda command: Path(command[-1]).write_text("no"))
    with pytest.warns(UserWarning, match="no native kernels, so single streams are slower"):
        assert not library.available()
    assert not library.available(), "told once"
    assert library.why_not(torch.float32) is not None
    if broken == "no compiler":
        assert "no-such-compiler" in library.why_not(torch.float32)


@needs_compiler
def test_answers_are_the_same_without_native_kernels(restarted, monkeypatch):
    asked = SamplingParams(max_tokens=24, temperature=0.0, logprobs=1)
    answers = []
    for switch in ("1", "0"):
        monkeypatch.setenv(compiling.SWITCH, switch)
        forget()
        llm = LLM(**tiny_model.OPTIONS, memory="32MiB")
        assert library.available() == (switch == "1")
        answers.append(llm.generate([[5, 6, 7], list(range(3, 90))], asked, use_tqdm=False))
    for ours, theirs in zip(*answers):
        assert ours.token_ids == theirs.token_ids
        for one, other in zip(ours.logprobs, theirs.logprobs):
            assert abs(one.logprob - other.logprob) < 1e-4


def test_nothing_is_said_where_it_was_switched_off(fresh, monkeypatch, recwarn):
    monkeypatch.setenv(compiling.SWITCH, "0")
    assert not library.available()
    assert not recwarn.list
    assert compiling.SWITCH in library.why_not(torch.float32)
    assert os.environ[compiling.SWITCH] == "0"


@needs_compiler
def test_dtypes_without_kernels_are_told():
    assert "float16" in library.why_not(torch.float16)
    assert library.why_not(torch.bfloat16) is None


def test_models_that_the_kernels_have_no_room_for_are_left_to_torch():
    def declined(*memories, cell=64):
        spec = MemorySpec(memories, cell=cell)
        return {group for group in DECODES if declines(group, spec) is not None}

    assert not declined(AttentionMemory(2, 256, "float32"), ssd_memory(4, 64, 256, 2, 99999, 4, "float32"))
    assert not declined(gated_delta_memory(2, 128, 4, 512, 64, 8, "bfloat16"), short_conv_memory(4096, 3, "float32"))
    assert declined(AttentionMemory(2, 513, "float32")) == {"attention"}
    assert declined(short_conv_memory(64, 9, "float32")) == {"causal_conv"}
    for large in (
        ssd_memory(4, 64, 513, 2, 64, 4, "float32"),
        ssd_memory(4, 513, 64, 2, 64, 4, "float32"),
        gated_delta_memory(2, 128, 4, 513, 64, 4, "float32"),
    ):
        assert declined(large) == {"ssd", "gated_delta", "channel_delta"}
    assert declined(cell=512) == set(DECODES)


@needs_compiler
def test_the_default_dtype_of_torch_is_nobodys_business():
    asked = SamplingParams(max_tokens=8, temperature=0.0)
    llm = LLM(**tiny_model.OPTIONS, device="cpu", memory="32MiB")
    expected = llm.generate([[5, 6, 7]], asked, use_tqdm=False)[0].token_ids
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert llm.generate([[5, 6, 7]], asked, use_tqdm=False)[0].token_ids == expected
        for step in llm.engine._device.eager.compute.steps.values():
            for prepared in step.batch.derived.values():
                prepared.renew(step.batch)
                kept = [x for x in getattr(prepared, "kept", []) if isinstance(x, torch.Tensor)]
                assert all(x.dtype == torch.float32 for x in kept)
    finally:
        torch.set_default_dtype(torch.float32)


def test_kernels_allocate_nothing_themselves():
    """A kernel that runs out of memory can only end the process; where Python allocates, an error is raised."""
    allocation = re.compile(
        r"\b(malloc|calloc|realloc|aligned_alloc|posix_memalign|std::vector|std::string|new)\b(?=.*[(;])"
    )
    found = {
        (source.name, line.strip())
        for source in compiling.FOLDER.glob("*.[ch]*")
        for line in source.read_text().splitlines()
        if allocation.search(line.split("//")[0])
    }
    # Once in a process, and tiny.
    assert found == {("pool.cpp", "static Pool* pool = new Pool;")}

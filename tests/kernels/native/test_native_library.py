"""Kernels in C++ are compiled once, kept where nobody else can write, and not missed where they cannot be had."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.support.kernels.operations import gated_delta_memory, ssd_memory
from tests.support.models import tiny_model
from tests.support.servers.held_steps import SECONDS
from weft import LLM, SamplingParams
from weft.kernels.choosing import DECODES
from weft.kernels.native import library, prebuilt
from weft.kernels.native.limits import declines, groups_of
from weft.kernels.recurrent import short_conv_memory
from weft.memory.spec import AttentionMemory, MemorySpec


def forget() -> None:
    for function in (library.library, library.attempt_for):
        function.cache_clear()
    library.Wanted.groups = library.OPTIONAL


@pytest.fixture
def restarted(monkeypatch):
    """Nothing remembered of earlier attempts; what a test finds is forgotten after it."""
    monkeypatch.delenv(library.SWITCH, raising=False)
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
    """Compile a source that takes no time; those of the kernels are compiled before the first test."""
    source, compile_library = tmp_path / "one.cpp", library.compile_library
    source.write_text("int one() { return 1; }")
    monkeypatch.setattr(
        library, "compile_library", lambda compiler, _, target: compile_library(compiler, [source], target)
    )


needs_compiler = pytest.mark.skipif(not library.available(), reason="no C++ compiler here")


@needs_compiler
def test_a_second_start_finds_what_the_first_compiled(fresh, one_source, monkeypatch):
    assert isinstance(library.load(), ctypes.CDLL)
    kept = list(fresh.iterdir())
    assert len(kept) == 1, "objects and scratch folders are gone"
    assert fresh.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(library, "compile_library", None)
    assert isinstance(library.load(), ctypes.CDLL)


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
    (path,) = fresh.iterdir()
    return path


def replace_compiler(monkeypatch, content, before=lambda: None):
    """Compiling yields this file from now on; the list grows with each time."""
    compiled = []

    def write(compiler, sources, target):
        before()
        compiled.append(target)
        target.write_bytes(content)

    monkeypatch.setattr(library, "compile_library", write)
    return compiled


@needs_compiler
@pytest.mark.parametrize("damage", [cut, rubbish, flipped, emptied])
def test_a_library_that_is_not_whole_is_compiled_again(kept, monkeypatch, caplog, damage):
    content = kept.read_bytes()
    compiled = replace_compiler(monkeypatch, content)
    overwrite(kept, damage(content))
    with caplog.at_level("WARNING", "weft"):
        assert isinstance(library.load(), ctypes.CDLL)
    assert len(compiled) == 1
    assert f"{kept} is damaged" in caplog.text
    assert list(kept.parent.iterdir()) == [kept]
    assert kept.read_bytes() == content
    library.load()
    assert len(compiled) == 1, "the new one is found"


@needs_compiler
def test_a_library_that_another_machine_compiled_is_replaced(kept, monkeypatch, caplog):
    """It is whole and cannot be loaded here, as from a home folder that machines share."""
    content = kept.read_bytes()
    overwrite(kept, b"for another kind of machine")
    foreign = kept.rename(kept.with_stem(f"{kept.stem.rpartition('-')[0]}-{prebuilt.checksum(kept)}"))
    replace_compiler(monkeypatch, content)
    with caplog.at_level("WARNING", "weft"):
        assert isinstance(library.load(), ctypes.CDLL)
    assert f"cannot load {foreign}" in caplog.text
    assert list(kept.parent.iterdir()) == [kept]


@needs_compiler
def test_starts_at_the_same_time_leave_one_whole_library(kept, monkeypatch):
    content = kept.read_bytes()
    overwrite(kept, cut(content))
    # None goes on before all have found the damaged one.
    compiled = replace_compiler(monkeypatch, content, before=threading.Barrier(4).wait)
    with ThreadPoolExecutor(4) as pool:
        assert all(isinstance(each, ctypes.CDLL) for each in pool.map(lambda _: library.load(), range(4)))
    assert len(compiled) == 4
    assert list(kept.parent.iterdir()) == [kept]
    assert kept.read_bytes() == content


@needs_compiler
def test_other_flags_and_sources_are_another_library(monkeypatch, tmp_path):
    compiler, source = library.find_compiler(), tmp_path / "one.cpp"
    source.write_text("int one() { return 1; }")
    found = {library.fingerprint(compiler, [source])}
    source.write_text("int one() { return 2; }")
    found.add(library.fingerprint(compiler, [source]))
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-g"))
    found.add(library.fingerprint(compiler, [source]))
    monkeypatch.setattr(library, "processor", lambda: "another")
    found.add(library.fingerprint(compiler, [source]))
    assert len(found) == 4


def count_sources(monkeypatch) -> list[list[str]]:
    """Return the names of the sources of each library that is compiled from now on; none takes any time."""
    compiled: list[list[str]] = []
    compile_library = library.compile_library

    def compile_one(compiler, sources, target):
        compiled.append([source.stem for source in sources])
        source = target.with_name("one.cpp")
        source.write_text("int one() { return 1; }")
        compile_library(compiler, [source], target)

    monkeypatch.setattr(library, "compile_library", compile_one)
    return compiled


@needs_compiler
def test_only_what_a_model_uses_is_compiled_and_more_when_another_needs_it(fresh, monkeypatch):
    compiled = count_sources(monkeypatch)
    attention, mixed = (AttentionMemory(1, 8, "float32"),), (short_conv_memory(4, 3, "float32"),)
    library.use(groups_of(MemorySpec(attention)))
    first = library.library()
    assert library.OPTIONAL & set(compiled[0]) == {"attention"}
    assert {"linear", "norm", "replay"} <= set(compiled[0])
    # The longest job must not be the last one to start.
    sizes = [(library.FOLDER / f"{name}.cpp").stat().st_size for name in compiled[0]]
    assert sizes == sorted(sizes, reverse=True)
    # A model that needs nothing else finds the same library.
    library.use(groups_of(MemorySpec(attention)))
    assert library.library() is first
    library.use(groups_of(MemorySpec(attention + mixed)))
    assert library.library() is not first
    assert set(compiled[1]) >= library.OPTIONAL
    # A start that finds the library of all sources compiles none of its own.
    forget()
    library.use({"ssd"})
    assert isinstance(library.attempt(), ctypes.CDLL)
    assert len(compiled) == 2


@needs_compiler
def test_kernels_compile_while_weights_load_and_once(fresh, monkeypatch):
    compiled, may_end = count_sources(monkeypatch), threading.Event()
    compile_library = library.compile_library

    def compile_later(*arguments):
        assert may_end.wait(SECONDS)
        compile_library(*arguments)

    monkeypatch.setattr(library, "compile_library", compile_later)
    library.begin({"attention"})
    may_end.set()
    assert isinstance(library.attempt(), ctypes.CDLL)
    assert len(compiled) == 1


def test_progress_is_logged_file_by_file(monkeypatch, tmp_path, caplog):
    called: list[str] = []
    monkeypatch.setattr(library, "_call", lambda command: called.append(command[-3]))
    monkeypatch.setattr(library.os, "cpu_count", lambda: 1)
    sources = [tmp_path / name for name in ("a.cpp", "b.cpp")]
    with caplog.at_level("DEBUG", "weft"):
        library.compile_library("g++", sources, tmp_path / "x.so")
    assert called[:2] == [str(source) for source in sources]
    assert "compiling kernels: 2 of 2" in caplog.text


def test_a_folder_that_others_can_write_to_is_not_used(fresh):
    fresh.mkdir(parents=True)
    fresh.chmod(0o777)
    assert library.cache_folder() is None
    fresh.chmod(0o700)
    assert library.cache_folder() == fresh


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null/nowhere")
    assert library.cache_folder() is None


@pytest.mark.parametrize("broken", ["no compiler", "rubbish", "compile error", "not loadable"])
def test_without_a_library_one_warning_says_why_and_torch_computes(fresh, monkeypatch, tmp_path, broken):
    if broken == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif broken == "rubbish":
        (tmp_path / "compiler").write_bytes(b"rubbish")
        (tmp_path / "compiler").chmod(0o700)
        monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    elif broken == "compile error":
        monkeypatch.setattr(library, "FLAGS", ("-no-such-flag",))
    else:
        monkeypatch.setattr(library, "compile_library", lambda compiler, sources, target: target.write_text("no"))
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
        monkeypatch.setenv(library.SWITCH, switch)
        forget()
        llm = LLM(**tiny_model.OPTIONS, memory="32MiB")
        assert library.available() == (switch == "1")
        answers.append(llm.generate([[5, 6, 7], list(range(3, 90))], asked, use_tqdm=False))
    for ours, theirs in zip(*answers):
        assert ours.token_ids == theirs.token_ids
        for one, other in zip(ours.logprobs, theirs.logprobs):
            assert abs(one.logprob - other.logprob) < 1e-4


def test_nothing_is_said_where_it_was_switched_off(fresh, monkeypatch, recwarn):
    monkeypatch.setenv(library.SWITCH, "0")
    assert not library.available()
    assert not recwarn.list
    assert library.SWITCH in library.why_not(torch.float32)
    assert os.environ[library.SWITCH] == "0"


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
        for source in library.FOLDER.glob("*.[ch]*")
        for line in source.read_text().splitlines()
        if allocation.search(line.split("//")[0])
    }
    # Once in a process, and tiny.
    assert found == {("pool.h", "static Pool* pool = new Pool;")}

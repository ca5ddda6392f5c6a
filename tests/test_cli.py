"""The command line: help that costs nothing, one-line errors, documentation that is derived."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.base.errors import OptionError
from weft.base.options import Facts, Options, memory_bytes, resolve
from weft.cli.generate import GenerateOptions, stats
from weft.cli.main import build_parser, main
from weft.cli.options import read_options
from weft.cli.reference import reference

SMALL = ["--memory", "16MiB", "--threads", "1", "--max-tokens", "8", "--max-length", "512"]
ROOT = Path(__file__).parent.parent


def weft(*arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "weft", *arguments], capture_output=True, text=True, input=text)


def test_help_names_every_option_and_is_quick():
    started = time.monotonic()
    found = weft("generate", "--help")
    assert time.monotonic() - started < 2.0
    assert found.returncode == 0
    for name in (
        "--model",
        "--max-tokens",
        "--temperature",
        "--seed",
        "--weights",
        "--dtype",
        "--no-stream",
        "--stats",
    ):
        assert name in found.stdout


def test_the_command_line_loads_no_torch_before_it_runs():
    code = "import sys, weft, weft.cli.main as m; m.build_parser(); assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_documentation_is_what_the_options_say():
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "run python -m weft.cli.reference > docs/cli.md"


def test_generate_streams_text_and_tells_its_pace():
    found = weft("generate", "Hello", *SMALL)
    assert found.returncode == 0
    assert found.stdout.endswith("\n")
    assert "random weights" in found.stderr
    assert "tokens/s; 0 of 5 prompt tokens cached" in found.stderr


@pytest.fixture
def quiet(capsys):
    """Runs a command in this process; its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def test_streamed_or_not_the_text_is_the_same(quiet):
    streamed = quiet("generate", "Hello", *SMALL, "--no-stats")
    assert quiet("generate", "Hello", *SMALL, "--no-stats", "--no-stream")[:2] == streamed[:2]
    assert "tokens/s" not in streamed[2]
    assert quiet("generate", "Hello", *SMALL, "--seed", "7")[1] != streamed[1]


def test_several_prompts_are_answered_together(quiet):
    code, text, told = quiet("generate", "one", "two", *SMALL)
    assert code == 0
    assert [line for line in text.splitlines() if line.startswith("---")] == ["--- 1", "--- 2"]
    assert "of 6 prompt tokens cached" in told


def test_a_prompt_may_come_from_standard_input(quiet, monkeypatch, tmp_path):
    (tmp_path / "prompt").write_text("Hello")
    with open(tmp_path / "prompt") as file:
        monkeypatch.setattr("sys.stdin", file)
        piped = quiet("generate", *SMALL)
    assert piped[:2] == quiet("generate", "Hello", *SMALL)[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "much", "x"], "--memory must be"),
        (["--max-tokens", "-1", "x"], "max_tokens must be"),
        (["--temperature", "1000", "x"], "temperature must be"),
        (["--model", "/no/such/model", "x"], "/no/such/model"),
        (["--max-length", "20", "--max-tokens", "30", "--memory", "16MiB", "x"], "exceeds max_length 20"),
        (["--depth", "7", "--memory", "16MiB", "x"], "depth must be one of 0, 1"),
    ],
)
def test_errors_are_one_line_with_exit_code_two(quiet, arguments, message):
    code, text, told = quiet("generate", *arguments)
    assert (code, text) == (2, "")
    lines = [line for line in told.splitlines() if "random weights" not in line]
    assert len(lines) == 1
    assert lines[0].startswith("weft generate: ")
    assert message in lines[0]


@pytest.mark.parametrize("arguments", [["generate", "--no-such"], ["generate", "--depth", "x"], ["fly"], []])
def test_a_wrong_command_line_is_one_line_with_exit_code_two(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m weft generate x {' '.join(SMALL)} --no-stats | true; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert found.returncode == 0
    assert "Traceback" not in found.stderr


def test_options_on_the_command_line_are_those_of_the_dataclass():
    found = vars(build_parser().parse_args(["generate", "a", "b", "--no-cache", "--depth", "1", "--memory", "1GiB"]))
    found.pop("command")
    options = read_options(GenerateOptions, found)
    assert options == GenerateOptions(prompt=("a", "b"), cache=False, depth=1, memory="1GiB")


# options into a configuration -----------------------------------------------------------------------------------------

FACTS = Facts(free_bytes=2 << 30, model_length=8192, bytes_per_token=1024, fixed_bytes=1 << 20)


def test_auto_memory_is_half_of_what_is_free_and_bounded():
    assert resolve(Options(), FACTS)[0].memory_bytes == 1 << 30
    rich = Facts(1 << 40, 8192, 1024, 1 << 20)
    config, reasons = resolve(Options(), rich)
    assert config.memory_bytes == 4 << 30
    assert "4096 MiB" in reasons["memory"]
    assert resolve(Options(memory="10MB"), rich)[0].memory_bytes == 10_000_000 // 4096 * 4096


@pytest.mark.parametrize(
    ("facts", "memory", "length"),
    [
        (FACTS, "auto", 8192),
        (Facts(8 << 30, None, 64, 0), "auto", 32768),
        (FACTS, "3MiB", 2048),
        (Facts(8 << 30, 1 << 20, 0, 0), "auto", 32768),
    ],
)
def test_auto_length_is_the_tightest_bound_and_says_which(facts, memory, length):
    config, reasons = resolve(Options(memory=memory), facts)
    assert config.max_length == length
    assert str(length) in reasons["max_length"]


def test_what_was_asked_for_is_not_decided():
    config, reasons = resolve(Options(memory="1GiB", max_length=100_000), FACTS)
    assert (config.max_length, dict(reasons)) == (100_000, {})


@pytest.mark.parametrize("value", ["", "0", "-5", "2XB", "GiB", True, None, "1e9", 0])
def test_memory_that_is_no_size_is_refused(value):
    with pytest.raises(OptionError, match="memory must be"):
        memory_bytes(value)


def test_stats_count_all_answers():
    assert stats([], 0.0) == "0 tokens in 0.00 s, 0.0 tokens/s; 0 of 0 prompt tokens cached"

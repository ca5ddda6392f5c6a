"""The command line: help that costs nothing, one-line errors, documentation that is derived."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from tests.support.fences import ROOT
from tests.support.models import tiny_model
from weft.base.aliases import SERVER, translate
from weft.base.errors import InvalidOption, OptionError
from weft.base.options import Options, SizingFacts, memory_bytes, resolve
from weft.cli.bench.options import BenchOptions
from weft.cli.generate import GenerateOptions, show_all, show_stream, stats
from weft.cli.main import COMMANDS, build_parser, main
from weft.cli.options import complaint, flag, read_options
from weft.cli.reference import reference
from weft.cli.route import RouteOptions, check_given
from weft.cli.serve import ServeOptions
from weft.offline.result import Chunk, CompletionOutput, Result, Times
from weft.text.template import ChatTemplate

SMALL = [*tiny_model.ARGUMENTS, "--memory", "16MiB", "--threads", "1", "--max-tokens", "8", "--max-length", "512"]


def options_of(name: str) -> list[str]:
    return [flag(each.name) for each in fields(COMMANDS[name].options) if not each.metadata.get("positional")]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help-all"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert options_of(name) or name == "completion"
    for option in options_of(name):
        assert option in text


# Each of these takes a good part of half a second; `--help` needs none.
SLOW_TO_LOAD = ("torch", "numpy", "tokenizers", "jinja2", "uvicorn", "starlette", "msgspec", "tqdm", "asyncio", "ssl")
SLOW_TO_LOAD += ("prompt_toolkit",)


def test_help_loads_nothing_that_takes_time():
    code = f"""
import sys
from weft.cli.main import main
for arguments in {[["--help"], *([name, "--help"] for name in COMMANDS)]!r}:
    try:
        main(arguments)
    except SystemExit:
        loaded = [name for name in {SLOW_TO_LOAD!r} if name in sys.modules]
        if loaded:
            sys.exit(f"{{arguments}} loaded {{loaded}}")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.count("usage: weft") == 1 + len(COMMANDS)


def test_the_documentation_is_what_the_options_say():
    assert (ROOT / "docs" / "cli.md").read_text() == reference(), "run python -m weft.cli.reference > docs/cli.md"


@pytest.fixture
def quiet(capsys):
    """Runs a command in this process; its exit code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run


def test_generate_streams_text_and_tells_its_pace(quiet):
    code, text, told = quiet("generate", "Hello", "--raw", *SMALL)
    assert code == 0
    assert text.endswith("\n")
    assert "tokens/s; 0 of 5 prompt tokens cached" in told


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
def test_a_chat_model_answers_a_message_unless_told_to_continue_the_text(quiet, stream):
    message = [{"role": "user", "content": "Hello"}]
    tokens = len(tiny_model.tokenizer().encode(ChatTemplate(tiny_model.TEMPLATE, {}).render(message)))
    as_chat, as_text = (quiet("generate", "Hello", *SMALL, stream, *more) for more in ([], ["--raw"]))
    assert f"of {tokens} prompt tokens" in as_chat[2]
    assert "of 5 prompt tokens" in as_text[2]
    assert as_chat[1] != as_text[1]


def test_a_model_without_a_chat_template_continues_the_text(quiet, tmp_path):
    folder = tmp_path / "plain"
    shutil.copytree(tiny_model.FOLDER, folder)
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    plain = quiet("generate", "Hello", *SMALL, "--model", str(folder))
    assert "of 5 prompt tokens" in plain[2]
    assert plain[1] == quiet("generate", "Hello", *SMALL, "--raw")[1]


def test_streamed_or_not_the_text_is_the_same(quiet):
    streamed = quiet("generate", "Hello", *SMALL, "--no-stats")
    assert quiet("generate", "Hello", *SMALL, "--no-stats", "--no-stream")[:2] == streamed[:2]
    assert "tokens/s" not in streamed[2]
    assert quiet("generate", "Hello", *SMALL, "--seed", "7")[1] != streamed[1]


def test_several_prompts_are_answered_together(quiet):
    code, text, told = quiet("generate", "one", "two", "--raw", *SMALL)
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
        (["--memory", "9999999GiB", "x"], "cannot allocate memory of 9999999.0 GiB"),
        (["--memory", "9" * 400, "x"], "--memory must be"),
        (["--max-tokens", "-1", "x"], "max_tokens must be"),
        (["--temperature", "1000", "x"], "temperature must be"),
        (["--model", "/no/such/model", "x"], "/no/such/model"),
        (["--chat-template", "/no/such.jinja", "x"], "chat_template: cannot read /no/such.jinja: No such file"),
        (["--max-length", "20", "--max-tokens", "30", "--memory", "32MiB", "x"], "exceeds the context of 20"),
        (["--depth", "7", "--memory", "32MiB", "x"], "--depth must be one of 0, 1"),
    ],
)
def test_errors_are_one_line_with_exit_code_two(quiet, arguments, message):
    code, text, told = quiet("generate", *arguments)
    assert (code, text) == (2, "")
    lines = told.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("weft generate: ")
    assert message in lines[0]


def test_only_an_error_that_names_its_option_is_rewritten_as_a_flag():
    assert complaint(InvalidOption("max_length", "must be\npositive"), Options) == "--max-length must be positive"
    assert complaint(InvalidOption("n", "must be positive"), Options) == "n must be positive"
    named = complaint(
        InvalidOption("max_length", "must be positive"), Options, {"max_length": "weft.yaml:3: max-length"}
    )
    assert named == "weft.yaml:3: max-length must be positive"
    assert complaint(OptionError("memory of this machine is full"), Options) == "memory of this machine is full"


@pytest.mark.parametrize("terminal", [True, False])
def test_an_answer_cannot_control_the_terminal(monkeypatch, capsys, terminal):
    """A file or pipe gets the answer as it is."""
    evil, shown = "a\x1b]0;title\x07b\u202e\n", "a]0;titleb\n" if terminal else "a\x1b]0;title\x07b\u202e\n"
    result = Result("0", None, [], [CompletionOutput(0, evil, [], "stop")], Times(0.0))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    show_stream([Chunk(evil[:2], (), None), Chunk(evil[2:], (), None, "stop", result)])
    show_all([result])
    assert capsys.readouterr().out == f"{shown}\n{shown}\n"


@pytest.mark.parametrize("arguments", [["generate", "--no-such"], ["generate", "--depth", "x"], ["fly"], []])
def test_a_wrong_command_line_is_one_line_with_exit_code_two(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_closed_pipe_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    with open(writes, "w") as pipe:
        command = [sys.executable, "-m", "weft", "completion", "bash"]
        found = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_options_on_the_command_line_are_those_of_the_dataclass():
    arguments = ["generate", "a", "b", "--no-cache", "--depth", "1", "--memory", "1GiB"]
    assert read(*arguments) == GenerateOptions(prompt=("a", "b"), cache=False, depth=1, memory="1GiB")
    assert read("generate") == GenerateOptions()


def read(name: str, *arguments: str) -> Any:
    """The options that a command would run with."""
    given, _ = translate(arguments, COMMANDS[name].aliases)
    found = vars(build_parser().parse_args([name, *given]))
    found.pop("command")
    return read_options(COMMANDS[name].options, found)


@pytest.mark.parametrize("name", COMMANDS)
def test_without_arguments_every_option_has_its_default(name):
    assert read(name) == COMMANDS[name].options()


def test_a_router_needs_replicas_and_a_secret():
    given = ["tcp://a:1", "tcp://b:1", "--fleet-secret", "file"]
    assert read("route", *given) == RouteOptions(replica=("tcp://a:1", "tcp://b:1"), fleet_secret="file")
    for arguments in ([], given[:2], given[2:], [*given, "--replicas-file", "list"]):
        with pytest.raises(InvalidOption, match=r"replicas_file|fleet_secret"):
            check_given(read("route", *arguments))


@pytest.mark.parametrize("name", ["serve", "chat", "doctor"])
def test_a_model_is_named_by_its_place_or_by_an_option(name):
    for arguments in (["m", "--depth", "1"], ["--depth", "1", "m"], ["--model", "m", "--depth", "1"]):
        assert read(name, *arguments) == COMMANDS[name].options(model="m", depth=1)


def test_an_option_may_be_repeated_where_it_holds_several():
    assert read("serve", "--api-key", "a", "--api-key", "b").api_key == ("a", "b")


# flags of other engines -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("--model-path m", {"model": "m"}),
        ("--model m --tokenizer-path t", {"model": "m", "tokenizer": "t"}),
        ("--max-model-len 4096", {"max_length": "4096"}),
        ("--context-length=4096", {"max_length": "4096"}),
        ("--max-model-len -1", {"max_length": "auto"}),
        ("--max-num-seqs 8", {"max_sequences": 8}),
        ("--max-running-requests 8", {"max_sequences": 8}),
        ("--max-num-batched-tokens 512", {"max_tokens_per_step": 512}),
        ("--chunked-prefill-size 512", {"max_tokens_per_step": 512}),
        ("--dp-size=1 --pp 1", {}),
        ("--tp 2 --enable-expert-parallel", {"tensor_parallel": 2, "expert_parallel": True}),
        ("--no-enable-prefix-caching", {"cache": False}),
        ("--disable-radix-cache", {"cache": False}),
        ("--enable-prefix-caching", {"cache": True}),
        ("--load-format dummy", {"weights": "dummy"}),
        ("--load-format safetensors", {"weights": "checkpoint"}),
        ("--disable-overlap-schedule", {"depth": 0}),
        ("--async-scheduling", {"depth": 1}),
        ("--schedule-policy lpm", {"order": "prefix"}),
        ("--schedule-policy fcfs", {"order": "fcfs"}),
        ("--dtype half", {"dtype": "float16"}),
        ("--dtype bfloat16", {"dtype": "bfloat16"}),
        ("--random-seed 7", {"seed": 7}),
        ("--tool-call-parser qwen25 --enable-auto-tool-choice", {"tool_parser": "hermes"}),
        ("--reasoning-parser qwen3", {"reasoning_parser": "think"}),
        ("--gpu-memory-utilization 0.5 --enforce-eager --device cpu", {"memory_fraction": 0.5, "device": "cpu"}),
        ("--mem-fraction-static=0.8", {"memory_fraction": 0.8}),
        ("--quantization fp8", {"quantize": "fp8"}),
        ("-q mxfp4", {"quantize": "off"}),
        ("--quantization=modelopt_fp8 --kv-cache-dtype auto --moe-runner-backend triton", {}),
        ("--kv-cache-dtype fp8_e4m3", {"kv_dtype": "fp8"}),
        ("--served-model-name a --host ::1 --port 30000", {"served_model_name": "a", "host": "::1", "port": 30000}),
    ],
)
def test_flags_of_other_engines_mean_what_they_mean_there(arguments, options):
    assert read("serve", *arguments.split()) == ServeOptions(**options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pipeline-parallel-size 2", "--pipeline-parallel-size 2: use --tensor-parallel"),
        ("--ep=8", "--ep 8: use --tensor-parallel with --expert-parallel"),
        ("--trust-remote-code", "--trust-remote-code: Weft never runs code from a model's folder"),
        ("-q bitsandbytes", "-q bitsandbytes: --quantize fp8, int8, int4 or mxfp4 quantises"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype fp8_e5m2: must be one of fp8_e4m3, auto, fp8"),
        ("--calculate-kv-scales", "--calculate-kv-scales: the KV cache has no scales"),
        ("--quantization-param-path a.json", "the KV cache has no scales"),
        ("--torchao-config int4wo-128", "--torchao-config int4wo-128: use --quantize"),
        ("--load-format gguf", "--load-format gguf: must be one of dummy, auto, safetensors"),
        ("--disable-radix-cache=yes", "takes no value"),
        ("--max-model-len", "needs a value"),
        ("--page-size 16", "64 tokens"),
        ("--max-num-seqs 0", "max_sequences must be at least 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused_in_one_line(quiet, arguments, message):
    code, text, told = quiet("doctor", "--memory", "32MiB", "--no-self-test", *arguments.split())
    assert message in (told or text)
    if code == 2:
        assert (text, len(told.splitlines())) == ("", 1)
        assert told.startswith("weft doctor: ")
    else:
        assert (code, arguments) == (1, "--max-num-seqs 0"), "only what needs the model may come later"


def test_flags_without_effect_are_told(quiet):
    _, _, told = quiet("doctor", *tiny_model.ARGUMENTS, "--memory", "16MiB", "--no-self-test", "--enforce-eager")
    assert told.splitlines() == ["weft doctor: --enforce-eager: decode steps on a GPU always use CUDA graphs"]


def test_flags_of_other_benchmarks_mean_what_they_mean_there():
    given = (
        "--base-url u --backend openai-chat --dataset-name generated-shared-prefix --num-prompts 5 --request-rate inf"
    )
    given += " --gsp-num-groups 3 --gsp-system-prompt-len 64 --random-output-len 7 --max-concurrency 2"
    given += " --disable-tqdm"
    assert read("bench", *given.split()) == BenchOptions(
        url="u",
        form="chat",
        workload="generated-shared-prefix",
        prompts=5,
        groups=3,
        prefix_length=64,
        output_length=7,
        concurrency=2,
        progress=False,
    )


@pytest.mark.parametrize("command", ["serve", "bench"])
def test_every_alias_leads_to_options_that_exist(command):
    known = {name for action in parser_of(command)._actions for name in action.option_strings}
    aliases = COMMANDS[command].aliases
    for alias in aliases:
        assert set(alias.to[:1]) <= known, alias
        assert not set(alias.names) & (known - set(alias.to)), f"{alias.names} would hide an option of ours"
    names = [name for alias in aliases for name in alias.names]
    assert len(set(names)) == len(names)


def parser_of(command: str) -> argparse.ArgumentParser:
    [commands] = [each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return commands.choices[command]


def test_what_follows_two_dashes_is_left_alone():
    assert translate(["--", "--disable-radix-cache"], SERVER) == (["--", "--disable-radix-cache"], [])


# options into a configuration -----------------------------------------------------------------------------------------


def facts(free_bytes: int, model_length: int | None, bytes_per_token: int, fixed_bytes: int) -> SizingFacts:
    return SizingFacts(free_bytes, model_length, lambda size: (size - fixed_bytes) // bytes_per_token, fixed_bytes)


FACTS = facts(free_bytes=2 << 30, model_length=8192, bytes_per_token=1024, fixed_bytes=1 << 20)


def test_auto_memory_is_half_of_what_is_free_and_bounded():
    assert resolve(Options(), FACTS)[0].memory_bytes == 1 << 30
    rich = facts(1 << 40, 8192, 1024, 1 << 20)
    config, reasons = resolve(Options(), rich)
    assert config.memory_bytes == 4 << 30
    assert "4096 MiB" in reasons["memory"]
    assert resolve(Options(memory="10MB"), rich)[0].memory_bytes == 10_000_000 // 4096 * 4096


@pytest.mark.parametrize(
    ("known", "memory", "length"),
    [
        (FACTS, "auto", 8192),
        (facts(8 << 30, None, 64, 0), "auto", 32768),
        (FACTS, "3MiB", 2048),
        (facts(8 << 30, 1 << 20, 1, 0), "auto", 32768),
    ],
)
def test_auto_length_is_the_tightest_bound_and_says_which(known, memory, length):
    config, reasons = resolve(Options(memory=memory), known)
    assert config.max_length == length
    assert str(length) in reasons["max_length"]


def test_what_was_asked_for_is_not_decided():
    config, reasons = resolve(Options(memory="1GiB", max_length=100_000, draft="off"), FACTS)
    assert (config.max_length, dict(reasons)) == (100_000, {})


@pytest.mark.parametrize("value", ["", "0", "-5", "2XB", "GiB", True, None, "1e9", 0])
def test_memory_that_is_no_size_is_refused(value):
    with pytest.raises(OptionError, match="memory must be"):
        memory_bytes(value)


def test_stats_count_all_answers():
    assert stats([], 0.0) == "0 tokens in 0.00 s, 0.0 tokens/s; 0 of 0 prompt tokens cached (0%)"

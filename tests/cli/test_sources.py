"""Options from the command line, the environment and a file: precedence, errors with their place, what is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.cli.config import ConfigOptions
from weft.cli.generate import GenerateOptions
from weft.cli.main import COMMANDS, collected, main
from weft.cli.options import read_options
from weft.cli.serve import ServeOptions
from weft.cli.sources import ALTERNATIVES, SECRETS, GivenOptions, collect, settable, variable, with_keys

KNOWN = {name for name, _, _ in settable(ServeOptions)}
# A value other than the default, as text, for the options that do not take any word.
TEXTS = {"port": "1", "limit": "n=4", "memory_fraction": "0.5", "max_step_ms": "40", "uds_mode": "660"}


def write(folder: Path, text: str) -> str:
    (folder / "weft.yaml").write_text(text)
    return str(folder / "weft.yaml")


def found_for(given: dict, environment: dict, file: str | None = None, options: type = ServeOptions) -> GivenOptions:
    return collect(options, given | ({} if file is None else {"config": file}), environment, KNOWN)


def text_of(name: str, hint: object, choices: tuple[str, ...]) -> str:
    if choices:
        return choices[-1]
    return TEXTS.get(name, "on" if "bool" in str(hint) else "3" if "int" in str(hint) or "float" in str(hint) else "x")


@pytest.mark.parametrize("command", [name for name, each in COMMANDS.items() if each.takes_file])
def test_every_option_comes_from_a_variable_and_from_a_file_alike(command, tmp_path, monkeypatch):
    options = COMMANDS[command]
    for name, hint, choices in settable(options.options):
        text = text_of(name, hint, choices)
        monkeypatch.setenv(variable(name), text)
        by_variable = collected(options, {}).values
        monkeypatch.delenv(variable(name))
        assert set(by_variable) == {name}
        if name in SECRETS:
            continue
        by_file = collected(options, {"config": write(tmp_path, f"{name.replace('_', '-')}: {text}\n")}).values
        assert by_file == by_variable, name


def test_the_command_line_comes_before_the_environment_and_that_before_the_file(tmp_path):
    file = write(tmp_path, "port: 1\nhost: file\nlog-level: debug\nmax_length: 100\n")
    found = found_for({"port": 3}, {"WEFT_PORT": "2", "WEFT_HOST": "variable"}, file)
    assert found.values == {"port": 3, "host": "variable", "log_level": "debug", "max_length": "100"}
    assert found.names == {
        "port": "--port",
        "host": "WEFT_HOST",
        "log_level": f"{file}:3: log-level",
        "max_length": f"{file}:4: max-length",
    }


def test_two_options_that_say_the_same_do_not_come_from_two_places(tmp_path):
    file = write(tmp_path, "api-key-file: keys\nadmin-key-file: admin\n")
    found = found_for({}, {"WEFT_API_KEY": "a, b", "WEFT_ADMIN_KEY": ""}, file)
    assert found.values == {"api_key": ("a", "b"), "admin_key_file": "admin"}
    assert found_for({"api_key_file": "mine"}, {"WEFT_API_KEY": "a"}).values == {"api_key_file": "mine"}
    both = found_for({}, {"WEFT_API_KEY": "a", "WEFT_API_KEY_FILE": "keys"}).values
    assert both == {"api_key": ("a",), "api_key_file": "keys"}
    assert {name for each in ALTERNATIVES for name in each} <= KNOWN | {"replica", "replicas_file"}


def test_values_have_the_command_lines_syntax(tmp_path):
    file = write(
        tmp_path, "draft: off\nexact: on\ncache: no\nuds-mode: 0660\nallowed-host: [a, b]\ncors-origin: c\ndisk:\n"
    )
    found = found_for({}, {}, file)
    assert read_options(ServeOptions, found.values) == ServeOptions(
        draft="off", exact=True, cache=False, uds_mode="0660", allowed_host=("a", "b"), cors_origin=("c",)
    )
    assert found_for({}, {"WEFT_CACHE": "1", "WEFT_EXACT": "AUTO", "WEFT_MAX_SEQUENCES": "8"}).values == {
        "cache": True,
        "exact": "auto",
        "max_sequences": 8,
    }


def test_what_kubernetes_sets_is_ignored_with_a_warning_and_unknown_variables_without_one():
    pod = {
        "WEFT_PORT": "tcp://10.96.0.7:80",
        "WEFT_PORT_80_TCP": "tcp://10.96.0.7:80",
        "WEFT_PORT_80_TCP_PORT": "80",
        "WEFT_SERVICE_HOST": "10.96.0.7",
        "WEFT_SERVICE_PORT": "80",
        "WEFT_NO_SUCH_OPTION": "x",
    }
    found = found_for({}, pod)
    assert found.values == {}
    [note] = found.notes
    assert note.startswith("WEFT_PORT=tcp://10.96.0.7:80 is ignored")
    assert "enableServiceLinks: false" in note
    # This one is an option's own syntax.
    assert found_for({}, {"WEFT_KV_EVENTS": "tcp://127.0.0.1:5557"}).values == {"kv_events": "tcp://127.0.0.1:5557"}


def test_a_program_without_a_command_line_takes_only_keys_from_the_environment():
    environment = {"WEFT_API_KEY": "a,b", "WEFT_ADMIN_KEY": "c", "WEFT_PORT": "9", "WEFT_MODEL": "other"}
    assert with_keys(ServeOptions(), environment) == ServeOptions(api_key=("a", "b"), admin_key="c")
    mine = ServeOptions(api_key_file="keys", admin_key="d")
    assert with_keys(mine, environment) == mine


def test_prompts_come_from_the_command_line_only():
    assert found_for({}, {"WEFT_PROMPT": "hello"}, options=GenerateOptions).values == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("host: a\nport: 70000\n", ":2: port must be from 0 to 65535, got 70000"),
        ("port: x\n", ":1: port must be a whole number, got 'x'"),
        ("\nmemory-fraction: much\n", ":2: memory-fraction must be a number, got 'much'"),
        ("dtype: int3\n", ":1: dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        ("cache: maybe\n", ":1: cache must be one of on, true, yes, 1, off"),
        ("exact: maybe\n", ":1: exact must be one of on, off, auto, got 'maybe'"),
        ("prot: 80\n", ":1: unknown option 'prot'; did you mean port?"),
        ("port: 80\nport: 81\n", ":2: port is given twice"),
        ("max-length: 80\nmax_length: 81\n", ":2: max_length is given twice"),
        ("host: [a, b]\n", ":1: host must be one value, got a list of 2"),
        ("limit: {n: 4}\n", ":1: limit must be a value or a list of values"),
        ("limit: [[n=4]]\n", ":1: limit must be a value or a list of values"),
        ("[host]: a\n", ":1: unknown option ''"),
        ("api-key: secret\n", ":1: api-key must not stand in a config file; name a file with api-key-file"),
        ("- port\n", ":1: must be a mapping of options"),
        ("host: a\nport: [1\n", ":3: is not YAML: "),
        ("port: 1\n\thost: a\n", ":2: is not YAML: "),
        ("a: \x00\n", ": is not YAML: "),
        (f"a: {'[' * 5000}\n", ": is not YAML: "),
        ("x" * 70_000, "must be at most 65536 bytes long"),
    ],
)
def test_errors_name_file_and_line(tmp_path, capsys, text, message):
    file = write(tmp_path, text)
    assert main(["config", "--config", file]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"{file}{message}" in line or (message in line and file in line)
    assert "secret" not in line


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("WEFT_PORT", "70000", "WEFT_PORT must be from 0 to 65535, got 70000"),
        ("WEFT_PORT", "eighty", "WEFT_PORT must be a whole number, got 'eighty'"),
        ("WEFT_LOG_LEVEL", "loud", "WEFT_LOG_LEVEL must be one of debug"),
        ("WEFT_CONFIG", "/no/such.yaml", "cannot read the config file /no/such.yaml: No such file"),
    ],
)
def test_errors_name_the_variable(monkeypatch, capsys, name, value, message):
    monkeypatch.setenv(name, value)
    assert main(["config"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"weft config: {message}")


def test_config_prints_every_value_with_its_source_and_no_key(tmp_path, monkeypatch, capsys):
    file = write(tmp_path, "port: 8080\nallowed-host: [a, b]\n")
    monkeypatch.setenv("WEFT_CONFIG", file)
    monkeypatch.setenv("WEFT_API_KEY", "very-secret")
    assert main(["config", "--max-model-len", "4096"]) == 0
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert sorted(rows) == sorted(
        [
            ["max-length", "4096", "--max-length"],
            ["port", "8080", f"{file}:1: port"],
            ["allowed-host", "a,b", f"{file}:2: allowed-host"],
            ["api-key", "(hidden)", "WEFT_API_KEY"],
        ]
    )
    assert main(["config", "--show"]) == 0
    text = capsys.readouterr().out
    shown = {line.split()[0]: line.split()[-1] for line in text.splitlines()}
    assert set(shown) == {name.replace("_", "-") for name, _, _ in settable(ServeOptions)}
    assert shown["device"] == "default"
    assert "very-secret" not in text


def test_config_says_when_nothing_was_given(monkeypatch, capsys):
    for name, _, _ in settable(ConfigOptions):
        monkeypatch.delenv(variable(name), raising=False)
    assert main(["config"]) == 0
    assert capsys.readouterr().out == "every option has its default; --show prints them\n"


def test_a_commands_notes_come_as_warnings(monkeypatch, capsys):
    monkeypatch.setenv("WEFT_PORT", "tcp://10.0.0.1:80")
    assert main(["config"]) == 0
    assert "WEFT_PORT=tcp://10.0.0.1:80 is ignored" in capsys.readouterr().err

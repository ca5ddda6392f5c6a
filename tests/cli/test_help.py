"""Help that groups options and shows examples, hints for misspelt ones, and completion in shells."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from dataclasses import fields

import pytest

from weft.base.aliases import translate
from weft.base.options import Options
from weft.cli.completion import SHELLS, completed
from weft.cli.groups import COMMON, ENGINE, EXAMPLES, GROUPS
from weft.cli.main import COMMANDS, build_parser, main
from weft.cli.options import flag, own_names


def help_of(name: str, capsys: pytest.CaptureFixture[str], option: str = "--help-all") -> str:
    with pytest.raises(SystemExit):
        main([name, option])
    return capsys.readouterr().out


# groups and examples --------------------------------------------------------------------------------------------------


def test_groups_name_existing_options_once():
    assert set(GROUPS) <= set(COMMANDS)
    for known, groups in [({each.name for each in fields(Options)}, ENGINE)] + [
        (own_names(COMMANDS[name].options), GROUPS[name]) for name in GROUPS
    ]:
        named = " ".join(groups.values()).split()
        assert set(named) <= known
        assert len(set(named)) == len(named)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_groups_in_order_examples_and_a_usage_of_one_line(name, capsys):
    text = help_of(name, capsys)
    titles = [*GROUPS.get(name, ()), *(ENGINE if issubclass(COMMANDS[name].options, Options) else ())]
    places = [text.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    assert re.match(rf"usage: weft {name} \[options\].*\n\n", text)
    assert all(f"\n  {line}\n" in text for line in EXAMPLES[name])


def test_an_option_stands_in_its_group(capsys):
    text = help_of("serve", capsys)
    assert text.index("\naccess:") < text.index("--api-key KEY ") < text.index("\nlimits:")
    assert text.index("\nscheduling:") < text.index("--max-sequences") < text.index("\nreproducing")


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines if line.startswith("weft ")])
def test_every_example_is_accepted(line):
    _, name, *given = shlex.split(line.partition(" <")[0].partition(" >")[0])
    translated, notes = translate(given, COMMANDS[name].aliases)
    assert (notes, build_parser().parse_args([name, *translated]).command) == ([], name)


def test_help_shows_what_most_people_need_and_where_the_rest_is(capsys):
    for name in ("serve", "route", "config"):
        short, full = help_of(name, capsys, "--help"), help_of(name, capsys)
        shown, all_shown = (set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)) for text in (short, full))
        left = len(all_shown - shown)
        assert shown < all_shown
        assert len(shown) <= 26, sorted(shown)
        found = re.search(rf"(\d+) more options: weft {name} --help-all", short)
        assert found is not None
        assert int(found[1]) == left
        assert "more options" not in full
    assert {"--port", "--memory", "--config", "--help-all"} <= shown


def test_options_shown_first_exist():
    for name, names in COMMON.items():
        known = Options if name == "engine" else COMMANDS[name].options
        assert set(names.split()) <= {each.name for each in fields(known)}


# hints ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sreve"], "weft: unknown command sreve; did you mean serve? (see weft --help)"),
        (["fly"], "weft: unknown command fly (see weft --help)"),
        (["serve", "--prot", "80"], "weft serve: unknown option --prot; did you mean --port? (see weft serve --help)"),
        (["serve", "--max-model-length=8"], "weft serve: unknown option --max-model-length; did you mean --max-mod"),
        (["generate", "x", "--no-streem"], "weft generate: unknown option --no-streem; did you mean --no-stream?"),
        (["serve", "a", "b"], "weft serve: unknown argument b (see weft serve --help)"),
    ],
)
def test_what_is_misspelt_gets_a_hint_in_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


# completion -----------------------------------------------------------------------------------------------------------


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["weft", "s"], ["serve", "simulate"]),
        (["weft", "serve", "--log-f"], ["--log-format"]),
        (["weft", "serve", "--no-log"], ["--no-log-requests"]),
        (["weft", "serve", "--log-format", ""], ["text", "json"]),
        (["weft", "generate", "--dtype", "b"], ["bfloat16"]),
        (["weft", "generate", "--log-f"], []),
        (["weft", "completion", "z"], ["zsh"]),
    ],
)
def test_bash_completes_commands_options_and_values(capsys, words, expected):
    asked = (
        f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; _weft; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    command = ["bash", "--norc", "-c", f"{script('bash', capsys)}\n{asked}"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.split() == expected


def test_scripts_name_every_option_of_every_command(capsys):
    for shell in SHELLS:
        text = script(shell, capsys)
        for name, command in COMMANDS.items():
            for each in fields(command.options):
                option = flag(each.name)
                if not each.metadata.get("positional"):
                    assert (option if shell != "fish" else f"from {name}' -l {option[2:]}") in text


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_are_valid_where_their_shell_is_installed(shell, capsys):
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    checked = subprocess.run([found, "-n"], input=script(shell, capsys), capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_completion_takes_the_users_shell_and_refuses_others(capsys, monkeypatch):
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert main(["completion"]) == 0
    assert "for fish" in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    for arguments in (["completion"], ["completion", "tcsh"]):
        assert main(arguments) == 2
        assert "bash, zsh, fish" in capsys.readouterr().err


def test_a_completed_flag_is_one_that_the_parser_knows():
    parser = build_parser()
    for name, command in COMMANDS.items():
        for each in completed(name, command.about, command.options).options:
            if each.name.startswith("-") and not each.takes_value and not each.name.startswith("--help"):
                parser.parse_args([name, each.name])

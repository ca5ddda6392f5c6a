"""`--model NAME=PATH` and what goes with it: on the command line, in variables, in files; and the shares of memory."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.support.fences import ROOT
from tests.support.models import tiny_model
from weft.base.errors import OptionError
from weft.base.options import Options
from weft.cli.main import COMMANDS, collected, main, parse
from weft.cli.options import read_options
from weft.cli.serve import ServeOptions, alone, settings_of
from weft.cli.several import models_of
from weft.start.several import SeveralServed
from weft.start.shares import PROCESS_BYTES, shares_of

GIB = 1 << 30


def given(*arguments: str) -> ServeOptions:
    found: argparse.Namespace = parse(["serve", *arguments])
    named = {name: value for name, value in vars(found).items() if name != "command"}
    return read_options(ServeOptions, collected(COMMANDS["serve"], named).values)


def test_models_have_names_and_options_of_their_own():
    options = given(
        "--model", "a=./a,memory=8GiB,cache=off,tool-parser=none", "--model", "b=owner/b", "--memory", "2GiB"
    )
    first, second = models_of(options)
    assert (first.name, first.options.model, first.options.memory, first.options.cache) == ("a", "./a", "8GiB", False)
    assert first.settings == {"tool_parser": "none"}
    assert (second.name, second.options.model, second.options.memory) == ("b", "owner/b", "2GiB")


def test_a_model_without_a_name_is_the_only_one_as_before():
    for arguments in (["./a"], ["--model", "./a"], ["--model", "./a=b"]):
        options = given(*arguments)
        assert (options.model, options.models) == (arguments[-1], ())


def test_one_named_model_is_an_ordinary_server_under_that_name():
    options = alone(given("--model", "a=./a,threads=1", "--alias", "gpt-4o=a"))
    assert (options.model, options.threads, options.models) == ("./a", 1, ())
    settings = settings_of(options)
    assert (settings.model_name, settings.aliases) == ("a", (("gpt-4o", "a"),))


def test_variables_and_files_name_models_too(monkeypatch, tmp_path):
    monkeypatch.setenv("WEFT_MODELS", "a=./a,memory=8GiB,b=./b")
    assert [(each.name, each.options.memory) for each in models_of(given())] == [("a", "8GiB"), ("b", "auto")]
    monkeypatch.delenv("WEFT_MODELS")
    for text in (
        "models: [a=./a, 'b=./b,memory=1GiB']",
        "models:\n  a: ./a\n  b:\n    memory: 1GiB\n    path: ./b\n",
    ):
        (tmp_path / "weft.yaml").write_text(text)
        first, second = models_of(given("--config", str(tmp_path / "weft.yaml")))
        assert (first.name, first.options.model, first.options.memory) == ("a", "./a", "auto")
        assert (second.name, second.options.model, second.options.memory) == ("b", "./b", "1GiB")


@pytest.mark.parametrize("text", ["models:\n  a:\n    memory: 1GiB\n", "models:\n  a: [x]\n", "models:\n  a: x,y\n"])
def test_a_file_says_how_models_look(text, tmp_path):
    (tmp_path / "weft.yaml").write_text(text)
    with pytest.raises(OptionError, match=r"weft.yaml:1: models: a must have"):
        given("--config", str(tmp_path / "weft.yaml"))


def test_the_example_is_one_that_runs():
    path = ROOT / "examples" / "several-models.yaml"
    options = given("--config", str(path))
    models = models_of(options)
    served = SeveralServed.of(models, str(options.models_memory), 600.0)
    assert [each.name for each in served.models] == ["small", "long"]
    assert served.shares.models["long"].options.memory == 512 << 20


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["m", "--model", "a=x"], "model cannot be combined with --model NAME=PATH; name every model"),
        (["--model", "a=x", "--model", "a=y"], "must have different names, got 'a' twice"),
        (["--model", "a=x", "--model", "b=y", "--alias", "b=a"], "must have different names, got 'b' twice"),
        (["--model", "a=x,memry=3"], "a: 'memry' is no option of a model; did you mean memory?"),
        (["--model", "a=x,memory=3GiB,memory=4GiB"], "a: memory is given twice"),
        (["--model", "a=x,memory=foo"], "model a: memory must be a size"),
        (["--model", "a=x,threads=many"], "model a: threads must be a whole number, got 'many'"),
        (["--model", "memory=x"], "must be NAME=PATH, such as small=./checkpoint, got 'memory=x'"),
        (["--model", "a=x", "--alias", "g=b"], "g must stand for one of a, got 'b'"),
        (["--alias", "g"], "must be ALIAS=NAME"),
        (["--keep-alive", "5m"], "needs several models"),
        (["--models-memory", "5GiB"], "needs several models"),
        (["--model", "a=x", "--model", "b=y", "--keep-alive", "soon"], "must be a time such as 5m, 90 or -1"),
        (["--model", "a=x", "--model", "b=y", "--replicas", "2"], "each of several models has one engine"),
        (["--model", "a=x", "--model", "b=y", "--in-process"], "each model has a process of its own"),
        (["--model", "a=x", "--model", "b=y", "--tokenizer", "t"], "NAME=PATH,tokenizer=FOLDER"),
        (["--model", "a=x", "--model", "b=y", "--served-model-name", "t"], "names are those of --model NAME=PATH"),
        (["--model", "a=x", "--model", "b=y", "--restart-engine"], "is loaded again for the next request"),
        (["--model", "a=x,disk=f,disk-size=1GiB", "--model", "b=y,disk=f,disk-size=1GiB"], "another file for each"),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(arguments, complaint):
    with pytest.raises(OptionError) as error:
        given(*arguments)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


# memory ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder whose weights have a GiB, none of which is on the disk."""
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(GIB)
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def shares(models: dict[str, Options], memory: str = "auto", gpu: bool = False, free: int = 40 * GIB):
    return shares_of(models, memory, lambda: gpu, lambda: free)


def test_models_share_memory_equally_up_to_four_gib_of_cache_each(folder):
    found = shares({"a": Options(model=folder), "b": Options(model=folder, memory="1GiB")}, "10GiB")
    process = PROCESS_BYTES["cpu"]
    assert found.models["a"].options.memory == 5 * GIB - GIB - process
    assert (found.models["b"].options.memory, found.models["b"].cost) == (GIB, 2 * GIB + process)
    assert sum(each.cost for each in found.models.values()) <= found.budget
    plenty = shares({"a": Options(model=folder), "b": Options(model=folder)})
    assert plenty.budget == 32 * GIB
    assert plenty.models["a"].options.memory == 4 * GIB


def test_models_that_do_not_fit_together_take_turns_and_get_half_of_the_rest(folder):
    found = shares({name: Options(model=folder) for name in "abc"}, "4.5GiB")
    assert found.models["a"].options.memory == int(1.5 * GIB)
    assert sum(each.cost for each in found.models.values()) > found.budget


def test_a_model_that_cannot_fit_alone_is_refused_with_figures(folder):
    with pytest.raises(OptionError, match=r"model b needs 9\.50 GiB \(1\.00 GiB of weights, 8\.00 GiB of KV cache"):
        shares({"a": Options(model=folder), "b": Options(model=folder, memory="8GiB")}, "8GiB")
    with pytest.raises(OptionError, match=r"model a needs .* but all models may use 1\.00 GiB"):
        shares({"a": Options(model=folder)}, "1GiB")


def test_a_gpu_is_for_one_model_at_a_time_unless_its_memory_is_named(folder):
    models = {"a": Options(model=folder), "b": Options(model=folder)}
    alone = shares(models, gpu=True)
    assert (alone.budget, [each.cost for each in alone.models.values()]) == (1, [1, 1])
    assert alone.models["a"].options.memory == "auto"
    named = shares(models, "20GiB", gpu=True)
    assert named.models["a"].cost == GIB + PROCESS_BYTES["cuda"] + 4 * GIB
    on_cpu = {name: Options(model=folder, device="cpu") for name in "ab"}
    assert shares(on_cpu, gpu=True).budget == 32 * GIB


def test_a_model_that_is_not_there_is_named(monkeypatch):
    with pytest.raises(OptionError, match=r"model b: there is no folder ./nosuchdir"):
        shares({"a": Options(), "b": Options(model="./nosuchdir")})
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OptionError, match=r"model c: owner/never-pulled is not on this machine; run weft pull"):
        shares({"c": Options(model="owner/never-pulled")})


def test_doctor_examines_each_model_with_its_share(capsys):
    models = [word for name in "ab" for word in ("--model", f"{name}={tiny_model.FOLDER},max-length=512")]
    limits = ["--memory", "64MiB", "--models-memory", "4GiB", "--weights", "dummy", "--threads", "1", "--no-self-test"]
    assert main(["doctor", *models, *limits]) == 0
    text = capsys.readouterr().out
    assert "4.00 GiB for a 0.56 GiB, b 0.56 GiB" in text
    assert text.count("memory:               0.06 GiB") == 2

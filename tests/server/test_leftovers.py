"""A server that is killed leaves no file behind: no process of it has a chance to tidy up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.held_steps import wait_until
from tests.support.servers.serving import Served, command_of, serving

# Where oneDNN lists the kernels that it has compiled on ARM, whatever the temporary directory is.
MAPS = Path("/tmp")
SAY = 'import os, weft; print(os.environ.get("ONEDNN_JIT_PROFILE"))'


def descendants(process: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in map(int, (thread / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def has_ended(process: int) -> bool:
    """Return whether a process is gone, or only waits to be noticed by its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def kill(served: Served, program: str | None) -> list[int]:
    """Kill a server, or the process of it that runs a program; return all of its processes when they have ended."""
    children = descendants(served.process.pid)
    victims = [each for each in children if program is not None and program in command_of(str(each))]
    os.kill(victims[0] if program else served.process.pid, signal.SIGKILL)
    served.process.wait()
    wait_until(lambda: all(map(has_ended, children)))
    return [served.process.pid, *children]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        pytest.param("1", None, id="a server"),
        pytest.param("2", None, id="a server with two ranks", marks=pytest.mark.thorough),
        pytest.param("2", "weft.start.engine_process", id="the engine of two ranks", marks=pytest.mark.thorough),
        pytest.param("2", "weft.start.rank_process", id="a rank", marks=pytest.mark.thorough),
    ],
)
def test_a_kill_leaves_nothing_in_the_temporary_directory(ranks: str, program: str | None, tmp_path: Path) -> None:
    with serving("--tensor-parallel", ranks, TMPDIR=str(tmp_path)) as served:
        body = {"prompt": "a" * 300, "max_tokens": 4, "response_format": {"type": "json_object"}}
        assert served.call("/v1/completions", body)[0] == 200
        processes = kill(served, program)
    assert len(processes) >= 2 + int(ranks)
    assert list(tmp_path.iterdir()) == []
    assert not any((MAPS / f"perf-{each}.map").exists() for each in processes)


@pytest.mark.parametrize(("given", "expected"), [({}, "0"), ({"ONEDNN_JIT_PROFILE": "6"}, "6")])
def test_importing_weft_stops_onednn_from_leaving_maps_unless_the_user_wants_them(
    given: dict[str, str], expected: str
) -> None:
    plain = {name: value for name, value in os.environ.items() if name != "ONEDNN_JIT_PROFILE"}
    found = subprocess.run([sys.executable, "-c", SAY], env=plain | given, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == expected

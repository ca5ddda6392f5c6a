"""Times the first minutes of a new user: install, start, first answer; with an empty home, empty caches, no settings.

    python release/first_run.py [--wheel dist/*.whl | --checkout] [--dependencies VENV] [--no-compiler]

A virtual environment, a home folder and an empty working directory are made for the run and removed after it. The
dependencies are installed with the wheel; `--dependencies` takes those of another environment instead, which is what
`.ci/run` does, and then `install` is the time of Weft alone. `--no-compiler` hides compilers from the server. The run
fails unless `weft` comes from the new environment, five lines end in an address, and a chat is answered.

To try the account of a real new user, `useradd -m newcomer`, and run this as that user in a copy of the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT_SECONDS = 300
COMPILERS = ("g++", "clang++", "c++", "gcc", "cc", "clang")
QUESTION = {"model": "weft-small", "max_tokens": 16, "messages": [{"role": "user", "content": "Hello"}]}


@dataclass(frozen=True, slots=True)
class FirstRun:
    """A new user's account: an environment with Weft, and the variables of its programs."""

    python: Path
    weft: Path
    home: Path
    variables: dict[str, str]

    def output(self, *command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, env=self.variables, cwd=self.home)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="python release/first_run.py", description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="wheel to install")
    parser.add_argument("--checkout", action="store_true", help="install this checkout, whose kernels are compiled")
    parser.add_argument("--dependencies", type=Path, help="virtual environment whose libraries are used")
    parser.add_argument("--no-compiler", action="store_true", help="hide compilers from the server")
    arguments = parser.parse_args()
    if (arguments.wheel is None) == (not arguments.checkout):
        parser.error("pass either --wheel FILE or --checkout")
    with tempfile.TemporaryDirectory(prefix="weft-first-") as folder:
        began = time.monotonic()
        user = install(Path(folder), str(arguments.wheel or ROOT), arguments.dependencies, arguments.no_compiler)
        print(f"install       {time.monotonic() - began:6.1f} s", flush=True)
        check(user, arguments.dependencies is not None)
        serve(user)
    return 0


def install(folder: Path, source: str, dependencies: Path | None, no_compiler: bool) -> FirstRun:
    """Make an environment and install Weft into it."""
    place, home = folder / "venv", folder / "home"
    home.mkdir()
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    if dependencies is not None:
        [theirs] = (dependencies / "lib").glob("python3*/site-packages")
        [ours] = (place / "lib").glob("python3*/site-packages")
        # Searched after the environment's own packages, so Weft itself comes from the new one.
        (ours / "dependencies.pth").write_text(f"{theirs.resolve()}\n")
    only = [] if dependencies is None else ["--no-deps"]
    subprocess.run([*pip(python), "install", "--quiet", *only, source], check=True, cwd=folder)
    path = str(hidden(folder / "bin")) if no_compiler else os.environ["PATH"]
    return FirstRun(python, place / "bin" / "weft", home, {"HOME": str(home), "PATH": path, "LANG": "C.UTF-8"})


def hidden(folder: Path) -> Path:
    """Return a folder with links to everything in PATH but compilers."""
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in Path(place).iterdir() if Path(place).is_dir() else ():
            is_compiler = any(name in program.name for name in COMPILERS)
            if not is_compiler and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    return folder


def pip(python: Path) -> list[str]:
    """Return this environment's pip for another one, which then has nothing but what is installed for Weft."""
    return [sys.executable, "-m", "pip", "--python", str(python)]


def check(user: FirstRun, borrowed: bool) -> None:
    """Raise unless the installed package is the new one, and complete."""
    place = user.output(str(user.python), "-c", "import weft; print(weft.__file__)").strip()
    if not place.startswith(str(user.python.parents[1])):
        raise SystemExit(f"weft comes from {place}, not from the new environment")
    done = subprocess.run([*pip(user.python), "check"], capture_output=True, text=True)
    # What a borrowed environment holds besides is not ours.
    wrong = [line for line in done.stdout.splitlines() if not borrowed or line.startswith("weft-serve ")]
    if done.returncode and wrong:
        raise SystemExit("\n".join(["pip check:", *wrong]))
    user.output(str(user.weft), "models")


def serve(user: FirstRun) -> None:
    """Start a server, ask it, print the seconds since its command, and stop it."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        command = [str(user.weft), "serve", "--port", "0"]
        server = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=user.variables, cwd=user.home
        )
        try:
            lines = until_address(server)
            if len(lines) != 5:
                log.seek(0)
                raise SystemExit(f"the server did not start:\n{''.join(lines)}{log.read()}")
            print("".join(lines), end="")
            print(f"start         {time.monotonic() - began:6.1f} s", flush=True)
            content = ask(lines[-1].strip())
            print(f"first answer  {time.monotonic() - began:6.1f} s: {content!r}", flush=True)
            log.seek(0)
            sys.stdout.write(log.read())
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(LIMIT_SECONDS)


def until_address(server: subprocess.Popen[str]) -> list[str]:
    lines: list[str] = []
    assert server.stdout is not None
    for line in server.stdout:
        lines.append(line)
        if line.startswith("http"):
            break
    return lines


def ask(url: str) -> str:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(QUESTION).encode(), headers)
    with urllib.request.urlopen(request, timeout=LIMIT_SECONDS) as answer:
        content = json.load(answer)["choices"][0]["message"]["content"]
    if not content.strip():
        raise SystemExit("the answer is empty")
    return str(content)


if __name__ == "__main__":
    sys.exit(main())

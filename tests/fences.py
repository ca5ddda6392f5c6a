"""Checkers of the project's own rules: each takes sources and returns complaints, an empty list if all is well.

They parse, they import nothing. `test_fences.py` runs each on the project, and on a small bad example.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
SKIPPED = {".git", ".venv", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__", "build", "dist", "results"}

# Who may import whom, by package; the longest prefix of a module's name counts.
MAY_IMPORT = {
    "weft.base": ["weft.base"],
    "weft.memory": ["weft.base", "weft.memory"],
    "weft.memory.device": ["weft.base", "weft.memory", "weft.memory.device"],
    "weft.speculate": ["weft.base", "weft.speculate"],
    "weft.engine": ["weft.base", "weft.memory", "weft.speculate", "weft.engine"],
    "weft.text": ["weft.base", "weft.text"],
    "weft.kernels": ["weft.base", "weft.memory.spec", "weft.memory.device", "weft.kernels"],
    "weft.models": [
        "weft.base",
        "weft.memory.identity",
        "weft.memory.spec",
        "weft.memory.device",
        "weft.kernels",
        "weft.models",
    ],
    "weft.runner": ["weft.base", "weft.memory", "weft.memory.device", "weft.kernels", "weft.models", "weft.runner"],
    "weft.builtin": ["weft.builtin"],
    "weft.answers": ["weft.base", "weft.engine", "weft.text", "weft.answers"],
    "weft.server": [
        "weft.base",
        "weft.builtin",
        "weft.fleet",
        "weft.memory.journal",
        "weft.memory.keys",
        "weft.memory.misses",
        "weft.engine",
        "weft.text",
        "weft.answers",
        "weft.server",
    ],
    "weft.fleet": [
        "weft.base",
        "weft.memory.keys",
        "weft.memory.journal",
        "weft.engine",
        "weft.text",
        "weft.server",
        "weft.fleet",
    ],
    "weft.transfer": [
        "weft.base",
        "weft.memory",
        "weft.server",
        "weft.fleet",
        "weft.transfer",
    ],
    # The one module of the server that knows tensors, inside a function that only the engine's process calls.
    "weft.server.engine_process": ["weft"],
    "weft.cli": ["weft"],
    # Loading, and the offline API: above everything but the command line.
    "weft": ["weft"],
}
# Ways into Weft from outside, which read the command line's options.
ENTRIES = ("weft.cli", "weft.__main__", "weft.ray")
# Packages that an allowed one above them does not bring along.
APART = ["weft.memory.device"]
WITH_TENSORS = (
    "weft.memory.device", "weft.kernels", "weft.models", "weft.runner", "weft.loading", "weft.rank_loading",
    "weft.drafters", "weft.offline.llm",
)  # fmt: skip
HEAVY = {"torch", "transformers", "safetensors", "triton"}

WORDS_AT_HOME = {"mamba", "ssm", "conv", "recurrent", "delta"}
HOMES = ("weft.memory", "weft.models", "weft.kernels")
# OpenAI's API calls a streamed piece a delta: whoever speaks it must say so.
SPEAKERS = {"weft.server": {"delta"}, "weft.cli": {"delta"}}

WAITING = {"item", "tolist", "cpu", "nonzero", "unique", "unique_consecutive", "masked_select", "synchronize"}
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "os.system", "jinja2.Environment", "jinja2.Template"}


def project_files(*suffixes: str, under: str = "") -> Iterator[Path]:
    return (path for path in _files(ROOT / under) if path.suffix in suffixes)


@cache
def _files(folder: Path) -> list[Path]:
    """Return all files below a folder, sorted. Virtual environments and caches are not even entered."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.endswith(".egg-info")]
        found += [Path(place, name) for name in names if name not in SKIPPED]
    return sorted(found)


def module_of(path: Path) -> str:
    """
    >>> module_of(ROOT / "weft" / "base" / "__init__.py"), module_of(ROOT / "weft" / "offline" / "llm.py")
    ('weft.base', 'weft.offline.llm')
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(under: str = "weft") -> dict[str, str]:
    """The text of every module, by name."""
    return {module_of(path): path.read_text() for path in project_files(".py", under=under)}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@cache
def parse(text: str) -> ast.Module:
    """Parse a source, once for all checkers."""
    return ast.parse(text)


@cache
def nodes(text: str) -> list[ast.AST]:
    """Return everything in a source, walked once for all checkers."""
    return list(ast.walk(parse(text)))


def imports(text: str) -> set[str]:
    """All modules that a source may import, wherever it does; `from a import b` counts as a and a.b."""
    found: set[str] = set()
    for node in nodes(text):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative imports hide their direction"
            found.add(str(node.module))
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def wrong_imports(modules: dict[str, str], known: Iterable[str]) -> list[str]:
    """Imports against the direction. `known` are the modules that exist: other names are not modules."""
    known = set(known)
    complaints = []
    for module, text in modules.items():
        layer = max((package for package in MAY_IMPORT if within(module, package)), key=len)
        for other in sorted(imports(text) & known):
            if not _allowed(other, MAY_IMPORT[layer]):
                complaints.append(f"{module} imports {other}")
            if within(other, "weft.cli") and not any(within(module, entry) for entry in ENTRIES):
                complaints.append(f"{module} imports {other}: nothing is above the command line")
    return complaints


def _allowed(module: str, packages: list[str]) -> bool:
    apart = next((each for each in APART if within(module, each)), None)
    if apart is not None and packages != ["weft"]:
        return apart in packages
    # A package's own __init__ comes with each of its modules.
    return any(within(module, package) or within(package, module) for package in packages)


def heavy_imports(modules: dict[str, str]) -> list[str]:
    """Tensor libraries where none belong."""
    return [
        f"{module} imports {other}"
        for module, text in modules.items()
        if not any(within(module, package) for package in WITH_TENSORS)
        for other in sorted(imports(text))
        if other.split(".")[0] in HEAVY
    ]


def imports_of_training(modules: dict[str, str]) -> list[str]:
    """Imports of the project in `training/`, which depends on Weft and not the other way round."""
    return [
        f"{module} imports {other}"
        for module, text in modules.items()
        for other in sorted(imports(text))
        if other.split(".")[0] in ("training", "weft_training")
    ]


# What only the packages behind the boundary may ask: where a tensor lies, and who could compute with it.
DEVICE_QUESTIONS = {
    "is_cuda",
    "is_cpu",
    "is_mkldnn",
    "device",
    "cuda",
    "available",
    "is_available",
    "get_default_device",
}
BACKENDS = ("weft.kernels.cuda", "weft.kernels.native", "weft.kernels.cpu", "weft.kernels.plain")


def device_questions(modules: dict[str, str]) -> list[str]:
    """Reads of a tensor's device, imports of a backend, questions whether one can be had."""
    complaints = []
    for module, text in modules.items():
        for other in sorted(imports(text)):
            if any(within(other, backend) for backend in BACKENDS):
                complaints.append(f"{module} imports {other}")
        for node in nodes(text):
            asked = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr
            # `torch.device(...)` makes a value and asks nothing.
            if asked in DEVICE_QUESTIONS and ast.unparse(node) != "torch.device":
                complaints.append(f"{module}:{node.lineno} asks {ast.unparse(node)}")
    return complaints


def modules_with_number(modules: dict[str, str], number: int) -> list[str]:
    """Modules in whose code, and not in texts, an integer stands."""
    return [
        module
        for module, text in modules.items()
        if any(isinstance(node, ast.Constant) and node.value == number for node in nodes(text))
    ]


def import_circles(modules: dict[str, str]) -> list[list[str]]:
    """Modules that import each other, directly or through others, wherever in them they do. Each circle once."""
    known = set(modules)
    graph = {name: sorted(imports(text) & known - {name}) for name, text in modules.items()}
    # A package's own __init__ is imported with each of its modules, and says nothing of direction.
    for name, found in graph.items():
        graph[name] = [other for other in found if not name.startswith(other + ".")]
    return [sorted(circle) for circle in strongly_connected(graph) if len(circle) > 1]


def strongly_connected(graph: dict[str, list[str]]) -> list[list[str]]:
    """Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            found.append(component)

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def words_away_from_home(modules: dict[str, str]) -> list[str]:
    complaints = []
    for module, text in modules.items():
        if any(within(module, home) for home in HOMES):
            continue
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}
        spoken = {word for package, known in SPEAKERS.items() if within(module, package) for word in known}
        complaints += [f"{module} says {word!r}" for word in sorted(words & WORDS_AT_HOME - spoken)]
    return complaints


def too_large(modules: dict[str, str], file_lines: int = 500, function_lines: int = 60) -> list[str]:
    complaints = []
    for module, text in modules.items():
        lines = len(text.splitlines())
        if lines > file_lines:
            complaints.append(f"{module} has {lines} lines")
        for name, function in functions(parse(text)):
            length = (function.end_lineno or 0) - function.lineno + 1
            # A kernel is one function by its nature: what it calls cannot be read apart from it.
            if length > function_lines * (2 if within(module, "weft.kernels.cuda") else 1):
                complaints.append(f"{module}.{name} has {length} lines")
    return complaints


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function | ast.ClassDef):
            if isinstance(node, Function):
                yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif not isinstance(node, ast.expr):
            # No expression holds a function with a name.
            yield from functions(node, prefix)


def repeated_class_names(modules: dict[str, str]) -> list[str]:
    """Class names that are defined more than once, at any level of any module, with the modules that define them."""
    homes: dict[str, list[str]] = {}
    for module, text in modules.items():
        for node in nodes(text):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    return [f"{name} is defined in {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1]


def without_header(modules: dict[str, str]) -> list[str]:
    trees = {module: parse(text) for module, text in modules.items()}
    return [f"{module} does not say what it is" for module, t in trees.items() if t.body and not ast.get_docstring(t)]


def unsafe(modules: dict[str, str]) -> list[str]:
    """Ways to run what a file says."""
    complaints = []
    for module, text in modules.items():
        complaints += [f"{module} imports {m}" for m in sorted(imports(text)) if m.split(".")[0] in UNSAFE_MODULES]
        for node in nodes(text):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in UNSAFE_CALLS:
                complaints.append(f"{module} calls {ast.unparse(node.func)}")
    return complaints


def waits(modules: dict[str, str]) -> set[tuple[str, str]]:
    """(module, function) of every call that could make the host wait for the device, in modules that import torch."""
    found = set()
    for module, text in modules.items():
        if not any(within(other, "torch") for other in imports(text)):
            continue
        for name, function in functions(parse(text)):
            nested = {id(node) for _, inner in functions(function) for node in ast.walk(inner)}
            own = [node for node in ast.walk(function) if isinstance(node, ast.Call) and id(node) not in nested]
            if any(_waits(call.func) for call in own):
                found.add((module, name))
    return found


def _waits(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in WAITING and ast.unparse(function.value) != "np"


# Folders of people's machines; written so that this line is not one itself.
MACHINE_PATH = re.compile(r"(?<![\w.])(?:/(?:work|root|home|Users|mnt|workspace)/\w|\.\./shared)")


def machine_paths(texts: dict[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:80]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


def private_patches(modules: dict[str, str]) -> list[str]:
    """Return patches of names with a leading underscore, except Python's own such as `__init__`."""
    found = []
    for module, source in modules.items():
        for node in nodes(source):
            is_patch = (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr"
            )
            if is_patch and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                name = str(node.args[1].value)
                if name.startswith("_") and not name.startswith("__"):
                    found.append(f"{module} patches {name}")
    return found

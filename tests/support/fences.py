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

ROOT = Path(__file__).parents[2]
SKIPPED = {".git", ".venv", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__", "build", "dist", "results"}

# The order of packages, from the ground up. A package imports from the levels below its own: nothing above, nothing
# beside it. So two packages never import each other.
ORDER = (
    ("base", "builtin"),
    ("memory", "text", "wire"),
    ("device", "drafting", "transfer"),
    ("kernels", "engine"),
    ("models", "answers", "backends"),
    ("runner", "fleet", "server"),
    ("start", "simulate"),
    ("offline",),
    ("cli",),
    ("ray", "__main__"),
)
# All that these packages may know of another one.
NARROW = {
    ("engine", "device"): (),
    ("engine", "transfer"): (),
    ("fleet", "models"): (),
    ("kernels", "drafting"): (),
    ("server", "models"): (),
    ("simulate", "runner"): (),
    ("simulate", "server"): (),
    ("device", "memory"): ("kinds", "spec"),
    ("kernels", "memory"): ("spec",),
    ("models", "memory"): ("identity", "spec"),
    ("backends", "memory"): ("journal", "misses"),
    ("fleet", "memory"): ("journal", "keys"),
    ("server", "memory"): (),
}
# Packages beside serving, and the only modules that may open their doors.
DOORS = {"simulate": ("weft.cli.simulate",), "ray": ()}
WITH_TENSORS = (
    "weft.device", "weft.kernels", "weft.models", "weft.runner", "weft.start.loading", "weft.start.rank_loading",
    "weft.start.assembling", "weft.start.drafters", "weft.offline.llm", "weft.cli.check.others",
)  # fmt: skip
HEAVY = {"torch", "transformers", "safetensors", "triton"}

WORDS_AT_HOME = {"mamba", "ssm", "conv", "recurrent", "delta"}
HOMES = ("weft.memory", "weft.device", "weft.models", "weft.kernels")
# OpenAI's API calls a streamed piece a delta: whoever speaks it must say so.
SPEAKERS = {"weft.server": {"delta"}, "weft.cli": {"delta"}, "weft.offline": {"delta"}}

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


def package_of(module: str) -> str:
    """
    >>> package_of("weft.memory.tiers.link"), package_of("weft.__main__")
    ('memory', '__main__')
    """
    return module.split(".")[1]


def loose_modules(modules: Iterable[str]) -> list[str]:
    """Modules that stand in no package, and packages that stand on no level."""
    levels = {package for level in ORDER for package in level}
    return sorted({module for module in modules if module != "weft" and package_of(module) not in levels})


def wrong_imports(modules: dict[str, str], known: Iterable[str]) -> list[str]:
    """Imports against the order of packages. `known` are the modules that exist: other names are not modules."""
    level_of = {package: level for level, packages in enumerate(ORDER) for package in packages}
    # The package as a whole is loaded with each of its modules, and says nothing of direction.
    known = set(known) - {"weft"}
    complaints = []
    for module in modules.keys() - {"weft"}:
        own = package_of(module)
        for other in sorted(imports(modules[module]) & known):
            package, _, part = other.removeprefix("weft.").partition(".")
            if package == own:
                continue
            if level_of[package] >= level_of[own]:
                complaints.append(f"{module} imports {other}, which does not stand below it")
            parts = NARROW.get((own, package))
            if part and parts is not None and not any(within(part, each) for each in parts):
                complaints.append(f"{module} imports {other}, which is none of its business")
            if module not in DOORS.get(package, (module,)):
                complaints.append(f"{module} imports {other}, which serving does without")
    return sorted(complaints)


def heavy_imports(modules: dict[str, str]) -> list[str]:
    """Tensor libraries where none belong."""
    return [
        f"{module} imports {other}"
        for module, text in modules.items()
        if not any(within(module, package) for package in WITH_TENSORS)
        for other in sorted(imports(text))
        if other.split(".")[0] in HEAVY
    ]


def imports_of_tests(modules: dict[str, str]) -> list[str]:
    """Imports of a module of tests. What two of them share stands in `tests/support`."""
    return [
        f"{module} imports {other}"
        for module, text in modules.items()
        for other in sorted(imports(text) & modules.keys())
        if other.rpartition(".")[2].startswith("test_")
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


# What the engine reads of a ledger besides its verbs, and the parts of it that the loop hands on whole.
LEDGER_VALUES = {"cell", "planned", "computed"}
LEDGER_PARTS = {"weft.engine.loop": {"tiers", "departures", "retentions", "carried"}}
LEASE_VALUES = {"miss", "seat"}


def verbs_in(page: str) -> set[str]:
    """The ledger's verbs, from the table of a page of the docs.

    >>> sorted(verbs_in("| word |\\n|---|\\n| `a` |\\n\\n| verb | meaning |\\n|---|---|\\n| `b`, `c` | `d` |\\n"))
    ['b', 'c']
    """
    table = page.partition("| verb | meaning |")[2].partition("\n\n")[0]
    rows = (line.split("|")[1] for line in table.splitlines() if line.startswith("| "))
    return {verb for row in rows for verb in re.findall(r"`(\w+)`", row)}


def ledger_uses(modules: dict[str, str]) -> Iterator[tuple[str, ast.Attribute]]:
    """Every attribute of a ledger that a module uses, whatever the ledger belongs to."""
    for module, text in modules.items():
        for node in nodes(text):
            if isinstance(node, ast.Attribute) and _name_of(node.value).lstrip("_") == "ledger":
                yield module, node


def _name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def ledger_insides(modules: dict[str, str], verbs: set[str]) -> list[str]:
    """Uses of a ledger that are none of its verbs, looks into its parts and leases, and what is written into it."""
    complaints = []
    for module, node in ledger_uses(modules):
        if node.attr not in verbs | LEDGER_VALUES | LEDGER_PARTS.get(module, set()):
            complaints.append(f"{module}:{node.lineno} uses {ast.unparse(node)}")
    for module, text in modules.items():
        for node in nodes(text):
            if not isinstance(node, ast.Attribute | ast.Subscript):
                continue
            inner = node.value
            is_used = isinstance(inner, ast.Attribute) and _name_of(inner.value).lstrip("_") == "ledger"
            is_part = is_used and inner.attr in LEDGER_PARTS.get(module, set())
            is_lease = isinstance(node, ast.Attribute) and _name_of(inner) == "lease"
            if is_part or (is_lease and node.attr not in LEASE_VALUES):
                complaints.append(f"{module}:{node.lineno} looks into {ast.unparse(inner)}")
            elif is_used and not isinstance(node.ctx, ast.Load):
                complaints.append(f"{module}:{node.lineno} writes into {ast.unparse(inner)}")
    return complaints


def words_away_from_home(modules: dict[str, str]) -> list[str]:
    complaints = []
    for module, text in modules.items():
        if any(within(module, home) for home in HOMES):
            continue
        words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}
        spoken = {word for package, known in SPEAKERS.items() if within(module, package) for word in known}
        complaints += [f"{module} says {word!r}" for word in sorted(words & WORDS_AT_HOME - spoken)]
    return complaints


def too_large(modules: dict[str, str], file_lines: int = 800, function_lines: int = 60) -> list[str]:
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


# The only modules that make one plan of another: one completes it before the launch, one cuts it into parts.
PLANS_OF_PLANS = ("weft.base.completion", "weft.base.parts")
# The only ones that build plans: from the memory of sequences, and trials on scratch memory.
PLAN_BUILDERS = ("weft.base.plan", "weft.memory.plans", "weft.runner.cuda.padding")


def plan_signatures(modules: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules with functions that take or return a plan, and the names of those that return one."""
    found: dict[str, set[str]] = {}
    for module, text in modules.items():
        for name, function in functions(parse(text)):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if _is_plan(function.returns) or any(_is_plan(each.annotation) for each in arguments):
                found.setdefault(module, set())
            if _is_plan(function.returns):
                found[module].add(name.rpartition(".")[2])
    return found


def _is_plan(annotation: ast.expr | None) -> bool:
    return annotation is not None and re.search(r"\bPlan\b", ast.unparse(annotation)) is not None


def plan_rewrites(modules: dict[str, str]) -> list[str]:
    """Plans that are built, or made of others, where that is not done."""
    makers = {"build", *(name for names in plan_signatures(modules).values() for name in names)}
    complaints = []
    for module, text in modules.items():
        # Without these words there is no such call.
        if not re.search(r"\bPlan\b|\breplace\b", text):
            continue
        for name, function in functions(parse(text)):
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            plans = {each.arg for each in arguments if _is_plan(each.annotation)}
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    made = node.value.func if isinstance(node.value, ast.Call) else None
                    if made is not None and ast.unparse(made).rpartition(".")[2] in makers:
                        plans.add(node.targets[0].id)
            for call in ast.walk(function):
                if not isinstance(call, ast.Call):
                    continue
                called, first = ast.unparse(call.func), ast.unparse(call.args[0]) if call.args else ""
                if called in ("Plan", "Plan.build") and module not in PLAN_BUILDERS:
                    complaints.append(f"{module}.{name} builds a plan")
                is_plan = first in plans or first in ("step.plan", "flight.plan")
                if is_plan and called.rpartition(".")[2] == "replace" and module not in PLANS_OF_PLANS:
                    complaints.append(f"{module}.{name} rewrites a plan")
    return complaints


def longest_way_of_a_plan(modules: dict[str, str]) -> list[str]:
    """Return the longest chain of modules, each of which imports the next one, that have plans in their signatures."""
    having = plan_signatures(modules).keys()
    ways: dict[str, list[str]] = {}

    def way(module: str) -> list[str]:
        if module not in ways:
            others = sorted(imports(modules[module]) & having - {module})
            ways[module] = [module, *max((way(other) for other in others), key=len, default=[])]
        return ways[module]

    return max((way(module) for module in sorted(having)), key=len, default=[])


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

"""Launching by what was compiled before: keys tell apart what Triton compiles apart, and all arguments arrive."""

from __future__ import annotations

import ast
from functools import cache
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITFunction, native_specialize_impl
from triton.tools.tensor_descriptor import TensorDescriptor

import weft.kernels.cuda
from weft.kernels.cuda.launch import launching
from weft.kernels.cuda.launch.launching import Arguments, Kernel, NamedLaunches, named, specialise

SOURCES = sorted(Path(weft.kernels.cuda.__file__).parent.rglob("*.py"))
X = torch.zeros(64)


def same_kind_of_tensors() -> list[torch.Tensor]:
    """Wherever they lie, as long as it is at a multiple of 16 bytes."""
    return [X, X[4:], torch.ones(3, 5), torch.nn.Parameter(X, requires_grad=False)]


ARGUMENTS = [
    *same_kind_of_tensors(), X[1:], X.half(), X.bfloat16(), X.int(), X.long(), X.bool(), X.to(torch.float8_e4m3fn),
    0, 1, 2, 3, 16, 17, 48, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**62, 2**63,
    None, True, False, 0.0, 1.0, 0.5,
]  # fmt: skip


def triton_kind(argument: object) -> object:
    return native_specialize_impl(BaseBackend, argument, False, True, True)


def key_of(*arguments: object, **settings: object) -> tuple:
    """Return the key of a launch with these arguments, in a group behind one of a tensor."""
    rest = named(**{f"argument_{number}": argument for number, argument in enumerate(arguments)})
    return specialise((named(x=X), rest), settings)[0]


def test_whatever_triton_compiles_apart_has_another_key():
    apart = 0
    for one, other in combinations(ARGUMENTS, 2):
        if triton_kind(one) != triton_kind(other):
            apart += 1
            assert key_of(one) != key_of(other), (one, other)
            assert key_of(one, 5) != key_of(other, 5), (one, other)
    assert apart > 200


def test_what_changes_from_step_to_step_has_the_same_key():
    for one, other in combinations(same_kind_of_tensors(), 2):
        assert key_of(one) == key_of(other)
    assert key_of(3) == key_of(17) == key_of(1001)
    assert key_of(32) == key_of(0) == key_of(4096)
    assert key_of(0.5) == key_of(2.0)


def test_arguments_in_another_order_or_place_have_another_key():
    assert key_of(X, X.half()) != key_of(X.half(), X)
    assert key_of(X[1:], X) != key_of(X, X[1:])
    assert key_of(1, 2) != key_of(2, 1)
    assert key_of(None, X) != key_of(X, None)
    assert key_of(2**40, 3) != key_of(3, 2**40)


def test_constants_and_options_are_part_of_the_key():
    keys = [key_of(), key_of(A=1, B=2), key_of(A=2, B=1), key_of(B=1, A=2), key_of(A=1), key_of(num_warps=1)]
    keys += [key_of(num_warps=2), key_of(NAME="silu"), key_of(NAME="relu"), key_of(A=None), key_of(A=tl.float32)]
    assert len(set(keys)) == len(keys)


def some_kernel(x, y, factor, size, WIDTH: tl.constexpr, NAME: tl.constexpr):
    pass


def given(x: object, y: object, factor: object, size: object) -> tuple[Arguments, Arguments]:
    return named(x=x, y=y), named(factor=factor, size=size)


@pytest.fixture
def started(monkeypatch):
    """A kernel, what Triton was asked to launch, and what was started without asking it."""
    asked, begun = [], []

    def run(kernel, *arguments, grid, warmup, **settings):
        # Names of parameters must not arrive as settings: Triton has its own of some names, such as `stream`.
        assert len(arguments) == 4
        assert not settings.keys() & {"x", "y", "factor", "size"}
        asked.append((arguments, grid, settings))
        return SimpleNamespace(run=lambda *all_: begun.append(all_), function="function", packed_metadata="metadata")

    monkeypatch.setattr(JITFunction, "run", run)
    stream = SimpleNamespace(get_current_stream=lambda device: f"stream of {device}")
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=stream))
    return Kernel(some_kernel), asked, begun


def test_a_launch_like_an_earlier_one_starts_what_was_compiled(started):
    kernel, asked, begun = started
    kernel[(7,)](*given(X, None, 0.5, 3), WIDTH=8, NAME="a", num_warps=2)
    assert (len(asked), begun) == (1, [])
    y = torch.ones(5)
    for grid, whole in (((9,), (9, 1, 1)), ((9, 2), (9, 2, 1)), ((9, 2, 3), (9, 2, 3))):
        kernel[grid](*given(y, None, 0.25, 5), WIDTH=8, NAME="a", num_warps=2)
        rest = (y.data_ptr(), None, 0.25, 5, None, None)
        assert begun.pop() == (*whole, "stream of -1", "function", "metadata", None, None, None, *rest)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ((X.half(), None, 0.5, 3), {}),
        ((X[1:], None, 0.5, 3), {}),
        ((X, X, 0.5, 3), {}),
        ((X, None, 0.5, 1), {}),
        ((X, None, 0.5, 16), {}),
        ((X, None, 0.5, 2**33 + 1), {}),
        ((X, None, 0.5, 3), {"WIDTH": 16}),
        ((X, None, 0.5, 3), {"num_warps": 4}),
    ],
)
def test_a_launch_unlike_all_others_is_left_to_triton(started, arguments, changed):
    kernel, asked, begun = started
    settings = {"WIDTH": 8, "NAME": "a", "num_warps": 2}
    kernel[(1,)](*given(X, None, 0.5, 3), **settings)
    kernel[(1,)](*given(*arguments), **settings | changed)
    assert (len(asked), begun) == (2, [])
    kernel[(1,)](*given(*arguments), **settings | changed)
    assert (len(asked), len(begun)) == (2, 1)


def test_kernels_that_take_descriptors_remember_nothing_and_their_shapes_are_part_of_the_key(started):
    _, asked, begun = started
    kernel = Kernel(some_kernel, remember=False)
    matrix = torch.zeros(64, 64)
    for block in ([16, 16], [16, 16], [16, 32]):
        described = TensorDescriptor.from_tensor(matrix, block)
        kernel[(1,)](named(x=described, y=X), named(factor=0.5, size=3), WIDTH=8, NAME="a")
    assert (len(asked), begun, kernel.compiled) == (3, [], {})
    keys = {
        named(x=TensorDescriptor.from_tensor(m, b)).key for m in (matrix, matrix.half()) for b in ([8, 16], [16, 8])
    }
    assert len(keys) == 4


def test_a_group_that_is_made_once_serves_many_launches_and_kernels(started):
    kernel, asked, begun = started
    shared = named(factor=0.5, size=3)
    for _ in range(2):
        kernel[(1,)](named(x=X, y=None), shared, WIDTH=8, NAME="a")
    assert (len(asked), len(begun)) == (1, 1)


@pytest.mark.parametrize(
    "groups",
    [
        (named(x=X, y=X), named(size=1, factor=1)),
        (named(x=X, y=X, factor=1),),
        (named(x=X, y=X), named(factor=1, size=1, more=1)),
        (named(factor=1, size=1, x=X), named(y=X)),
    ],
    ids=["another order", "one is missing", "one too many", "groups in another order"],
)
def test_groups_that_are_not_a_kernels_parameters_in_their_order_are_refused(started, groups):
    kernel, asked, _ = started
    with pytest.raises(TypeError, match=r"takes the arguments \['x', 'y', 'factor', 'size'\]"):
        kernel[(1,)](*groups, WIDTH=8, NAME="a")
    assert asked == []


def test_an_argument_in_two_groups_is_refused(started):
    with pytest.raises(TypeError, match=r"was given \['x', 'y', 'factor', 'factor', 'size'\]"):
        started[0][(1,)](named(x=X, y=X, factor=1), named(factor=1, size=1), WIDTH=8, NAME="a")


def test_without_the_cache_arguments_arrive_in_their_places_and_are_checked():
    """As with another version of Triton, or its interpreter."""
    seen = []

    class Plain:
        arg_names = ("x", "y", "factor", "size", "WIDTH")

        def __getitem__(self, grid):
            return lambda *arguments, **settings: seen.append((grid, arguments, settings))

    kernel = NamedLaunches(Plain())
    kernel[(3,)](*given(X, None, 0.5, 3), WIDTH=8)
    assert seen == [((3,), (X, None, 0.5, 3), {"WIDTH": 8})]
    with pytest.raises(TypeError, match="takes the arguments"):
        kernel[(3,)](named(y=None, x=X), named(factor=1, size=1), WIDTH=8)


def test_who_listens_to_launches_hears_of_all(started):
    kernel, asked, begun = started
    hook = print
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        for _ in range(3):
            kernel[(1,)](*given(X, None, 0.5, 3), WIDTH=8, NAME="a")
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert (len(asked), begun) == (3, [])


def test_nothing_is_remembered_where_nothing_is_compiled(started, monkeypatch):
    kernel, _, begun = started
    monkeypatch.setattr(JITFunction, "run", lambda *arguments, **named: None)
    for _ in range(2):
        kernel[(1,)](*given(X, None, 0.5, 3), WIDTH=8, NAME="a")
    assert kernel.compiled == {}
    assert begun == []


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_both_ways_compute_the_same(dtype):
    """Rows that begin anywhere, one or many, narrow and wide, each twice: the second launch is by what was compiled."""
    from weft.kernels.cuda.norm.norms import join
    from weft.kernels.stream import Change

    packed = torch.randn(70, 2048 + 64, device="cuda").to(dtype)
    for _ in range(2):
        for first, size, rows in [(0, 2048, 70), (1, 2048, 70), (8, 16, 1), (3, 1, 5), (16, 1000, 64), (0, 33, 2)]:
            x, weight = packed[:rows, first : first + size], torch.ones(size, dtype=dtype, device="cuda")
            found = join(x, [Change(x, 0.5)], weight, 1e-5)
            Kernel.remembering = False
            try:
                expected = join(x, [Change(x, 0.5)], weight, 1e-5)
            finally:
                Kernel.remembering = True
            assert all(mine.equal(theirs) for mine, theirs in zip(found, expected, strict=True))


@cache
def kernels_of(source: Path) -> dict[str, tuple[str, ast.FunctionDef]]:
    """Compiled functions of a file by name, with the name of what decorates them."""
    found = {}
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            decorator = node.decorator_list[0]
            found[node.name] = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator), node
    return found


def launched_in(source: Path) -> set[str]:
    """Names in `name[...](...)`."""
    calls = (node.func for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call))
    return {f.value.id for f in calls if isinstance(f, ast.Subscript) and isinstance(f.value, ast.Name)}


def test_all_kernels_that_are_launched_remember_and_none_else():
    decorators: dict[str, set[str]] = {}
    for source in SOURCES:
        for name, (decorator, _) in kernels_of(source).items():
            decorators.setdefault(name, set()).add(decorator)
    launched = set().union(*(launched_in(source) for source in SOURCES))
    compiled = {name for name, by in decorators.items() if by & {"jit", "triton.jit"}}
    assert len(launched & compiled) > 30
    assert {name for name in launched & compiled if "jit" not in decorators[name]} == set()
    assert {name for name in compiled - launched if "jit" in decorators[name]} == set()


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_constants_are_a_kernels_last_parameters(source):
    for name, (decorator, node) in kernels_of(source).items():
        if decorator == "jit":
            constant = [
                arg.annotation is not None and "constexpr" in ast.unparse(arg.annotation) for arg in node.args.args
            ]
            assert constant == sorted(constant), name
            assert not node.args.defaults, name


def positional(source: Path) -> list[str]:
    """Return launches that pass anything by position but groups of arguments."""
    tree, found = ast.parse(source.read_text()), []
    kernels = {name for each in SOURCES for name, (decorator, _) in kernels_of(each).items() if decorator == "jit"}
    groups = {"named", *(name for each in SOURCES for name in returning_groups(each))}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        local = {
            target.id
            for node in ast.walk(function) if isinstance(node, ast.Assign)
            for target in flat(node.targets) if any(call in groups for call in calls(node.value))
        }  # fmt: skip
        for call in ast.walk(function):
            is_launch = isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript)
            if is_launch and isinstance(call.func.value, ast.Name) and call.func.value.id in kernels:
                for argument in call.args:
                    value = argument.value if isinstance(argument, ast.Starred) else argument
                    is_group = isinstance(value, ast.Name) and value.id in local
                    if not is_group and not (isinstance(value, ast.Call) and calls(value)[0] in groups):
                        found.append(f"{call.func.value.id}: {ast.unparse(argument)}")
    return found


def flat(targets: list[ast.expr]) -> list[ast.Name]:
    return [name for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def calls(node: ast.AST) -> list[str]:
    found = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
    return [function.id for function in found if isinstance(function, ast.Name)] or [""]


@cache
def returning_groups(source: Path) -> list[str]:
    functions = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.FunctionDef)]
    return [node.name for node in functions if node.returns is not None and "Arguments" in ast.unparse(node.returns)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_kernels_are_launched_with_named_groups_of_arguments(source):
    assert positional(source) == []


def test_the_search_for_launches_by_position_finds_one(tmp_path):
    sample = tmp_path / "sample.py"
    sample.write_text("def launch(x):\n    join_kernel[(1,)](x, named(y=x), BLOCK=1)\n")
    assert positional(sample) == ["join_kernel: x"]

"""A faster Triton interpreter with the same results: kernels on tensors of the CPU take less than half of the time.

Triton's own spends most of its time on three things without an effect: it computes whether every sum and product of
integers overflows, and drops the answer unless it is debugging; it patches the language again for every function that
a kernel calls; and it builds a table of types whenever it needs one of them. It also describes the shape of every
result anew, although a kernel has few, converts operands that have the same type already, and reduces element by
element wherever a kernel brings a function of its own.

Two things differ. It checks every address: Triton's own reads and writes whatever lies outside of a kernel's tensors,
and on a GPU such an access may end the process. And a float32 becomes the nearest bfloat16, as on a GPU: Triton's own
drops bits.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


def speed_up() -> None:
    """Install all of it, once."""
    from triton.runtime import interpreter

    if not isinstance(interpreter._get_np_dtype, Types):
        builder = interpreter.interpreter_builder
        builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
        interpreter._get_np_dtype = Types(interpreter)
        Patches(interpreter).install()
        Shapes(interpreter.tl.core).install()
        Operands(interpreter).install()
        Narrowing(interpreter).install()
        interpreter.ReduceOps.generic_reduce = reduce_by_halves
        Bounds(interpreter).install()


class Types:
    """NumPy's types by Triton's, each looked up once."""

    def __init__(self, interpreter: Any) -> None:
        self.look_up = interpreter._get_np_dtype
        self.pointer = interpreter.tl.pointer_type
        self.known: dict[str, Any] = {}

    def __call__(self, kind: Any) -> Any:
        scalar = kind.scalar
        if isinstance(scalar, self.pointer):
            return self.look_up(scalar)
        if scalar.name not in self.known:
            self.known[scalar.name] = self.look_up(scalar)
        return self.known[scalar.name]


class Patches:
    """Patches of Triton's language, made once per launch instead of once per call of a device function."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.patch = interpreter._patch_lang
        self.patched: set[str] | None = None
        self.seen: dict[Any, set[str]] = {}

    def install(self) -> None:
        launch = self.interpreter.GridExecutor.__call__

        def launch_and_forget(executor: Any, *args: Any, **kwargs: Any) -> Any:
            self.patched = set()
            try:
                return launch(executor, *args, **kwargs)
            finally:
                self.patched = None

        self.interpreter.GridExecutor.__call__ = launch_and_forget
        self.interpreter._patch_lang = self.patch_once
        self.interpreter._patch_attr = self.patch_member

    def patch_once(self, function: Any) -> Any:
        languages = self.languages(function)
        if self.patched is None:
            return self.patch(function)
        # A call inside of a kernel, which drops what is returned: only launches take patches back.
        if languages and self.patched >= languages:
            return None
        self.patched |= languages
        return self.patch(function)

    def patch_member(self, part: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        """Give a function of the language what it needs here, without a new dictionary for every call."""
        semantic = self.interpreter.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return member(*args, **named)

        scope.set_attr(part, name, call)

    def languages(self, function: Any) -> set[str]:
        """Return the parts of the language that a function sees, and which it needs patched."""
        if function not in self.seen:
            self.seen[function] = self.look(function)
        return self.seen[function]

    def look(self, function: Any) -> set[str]:
        known = (self.interpreter.tl, self.interpreter.tl.core)
        return {each.__name__ for each in function.__globals__.values() if inspect.ismodule(each) and each in known}


class Shapes:
    """Descriptions of shapes, each made once for all results that have it. They are values: nothing changes them."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.make_type = core.block_type.__init__
        self.unwrap_all = core._unwrap_if_constexpr
        # Of types, by sizes and element; of tensors, by sizes.
        self.types: dict[Any, tuple[Any, Any, str]] = {}
        self.tensors: dict[Any, tuple[Any, Any]] = {}

    def install(self) -> None:
        core = self.core
        constant = core.constexpr
        plain = {int, bool, float, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

        def unwrap(value: Any) -> Any:
            kind = type(value)
            if kind is constant:
                return value.value
            return value if kind in plain else self.unwrap_all(value)

        def make_type(each: Any, element: Any, shape: Any) -> None:
            key = element.name, *(size.value if type(size) is constant else size for size in shape)
            if key not in self.types:
                self.make_type(each, element, shape)
                self.types[key] = each.shape, each.numel, each.name
            each.element_ty = element
            each.shape, each.numel, each.name = self.types[key]

        def make_tensor(each: Any, handle: Any, kind: Any) -> None:
            sizes = tuple(kind.shape.values) if kind.is_block() else ()
            if sizes not in self.tensors:
                shape = core.tuple([constant(size) for size in sizes])
                self.tensors[sizes] = shape, constant(math.prod(sizes))
            each.handle, each.type, each.dtype = handle, kind, kind.scalar
            each.shape, each.numel = self.tensors[sizes]

        def equal(each: Any, other: Any) -> bool:
            other = unwrap(other)
            return each is other or (isinstance(other, core.dtype) and each.name == other.name)

        core._unwrap_if_constexpr = unwrap
        core.dtype.__eq__ = equal
        core.block_type.__init__ = make_type
        core.tensor.__init__ = make_tensor


class Operands:
    """Operands of the same type, which need no conversion, and numbers, which are converted once.

    Relies on `Shapes`: tensors of the same shape share its description.
    """

    def __init__(self, interpreter: Any) -> None:
        self.semantic = interpreter.interpreter_semantic
        self.tensor = interpreter.tl.core.tensor
        self.numbers: dict[tuple[type, Any, str], Any] = {}

    def install(self) -> None:
        semantic, tensor = self.semantic, self.tensor
        convert, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
        make_number = semantic.scalar_constant

        def convert_unless_same(
            left: Any, right: Any, pointer_left: bool = False, pointer_right: bool = False, arithmetic: bool = True,
            divides: bool = False,
        ) -> Any:  # fmt: skip
            if type(left) is tensor and type(right) is tensor and left.shape is right.shape and not divides:
                kind = left.dtype
                if kind.name == right.dtype.name and not kind.is_ptr():
                    return left, right
            return convert(left, right, pointer_left, pointer_right, arithmetic, divides)

        def broadcast_unless_same(left: Any, right: Any) -> Any:
            return (left, right) if left.shape is right.shape else broadcast(left, right)

        def make_number_once(value: Any, dtype: Any) -> Any:
            key = type(value), value, dtype.name
            if key not in self.numbers:
                self.numbers[key] = make_number(value, dtype)
            return self.numbers[key]

        semantic.binary_op_type_checking_impl = convert_unless_same
        semantic.broadcast_impl_value = broadcast_unless_same
        semantic.scalar_constant = make_number_once


class Narrowing:
    """Rounds float32 to bfloat16 to the nearest, to even ones between two."""

    def __init__(self, interpreter: Any) -> None:
        self.language, self.make_handle = interpreter.tl, interpreter.TensorHandle
        self.builder = interpreter.InterpreterBuilder

    def install(self) -> None:
        convert, language, make_handle = self.builder.create_fp_trunc, self.language, self.make_handle

        def round_to_nearest(builder: Any, source: Any, kind: Any) -> Any:
            if source.dtype.scalar != language.float32 or kind.scalar != language.bfloat16:
                return convert(builder, source, kind)
            bits = np.ascontiguousarray(source.data).view(np.uint32)
            rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
            rounded = np.where(np.isnan(source.data), 0x7FC0, rounded)
            return make_handle(rounded.astype(np.uint16), kind.scalar)

        self.builder.create_fp_trunc = round_to_nearest


def reduce_by_halves(each: Any, values: Any) -> Any:
    """Reduce with a function of the kernel's own, which like on a GPU combines all pairs of a round at once."""
    axis = each.axis
    assert axis is not None, "which axis?"
    kinds, parts = [value.dtype for value in values], [value.handle.data for value in values]
    while parts[0].shape[axis] > 1:
        # Sizes are powers of two.
        lower, upper = zip(*(np.split(part, 2, axis) for part in parts), strict=True)
        pairs = [each.to_tensor(part, kind) for half in (lower, upper) for part, kind in zip(half, kinds, strict=True)]
        combined = each.combine_fn.fn(*pairs)
        parts = [part.handle.data for part in (combined if isinstance(combined, tuple) else (combined,))]
    if each.keep_dims:
        return [each.to_tensor(part, kind) for part, kind in zip(parts, kinds, strict=True)]
    return [each.to_tensor(part.squeeze(axis), kind) for part, kind in zip(parts, kinds, strict=True)]


class OutOfBounds(Exception):
    """A kernel has accessed memory outside of the tensors that it was given."""


class Bounds:
    """The storages of a launch's tensors; every load, store and atomic operation must stay inside of one of them."""

    def __init__(self, interpreter: Any) -> None:
        self.interpreter = interpreter
        self.first = self.end = np.zeros(0, np.uint64)

    def install(self) -> None:
        executor, builder = self.interpreter.GridExecutor, self.interpreter.InterpreterBuilder
        copy_arguments = executor._init_args_hst

        def copy_and_note(each: Any, args: Any, kwargs: Any) -> Any:
            copied, named = copy_arguments(each, args, kwargs)
            self.note([*copied, *named.values()])
            return copied, named

        executor._init_args_hst = copy_and_note
        load, store = builder.create_masked_load, builder.create_masked_store
        update, exchange = builder.create_atomic_rmw, builder.create_atomic_cas

        def checked_load(each: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self.check(pointers, mask)
            return load(each, pointers, mask, *rest, **named)

        def checked_store(each: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            self.check(pointers, mask)
            return store(each, pointers, value, mask, *rest, **named)

        def checked_update(each: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.check(pointers, mask)
            return update(each, operation, pointers, value, mask, *rest)

        def checked_exchange(each: Any, pointers: Any, *rest: Any) -> Any:
            self.check(pointers, np.ones(pointers.data.shape))
            return exchange(each, pointers, *rest)

        builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
        builder.create_atomic_rmw, builder.create_atomic_cas = checked_update, checked_exchange

    def note(self, arguments: list[Any]) -> None:
        """Note the storages of these arguments, in order of their addresses."""
        storages = {first: first + size for first, size in self.storages(arguments)}
        self.first = np.array(sorted(storages), np.uint64)
        self.end = np.array([storages[int(first)] for first in self.first], np.uint64)

    def storages(self, arguments: Any) -> list[tuple[int, int]]:
        found = []
        for each in arguments:
            if isinstance(each, tuple):
                found += self.storages(each)
            elif isinstance(each, self.interpreter.TensorDescriptor):
                found += self.storages([each.base])
            elif hasattr(each, "data_ptr"):
                storage = self.interpreter._unwrap_tensor(each).untyped_storage()
                found.append((storage.data_ptr(), storage.nbytes()))
        return found

    def check(self, pointers: Any, mask: Any) -> None:
        # The mask of a descriptor is an array, others are handles of one; a mask may hold numbers.
        mask = (mask if isinstance(mask, np.ndarray) else mask.data).astype(bool)
        at = pointers.data if mask.all() else np.broadcast_to(pointers.data, mask.shape)[mask]
        if not at.size:
            return
        size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
        low, high = at.min(), at.max() + size
        place = np.searchsorted(self.first, low, "right") - 1
        # Most accesses lie in one storage from the lowest to the highest address.
        if place >= 0 and high <= self.end[place]:
            return
        places = np.searchsorted(self.first, at, "right").astype(np.int64) - 1
        outside = (places < 0) | (at + size > self.end[places])
        if outside.any():
            raise OutOfBounds(self.explain(at[outside]))

    def explain(self, outside: NDArray[np.uint64]) -> str:
        address = int(outside.flat[0])
        near = [
            f"{address - int(end)} bytes behind the end" if address >= end else f"{int(first) - address} before"
            for first, end in zip(self.first, self.end, strict=True)
        ]
        return f"{outside.size} elements lie outside of the kernel's tensors: the first is {', '.join(near)}"

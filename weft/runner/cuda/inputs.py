"""Inputs of recorded decode steps: one device buffer at a fixed address, filled by one copy.

A recorded step of `rows` rows reads the beginnings of these arrays. Rows beyond the plan's are *padding*: they point
to scratch units of memory, at position 0, so no kernel needs to know that they are not real.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.base.plan import Ints, Plan, row_arrays
from weft.kernels.interface import NO_SLOT, Batch, Operations, PageList, PageSections, SharedPrefixes
from weft.memory.kinds import Kind
from weft.memory.spec import AttentionMemory, MemorySpec
from weft.runner.cuda.shared_prefixes import PrefixGroups

# One number per row each.
KERNEL_ROWS = row_arrays(Plan, "kernels")
PER_ROW = ("token", "seat", "from_board", "slot", *KERNEL_ROWS, "closing")
PER_ROW_OF_PAGES = ("write_page", "first_position")
# Of shared prefixes, one number per row or one more. There are never more groups than rows.
OF_GROUPS = ("order", "first", "start", "place", "bounds")
OF_OWN_PAGES = ("own_place", "own_first_position", "own_bounds")
# Arrays start at multiples of this number of elements, so that their loads are aligned.
ALIGNED = 32
# Writes an array by name, and its padding.
Put = Callable[[str, Ints | NDArray[np.int64], int], None]


@dataclass(frozen=True, slots=True)
class BufferSlice:
    first: int
    length: int


class DecodeInputs:
    """Inputs of decode-only steps. `scratch` names a unit of each kind for padding; `cells` is the longest row's.

    With a `padding_line`, every row also has a line of hidden states.
    """

    def __init__(
        self,
        rows: int,
        cells: int,
        spec: MemorySpec,
        scratch: dict[Kind, int],
        device: torch.device | str,
        operations: Operations,
        padding_line: int | None = None,
    ) -> None:
        self.padding_line = padding_line
        self.rows, self.spec, self.scratch, self.operations = rows, spec, scratch, operations
        windows = {m.window is not None for m in spec.memories if isinstance(m, AttentionMemory)}
        # Lists of pages come last, the potentially long one at the very end: the unused part is not copied.
        self.pagings = [name for name, windowed in (("windowed", True), ("full", False)) if windowed in windows]
        self.places: dict[str, BufferSlice] = {}
        self.size = 0
        for name in self.per_row:
            self._place(name, rows)
        for paging in self.pagings:
            for name in PER_ROW_OF_PAGES:
                self._place(f"{paging}.{name}", rows)
            self._place(f"{paging}.bounds", rows + 1)
        for name in (*OF_GROUPS, *OF_OWN_PAGES) if "full" in self.pagings else ():
            self._place(f"shared.{name}", rows + 1)
        for paging in self.pagings:
            self._place(f"{paging}.pages", rows * (cells if paging == "full" else min(cells, spec.window_cells + 2)))
        self.device = torch.device(device)
        self.buffer = torch.zeros(self.size, dtype=torch.int32, device=device)
        self.packed_first = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self.none = torch.zeros(1, dtype=torch.int32, device=device)
        self.zeros = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def per_row(self) -> tuple[str, ...]:
        return PER_ROW if self.padding_line is None else ("line", "starts_earlier", *PER_ROW)

    def _place(self, name: str, length: int) -> None:
        self.places[name] = BufferSlice(self.size, length)
        self.size += -(-length // ALIGNED) * ALIGNED

    def tensor(self, name: str, length: int | None = None) -> Tensor:
        place = self.places[name]
        return self.buffer[place.first : place.first + (place.length if length is None else length)]

    # filling ----------------------------------------------------------------------------------------------------------

    def fill(self, plan: Plan, rows: int, lines: Ints | None = None, groups: PrefixGroups | None = None) -> None:
        """Send a plan of decodes, padded to `rows` rows, and the lines of hidden states. The copy is asynchronous.

        With `groups`, send the prefixes that they share, too.
        """
        pinned = torch.empty(self.size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        used = self._write(plan, rows, lines, pinned.numpy())
        if groups is not None:
            self._write_groups(groups, rows, pinned.numpy())
        self.buffer[:used].copy_(pinned[:used], non_blocking=True)

    def fill_with_padding(self) -> None:
        """Fill the inputs like those of a plan without rows, padded to the maximum."""
        padding = {"seat": self.scratch_seat, "tail": self.scratch.get(Kind.TAIL, 0), "closing": NO_SLOT}
        if self.padding_line is not None:
            padding["line"] = self.padding_line
        for name, value in padding.items():
            self.tensor(name).fill_(value)
        for paging in self.pagings:
            scratch_page = self.scratch[Kind.WINDOW if paging == "windowed" else Kind.PAGE]
            self.tensor(f"{paging}.write_page").fill_(scratch_page)
            self.tensor(f"{paging}.pages").fill_(scratch_page)
            self.tensor(f"{paging}.bounds").copy_(self.packed_first)
        for name in OF_GROUPS if "full" in self.pagings else ():
            self.tensor(f"shared.{name}").fill_(0)
        for name in ("own_place", "own_bounds") if "full" in self.pagings else ():
            self.tensor(f"shared.{name}").copy_(self.packed_first)

    def _write(self, plan: Plan, rows: int, lines: Ints | None, host: NDArray[np.int32]) -> int:
        """Write all arrays into `host`; return how much of it to copy."""

        def put(name: str, values: Ints | NDArray[np.int64], padding: int) -> None:
            first = self.places[name].first
            host[first : first + len(values)] = values
            host[first + len(values) : first + rows] = padding

        cell = self.spec.cell
        closing = np.full(plan.rows, NO_SLOT, np.int32)
        closing[plan.captures.row] = plan.captures.slot
        if lines is not None and self.padding_line is not None:
            put("line", lines, self.padding_line)
            drafts, none = plan.drafts, np.zeros(plan.rows, np.int32)
            put("starts_earlier", np.minimum(drafts.unverified_before, 1) if drafts.may_move else none, 0)
        put("token", plan.tokens, 0)
        put("seat", plan.seat, self.scratch_seat)
        put("from_board", plan.from_board, 0)
        put("slot", np.where(plan.start >= cell, plan.read_slot, 0), 0)
        for name in KERNEL_ROWS:
            put(name, getattr(plan, name), self.scratch.get(Kind.TAIL, 0) if name == "tail" else 0)
        put("closing", closing, NO_SLOT)
        used = self.places["closing"].first + rows
        for paging in self.pagings:
            used = self._write_pages(plan, rows, paging, host, put)
        return used

    def _write_pages(self, plan: Plan, rows: int, paging: str, host: NDArray[np.int32], put: Put) -> int:
        cell, real = self.spec.cell, plan.rows
        windowed = paging == "windowed"
        table, scratch = (plan.window_table, Kind.WINDOW) if windowed else (plan.page_table, Kind.PAGE)
        first_cell = plan.window_first if windowed else np.zeros(real, np.int32)
        last = plan.start // cell - first_cell
        scratch_page = self.scratch[scratch]
        put(f"{paging}.write_page", table[np.arange(real), last], scratch_page)
        put(f"{paging}.first_position", first_cell * cell, 0)
        bounds = self.places[f"{paging}.bounds"].first
        host[bounds] = 0
        host[bounds + 1 : bounds + 1 + real] = np.cumsum(last + 1)
        count = int(host[bounds + real])
        host[bounds + 1 + real : bounds + 1 + rows] = np.arange(count + 1, count + 1 + rows - real)
        pages = self.places[f"{paging}.pages"].first
        host[pages : pages + count] = table[np.arange(table.shape[1]) <= last[:, None]]
        end = pages + count + rows - real
        host[pages + count : end] = scratch_page
        return end

    def _write_groups(self, groups: PrefixGroups, rows: int, host: NDArray[np.int32]) -> None:
        """Write where groups and rows find their pages in the full list, which is there already."""

        def put(name: str, values: Ints, length: int, padding: int = 0) -> None:
            first = self.places[f"shared.{name}"].first
            host[first : first + len(values)] = values
            host[first + len(values) : first + length] = padding

        cell, real = self.spec.cell, len(groups.shared)
        bounds = host[self.places["full.bounds"].first :][: rows + 1]
        put("order", groups.order, rows)
        put("first", groups.first, rows + 1, len(groups.order))
        put("start", groups.cells * cell - 1, rows)
        put("place", bounds[groups.order[groups.first[:-1]]], rows)
        put("bounds", groups.bounds, rows + 1, int(groups.bounds[-1]))
        put("own_first_position", groups.shared * cell, rows)
        # All of padding is its own.
        place, own = (host[self.places[f"shared.{name}"].first :] for name in ("own_place", "own_bounds"))
        place[:rows] = bounds[:-1]
        place[:real] += groups.shared
        left_out = np.cumsum(groups.shared, dtype=np.int32)
        own[: rows + 1] = bounds
        own[1 : real + 1] -= left_out
        own[real + 1 : rows + 1] -= left_out[-1]

    @property
    def scratch_seat(self) -> int:
        """Return the line of the token board after the last real one."""
        return self.rows

    # reading ----------------------------------------------------------------------------------------------------------

    def batch(self, rows: int, token_ids: Tensor, members: int = 1) -> Batch:
        """Return the step as kernels see it: views of the buffer. Nothing here depends on its contents.

        Up to `members` rows read a shared prefix together; if 1, groups are not read.
        """
        rows_of_plan: dict[str, Any] = {name: self.tensor(name, rows) for name in KERNEL_ROWS}
        return Batch(
            operations=self.operations,
            tokens=rows,
            rows=rows,
            decodes=rows,
            pieces=0,
            most_pieces=0,
            longest=1,
            farthest=0,
            cell=self.spec.cell,
            token_ids=token_ids,
            positions=self.tensor("start", rows),
            first=self.packed_first[: rows + 1],
            slot=self.tensor("slot", rows),
            **rows_of_plan,
            closing=self.tensor("closing", rows),
            piece_row=self.none[:0],
            piece_position=self.none[:0],
            piece_slot=self.none[:0],
            first_piece=self.none,
            full=self._page_list("full", rows),
            windowed=self._page_list("windowed", rows),
            host_start=nothing(),
            host_first=nothing(),
            host=None,
            shared=self._shared(rows, members) if members > 1 else None,
        )

    def _shared(self, rows: int, members: int) -> SharedPrefixes:
        def tensor(name: str, length: int = rows) -> Tensor:
            return self.tensor(f"shared.{name}", length)

        return SharedPrefixes(
            members,
            tensor("order"),
            tensor("first", rows + 1),
            tensor("start"),
            PageSections(tensor("place"), self.zeros[:rows], tensor("bounds", rows + 1)),
            PageSections(tensor("own_place"), tensor("own_first_position"), tensor("own_bounds", rows + 1)),
        )

    def _page_list(self, paging: str, rows: int) -> PageList | None:
        if paging not in self.pagings:
            return None
        return PageList(
            self.tensor(f"{paging}.write_page", rows),
            self.tensor(f"{paging}.first_position", rows),
            self.tensor(f"{paging}.bounds", rows + 1),
            self.tensor(f"{paging}.pages"),
            nothing(),
            nothing(),
        )


def nothing() -> Tensor:
    """Return an empty host array, for steps that are recorded before their rows are known."""
    return torch.empty(0, dtype=torch.int32, device="cpu")

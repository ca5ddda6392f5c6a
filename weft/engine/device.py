"""The engine's interface to the executor of plans: a GPU, a CPU, a simulator, a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from weft.base.copies import CopyPlan
from weft.base.plan import Ints, Landing, Plan

if TYPE_CHECKING:
    from weft.memory.tiers.copies import HostCopies
    from weft.memory.tiers.disk.file import DiskFile
    from weft.memory.tiers.remote.tier import RemoteCopies


class StepSizes(Protocol):
    """Sizes to which a device pads its steps."""

    def padded_tokens(self, rows: int, drafts: int) -> int:
        """Return how many tokens it computes in a step of these rows, which have this number of drafts in all."""
        ...

    def draft_counts(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of drafts, of all rows together, that fill the sizes for these rows, in order.

        With more drafts than the last of them, a step has no size of its own. None: no size is for drafts.
        """
        ...


class StepProgress(Protocol):
    """How far a step in flight is, so that what its layers have written can be copied."""

    def has_computed(self, flight: Any, layer: int) -> bool:
        """Return whether a flight has written the model's memory of this index."""
        ...

    def landed(self, flight: Any) -> bool:
        """Return whether `land` would not wait."""
        ...


class DeviceTiers(Protocol):
    """The tiers below a device's memory. Copies of one level and direction land in the order of their launch."""

    @property
    def disk(self) -> DiskFile:
        """The file of the disk tier, if there is one."""
        ...

    @property
    def remote(self) -> RemoteCopies:
        """The copies from and to a remote store, if there is one."""
        ...

    @property
    def load_bytes_per_second(self) -> float | None:
        """The rate of loads from host memory, measured at the start, if it was."""
        ...

    def allocate(self, size_bytes: int) -> HostCopies:
        """Return more host memory, beside the tiers, and what copies between the device and it."""
        ...

    def copy(self, plan: CopyPlan) -> Any:
        """Begin the copies of a plan beside the steps."""
        ...

    def copied(self, ticket: Any, wait: bool) -> float | None:
        """Return the seconds that the copies took, or None if they are under way; with `wait`, wait a little for them.

        A wait is about a millisecond at most, so that an engine with nothing else to do still sees new requests.

        Raises `CopyFailed` if they could not be made.
        """
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a device can do besides executing plans. None: it cannot."""

    # Launches the sampling of the last flight, whose plan has samples `awaiting_mask`: with their masks, in order.
    supply_masks: Callable[[Any, Ints], None] | None = None
    # The device verifies drafts itself, and a row may start where the drafts of the flight before turn out to end.
    # Returns whether it can in a step of these decodes, rows with drafts, and tokens of the latter.
    builds_on_flight: Callable[[int, int, int], bool] | None = None
    sizes: StepSizes | None = None
    progress: StepProgress | None = None
    tiers: DeviceTiers | None = None


PLANS_ONLY = Capabilities()


class Device(Protocol):
    """Executes plans whole and in the order of their launch. Flights are opaque to the engine."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def launch(self, plan: Plan) -> Any: ...

    def land(self, flight: Any) -> Landing: ...

    def close(self) -> None:
        """Release what is more than memory: files, other processes."""

"""The engine's interface to the executor of plans: a GPU, a CPU, a simulator, a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from weft.base.copies import CopyPlan
from weft.base.plan import Ints, Landing, Plan

if TYPE_CHECKING:
    from weft.memory.tiers.disk.file import DiskFile
    from weft.memory.tiers.remote.tier import RemoteCopies


class Device(Protocol):
    """Executes plans whole and in the order of their launch. Flights are opaque to the engine."""

    def launch(self, plan: Plan) -> Any: ...

    def land(self, flight: Any) -> Landing: ...


@runtime_checkable
class MaskingDevice(Protocol):
    """A device that samples in a launch of its own where a plan has `late` samples."""

    def supply_masks(self, flight: Any, masks: Ints) -> None:
        """Launch the sampling of the last flight: `masks` are those of its late samples, in order."""


@runtime_checkable
class FollowingDevice(Protocol):
    """A device that verifies drafts itself: a row may start where the drafts of the flight before turn out to end."""

    def follows(self, decodes: int, drafting: int, tokens: int) -> bool:
        """Return whether it can do that in a step of these decodes, and of rows with drafts that have these tokens."""
        ...


def following_device(device: Device) -> FollowingDevice | None:
    """Return the device if it follows drafts at least in the smallest step."""
    return device if isinstance(device, FollowingDevice) and device.follows(0, 1, 2) else None


@runtime_checkable
class PaddingDevice(Protocol):
    """A device that pads steps to sizes of its own."""

    def padded_tokens(self, rows: int, drafts: int) -> int:
        """Return how many tokens it computes in a step of these rows, which have this number of drafts in all."""
        ...

    def draft_counts(self, rows: int) -> Sequence[int] | None:
        """Return the numbers of drafts, of all rows together, that fill the sizes for these rows, in order.

        With more drafts than the last of them, a step has no size of its own. None: no size is for drafts.
        """
        ...


@runtime_checkable
class LayeredDevice(Protocol):
    """A device that says how far a step in flight is, so that what its layers have written can be copied."""

    def has_computed(self, flight: Any, layer: int) -> bool:
        """Return whether a flight has written the model's memory of this index."""
        ...

    def landed(self, flight: Any) -> bool:
        """Return whether `land` would not wait."""
        ...


@runtime_checkable
class ClosableDevice(Protocol):
    """A device that holds more than memory: a file, other processes."""

    def close(self) -> None: ...


class CopyingDevice(Device, Protocol):
    """A device with tiers below its memory. Copies of one level and direction land in the order of their launch."""

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

    def close(self) -> None:
        """Release the tiers below."""
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

"""The engine's part in prompts in files: writes those that a request has computed, reads others, and verifies them.

Runs between steps, in the engine's thread, a few milliseconds at a time. One prompt after the other is carried.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weft.base.companions import Companion
from weft.base.copies import UnitCopy
from weft.base.errors import CopyFailed, InvalidField, OptionError, RequestError
from weft.engine.device import Device
from weft.engine.events import Output
from weft.engine.request import Request
from weft.engine.saved.jobs import CarriedBatch, Job, LoadJob, SaveJob
from weft.engine.saved.verification import chosen_stretches, request_of
from weft.engine.sequence import Sequence as EngineSequence
from weft.memory.keys import PrefixIdentity
from weft.memory.saved.carriages import (
    NO_ROOM,
    ByteComparison,
    OutgoingFile,
    PromptCarriage,
    plan_of,
)
from weft.memory.saved.carried import DROPPED, Carried
from weft.memory.saved.file import SavedModel
from weft.memory.tiers.copies import HostCopies

log = logging.getLogger("weft")

# Prompts on their way at once; the memory that they read or fill is held.
MOST_JOBS = 8
NOT_HERE = "needs an engine that was started with --prefix-key or --trusted-prefix-keys"
BUSY = "too many prompts are on their way to or from files; try again later"


class SavedPrompts(Companion):
    """`add` and `abort` are the engine's; `report_end` is called when a request's prompt is written, or could not be.

    `name` names cells, but for their salt.
    """

    def __init__(
        self,
        device: Device,
        carried: Carried,
        model: SavedModel,
        name: Callable[[bytes], PrefixIdentity],
        add: Callable[[Request], int],
        abort: Callable[[int], None],
        report_end: Callable[[int, str | None], None],
    ) -> None:
        self._device, self._carried, self._model, self._name = device, carried, model, name
        self._add, self._abort, self._report_end = add, abort, report_end
        self._area = carried.area
        self._copies: HostCopies | None = None
        self._jobs: deque[Job] = deque()
        self._flight: CarriedBatch | None = None
        # Requests to be written, by number; and those that compute a stretch, by theirs.
        self._paths: dict[int, Path] = {}
        self._computing: dict[int, LoadJob] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        # Between two steps: saves that could not begin, and requests that verify nothing any more.
        self._failed: list[tuple[int, str]] = []
        self._useless: list[int] = []
        self._plans = 0
        self.counts: Counter[str] = Counter()
        carried.give_up = self._give_up_imports

    @property
    def busy(self) -> bool:
        return bool(self._jobs or self._failed or self._useless)

    # what is asked --------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise if the prompt of a request cannot be written."""
        if request.params.max_tokens or request.send_to is not None:
            raise InvalidField("max_tokens", "must be 0 for a prompt that is saved")
        cell = self._name(b"").cell
        if len(request.known) < cell:
            raise InvalidField("prompt", f"must have at least {cell} tokens, or there is nothing to save")
        if len(self._paths) + len(self._jobs) >= MOST_JOBS:
            raise RequestError(BUSY, 429)

    def expect(self, number: int, path: Path) -> None:
        """Write the prompt of this request when it is computed."""
        self._paths[number] = path

    def load(self, number: int, path: Path, salt: bytes, tenant: bytes, share: float) -> None:
        """Read a file for a tenant; `take_answers` has the answer. `share` of its cells are computed again before."""
        try:
            self._jobs.append(self.open_file(number, path, salt, tenant, share))
        except RequestError as error:
            self._refuse(number, error)

    def open_file(self, number: int, path: Path, salt: bytes, tenant: bytes, share: float) -> LoadJob:
        """Return a file on its way in, for requests with a salt. Raises if it is not for them."""
        name = self._name(salt)
        if share and name.form is None:
            raise RequestError("verifying needs --exact: otherwise the same tokens may give other bits")
        if len(self._jobs) >= MOST_JOBS:
            raise RequestError(BUSY, 429)
        carriage = self._carried.open_file(path, self._model, name, tenant)
        return LoadJob(number, carriage.reader, carriage.loose, carriage, share, carriage.reader.keys, tenant)

    def take_answers(self) -> dict[int, dict[str, Any]]:
        """Return the answers of files that were read, or refused, by their numbers."""
        answers, self._answers = self._answers, {}
        return answers

    # sequences ------------------------------------------------------------------------------------------------------

    def computed(self, sequence: EngineSequence) -> bool:
        """Take what a request has computed; return whether its end waits for a file. Its lease is still open."""
        job = self._computing.get(sequence.id)
        if job is not None:
            self._compare(job, sequence)
            return False
        path = self._paths.pop(sequence.id, None)
        if path is None:
            return False
        try:
            self._jobs.append(self._leaving(sequence, path))
        except RequestError as error:
            # Not now: the sequence is still ending.
            self._failed.append((sequence.id, str(error)))
        return True

    def _leaving(self, sequence: EngineSequence, path: Path) -> SaveJob:
        assert sequence.lease is not None
        writer = self._carried.new_file(path, self._model, sequence.lease)
        try:
            kept = self._carried.keep(sequence.lease, inner=True)
        except BaseException:
            writer.abandon()
            raise
        keys = sequence.keys[: kept.node.depth]
        carriage = OutgoingFile(self._area, kept, keys, writer)
        return SaveJob(
            sequence.id, kept, carriage, writer, sequence.known, len(sequence.request.prompt), keys, writer.tenant
        )

    def abandon(self, number: int) -> None:
        """Forget a request that was aborted or has failed."""
        self._paths.pop(number, None)
        for job in [each for each in self._jobs if isinstance(each, SaveJob) and each.number == number]:
            self._end(job, RequestError("the request was aborted"), tell=False)

    def own(self, outputs: list[Output], forget: Callable[[int], None]) -> list[Output]:
        """Return the outputs of callers: those of requests that verify a file stay here."""
        if not self._computing:
            return outputs
        found = []
        for output in outputs:
            job = self._computing.get(output.sequence)
            if job is None:
                found.append(output)
            elif output.finish is not None:
                del self._computing[output.sequence]
                forget(output.sequence)
                if job.computing == output.sequence:
                    job.computing = None
                    if output.error is not None or job.carriage is None:
                        self._end(job, RequestError(output.error or NO_ROOM, 503))
        return found

    def drop(self, tenant: bytes | None, prefix: bytes | None) -> None:
        """End the prompts on their way that an operator drops."""
        for job in list(self._jobs):
            named = prefix is not None and any(key.startswith(prefix) for key in job.keys)
            if named or tenant == job.tenant or (tenant is None and prefix is None):
                self._end(job, RequestError(f"the prompt was given up: {DROPPED}", 409))

    def _give_up_imports(self) -> None:
        """Give back the memory of files on their way in, because requests need it."""
        for job in [each for each in self._jobs if isinstance(each, LoadJob)]:
            self._end(job, RequestError(NO_ROOM, 503))

    # between steps --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        self._go_on(wait=False)

    def attend(self, idle: bool) -> None:
        if idle:
            self._go_on(wait=True)

    def close(self) -> None:
        for job in list(self._jobs):
            self._end(job, RequestError("the engine has ended", 503))
        if self._copies is not None:
            self._copies.close()

    def _go_on(self, wait: bool) -> None:
        """Take in the batch under way, and begin the next one."""
        failed, self._failed = self._failed, []
        for number, error in failed:
            self.counts["unsaved"] += 1
            self._report_end(number, error)
        useless, self._useless = self._useless, []
        for number in useless:
            self._abort(number)
        if self._flight is not None and not self._land(self._flight, wait):
            return
        self._carried.moving = False
        if not self._jobs:
            return
        job = self._jobs[0]
        try:
            if job.carriage is None:
                self._begin_stretch(job)
                return
            memory = self._memory()
            copies = job.carriage.plan()
            if copies is None:
                self._advance(job)
            else:
                self._begin(job, job.carriage, copies, memory)
        except RequestError as error:
            self._end(job, error)

    def _memory(self) -> HostCopies:
        """Return the area's memory, which is allocated with the first prompt: most engines have none."""
        if self._copies is None:
            tiers = self._device.capabilities.tiers
            assert tiers is not None, "a device has the memory that prompts in files pass through"
            try:
                self._copies = tiers.allocate(self._area.size_bytes)
            except (MemoryError, OptionError) as error:
                raise RequestError(f"there is no host memory for prompts in files: {error}", 503) from None
            self._area.use(self._copies.memory)
        return self._copies

    def _begin(self, job: Job, carriage: PromptCarriage, copies: Sequence[UnitCopy], memory: HostCopies) -> None:
        self._plans += 1
        plan = plan_of(self._plans, carriage, copies, self._carried.waits_for_steps)
        self._flight = CarriedBatch(job, carriage, copies, memory.copy(plan))
        self._carried.moving = True

    def _land(self, flight: CarriedBatch, wait: bool) -> bool:
        """Take in a batch, unless it is still under way; return whether it has landed."""
        assert self._copies is not None
        error: RequestError | None = None
        try:
            if self._copies.copied(flight.ticket, wait) is None:
                return False
            if flight.job in self._jobs:
                flight.carriage.landed(flight.copies)
        except (RequestError, CopyFailed) as failed:
            error = failed if isinstance(failed, RequestError) else RequestError(str(failed), 503)
        self._flight = None
        self._area.release(flight.copies)
        if flight.job not in self._jobs:
            self._release(flight.job)
        elif error is not None:
            self._end(flight.job, error)
        return True

    # the life of a job ----------------------------------------------------------------------------------------------

    def _advance(self, job: Job) -> None:
        """Go on with a job whose carriage is done."""
        if isinstance(job, SaveJob):
            job.carriage.close(job.tokens, job.prompt)
            self._end(job, None)
            return
        if job.incoming:
            job.incoming = False
            cells, points = len(job.keys), list(job.loose.points)
            job.stretches = chosen_stretches(cells, self._name(b"").cell, points, job.share) if job.share else []
        else:
            self._end_stretch(job)
        job.carriage = None
        if not job.stretches:
            self._publish(job)

    def _begin_stretch(self, job: LoadJob) -> None:
        """Compute a part of a file's prompt, from a resume point of the file, where nothing else is cached."""
        if job.computing is not None:
            return
        stretch, request = job.stretches[0], request_of(job.reader.tokens, job.reader.prompt, job.stretches[0])
        if stretch.start:
            keys = self._name(request.salt).keys(job.reader.tokens[: stretch.start], decoded_from=job.reader.prompt)
            self._carried.begin_at(job.loose, keys, job.tenant)
        job.computing = self._add(request)
        self._computing[job.computing] = job

    def _compare(self, job: LoadJob, sequence: EngineSequence) -> None:
        try:
            assert sequence.lease is not None
            job.computed = self._carried.keep(sequence.lease, inner=False)
        except RequestError:
            return  # its output ends the job
        first = job.stretches[0].start // self._name(b"").cell
        job.carriage = ByteComparison(self._area, job.computed, job.loose, job.keys, first)

    def _end_stretch(self, job: LoadJob) -> None:
        stretch = job.stretches.pop(0)
        job.verified_tokens += stretch.end - stretch.start
        self._forget_computed(job)

    def _forget_computed(self, job: LoadJob) -> None:
        computed, job.computed = job.computed, None
        if computed is not None:
            self._carried.forget(computed)

    def _publish(self, job: LoadJob) -> None:
        tokens = self._carried.publish(job.loose, job.keys, job.tenant)
        self.counts["loaded_tokens"] += tokens
        self.counts["verified_tokens"] += job.verified_tokens
        self._answers[job.number] = {
            "tokens": len(job.reader.tokens),
            "cached_tokens": tokens,
            "verified_tokens": job.verified_tokens,
        }
        self._end(job, None)

    def _refuse(self, number: int, error: RequestError) -> None:
        self.counts["refused"] += 1
        self._answers[number] = {"error": str(error), "status": error.status}

    def _end(self, job: Job, error: RequestError | None, tell: bool = True) -> None:
        """End a job. Its memory stays with it while a batch is under way."""
        self._jobs.remove(job)
        if isinstance(job, LoadJob):
            self.counts["loaded"] += error is None
            if error is not None:
                self._refuse(job.number, error)
            if job.computing is not None:
                # Not now: a step may be planned.
                self._useless.append(job.computing)
                job.computing = None
        else:
            self.counts["saved" if error is None else "unsaved"] += 1
            if error is not None:
                job.writer.abandon()
            if tell:
                self._report_end(job.number, None if error is None else str(error))
        if self._flight is None or self._flight.job is not job:
            self._release(job)

    def _release(self, job: Job) -> None:
        if isinstance(job, SaveJob):
            self._carried.release(job.kept)
            return
        self._forget_computed(job)
        self._carried.release(job.loose)
        job.reader.close()

    def stats(self) -> dict[str, int]:
        """Return counters for metrics."""
        names = ("saved", "unsaved", "loaded", "refused", "loaded_tokens", "verified_tokens")
        return {name: self.counts[name] for name in names}

"""Store of versions that are sent through a collective group and staged at the explorers."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress

import redis

from trinity_schemas import StepRef

from ....diagnostics.waits import NO_REPORTS, WaitReporter
from ....errors import GroupBroken, VersionNotStored
from ...errors import PartClosed, TransportRefused
from ..base import Check, PartRef
from ..chunk_slices import check_chunks, cut_chunks
from .frames import FrameKind, FrameSender
from .receiver import GroupReceiver
from .rendezvous import Rendezvous, WeightSyncInfo, own_address
from .sender import GroupSender
from .staged_versions import Buffer, StagedVersions

CHUNK_BYTES = 4 << 20
"""Bytes of a bucket; the sender has two of them, whatever the size of the model."""
TIMEOUT = 30.0
"""Seconds after which a dead or hung peer is an error to all others.

The trainer's other ranks wait during this time: their own timeout must be several times as long.
"""

_MEETING = 10.0
"""Seconds that an explorer has to reach the trainer before it makes a request."""


class CollectiveStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`, pushing instead of keeping.

    Each chunk of the publisher goes to every explorer of the group at once. Each explorer keeps the
    newest complete version in its own memory. The publisher keeps nothing: the only part is rank
    0's. An explorer that was not in the group when the version was sent waits for the next one.

    Args:
        client: Client of the server at which the trainer announces its address.
        run_id: Id of the run.
        name: Name of this process.
        timeout: Seconds after which a dead peer is an error; only the trainer's value counts.
        waits: Returns the reporter of the trainer's long waits.
    """

    name = "collective"

    def __init__(
        self,
        client: redis.Redis,
        run_id: str,
        name: str,
        *,
        timeout: float = TIMEOUT,
        waits: Callable[[], WaitReporter] = lambda: NO_REPORTS,
    ) -> None:
        self._redis = client
        self._waits = waits
        self._run_id = run_id
        self._who = name
        self._timeout = timeout
        self._place = Rendezvous(client, run_id)
        self._staging = StagedVersions()
        self._trainer: GroupSender | None = None
        self._explorer: GroupReceiver | None = None

    # --- the group -------------------------------------------------------------------------

    def listen(self, epoch: int) -> WeightSyncInfo:
        """Listen for explorers as the trainer's rank 0, and announce the address."""
        if self._trainer is None:
            self._trainer = GroupSender(
                self._run_id,
                epoch,
                self._place,
                timeout=self._timeout,
                host=own_address(self._redis),
                waits=self._waits(),
            )
        return self._trainer.info

    def set_up(self, epoch: int, explorers: int, patience: float) -> tuple[str, ...]:
        """Wait for ``explorers`` explorers and make the group; return their names."""
        self.listen(epoch)
        assert self._trainer is not None
        return self._trainer.set_up(explorers, patience)

    def join(self) -> None:
        """Join the trainer's groups from now on, in a separate thread."""
        if self._explorer is None:
            self._explorer = GroupReceiver(self._run_id, self._who, self._place, self._staging)

    def would_get(self, version: StepRef) -> bool:
        """Return True if an explorer would receive the next send, and has no newer version."""
        newest = self._staging.newest()
        if newest is not None and StepRef(newest.epoch, newest.step) > version:
            return False
        return self._explorer is not None and self._explorer.is_met(_MEETING)

    def sync_info(self) -> WeightSyncInfo | None:
        """Return the trainer's address, if this process knows it."""
        end = self._trainer or self._explorer
        return end.info if end is not None else None

    def tear_down(self) -> None:
        """End the group; an explorer leaves it and keeps its staged versions."""
        if self._trainer is not None:
            self._trainer.tear_down()
        if self._explorer is not None:
            self._explorer.close()
            self._explorer = None

    # --- the port --------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> CollectiveSink:
        """Begin a part. Raises GroupBroken if no explorer would receive it."""
        if part.rank != 0:
            raise TransportRefused("rank", self.name)
        self.listen(part.epoch)
        assert self._trainer is not None
        return CollectiveSink(self._trainer, part, chunk_bytes or CHUNK_BYTES)

    def open(self, part: PartRef) -> CollectiveSource | None:
        """Return the part if it is the newest one that was received complete."""
        buffer = self._staging.hold(part)
        return None if buffer is None else CollectiveSource(self._staging, buffer)

    def delete(self, part: PartRef) -> None:
        """Forget a received part; the sender keeps nothing."""
        self._staging.forget(part)

    def missing(self, part: PartRef) -> VersionNotStored:
        """Return the error of a part that is missing here."""
        if self._explorer is None:
            return VersionNotStored(str(part), fault="outside group")
        if self._explorer.failure is not None:
            reason = self._explorer.failure
            return VersionNotStored(str(part), fault="left group", reason=reason)
        newest = self._staging.newest()
        return VersionNotStored(
            str(part), fault="late to group", newest=None if newest is None else newest.step
        )

    def close(self) -> None:
        """Leave the group and release the staged versions."""
        if self._explorer is not None:
            self._explorer.close()
            self._explorer = None
        try:
            if self._trainer is not None:
                self._trainer.close()
        finally:
            self._trainer = None
            self._staging = StagedVersions()
            self._redis.close()


class CollectiveSink:
    """Implements :class:`~trinity_events.weights.PartSink`: chunks are buckets."""

    def __init__(self, trainer: GroupSender, part: PartRef, chunk_bytes: int) -> None:
        self._trainer = trainer
        self._part = part
        # The explorers are told before the first bucket is filled.
        self._sender: FrameSender | None = FrameSender(trainer.begin(part), chunk_bytes)

    def reserve(self) -> memoryview:
        """Return one bucket, while the other one is sent."""
        with self._sending() as sender:
            return sender.reserve()
        raise AssertionError("unreachable")

    def commit(self, nbytes: int) -> None:
        """Send the bucket."""
        with self._sending() as sender:
            sender.commit(nbytes)

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Send the manifest, and wait until every explorer has the whole part."""
        with self._sending() as sender:
            sender.finish(FrameKind.SEAL, manifest)
            # Before the part is announced: an announced version is at every explorer.
            self._trainer.confirm()
        self._sender = None

    def discard(self) -> None:
        """Report to the explorers that the part will not come; a sealed part stays theirs."""
        if self._sender is not None:
            with suppress(GroupBroken), self._sending() as sender:
                # Receivers wait inside of a collective, which only a frame of rank 0 ends.
                sender.finish(FrameKind.ABORT)
            self._sender = None

    @contextmanager
    def _sending(self) -> Iterator[FrameSender]:
        """End a group that breaks at once, so that its other members get an error."""
        if self._sender is None:
            raise PartClosed(str(self._part))
        try:
            yield self._sender
        except GroupBroken:
            self._sender = None
            self._trainer.tear_down()
            raise


class CollectiveSource:
    """Implements :class:`~trinity_events.weights.PartSource` over a staged buffer."""

    def __init__(self, staging: StagedVersions, buffer: Buffer) -> None:
        self.manifest = buffer.manifest
        self._staging = staging
        self._buffer: Buffer | None = buffer
        self._data = buffer.data

    def read(
        self, sizes: Sequence[int], check: Check, indices: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """Return the bytes where they were received, without a copy."""
        check_chunks(cut_chunks(self._data, sizes, indices), check)
        return [self._data]

    def close(self) -> None:
        """Release the memory, which the second next version reuses."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._staging.release(buffer)

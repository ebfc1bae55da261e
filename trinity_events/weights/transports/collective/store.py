"""Versions that are sent to explorers through a collective group, and staged there."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, suppress

import redis

from trinity_schemas import StepRef

from ....errors import GroupBroken
from ..base import Check, PartRef
from ..chunk_slices import check_chunks, cut_chunks
from .frames import Frame, FrameSender
from .receiver import GroupReceiver
from .rendezvous import Rendezvous, WeightSyncInfo, own_address
from .sender import GroupSender
from .staged_versions import Buffer, StagedVersions

CHUNK_BYTES = 4 << 20
"""Of a bucket; the sender has two of them, whatever the size of the model."""
TIMEOUT = 30.0
"""Seconds within which a peer that died, or hangs, is an error to all others.

The trainer's other ranks wait meanwhile: their own timeout must be several times as long.
"""

_MEETING = 10.0
"""Seconds that an explorer is given to reach the trainer, before it asks for anything."""


class CollectiveStore:
    """Implements :class:`~trinity_events.weights.ChunkStore`, pushing instead of keeping.

    What the publisher puts goes to every explorer of the group at once, and each keeps the newest
    whole version in memory of its own. The publisher keeps nothing: there is one part, rank 0's,
    and an explorer that was not in the group when it was sent waits for the next version.

    Args:
        client: The server on which the trainer says where it is.
        run_id: The run.
        name: Who this process is.
        timeout: Seconds within which a dead peer is an error; the trainer's counts.
    """

    name = "collective"

    def __init__(
        self, client: redis.Redis, run_id: str, name: str, *, timeout: float = TIMEOUT
    ) -> None:
        self._redis = client
        self._run_id = run_id
        self._who = name
        self._timeout = timeout
        self._place = Rendezvous(client, run_id)
        self._staging = StagedVersions()
        self._trainer: GroupSender | None = None
        self._explorer: GroupReceiver | None = None

    # --- the group -------------------------------------------------------------------------

    def listen(self, epoch: int) -> WeightSyncInfo:
        """Let explorers find us; from then on we are the trainer's rank 0."""
        if self._trainer is None:
            self._trainer = GroupSender(
                self._run_id,
                epoch,
                self._place,
                timeout=self._timeout,
                host=own_address(self._redis),
            )
        return self._trainer.info

    def set_up(self, epoch: int, explorers: int, patience: float) -> tuple[str, ...]:
        """Wait for so many explorers and make the group; returns their names."""
        self.listen(epoch)
        assert self._trainer is not None
        return self._trainer.set_up(explorers, patience)

    def join(self) -> None:
        """Take part in the trainer's groups from now on, in a thread of its own."""
        if self._explorer is None:
            self._explorer = GroupReceiver(self._run_id, self._who, self._place, self._staging)

    def would_get(self, version: StepRef) -> bool:
        """Whether an explorer would get what is sent from now on, and has nothing newer."""
        newest = self._staging.newest()
        if newest is not None and StepRef(newest.epoch, newest.step) > version:
            return False
        return self._explorer is not None and self._explorer.is_met(_MEETING)

    def found(self) -> WeightSyncInfo | None:
        """Where the trainer is, as far as this process knows."""
        end = self._trainer or self._explorer
        return end.info if end is not None else None

    def tear_down(self) -> None:
        """End the group; an explorer leaves it, and keeps what is staged."""
        if self._trainer is not None:
            self._trainer.tear_down()
        if self._explorer is not None:
            self._explorer.close()
            self._explorer = None

    # --- the port --------------------------------------------------------------------------

    def begin(self, part: PartRef, chunk_bytes: int | None = None) -> CollectiveSink:
        """Begin a part. Raises GroupBroken when nobody would get it."""
        if part.rank != 0:
            raise ValueError("only rank 0 is in the collective group: it sends the full weights")
        self.listen(part.epoch)
        assert self._trainer is not None
        return CollectiveSink(self._trainer, part, chunk_bytes or CHUNK_BYTES)

    def open(self, part: PartRef) -> CollectiveSource | None:
        """The part, where it was received whole and nothing newer has been since."""
        buffer = self._staging.hold(part)
        return None if buffer is None else CollectiveSource(self._staging, buffer)

    def delete(self, part: PartRef) -> None:
        """Nothing is kept by who sends; who received it forgets it."""
        self._staging.forget(part)

    def missing(self, part: PartRef) -> str:
        """Why the part may not be there, in words."""
        if self._explorer is None:
            return (
                "they are sent through a collective group, which this process has not joined; for "
                "readers beside the explorers start the trainer with --weights redis"
            )
        if self._explorer.failure is not None:
            return self._explorer.failure
        newest = self._staging.newest()
        here = (
            "none has come yet" if newest is None else f"the newest here is of step {newest.step}"
        )
        return f"this explorer was not in the collective group when they were sent ({here})"

    def close(self) -> None:
        """Leave the group, and let go of what was staged."""
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
        # Who is there is told before the first bucket is filled.
        self._sender: FrameSender | None = FrameSender(trainer.begin(part), chunk_bytes)

    def reserve(self) -> memoryview:
        """One bucket, while the other is on its way."""
        with self._sending() as sender:
            return sender.reserve()
        raise AssertionError("unreachable")

    def commit(self, nbytes: int) -> None:
        """Send the bucket."""
        with self._sending() as sender:
            sender.commit(nbytes)

    def seal(self, manifest: bytes, base: PartRef | None = None) -> None:
        """Send the manifest, and wait until every explorer has all of it."""
        with self._sending() as sender:
            sender.finish(Frame.SEAL, manifest)
            self._trainer.confirm()
        self._sender = None

    def discard(self) -> None:
        """Tell the explorers that it will not come; what is sealed is theirs."""
        if self._sender is not None:
            with suppress(GroupBroken), self._sending() as sender:
                sender.finish(Frame.ABORT)
            self._sender = None

    @contextmanager
    def _sending(self) -> Iterator[FrameSender]:
        """A group that breaks is ended at once, so that everybody else in it hears of it."""
        if self._sender is None:
            raise ValueError(f"the {self._part} are sealed or given up: nothing can be added")
        try:
            yield self._sender
        except GroupBroken:
            self._sender = None
            self._trainer.tear_down()
            raise


class CollectiveSource:
    """Implements :class:`~trinity_events.weights.PartSource`: what is staged here."""

    def __init__(self, staging: StagedVersions, buffer: Buffer) -> None:
        self.manifest = buffer.manifest
        self._staging = staging
        self._buffer: Buffer | None = buffer
        self._data = buffer.data

    def read(
        self, sizes: Sequence[int], check: Check, wanted: Container[int] | None = None
    ) -> Sequence[memoryview]:
        """The bytes where they were received; nothing is copied."""
        check_chunks(cut_chunks(self._data, sizes, wanted), check)
        return [self._data]

    def close(self) -> None:
        """Let the next version but one take the memory."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            self._staging.let_go(buffer)

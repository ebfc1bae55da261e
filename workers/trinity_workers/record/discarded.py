"""Record of the answers that no step trains on: stale, filtered, surplus, and others.

1. A payload is read before the dispatcher frees it. An answer whose payload is gone is counted as
   dropped, as its tokens are nowhere.
2. With ``all``, answers are on disk before the log has their fate. With ``sample``, each step
   records its first groups; what the writer's queue has no room for is dropped and counted.
3. No process is started before the first answer is discarded.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import NamedTuple

import anyio.to_thread

from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import DeadlineExceeded
from trinity_events.log import SyncEventLog
from trinity_events.rollouts import AnswerGroup
from trinity_events.rollouts.payloads import PayloadReader
from trinity_schemas import ExperienceReference

from ..config.train_config import RunConfig
from ..rollouts.payloads import open_payload_reader
from .recorder import QUEUE_BYTES, DiscardedGroup, RolloutRecorder

logger = logging.getLogger(__name__)


class _Unread(NamedTuple):
    """Answer whose payload is not read yet."""

    group: AnswerGroup
    fate: str


class DiscardedRollouts:
    """Recorder of discarded answers, in the trainer's process.

    Args:
        config: The run.
        waits: Reporter of the trainer's long waits.
        log: The run's log, for the seconds of the writer; None reports none.
    """

    def __init__(
        self, config: RunConfig, waits: WaitReporter, log: SyncEventLog | None = None
    ) -> None:
        self._config, self._waits, self._log = config, waits, log
        self._reader: PayloadReader | None = None
        self._recorder: RolloutRecorder | None = None
        self._unread: list[_Unread] = []
        self._groups: list[DiscardedGroup] = []
        self._bytes = 0
        """Bytes of the groups."""
        self._count = 0
        """Groups since the last step."""
        self._step = (config.resumed_step or 0) + 1
        """Step that is being filled."""
        self._lost = 0
        """Samples whose payloads were gone."""

    def add(self, group: AnswerGroup, fate: str) -> None:
        """Keep an answer for the record, if its limits allow."""
        settings = self._config.record
        is_sampled = settings.rollouts == "sample" and self._count < settings.groups_per_step
        if settings.rollouts == "all" or is_sampled:
            self._count += 1
            self._unread.append(_Unread(group, fate))

    async def read(self) -> None:
        """Read the payloads of answers that were added, before they are freed."""
        if not self._unread:
            return
        unread, self._unread = self._unread, []
        groups = await anyio.to_thread.run_sync(self._read, unread)
        samples = sum(len(answer.group.experiences) for answer in unread)
        self._lost += samples - sum(len(group.experiences) for group in groups)
        self._groups += groups
        self._bytes += sum(group.size for group in groups)
        # Half of the writer's queue: the next half is collected while this one is written.
        if self._bytes > QUEUE_BYTES // 2:
            await self._write()

    async def record(self, step: int) -> None:
        """Record the answers that were discarded while a step was filled.

        Raises:
            RecordFailed: The run is to have every sample, and the writer failed.
            DeadlineExceeded: The writer did not write them in time.
        """
        await self.read()
        await self._write()
        self._step, self._count = step + 1, 0

    @property
    def dropped_samples(self) -> int:
        """Samples that the record lacks so far."""
        return self._lost + (self._recorder.counts.dropped_samples if self._recorder else 0)

    def close(self) -> None:
        """Write what is queued, and end the writer."""
        if self._recorder is not None:
            self._recorder.close()

    async def _write(self) -> None:
        if not self._groups:
            return
        groups, self._groups, self._bytes = self._groups, [], 0
        await anyio.to_thread.run_sync(partial(self._add, self._step, groups))

    def _add(self, step: int, groups: list[DiscardedGroup]) -> None:
        if self._recorder is None:
            self._recorder = RolloutRecorder(self._config, None, self._waits, log=self._log)
        self._recorder.add_discarded(step, groups)

    def _read(self, unread: list[_Unread]) -> list[DiscardedGroup]:
        # A group has one payload, which each of its samples names.
        addresses = [
            first.payload
            for group, _ in unread
            if isinstance(first := group.experiences[0], ExperienceReference)
        ]
        if addresses and self._reader is None:
            self._reader = open_payload_reader(self._config)
        groups = []
        try:
            payloads = self._reader.read(addresses) if self._reader is not None else iter(())
            for group, fate in unread:
                payload = None
                if isinstance(group.experiences[0], ExperienceReference):
                    payload = next(payloads)
                    if payload is None:
                        continue
                groups.append(DiscardedGroup(fate, group.experiences, payload))
        # Their medium is away: what the run itself needs from it is waited for elsewhere.
        except DeadlineExceeded as error:
            logger.warning("run %s: discarded answers: %s", self._config.run_id, error)
        return groups

"""Recorder of the samples that a rank trains on.

1. ``sample`` never waits: rows that the queue has no room for are dropped, and counted.
2. With ``all`` a step's samples are on disk before its training step returns. So the trainer
   publishes the step, and frees its answers, after that; a kill in between leaves samples of a step
   that is taken again, which a reader knows by their epoch.
3. The rank keeps references to immutable samples; encoding and writing happen in a thread and in a
   process of its own.
4. A writer that fails ends the run with ``all``; with ``sample`` the rest of the run is dropped.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from trinity_events.diagnostics.phase_names import (
    DISCARDS_WRITER_ROLE,
    WAITING_SAMPLES,
    WRITER_ROLE,
)
from trinity_events.diagnostics.phases import PhaseClock, PhaseReports
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import DeadlineExceeded, TrinityError
from trinity_events.log import Publisher, SyncEventLog, new_producer
from trinity_events.record.files import RECORD
from trinity_schemas import Experience, ExperienceReference, encode

from ..config.train_config import RunConfig
from .messages import DiscardedRows, StepRows, WriterSettings, Written, read_message, write_message

if TYPE_CHECKING:
    from ..algorithms.batch import Batch

logger = logging.getLogger(__name__)

QUEUE_BYTES = 256 << 20
"""Bytes of samples that wait for the writer: some steps of 512 samples of 4,096 tokens."""
DROPPED_SAMPLES = "record/dropped_samples"
"""Metric of the samples that the record lacks."""
_BYTES_PER_TOKEN = 16
"""Token, two log-probabilities and an advantage, of four bytes each."""
_DISCARDED_SHARE = 8
"""Part of the record's bytes that discarded answers may have: what was trained on is asked for
more often."""
_ENDS_WITHIN = 30.0
"""Seconds in which a writer writes what it was given when its rank closes."""


def format_writer(rank: int | None) -> str:
    """Return a rank in words; None is the trainer, which records discarded answers."""
    return "the trainer" if rank is None else f"rank {rank}"


class RecordFailed(TrinityError):
    """The record of rollouts cannot be written, and the run is to have all of it.

    Attributes:
        run_id: The run.
        rank: The rank; None for the trainer, which records discarded answers.
        reason: Error of the writer.
    """

    run_id: str
    rank: int | None
    reason: str
    text = (
        "run {run_id}: {_writer} cannot record its rollouts: {reason}; mend it and resume the "
        "run, or set record.rollouts sample or none"
    )

    @property
    def _writer(self) -> str:
        return format_writer(self.rank)


class RecordCounts(NamedTuple):
    """Losses of a record so far."""

    dropped_samples: int = 0
    removed_steps: int = 0


class DiscardedGroup(NamedTuple):
    """Answer that no step trained on."""

    fate: str
    experiences: Sequence[Experience | ExperienceReference]
    payload: bytes | None
    """Payload of the tokens; None if the experiences have them."""

    @property
    def size(self) -> int:
        """Bytes that it takes while it waits for the writer."""
        if self.payload is not None:
            return len(self.payload)
        return _BYTES_PER_TOKEN * sum(sample.token_count for sample in self.experiences)


class _Queued(NamedTuple):
    """Samples of a step in the queue."""

    step: int
    samples: int
    size: int
    encode: Callable[[], StepRows]


class RolloutRecorder:
    """Recorder of one rank, or of discarded answers.

    Args:
        config: The run.
        rank: Number of the rank; None for discarded answers.
        waits: Reporter of the rank's long waits.
        log: The run's log, for the seconds of the writer; None reports none.
        queue_bytes: Bytes of samples that wait for the writer at most, beyond one step.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int | None,
        waits: WaitReporter,
        *,
        log: SyncEventLog | None = None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._queue_bytes = queue_bytes
        self._config, self._rank, self._waits = config, rank, waits
        self._settings = config.record
        self._queue: deque[_Queued] = deque()
        self._queued_bytes = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._added = self._recorded = 0
        self._dropped = self._removed = 0
        self._fault: str | None = None
        # The recorder measures its writer, which has no connection to the log.
        self._clock = PhaseClock(WAITING_SAMPLES)
        self._reports = ExitStack()
        if log is not None:
            self._open_reports(log)
        # Its own session: a Ctrl-C for the run must not end it before it has written.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "trinity_workers.record.writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            # One thread: the cores are the trainer's.
            env={**os.environ, "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self._thread = threading.Thread(target=self._write, name="rollout-record", daemon=True)
        self._thread.start()

    def _open_reports(self, log: SyncEventLog) -> None:
        role = DISCARDS_WRITER_ROLE if self._rank is None else WRITER_ROLE
        config, producer = self._config, new_producer(role, self._rank or 0)
        publisher = Publisher(log, config.epoch, producer, deadline=config.sync.timeout)
        self._reports.callback(_close_quietly, publisher)
        # Without cores: the writer takes those that nothing else needs, at the lowest priority.
        self._reports.enter_context(PhaseReports(self._clock, publisher.publish, cores=0))

    def add(self, step: int, groups: Sequence[Sequence[Experience]], batch: Batch | None) -> None:
        """Record the samples of a step; with ``all``, return once they are on disk.

        Args:
            step: The training step.
            groups: Groups of this rank.
            batch: The rows of these samples, in order, as they were trained on; None if unknown.

        Raises:
            RecordFailed: The run is to have every sample, and the writer failed.
            DeadlineExceeded: The writer did not write them in time.
        """
        all_samples = self._settings.rollouts == "all"
        chosen = range(len(groups))
        if not all_samples:
            chosen = choose_groups(groups, self._settings.groups_per_step)  # type: ignore[assignment]
        self._add(_queue_rows(step, groups, chosen, batch))

    def add_discarded(self, step: int, groups: Sequence[DiscardedGroup]) -> None:
        """Record answers that came for a step and that none trained on, as :meth:`add` does."""
        count = sum(len(group.experiences) for group in groups)
        size = sum(group.size for group in groups)
        self._add(_Queued(step, count, size, partial(_encode_discarded, step, groups)))

    def _add(self, queued: _Queued) -> None:
        all_samples = self._settings.rollouts == "all"
        with self._changed:
            # A step that is larger than the queue is taken if nothing waits before it.
            has_room = not self._queue or self._queued_bytes + queued.size <= self._queue_bytes
            if self._fault is None and (all_samples or has_room):
                self._queue.append(queued)
                self._queued_bytes += queued.size
                self._added += 1
                self._changed.notify_all()
            else:
                self._dropped += queued.samples
        if all_samples:
            self.wait_recorded(queued.step)

    @property
    def counts(self) -> RecordCounts:
        """Losses so far."""
        with self._changed:
            return RecordCounts(self._dropped, self._removed)

    def close(self) -> None:
        """Write what is queued, and end the writer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_ENDS_WITHIN)
        if self._thread.is_alive():
            logger.warning(
                "run %s: the writer of the rollouts of %s is ended before it is done",
                *(self._config.run_id, format_writer(self._rank)),
            )
            self._process.kill()
            self._thread.join()

    def wait_recorded(self, step: int) -> None:
        """Wait until all samples that were added are on disk, the newest ones of a step.

        Raises:
            RecordFailed: The writer failed.
            DeadlineExceeded: It did not write the step in time.
        """
        timeout = self._config.sync.timeout
        waiting = self._waits.waiting("the record of its rollouts", deadline=timeout, step=step)
        with waiting, self._changed:
            done = self._changed.wait_for(
                lambda: self._recorded >= self._added or self._fault is not None, timeout
            )
            if self._fault is not None:
                raise RecordFailed(self._config.run_id, self._rank, self._fault)
        if not done:
            raise DeadlineExceeded(
                f"run {self._config.run_id}: {format_writer(self._rank)} did not record step "
                f"{step}",
                timeout,
            )

    # --- the thread --------------------------------------------------------------------------

    def _write(self) -> None:
        inward, outward = (
            cast("BinaryIO", self._process.stdin),
            cast("BinaryIO", self._process.stdout),
        )
        try:
            self._exchange(inward, outward, self._writer_settings())
            self._clock.end_start()
            while (queued := self._next()) is not None:
                written = self._exchange(inward, outward, queued.encode())
                with self._changed:
                    # Only now: what is being written counts as queued.
                    self._queue.popleft()
                    self._queued_bytes -= queued.size
                    self._recorded += 1
                    self._removed += len(written.removed)
                    self._dropped += queued.samples - written.samples
                    self._changed.notify_all()
                if written.removed:
                    logger.warning(
                        "run %s: the record of rollouts is full: step %s is removed from it",
                        *(self._config.run_id, ", ".join(map(str, written.removed))),
                    )
        # Whatever fails here is a fault of the record, which is reported where it counts.
        except Exception as error:
            self._fail(str(error) or type(error).__name__)
        finally:
            # Closing writes what is left in the buffer, also to a writer that is dead.
            with outward, suppress(BrokenPipeError):
                inward.close()
            self._process.wait()
            self._reports.close()

    def _writer_settings(self) -> WriterSettings:
        config, settings = self._config, self._settings
        return WriterSettings(
            run_id=config.run_id,
            epoch=config.epoch,
            resumed_step=config.resumed_step or 0,
            folder=str(config.checkpoint_folder / RECORD),
            model_folder=str(config.model_folder),
            rank=self._rank,
            ranks=config.trainer.rank_count,
            max_bytes=_find_share(config, self._rank),
            max_steps=settings.max_steps,
            redact=settings.redact,
        )

    def _exchange(
        self, inward: BinaryIO, outward: BinaryIO, message: WriterSettings | StepRows
    ) -> Written:
        with self._clock.phase("writing"):
            with suppress(BrokenPipeError):  # its last message may say why
                write_message(inward, message)
            written = read_message(outward, Written)
        if written is None:
            raise EOFError("its process has ended")
        if written.error:
            raise RuntimeError(written.error)
        return written

    def _next(self) -> _Queued | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            return self._queue[0] if self._queue else None

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._fault = reason
            self._dropped += sum(queued.samples for queued in self._queue)
            self._queue.clear()
            self._changed.notify_all()
        if self._settings.rollouts == "sample":
            logger.warning(
                "run %s: %s records no more rollouts: %s",
                *(self._config.run_id, format_writer(self._rank), reason),
            )


def _close_quietly(publisher: Publisher) -> None:
    """Close the publisher of a writer's seconds; the record is complete without them."""
    try:
        publisher.close()
    except TrinityError as error:
        logger.debug("the last seconds of a writer were not reported: %s", error)


def choose_groups(groups: Sequence[Sequence[Experience]], count: int) -> list[int]:
    """Return the places of some groups, in order: spread over the order of their mean rewards.

    The worst and the best one are among them, if there are two or more.
    """
    if len(groups) <= count:
        return list(range(len(groups)))
    means = [sum(sample.reward for sample in group) / len(group) for group in groups]
    by_reward = sorted(range(len(groups)), key=means.__getitem__)
    if count == 1:
        # The median: one group cannot be both the best and the worst.
        return [by_reward[len(groups) // 2]]
    last = len(groups) - 1
    return sorted({by_reward[round(place * last / (count - 1))] for place in range(count)})


def _queue_rows(
    step: int,
    groups: Sequence[Sequence[Experience]],
    chosen: Sequence[int],
    batch: Batch | None,
) -> _Queued:
    begins = [0]
    for group in groups:
        begins.append(begins[-1] + len(group))
    samples = [sample for place in chosen for sample in groups[place]]
    rows = [row for place in chosen for row in range(begins[place], begins[place + 1])]
    tokens = sum(len(turn.tokens) for sample in samples for turn in sample.turns)
    size = tokens * _BYTES_PER_TOKEN
    return _Queued(step, len(samples), size, partial(_encode, step, samples, rows, batch))


def _encode(
    step: int, samples: Sequence[Experience], rows: Sequence[int], batch: Batch | None
) -> StepRows:
    experiences = [encode(sample) for sample in samples]
    if batch is None:
        return StepRows(step=step, experiences=experiences)

    def pack(name: str) -> bytes | None:
        values = getattr(batch, name)
        if values is None:
            return None
        # As float32, since numpy has no bfloat16.
        selected = values[rows].detach().float().cpu().contiguous()  # (samples, width)
        # A memoryview without elements cannot be cast.
        return bytes(memoryview(selected.numpy()).cast("B")) if selected.numel() else b""

    return StepRows(
        step=step,
        experiences=experiences,
        width=batch.response_width,
        advantages=pack("advantages"),
        logprobs=pack("logprobs"),
    )


def _encode_discarded(step: int, groups: Sequence[DiscardedGroup]) -> StepRows:
    return StepRows(
        step=step,
        experiences=[],
        discarded=[
            DiscardedRows(
                fate=group.fate,
                samples=[encode(sample) for sample in group.experiences],
                payload=group.payload,
            )
            for group in groups
        ],
    )


def _find_share(config: RunConfig, rank: int | None) -> int:
    """Return the bytes of the record that a rank may write, or the discarded answers."""
    discarded = config.record.max_bytes // _DISCARDED_SHARE
    if rank is None:
        return discarded
    return (config.record.max_bytes - discarded) // config.trainer.rank_count

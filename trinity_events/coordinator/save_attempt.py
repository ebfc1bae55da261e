"""State machine of one attempt at a save: it makes the event for each transition."""

from __future__ import annotations

from typing import Literal

from trinity_schemas import (
    Process,
    SaveFailed,
    SaveFinished,
    SaveProgressed,
    SaveRequested,
    SaveStarted,
    Slot,
)

from ..errors import StructuredError
from ..system.error_text import checkpoint_cause, format_message

_LONGEST_MESSAGE = 2000  # characters: an error of a save is an event, which has a maximum size
_LONGEST_NAME = 256  # characters of an error's class name; a class made at run time may have any


class AttemptOutOfOrder(StructuredError, RuntimeError):
    """A save attempt takes a step twice, or out of order.

    Attributes:
        save: The save, such as ``model of step 5``.
        stage: Its stage.
        stages: Stages in which it can take the step.
    """

    save: str
    stage: str
    stages: tuple[str, ...]
    text = "the save {save} is {stage}, not {_stages}"

    @property
    def _stages(self) -> str:
        return " or ".join(self.stages)


class SaveAttempt:
    """One attempt at a save. No I/O, no clock, no threads; each method returns an event.

    ``new`` → (``waiting`` →) ``running`` → ``over``. A waiting or running attempt may fail.

    Args:
        save_id: Unique id of the attempt.
        slot: Slot that the attempt fills.
        path: File or folder that it writes, relative to the run's directory.
        lease: Seconds for which one heartbeat of its process counts.
        process: Process that asks for a turn; None starts the attempt without a turn.
        ranks: Number of ranks that each make a save of this name; None if unknown.
    """

    def __init__(
        self,
        save_id: str,
        slot: Slot,
        *,
        path: str | None = None,
        lease: float | None = None,
        process: Process | None = None,
        ranks: int | None = None,
    ) -> None:
        self.save_id = save_id
        self.slot = slot
        self.stage: Literal["new", "waiting", "running", "over"] = "new"
        self._path = path
        self._lease = lease
        self._process = process
        self.ranks = ranks

    @property
    def what(self) -> str:
        """Describe the save for messages."""
        return f"{self.slot.name} of step {self.slot.step}"

    def begin(self) -> SaveRequested | SaveStarted:
        """Begin the attempt: start it, or request a turn if it needs one."""
        self._leave("new")
        # No strategy limits the saves: a turn would cost a round trip through the reducer.
        if self._process is None:
            return self._start()
        self.stage = "waiting"
        return SaveRequested(
            save_id=self.save_id,
            slot=self.slot,
            process=self._process,
            lease=self._lease,
            ranks=self.ranks,
        )

    def granted(self) -> SaveStarted:
        """Start the attempt after its turn was granted."""
        self._leave("waiting")
        return self._start()

    def progress(self, nbytes: int) -> SaveProgressed:
        """Report the number of bytes written so far."""
        self._leave("running")  # or stay in it
        return SaveProgressed(save_id=self.save_id, slot=self.slot, bytes=nbytes)

    def finish(
        self,
        *,
        nbytes: int,
        seconds: float,
        digest: str | None = None,
        files: tuple[str, ...] = (),
    ) -> SaveFinished:
        """End the attempt with success: its files are durable."""
        self._leave("running")
        # A terminal stage: a progress event that comes after the end raises, instead of being
        # folded.
        self.stage = "over"
        return SaveFinished(
            save_id=self.save_id,
            slot=self.slot,
            path=self._path,
            bytes=nbytes,
            seconds=seconds,
            digest=digest,
            ranks=self.ranks,
            files=files,
        )

    def fail(self, error: BaseException, *, followed: bool = False) -> SaveFailed:
        """End the attempt with a failure, which also ends its turn or withdraws its request.

        Args:
            error: Exception that ended the attempt.
            followed: True if the failure of another attempt ended this one.
        """
        self._leave("waiting", "running")
        self.stage = "over"
        cause = checkpoint_cause(error)
        return SaveFailed(
            save_id=self.save_id,
            slot=self.slot,
            # The cause, because torch wraps the errors of checkpoint threads in one of its own.
            error_type=type(cause).__name__[:_LONGEST_NAME],
            message=format_message(cause)[:_LONGEST_MESSAGE],
            followed=followed,
        )

    def _start(self) -> SaveStarted:
        self.stage = "running"
        return SaveStarted(
            save_id=self.save_id,
            slot=self.slot,
            path=self._path,
            lease=self._lease,
            ranks=self.ranks,
        )

    def _leave(self, *stages: str) -> None:
        if self.stage not in stages:
            raise AttemptOutOfOrder(self.what, self.stage, stages)

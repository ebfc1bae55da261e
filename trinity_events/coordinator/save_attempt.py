"""One attempt at a save: what it tells the log next, given what happened to it."""

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

from ..error_text import message_of

_LONGEST_MESSAGE = 2000
_LONGEST_NAME = 256


class SaveAttempt:
    """A pure state machine: no I/O, no clock, no threads. Each step returns what to publish.

    ``new`` → (``waiting`` →) ``running`` → ``over``; what waits or runs may fail at any time.

    Args:
        save_id: The attempt's name, never used again.
        slot: What it fills.
        path: What it writes, relative to the run's directory.
        lease: Seconds for which its process's heartbeats hold.
        process: Who asks for a turn; without one the attempt asks nobody and starts at once.
        ranks: How many ranks each make a save of this name, where that is known.
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
        self._ranks = ranks

    @property
    def what(self) -> str:
        """The save, in words."""
        return f"{self.slot.name} of step {self.slot.step}"

    def begin(self) -> SaveRequested | SaveStarted:
        """Begin: by asking for a turn, where one is needed."""
        self._leave("new")
        if self._process is None:
            return self._start()
        self.stage = "waiting"
        return SaveRequested(
            save_id=self.save_id,
            slot=self.slot,
            process=self._process,
            lease=self._lease,
            ranks=self._ranks,
        )

    def granted(self) -> SaveStarted:
        """The turn that it waited for has come."""
        self._leave("waiting")
        return self._start()

    def progress(self, nbytes: int) -> SaveProgressed:
        """So many bytes are written."""
        self._leave("running")  # or stay in it
        return SaveProgressed(save_id=self.save_id, slot=self.slot, bytes=nbytes)

    def finish(self, *, nbytes: int, seconds: float, digest: str | None = None) -> SaveFinished:
        """What it saved is durable."""
        self._leave("running")
        self.stage = "over"
        return SaveFinished(
            save_id=self.save_id,
            slot=self.slot,
            path=self._path,
            bytes=nbytes,
            seconds=seconds,
            digest=digest,
            ranks=self._ranks,
        )

    def fail(self, error: BaseException, *, followed: bool = False) -> SaveFailed:
        """It ended without a result. Ends its turn, or takes its request for one back.

        ``followed`` when it is another's failure that ended it, which tells why itself.
        """
        self._leave("waiting", "running")
        self.stage = "over"
        return SaveFailed(
            save_id=self.save_id,
            slot=self.slot,
            error_type=type(error).__name__[:_LONGEST_NAME],
            message=message_of(error)[:_LONGEST_MESSAGE],
            followed=followed,
        )

    def _start(self) -> SaveStarted:
        self.stage = "running"
        return SaveStarted(
            save_id=self.save_id,
            slot=self.slot,
            path=self._path,
            lease=self._lease,
            ranks=self._ranks,
        )

    def _leave(self, *stages: str) -> None:
        if self.stage not in stages:
            raise RuntimeError(f"the save {self.what} is {self.stage}, not {' or '.join(stages)}")

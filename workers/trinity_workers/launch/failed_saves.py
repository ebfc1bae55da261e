"""Steps of which a save failed, as the run's log tells of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trinity_schemas import (
    Event,
    LeaseExpired,
    RunOpened,
    RunResumed,
    SaveFailed,
    SaveFinished,
    SaveStarted,
    StepFailed,
    StepReady,
)

_UNDER_WAY = 4096
"""Attempts whose paths are remembered; of more, the oldest are forgotten."""


class FailedSaves:
    """The steps of the present epoch that failed and that no retry has made ready.

    Args:
        folder: The run's checkpoint directory; without it, paths are told relative to it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._paths: dict[str, str] = {}
        self.steps: dict[int, set[str]] = {}
        """Each step with the kinds of it that failed."""

    def heard(self, event: Event, announced: Iterable[Event]) -> list[str]:
        """Note an event and what it made true; return a line for each failure of a step."""
        if isinstance(event, RunOpened | RunResumed):
            # Attempts and failures of an earlier epoch end with it.
            self._paths, self.steps = {}, {}
        if isinstance(event, SaveStarted) and event.path is not None:
            self._paths[event.save_id] = event.path
            if len(self._paths) > _UNDER_WAY:
                del self._paths[next(iter(self._paths))]
        ended = _ended(event)
        paths = [path for save_id in ended if (path := self._paths.pop(save_id, None)) is not None]
        failures: dict[tuple[int, str], list[str]] = {}
        for announcement in announced:
            if isinstance(announcement, StepFailed):
                self.steps.setdefault(announcement.step, set()).add(announcement.kind)
                failures.setdefault((announcement.step, announcement.reason), []).append(
                    announcement.kind
                )
            elif isinstance(announcement, StepReady) and announcement.kind in self.steps.get(
                announcement.step, ()
            ):
                self.steps[announcement.step].discard(announcement.kind)
                if not self.steps[announcement.step]:
                    del self.steps[announcement.step]
        return [
            f"step {step}: {' and '.join(kinds)} FAILED: {reason.rstrip('.')}"
            + ("" if kinds == ["weights"] else self._where(paths))
            for (step, reason), kinds in failures.items()
        ]

    def format_steps(self) -> str:
        """Return the number of failed steps, and the last of them, for a bar."""
        return f"{len(self.steps)} (last: step {max(self.steps)})"

    def _where(self, paths: list[str]) -> str:
        """Return where a save was being written, as the end of a sentence."""
        if not paths:
            return "" if self._folder is None else f" (in {self._folder})"
        path = paths[0] if self._folder is None else str(self._folder / paths[0])
        return f" (writing {path})"


def _ended(event: Event) -> list[str]:
    """Return the attempts that an event ends."""
    match event:
        case SaveFailed() | SaveFinished():
            return [event.save_id]
        case LeaseExpired():
            return [attempt.save_id for attempt in event.attempts]
        case _:
            return []

"""Pauses of explorers' engines: open ones at a moment, and their sentences."""

from __future__ import annotations

from typing import NamedTuple

from ..system.counts import format_count
from .state import EnginePause, MonitorState


class OpenPause(NamedTuple):
    """Pause of an explorer's engine that has not ended, as far as the log tells."""

    explorer: str
    pause: EnginePause


def open_pauses(state: MonitorState) -> list[OpenPause]:
    """Return the pauses of explorers that have not stopped, oldest first; none of a closed run."""
    if state.closed is not None:
        return []
    pauses = [
        OpenPause(name, explorer.pause)
        for name, explorer in state.explorers.items()
        if explorer.pause is not None
    ]
    return sorted(pauses, key=lambda paused: paused.pause.since)


def has_lapsed(pause: EnginePause, now: int) -> bool:
    """Return True if the lease of a pause is over: its explorer died, or cannot end it."""
    return now > pause.since + pause.lease * 1000


def format_pause(paused: OpenPause, now: int) -> str:
    """Return a pause in one sentence."""
    name, pause = paused
    requests = format_count(pause.in_flight, "request")
    sentence = (
        f"{name} has paused generation for the weights of step {pause.version.step} for "
        f"{max(0, now - pause.since) / 1000:.1f} s (mode {pause.mode}, {requests} in flight)"
    )
    if has_lapsed(pause, now):
        return (
            f"{sentence}; its lease of {pause.lease:g} s is over, so that its process has ended, "
            "or its engine does not answer."
        )
    return f"{sentence}; its lease ends in {pause.lease - (now - pause.since) / 1000:.0f} s."

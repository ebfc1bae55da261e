"""Recorded history of a run inside a test file, as ``export --pytest`` writes it."""

from __future__ import annotations

import base64
import pprint
import textwrap
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from trinity_schemas import event_tag

from ..analysis.explain import format_unfinished
from ..analysis.failures import failures
from ..core import Monitor, MonitorState
from ..log import Entry

_WIDTH = 96


class _Folded(NamedTuple):
    state: MonitorState
    announced: dict[str, int]


class RecordedHistory:
    """Events of a run, folded by the version of trinity-events that is installed.

    Args:
        run_id: The run.
        events: The events, as :meth:`pack` returns them.
    """

    def __init__(self, run_id: str, events: str) -> None:
        self.run_id = run_id
        packed = zlib.decompress(base64.b85decode("".join(events.split())))
        self.entries = [Entry(*pair) for pair in msgspec.msgpack.decode(packed, type=_Entries)]

    @staticmethod
    def pack(entries: Sequence[Entry]) -> str:
        """Encode events as text without quotes and backslashes."""
        # Base 85 adds a quarter to the bytes, and base 64 a third. Its alphabet has no quote and no
        # backslash, so that the text stands in a literal as it is.
        return base64.b85encode(zlib.compress(msgspec.msgpack.encode(list(entries)), 9)).decode()

    @cached_property
    def _folded(self) -> _Folded:
        monitor = Monitor(MonitorState(run_id=self.run_id))
        announcements, _ = monitor.fold(self.entries)
        counts: dict[str, int] = {}
        for announcement in announcements:
            tag = event_tag(announcement.event)
            counts[tag] = counts.get(tag, 0) + 1
        return _Folded(monitor.state, counts)

    @property
    def state(self) -> MonitorState:
        """State after the last event."""
        return self._folded.state

    @property
    def announced(self) -> dict[str, int]:
        """Number of announcements by type."""
        return self._folded.announced

    @property
    def closed(self) -> str | None:
        """Reason with which the run was closed; None for an open one."""
        return self.state.closed

    @property
    def ready(self) -> dict[str, int]:
        """Newest ready step of each kind."""
        return {kind: pointer.at.step for kind, pointer in self.state.ready.items()}

    @property
    def serves(self) -> dict[str, int | None]:
        """Step of the weights that each explorer serves."""
        return {
            name: None if explorer.version is None else explorer.version.step
            for name, explorer in self.state.explorers.items()
        }

    @property
    def failures(self) -> list[str]:
        """Failures that no retry has overcome, in words."""
        return [failure.sentence for failure in failures(self.state)]

    @property
    def unfinished(self) -> list[str]:
        """Reason why each step that is neither ready nor failed is not, in words."""
        return format_unfinished(self.state)

    @property
    def anomalies(self) -> dict[str, int]:
        """Number of anomalies by name."""
        return dict(self.state.anomaly_counts)


_Entries = list[tuple[str, bytes]]
# A test of each, so that a change of the fold is named by the tests that fail.
_CLAIMS = {
    "closed": "the_run_is_closed_as_it_was",
    "ready": "the_same_steps_are_ready",
    "serves": "each_explorer_serves_the_same_version",
    "failures": "the_same_steps_failed",
    "unfinished": "the_same_steps_wait_for_the_same",
    "announced": "the_same_is_announced",
    "anomalies": "the_same_anomalies_are_counted",
}


def as_test_file(run_id: str, entries: Sequence[Entry]) -> str:
    """Return a test file that folds a history and compares the result with that of now."""
    packed = RecordedHistory.pack(entries)
    history = RecordedHistory(run_id, packed)
    # Hyphens are of the alphabet, and no places to break at.
    lines = "\n".join(textwrap.wrap(packed, _WIDTH, break_on_hyphens=False))
    last = entries[-1].id if entries else "none"
    head = (
        f'"""History of run {run_id} up to entry {last}: {len(entries)} events."""\n\n'
        "from trinity_events.testing import RecordedHistory\n\n"
        f'HISTORY = RecordedHistory(\n    "{run_id}",\n    """\n{lines}\n""",\n)\n'
    )
    return head + "".join(
        f"\n\ndef test_{claim}() -> None:\n{_comparison(name, getattr(history, name))}"
        for name, claim in _CLAIMS.items()
    )


def _comparison(name: str, expected: Any) -> str:
    if expected is None:
        return f"    assert HISTORY.{name} is None\n"
    text = pprint.pformat(expected, width=_WIDTH - 10, sort_dicts=False)
    shown = textwrap.indent(text, " " * 15).strip()
    return f"    expected = {shown}\n    assert HISTORY.{name} == expected\n"

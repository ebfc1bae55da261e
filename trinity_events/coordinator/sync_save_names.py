"""Names of the saves that a worker makes in its own thread and does not name.

Trinity-RFT counts calls: each ``save_sync`` that returns is one of the saves that a trainer
registered (``notify_finished`` of trinity/trainer/verl/checkpoint.py). A step here counts slots, so
that a save which is made again counts once (invariant 2 of the fold). Calls without a name
therefore get one slot each:

1. Two calls that returned never have one name, within a step, a kind and a staged folder.
2. A call after a failed one takes its name, and so its slot.
3. A step that is saved again, into another staged folder, gets the same names again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from trinity_schemas import Kind

_MOST_PLACES = 64
"""Places whose numbers are remembered: a worker saves to few steps at a time."""


class SavePlace(NamedTuple):
    """Step, kind and staged folder of a save; the folder is None outside of staging."""

    step: int
    kind: Kind
    folder: str | None


class SyncSaveNames:
    """Names of a worker's unnamed saves; any thread may use it."""

    def __init__(self) -> None:
        self._numbers: dict[SavePlace, set[int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reserved(self, place: SavePlace) -> Iterator[str]:
        """Return a name for the block, which keeps it unless the block raises."""
        with self._lock:
            numbers = self._numbers.setdefault(place, set())
            # The lowest free number: a call after a failed one fills that slot (invariant 2).
            number = next(number for number in range(len(numbers) + 1) if number not in numbers)
            numbers.add(number)
            while len(self._numbers) > _MOST_PLACES:
                del self._numbers[next(iter(self._numbers))]
        try:
            # Without the lock: other threads save while this save runs.
            yield "save_sync" if number == 0 else f"save_sync-{number + 1}"
        except BaseException:
            with self._lock:
                numbers.discard(number)
            raise

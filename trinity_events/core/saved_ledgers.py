"""Comparison of the ledger in a checkpoint with the fates in the log. No I/O.

1. The trainer saves the ledger of a step as it is right after the event ``step-trained`` of that
   step. The fold's ledger after this event is therefore the same.
2. The comparison covers each number from which dispatch continues. A ledger with fewer fates would
   train prompts twice, and one with more would lose them.
3. Reasons of drops are compared by their sum alone: beyond a limit, the ledgers file them under
   one name, in the order in which they occur.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from trinity_schemas import TrainedLedger

from .ledger import Ledger
from .ordinal_ranges import Range, compact_ranges, difference


class LedgerDifference(NamedTuple):
    """Number that differs between a checkpoint's ledger and the log."""

    field: str
    saved: str
    logged: str


def find_ledger_difference(saved: TrainedLedger, logged: Ledger) -> LedgerDifference | None:
    """Return the first number that differs; None if a checkpoint's ledger is that of the log.

    Of settled ordinals, those that one side alone has are compared.

    Args:
        saved: Ledger in the checkpoint of a step.
        logged: Ledger of the fold after the event ``step-trained`` of that step.
    """
    numbers = {
        "mark": (saved.mark, logged.mark),
        "next": (saved.next, logged.next),
        "trained": (saved.trained, logged.trained),
        "dropped": (sum(saved.dropped.values()), sum(logged.dropped.values())),
    }
    for field, (in_checkpoint, in_log) in numbers.items():
        if in_checkpoint != in_log:
            return LedgerDifference(field, str(in_checkpoint), str(in_log))
    added = difference(saved.settled, logged.settled)
    missing = difference(logged.settled, saved.settled)
    if added or missing:
        return LedgerDifference("settled", _format_ordinals(added), _format_ordinals(missing))
    return None


def _format_ordinals(ordinals: Sequence[Range]) -> str:
    return compact_ranges(ordinals) if ordinals else "none"

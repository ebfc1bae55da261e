"""Intake of reports: the leading reducer checks what explorers report, and copies it to the events.

1. Only the newest leader copies (the fence), from the position where the last copy ended, in one
   script with the move of that position: each report is copied or refused exactly once.
2. Reports of one explorer keep their order.
3. A refused report is a dead letter with a reason; it delays no other report.
4. The fold reads events alone. A report has no effect before it is copied, and a replay needs no
   reports.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from trinity_schemas import ContractError, EnvelopeReader

from ..core.decisions.report_checks import check_report
from ..log import DeadLetter, Entry, EventLog, Intake, PageSize
from ..log.position import is_from_a_clock

logger = logging.getLogger(__name__)

PAGE = 500
"""Most reports of one copy: a script with more would hold up the server for milliseconds."""
_BLOCK = 5.0
"""Seconds of one blocking read; below the socket's deadline."""


class ReportIntake:
    """Task of the leader that moves reports into the events.

    Args:
        log: The run's log.
        token: Fencing token of the lead.
    """

    def __init__(self, log: EventLog, token: int) -> None:
        self._log = log
        self._token = token
        self._decode = EnvelopeReader().decode
        self._page = PageSize(PAGE)

    async def run(self) -> None:
        """Copy reports as they come, until another reducer leads."""
        position = await self._log.reports_position()
        while True:
            limit = self._page.limit
            reports = await self._log.read_reports(position, seconds=_BLOCK, limit=limit)
            if not reports:
                continue
            # A stream with the largest id takes no more entries, and a position after such ids
            # hides all later reports.
            if not is_from_a_clock(reports[-1].id):
                if await self._log.renumber_reports(self._token, position) is None:
                    return
                continue
            self._page.learn(reports)
            intake = self._sort(position, reports)
            if not await self._log.accept_reports(intake):
                return
            position = intake.position

    def _sort(self, after: str, reports: Sequence[Entry]) -> Intake:
        accepted: list[bytes] = []
        refused: list[DeadLetter] = []
        for entry in reports:
            try:
                check_report(entry.payload, self._log.run_id, self._decode)
            except ContractError as error:
                refused.append(DeadLetter(entry, f"a report was refused: {error}"))
            else:
                accepted.append(entry.payload)
        if refused:
            logger.warning(
                "run %s: %d reports were refused and are dead letters, the last one %s: %s",
                self._log.run_id,
                len(refused),
                refused[-1].entry.id,
                refused[-1].reason,
            )
        return Intake(
            token=self._token,
            after=after,
            position=reports[-1].id,
            accepted=accepted,
            refused=refused,
        )

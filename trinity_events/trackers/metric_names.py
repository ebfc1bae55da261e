"""Names of metrics in a tracker that takes fewer characters than the log."""

from __future__ import annotations

import logging
import re

logger = logging.getLogger(__name__)


class MetricNames:
    """Names of one run's metrics in one tracker: ``acc@8`` is ``acc_at_8``.

    A metric whose name there is that of another one is left out, with a warning: two curves under
    one name could not be told apart.

    Args:
        tracker: Name of the tracker, for warnings.
        refused: Characters that it refuses, each of which becomes an underscore.
    """

    def __init__(self, tracker: str, refused: re.Pattern[str]) -> None:
        self._tracker = tracker
        self._refused = refused
        self._names: dict[str, str | None] = {}

    def get(self, name: str) -> str | None:
        """Return the name of a metric in the tracker; None if it is left out."""
        if name not in self._names:
            replaced = self._refused.sub("_", name.replace("@", "_at_"))
            # Trackers take names for paths: without this, some would lie outside of their run.
            parts = (part for part in replaced.split("/") if part not in {"", ".", ".."})
            accepted = "/".join(parts) or "_"
            if accepted in self._names.values():
                self.leave_out(name, f"another metric has the name {accepted!r} there")
            else:
                self._names[name] = accepted
        return self._names[name]

    def leave_out(self, name: str, reason: str) -> None:
        """Leave a metric out from now on, and warn of it."""
        self._names[name] = None
        logger.warning("metric %r is left out of %s: %s", name, self._tracker, reason)

"""Transfers of weight versions: the first times that explorers apply them."""

from __future__ import annotations

from trinity_schemas import Envelope, StepRef, WeightsApplied

from ..core.fold_state import trim_oldest
from ..core.limits import KEPT_EXPLORERS


class FirstApplications:
    """Newest version that each explorer has applied.

    For an evaluation an explorer goes back to an earlier version, and then to its newest one. What
    it applies a second time is no transfer: its time since the version's opening tells nothing.
    """

    def __init__(self) -> None:
        self._newest: dict[str, StepRef] = {}
        self._went_back: set[str] = set()

    def add(self, envelope: Envelope, event: WeightsApplied) -> bool:
        """Note an application; return True if it is a transfer."""
        explorer, version = envelope.producer.incarnation, event.version
        newest = self._newest.get(explorer, version)
        self._newest[explorer] = max(newest, version)
        # Names are of incarnations: a run whose explorers restart would have ever more of them.
        trim_oldest(self._newest, KEPT_EXPLORERS)
        is_earlier = version < newest
        is_return = version == newest and explorer in self._went_back
        if is_earlier:
            self._went_back.add(explorer)
        else:
            self._went_back.discard(explorer)
        return not (is_earlier or is_return)

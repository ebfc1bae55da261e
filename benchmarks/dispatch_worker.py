"""Rank of the dispatch benchmark, apart from it: this imports torch."""

from __future__ import annotations

from typing import Any

from trinity_workers.algorithms.batch import Batch
from trinity_workers.worker_group.dispatch import Dispatch
from trinity_workers.worker_group.ranks import DistRankInfo
from trinity_workers.worker_group.registered import register
from trinity_workers.worker_group.worker import Worker

FIELD = "behaviour_logprobs"
"""Field that the ranks answer."""


class Answering(Worker):
    """Rank that computes nothing."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank_info(self) -> DistRankInfo:
        """Return the place of a rank that is a replica."""
        return DistRankInfo(tp_rank=0, dp_rank=self._rank, pp_rank=0, cp_rank=0)

    @register(dispatch_mode=Dispatch.MEGATRON_COMPUTE_PROTO)
    def answer(self, batch: Batch) -> dict[str, Any]:
        """Return one field of the batch."""
        return {FIELD: getattr(batch, FIELD)}

    def answer_bare(self, fields: dict[str, Any]) -> Any:
        """Return one field of a mapping."""
        return fields[FIELD]

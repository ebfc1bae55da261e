"""Places of ranks in a layout: the table that dispatch is computed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from msgspec import Struct


class DistRankInfo(Struct, frozen=True):
    """Place of one rank in its parallel groups."""

    tp_rank: int
    dp_rank: int
    pp_rank: int
    cp_rank: int


NOWHERE = DistRankInfo(tp_rank=0, dp_rank=0, pp_rank=0, cp_rank=0)
"""Place of a rank that is not known, or is the only one."""


class DistGlobalInfo(Struct, frozen=True):
    """Sizes of the parallel groups."""

    tp_size: int
    dp_size: int
    pp_size: int
    cp_size: int


RankTable: TypeAlias = Sequence[DistRankInfo]
"""Places of all ranks, in the order of ranks."""


def rank_table(sizes: DistGlobalInfo) -> list[DistRankInfo]:
    """Return the places of all ranks in Megatron's order: tensor, context, data, pipeline.

    Expert parallelism divides the data-parallel ranks anew and moves none of them.
    """
    # megatron-core's default order is "tp-cp-ep-dp-pp", the fastest first (parallel_state.py).
    return [
        DistRankInfo(tp_rank=tp, dp_rank=dp, pp_rank=pp, cp_rank=cp)
        for pp in range(sizes.pp_size)
        for dp in range(sizes.dp_size)
        for cp in range(sizes.cp_size)
        for tp in range(sizes.tp_size)
    ]


def find_sizes(table: RankTable) -> DistGlobalInfo:
    """Return the sizes of the parallel groups that these ranks make up."""
    return DistGlobalInfo(
        tp_size=1 + max(info.tp_rank for info in table),
        dp_size=1 + max(info.dp_rank for info in table),
        pp_size=1 + max(info.pp_rank for info in table),
        cp_size=1 + max(info.cp_rank for info in table),
    )

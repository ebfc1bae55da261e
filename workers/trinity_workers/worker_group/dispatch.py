"""Dispatch modes as pure functions over the table of ranks, by veRL's names."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple

from trinity_events.errors import TrinityError

from .ranks import RankTable, find_sizes
from .rows import Dealing, join_rows, split_rows


class DispatchRefused(TrinityError):
    """Arguments cannot be dealt out to the ranks, or answers be collected from them.

    Attributes:
        fault: ``layout`` if the ranks' places make up none, ``nothing`` without arguments to deal
            out, ``rows`` if arguments have different numbers of rows.
        mode: Mode of the dispatch.
        ranks: Number of the ranks.
        rows: Rows of the arguments, in ascending order.
    """

    fault: Literal["layout", "nothing", "rows"]
    mode: str = ""
    ranks: int = 0
    rows: tuple[int, ...] = ()
    texts: ClassVar = {
        "layout": "mode {mode} has no answer for each share: the places of {ranks} ranks make up "
        "no layout",
        "nothing": "mode {mode} deals out rows: give it a batch or a list",
        "rows": "arguments of {_rows} rows cannot be dealt out together",
    }

    @property
    def _rows(self) -> str:
        return ", ".join(map(str, self.rows))


class Dispatch(Enum):
    """Modes in which a call's arguments reach the ranks, and answers come back.

    Modes that deal out divide every positional argument, and give keyword arguments to all ranks.
    """

    RANK_ZERO = "rank-zero"
    """Rank 0 alone is called. Its answer is returned."""
    ONE_TO_ALL = "one-to-all"
    """All ranks get the arguments as they are. The answers of all are returned, by rank."""
    DP_COMPUTE_PROTO = "data-parallel"
    """Every rank gets a share of its own, and answers for it."""
    MEGATRON_COMPUTE_PROTO = "megatron"
    """Every replica gets a share, with all of its ranks. Its first tensor-parallel rank of the last
    pipeline stage answers for it. Where every rank is a replica, as on FSDP, this is the mode
    above."""
    MEGATRON_PP_AS_DP_PROTO = "megatron-pipeline-as-data"
    """Pipeline stages and context-parallel ranks count as replicas: each gets a share, with its
    tensor-parallel ranks, of which the first answers."""

    @property
    def deals_out(self) -> bool:
        """True if ranks get shares."""
        return self not in {Dispatch.RANK_ZERO, Dispatch.ONE_TO_ALL}


class Shares(NamedTuple):
    """Share of each rank, and the ranks that answer."""

    ranks: tuple[int, ...]
    """Index of each rank's share."""
    answering: tuple[int, ...]
    """Ranks that answer, one for each share, in the order of shares."""

    @property
    def number(self) -> int:
        """Number of shares."""
        return len(self.answering)


def find_shares(mode: Dispatch, table: RankTable) -> Shares:
    """Return the shares of a mode that deals out.

    Answers are ordered by share, never by rank: those of pipeline stages that count as replicas
    come from ranks in another order than their shares.

    Raises:
        DispatchRefused: if the table is not of a whole layout, so that a share has no answer.
    """
    sizes = find_sizes(table)
    if mode is Dispatch.DP_COMPUTE_PROTO:
        shares = list(range(len(table)))
        answering = shares
    elif mode is Dispatch.MEGATRON_COMPUTE_PROTO:
        shares = [info.dp_rank for info in table]
        answering = [
            rank
            for rank, info in enumerate(table)
            # The last stage alone has logits, and its tensor-parallel ranks have equal results.
            if (info.tp_rank, info.pp_rank, info.cp_rank) == (0, sizes.pp_size - 1, 0)
        ]
    else:
        shares = [
            (info.cp_rank * sizes.dp_size + info.dp_rank) * sizes.pp_size + info.pp_rank
            for info in table
        ]
        answering = [rank for rank, info in enumerate(table) if info.tp_rank == 0]
    answering = sorted(answering, key=shares.__getitem__)
    # Else rows would silently come back in the place of others.
    if [shares[rank] for rank in answering] != list(range(len(set(shares)))):
        raise DispatchRefused("layout", mode.value, ranks=len(table))
    return Shares(tuple(shares), tuple(answering))


class Dealt(NamedTuple):
    """Arguments of each rank, and the way back from their answers."""

    arguments: list[tuple[Any, ...]]
    """Positional arguments of each share; of one alone, where nothing is dealt out."""
    ranks: tuple[int, ...]
    """Index of each called rank's share."""
    answering: tuple[int, ...]
    """Ranks whose answers are collected, in the order of shares."""
    mode: Dispatch
    dealing: Dealing | None
    """Places of the rows, where the answers have them too."""

    def collect(self, answers: Sequence[Any]) -> Any:
        """Return the result of a call from the answers of the called ranks."""
        by_share = [answers[rank] for rank in self.answering]
        if self.mode is Dispatch.RANK_ZERO:
            return by_share[0]
        return by_share if self.dealing is None else join_rows(by_share, self.dealing)


def deal(mode: Dispatch, table: RankTable, arguments: Sequence[Any]) -> Dealt:
    """Return the arguments of each rank.

    Args:
        mode: The mode.
        table: Places of all ranks.
        arguments: Positional arguments of the call. Modes that deal out take rows: batches, lists,
            or veRL's `DataProto`, all of as many rows.

    Raises:
        DispatchRefused: if a mode that deals out is given anything else, or nothing.
    """
    if not mode.deals_out:
        ranks = 1 if mode is Dispatch.RANK_ZERO else len(table)
        return Dealt([tuple(arguments)], (0,) * ranks, tuple(range(ranks)), mode, None)
    if not arguments:
        raise DispatchRefused("nothing", mode.value)
    shares = find_shares(mode, table)
    divided = [split_rows(argument, shares.number) for argument in arguments]
    # Rows of arguments of other lengths would come to ranks that have others to go with them.
    rows = {division.dealing.rows for division in divided}
    if len(rows) > 1:
        raise DispatchRefused("rows", rows=tuple(sorted(rows)))
    parts = list(zip(*(division.parts for division in divided), strict=True))
    return Dealt(parts, shares.ranks, shares.answering, mode, divided[0].dealing)

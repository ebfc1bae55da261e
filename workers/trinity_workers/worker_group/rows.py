"""Rows that are divided into shares and put together again: batches, lists, veRL's `DataProto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from itertools import chain
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from trinity_events.errors import TrinityError

from ..algorithms.batch import Batch, concatenate


class UnknownRows(TrinityError):
    """A value has no rows that can be divided, or answers are not of the rows asked.

    Attributes:
        fault: ``value``, or ``answers``.
        kind: Class of the value.
        answered: Rows of the answers.
        dealt: Rows that were dealt out, with padding.
        requested: Rows that were asked for.
    """

    fault: Literal["value", "answers"]
    kind: str = ""
    answered: int = 0
    dealt: int = 0
    requested: int = 0
    texts: ClassVar = {
        "value": "{kind} has no rows to deal out: give a batch, a list or a DataProto, and what "
        "every rank is to get as a keyword argument",
        "answers": "the ranks answered {answered} rows to {dealt}, of which {requested} were asked",
    }


class Dealing(NamedTuple):
    """Places of rows in shares."""

    rows: int
    shares: int
    is_dealt_in_turn: bool
    """True if share s has rows s, s + shares, and so on; False if it has consecutive rows, and
    padding rows make all shares equally long."""

    @property
    def total(self) -> int:
        """Rows of all shares, with padding."""
        return self.rows if self.is_dealt_in_turn else -(-self.rows // self.shares) * self.shares

    @property
    def places(self) -> Sequence[int]:
        """Place of each row among the rows of all shares, one share after the other."""
        if not self.is_dealt_in_turn:
            return range(self.rows)
        rows, shares = self.rows, self.shares
        firsts = [0]
        for share in range(shares - 1):
            firsts.append(firsts[-1] + len(range(share, rows, shares)))
        return [firsts[row % shares] + row // shares for row in range(rows)]


class Divided(NamedTuple):
    """Shares of a value."""

    parts: list[Any]
    dealing: Dealing


def split_rows(value: Any, shares: int) -> Divided:
    """Divide a value's rows into shares.

    A list is dealt out in turn, so that neighbours of like length go to different shares, of which
    some may be empty. Batches are cut into consecutive parts of equally many rows.

    Raises:
        UnknownRows: if the value is neither a batch, nor a list, nor a `DataProto` of veRL.
    """
    if isinstance(value, Batch):
        return Divided(value.equal_parts(shares), Dealing(len(value), shares, False))
    if isinstance(value, list | tuple):
        parts = [list(value[share::shares]) for share in range(shares)]
        return Divided(parts, Dealing(len(value), shares, True))
    if is_data_proto(value):
        from verl.protocol import pad_dataproto_to_divisor

        padded, _ = pad_dataproto_to_divisor(value, shares)
        return Divided(padded.chunk(shares), Dealing(len(value), shares, False))
    raise UnknownRows("value", kind=type(value).__name__)


def join_rows(answers: Sequence[Any], dealing: Dealing) -> Any:
    """Return the answers of all shares as one, with the rows in the order before the division.

    Tensors, batches, lists and veRL's `DataProto` have a row for each that was dealt out; mappings
    are put together by name. Anything else, such as a metric of all ranks, is the first share's.

    Raises:
        UnknownRows: if answers have another number of rows.
    """
    first = answers[0]
    if is_data_proto(first):
        return _join_data_proto(answers, dealing)
    return _join(first, answers, dealing)


@singledispatch
def _join(first: Any, answers: Sequence[Any], dealing: Dealing) -> Any:
    return first


@_join.register
def _(first: Tensor, answers: Sequence[Tensor], dealing: Dealing) -> Tensor:
    if not first.ndim:
        return first
    whole = torch.cat(list(answers))
    _check(len(whole), dealing)
    if not dealing.is_dealt_in_turn:
        return whole[: dealing.rows]
    return whole[torch.tensor(dealing.places, dtype=torch.int64, device=whole.device)]


@_join.register
def _(first: Batch, answers: Sequence[Batch], dealing: Dealing) -> Batch:
    whole = concatenate(answers)
    _check(len(whole), dealing)
    if not dealing.is_dealt_in_turn:
        return whole.rows(0, dealing.rows)
    return whole.select(dealing.places)


@_join.register
def _(first: list, answers: Sequence[list[Any]], dealing: Dealing) -> list[Any]:  # type: ignore[type-arg]
    whole = list(chain.from_iterable(answers))
    _check(len(whole), dealing)
    return [whole[place] for place in dealing.places]


@_join.register
def _(
    first: Mapping,  # type: ignore[type-arg]
    answers: Sequence[Mapping[str, Any]],
    dealing: Dealing,
) -> dict[str, Any]:
    return {name: join_rows([answer[name] for answer in answers], dealing) for name in first}


def _join_data_proto(answers: Sequence[Any], dealing: Dealing) -> Any:
    from verl import DataProto

    whole: Any = DataProto.concat(list(answers))
    if whole.batch is None and not whole.non_tensor_batch:
        return answers[0]  # metrics alone, in `meta_info`
    _check(len(whole), dealing)
    return whole.select_idxs(list(dealing.places))


def _check(rows: int, dealing: Dealing) -> None:
    if rows != dealing.total:
        raise UnknownRows("answers", answered=rows, dealt=dealing.total, requested=dealing.rows)


def is_data_proto(value: Any) -> bool:
    """Return True for a `DataProto` of veRL."""
    # By name, so that veRL is imported only where it is used.
    return any(
        (base.__module__, base.__name__) == ("verl.protocol", "DataProto")
        for base in type(value).__mro__
    )

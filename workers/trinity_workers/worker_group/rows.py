"""Rows that are divided into shares and put together again: batches, lists, veRL's `DataProto`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from trinity_events.errors import TrinityError
from trinity_schemas import ExperienceHeader

from ..algorithms.partition import balance, places
from .value_kinds import is_batch, is_data_proto, is_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from ..algorithms.batch import Batch


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
    total: int
    """Rows of all shares, with the padding that makes them equally long."""
    places: Sequence[int]
    """Place of each row among the rows of all shares, one share after the other."""

    @property
    def is_in_order(self) -> bool:
        """True if the shares have consecutive rows."""
        return isinstance(self.places, range)


class Divided(NamedTuple):
    """Shares of a value."""

    parts: list[Any]
    dealing: Dealing


def split_rows(value: Any, shares: int) -> Divided:
    """Divide a value's rows into shares.

    Groups of samples are dealt out so that all shares have nearly equal numbers of tokens, and of
    groups. Any other list is dealt out in turn. Some shares may be empty. Batches are cut into
    consecutive parts of equally many rows.

    Raises:
        UnknownRows: if the value is neither a batch, nor a list, nor a `DataProto` of veRL.
    """
    if is_batch(value):
        return Divided(value.equal_parts(shares), _deal_in_order(len(value), shares))
    if isinstance(value, list | tuple):
        if is_groups(value):
            parts = balance([_count_tokens(group) for group in value], shares)
        else:
            # In turn, so that a list sorted by length is spread.
            parts = [list(range(share, len(value), shares)) for share in range(shares)]
        dealing = Dealing(len(value), len(value), places(parts, [len(part) for part in parts]))
        return Divided([[value[row] for row in part] for part in parts], dealing)
    if is_data_proto(value):
        from verl.protocol import pad_dataproto_to_divisor

        padded, _ = pad_dataproto_to_divisor(value, shares)
        return Divided(padded.chunk(shares), _deal_in_order(len(value), shares))
    raise UnknownRows("value", kind=type(value).__name__)


def is_groups(value: Any) -> bool:
    """Return True if a value is a sequence of groups of samples, none of them empty."""
    # All of them: a list that begins with a group may have anything else behind it.
    return (
        isinstance(value, Sequence)
        and bool(value)
        and all(
            isinstance(group, Sequence)
            and bool(group)
            and all(isinstance(sample, ExperienceHeader) for sample in group)
            for group in value
        )
    )


def _count_tokens(group: Sequence[ExperienceHeader]) -> int:
    return sum(sample.token_count for sample in group)


def _deal_in_order(rows: int, shares: int) -> Dealing:
    # A range marks that shares are consecutive, and costs no list of a place for each row.
    return Dealing(rows, -(-rows // shares) * shares, range(rows))


def join_rows(answers: Sequence[Any], dealing: Dealing) -> Any:
    """Return the answers of all shares as one, with the rows in the order before the division.

    Tensors, batches, lists and veRL's `DataProto` have a row for each that was dealt out; mappings
    are put together by name. Anything else, such as a metric of all ranks, is the first share's.

    Raises:
        UnknownRows: if answers have another number of rows.
    """
    first = answers[0]
    if is_tensor(first):
        return _join_tensors(answers, dealing) if first.ndim else first
    if is_batch(first):
        return _join_batches(answers, dealing)
    if is_data_proto(first):
        return _join_data_proto(answers, dealing)
    if isinstance(first, list):
        whole = list(chain.from_iterable(answers))
        _check(len(whole), dealing)
        return [whole[place] for place in dealing.places]
    if isinstance(first, Mapping):
        return {name: join_rows([answer[name] for answer in answers], dealing) for name in first}
    return first


def _join_tensors(answers: Sequence[Tensor], dealing: Dealing) -> Tensor:
    import torch

    whole = torch.cat(list(answers))  # (total rows, ...)
    _check(len(whole), dealing)
    if dealing.is_in_order:
        return whole[: dealing.rows]
    return whole[torch.tensor(dealing.places, dtype=torch.int64, device=whole.device)]


def _join_batches(answers: Sequence[Batch], dealing: Dealing) -> Batch:
    from ..algorithms.batch import concatenate

    whole = concatenate(answers)
    _check(len(whole), dealing)
    if dealing.is_in_order:
        return whole.rows(0, dealing.rows)
    return whole.select(dealing.places)


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

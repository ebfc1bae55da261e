"""Updates that a training step skipped because a number was not finite, and when that is too often.

1. All ranks skip an update, or none does: the norm that decides was reduced over them.
2. The ranks exchange causes only after a skipped update, so that others cost nothing.
3. A training step that skipped an update of a model counts once. ``limit`` of them in a row end the
   run, on all ranks alike; a training step without a skipped update begins the count again.
4. The prompts of a skipped update keep the fate of their step: they are trained. To dispatch
   them again would give the same answers the same numbers, and a prompt has one fate.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct
from torch import Tensor

from trinity_events.errors import TrinityError
from trinity_events.system.counts import format_count

from ...algorithms.aggregation import Means
from ...algorithms.batch import NO_GROUP, Batch, layouts
from ...runtime.collectives import gather_bytes

logger = logging.getLogger(__name__)

MAX_SKIPPED_STEPS = 3
"""Default limit. A rare sample spoils a step or two; a model that diverged spoils every step."""

_LISTED = 8
"""Prompts that a sentence lists: it is one line of a terminal."""


_LOSS = "loss"
_NORM = "gradient norm"
_CERTAINTY = {_LOSS: 1, _NORM: 2}
"""Order of causes, after fields of the batch: a loss follows from these, and a norm from a loss."""


class SkipCause(Struct, frozen=True):
    """Number that was not finite, as one rank sees it."""

    quantity: str
    """Field of the batch, such as ``rewards``; else ``loss``, else ``gradient norm``."""
    rank: int
    ordinals: tuple[int, ...] = ()
    """Prompts of the rows that it may come from."""

    def __str__(self) -> str:
        if self.quantity == _NORM:  # of all ranks
            return f"the {_NORM} is not finite"
        prompts = ""
        if self.ordinals:
            listed = ", ".join(map(str, self.ordinals[:_LISTED]))
            more = len(self.ordinals) - _LISTED
            prompts = f" (prompts {listed}{f' and {more} more' if more > 0 else ''})"
        verb = "is" if self.quantity == _LOSS else "are"
        return f"the {self.quantity} of rank {self.rank}{prompts} {verb} not finite"


class TooManySkippedSteps(TrinityError):
    """The updates of a model were skipped in too many training steps in a row.

    Args:
        model: The model, ``policy`` or ``critic``.
        count: Training steps in a row.
        reason: Cause in the last of them.
        step: The last of them, if it is known.
    """

    model: str
    count: int
    reason: SkipCause
    step: int | None = None

    def __str__(self) -> str:
        where = "" if self.step is None else f"step {self.step}: "
        steps = format_count(self.count, "step", "steps in a row")
        return (
            f"{where}updates of the {self.model} were skipped in {steps}, because {self.reason}: "
            "correct what computes these numbers, or lower trainer.learning_rate, and resume from "
            "the last checkpoint; trainer.max_skipped_steps sets after how many steps a run fails"
        )


class SkippedUpdates:
    """Count of training steps in a row in which a model's update was skipped.

    Args:
        limit: Training steps in a row after which the run fails.
    """

    def __init__(self, limit: int = MAX_SKIPPED_STEPS) -> None:
        self._limit = limit
        self._in_a_row: dict[str, int] = {}

    def record(
        self,
        model: str,
        skipped: Sequence[tuple[Means, Sequence[Batch]]],
        *,
        step: int | None = None,
    ) -> None:
        """Record a training step's updates of a model. Collective if there are skipped ones.

        Args:
            model: Name of the model.
            skipped: Means and rows of each skipped update, as far as this rank has them.
            step: The training step, for the log and for the error.

        Raises:
            TooManySkippedSteps: on all ranks, if this is the last step of too many.
        """
        if not skipped:
            self._in_a_row[model] = 0
            return
        count = self._in_a_row[model] = self._in_a_row.get(model, 0) + 1
        cause = find_cause(*skipped[0])
        if dist.get_rank() == 0:
            where = "" if step is None else f"step {step}: "
            text = "%sskipped %d updates of the %s, because %s"
            logger.warning(text, where, len(skipped), model, cause)
        if count >= self._limit:
            raise TooManySkippedSteps(model, count, cause, step)


def find_cause(means: Means, rows: Sequence[Batch]) -> SkipCause:
    """Return the likeliest cause, over all ranks, of a norm that is not finite. Collective.

    Args:
        means: Means of the update on this rank.
        rows: Micro-batches of this rank.
    """
    mine = msgspec.msgpack.encode(_local_cause(means, rows))
    causes = [msgspec.msgpack.decode(each, type=SkipCause) for each in gather_bytes(mine)]
    return min(causes, key=lambda cause: (_CERTAINTY.get(cause.quantity, 0), cause.rank))


def _local_cause(means: Means, rows: Sequence[Batch]) -> SkipCause:
    rank = dist.get_rank()
    for name in layouts():
        ordinals = {ordinal for part in rows for ordinal in _ordinals_of_non_finite(part, name)}
        if ordinals:
            return SkipCause(name, rank, tuple(sorted(ordinals - {NO_GROUP})))
    losses = dict(zip(means.names, means.sums[0].tolist(), strict=True))
    if not math.isfinite(losses.get(_LOSS, 0.0)):
        ordinals = {int(group) for part in rows for group in part.groups}
        return SkipCause(_LOSS, rank, tuple(sorted(ordinals - {NO_GROUP})))
    return SkipCause(_NORM, rank)


def _ordinals_of_non_finite(part: Batch, name: str) -> set[int]:
    """Return the prompts of rows in which a field is not finite where it counts."""
    values: Tensor | None = part.known().get(name)
    if values is None or not values.is_floating_point():
        return set()
    bad = ~torch.isfinite(values)
    # (rows,). Padding may hold anything: nothing is computed of it.
    bad = bad & (part.groups != NO_GROUP) if bad.ndim == 1 else (bad & part.response_mask).any(1)
    return {int(group) for group in part.groups[bad]}


def taken_norm(norms: Sequence[float]) -> float:
    """Return the mean norm of the updates that were taken; NaN if none was."""
    finite = [norm for norm in norms if math.isfinite(norm)]
    return math.fsum(finite) / len(finite) if finite else math.nan

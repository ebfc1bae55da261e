"""Loading of groups: references become samples, each checked as the dispatcher checks samples.

1. A sample that is returned has the tokens and versions of its reference, and no fault.
2. No content of a payload raises; a payload that cannot be used is a :class:`PayloadFault`.
3. A payload that is damaged or malformed counts against its explorer, one that is gone does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

from msgspec import Struct

from trinity_schemas import (
    ContractError,
    Experience,
    ExperienceHeader,
    ExperienceReference,
    Sampling,
    decode_turns,
)

from ...errors import TrinityError
from ..experience_checks import LONGEST_DETAIL, NO_LIMITS, AnswerLimits, find_group_fault
from .base import PayloadReader, digest_payload

_NAMED = 4
"""Payloads that an error names."""


class PayloadFault(Struct, frozen=True):
    """Reason for which the payload of a group cannot be used."""

    ordinal: int
    kind: Literal["missing", "damaged", "malformed"]
    detail: str
    """Sentence about the payload, without a full stop."""


class PayloadsUnusable(TrinityError):
    """Groups cannot be trained on, as their payloads are gone, damaged or malformed.

    Attributes:
        faults: Fault of each such group.
    """

    faults: tuple[PayloadFault, ...]
    text = (
        "the tokens of {_count} cannot be used: {_named}; they are generated again. If it repeats, "
        "see whether all ranks and explorers reach the server of the weights (--weights-redis-url) "
        "or share /dev/shm, and whether that server evicts keys (maxmemory-policy)"
    )

    @property
    def _count(self) -> str:
        return f"{len(self.faults)} group{'s' * (len(self.faults) > 1)}"

    @property
    def _named(self) -> str:
        named = "; ".join(
            f"ordinal {fault.ordinal}: {fault.detail}" for fault in self.faults[:_NAMED]
        )
        more = len(self.faults) - _NAMED
        return f"{named}; and {more} more" if more > 0 else named


def load_groups(
    reader: PayloadReader,
    groups: Sequence[Sequence[ExperienceHeader]],
    limits: AnswerLimits = NO_LIMITS,
    sampling: Sampling | None = None,
) -> list[list[Experience]]:
    """Return groups with the tokens of their samples; those that have them stay as they are.

    Args:
        reader: Reader of the payloads.
        groups: Samples of each prompt, or references to them.
        limits: Limits of the run's model and task.
        sampling: Sampling that was asked for; None if it is unknown.

    Raises:
        PayloadsUnusable: Payloads are missing, damaged or malformed; it has all faults.
        DeadlineExceeded: The medium stayed away.
    """
    addresses = [group[0].payload for group in groups if isinstance(group[0], ExperienceReference)]
    payloads = reader.read(addresses)
    loaded, faults = [], []
    for group in groups:
        if not isinstance(group[0], ExperienceReference):
            loaded.append(cast("list[Experience]", [*group]))
            continue
        references = cast("Sequence[ExperienceReference]", group)
        samples = load_group(references, next(payloads), limits, sampling)
        if isinstance(samples, PayloadFault):
            faults.append(samples)
        else:
            loaded.append(samples)
    if faults:
        raise PayloadsUnusable(tuple(faults))
    return loaded


def load_group(
    references: Sequence[ExperienceReference],
    payload: bytes | None,
    limits: AnswerLimits = NO_LIMITS,
    sampling: Sampling | None = None,
) -> list[Experience] | PayloadFault:
    """Return the samples of a group from the bytes of its payload, or the fault of these."""
    ordinal, address = references[0].ordinal, references[0].payload
    if payload is None:
        return PayloadFault(ordinal, "missing", f"its payload {address.name} is gone")
    if len(payload) != address.size or digest_payload(payload) != address.digest:
        detail = f"its payload {address.name} has other bytes than its explorer has announced"
        return PayloadFault(ordinal, "damaged", detail)
    try:
        samples = decode_turns(payload, references)
    except ContractError as error:
        return PayloadFault(ordinal, "malformed", str(error)[:LONGEST_DETAIL])
    if (malformed := find_group_fault(samples, limits, sampling)) is not None:
        sample, fault = malformed
        return PayloadFault(ordinal, "malformed", f"sample {sample.sample}: {fault.detail}")
    return samples

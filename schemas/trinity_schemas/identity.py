"""The names by which runs, steps, slots and registrations are known."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

# A run id names a Redis hash tag and a folder: braces, colons and slashes must not appear in it.
RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_RUN_ID = re.compile(RUN_ID_PATTERN)

RunId = Annotated[str, Meta(pattern=RUN_ID_PATTERN, description="Name of a run, a slug.")]
Slug = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$")]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=8192)]
Step = Annotated[int, Meta(ge=0, le=2**53)]
Epoch = Annotated[int, Meta(ge=0, le=2**53, description="Which opening of the run; 0 is none.")]
Rank = Annotated[int, Meta(ge=0, le=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Bytes = Annotated[int, Meta(ge=0, le=2**62)]
Seconds = Annotated[float, Meta(ge=0)]
Digest = Annotated[str, Meta(pattern=r"^[a-z0-9]{2,16}:[0-9a-f]{16,128}$", description="algo:hex")]
RelativePath = Annotated[
    str, Meta(max_length=4096, description="Relative to the run's checkpoint directory.")
]

Kind = Literal["state_dict", "checkpoint", "weights"]
TrainerStatus = Literal["running", "require_sync", "stopped"]
ExplorerStatus = Literal["running", "require_sync", "stopped"]


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it is a slug; raise :class:`ValueError` otherwise."""
    if not _RUN_ID.match(run_id):
        raise ValueError(
            f"run id {run_id[:80]!r} is not a slug: use 1 to 63 letters, digits, dots, dashes "
            "and underscores, beginning with a letter or a digit"
        )
    return run_id


class Slot(Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """What one save fills: one kind of one step, from one rank, under one name.

    Together with the envelope's epoch it identifies the slot; a save id is one attempt at it.
    """

    step: Step
    kind: Kind
    role: Slug
    rank: Rank
    name: Name


class StepRef(Struct, frozen=True, order=True):
    """A step of an epoch. Orders by epoch first: a later epoch outranks an earlier one."""

    epoch: Epoch
    step: Step


class Registration(Struct, frozen=True, kw_only=True):
    """How many saves of a kind a step is to expect; registrations add up by distinct id."""

    registration_id: Slug
    kind: Kind
    expected: Count
    slots: tuple[Slot, ...] = ()

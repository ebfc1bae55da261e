"""The names by which runs, steps, slots and registrations are known."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

# A run id names a Redis hash tag and a folder: braces, colons and slashes must not appear in it.
RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_RUN_ID = re.compile(RUN_ID_PATTERN)

RunId = Annotated[str, Meta(pattern=RUN_ID_PATTERN, title="run id", description="Name of a run.")]
Slug = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$", title="slug")]
Role = Annotated[Slug, Meta(description="What the process is in the run, such as actor.")]
SaveId = Annotated[Slug, Meta(description="Name of one attempt at a slot, never used again.")]
Transport = Annotated[Slug, Meta(description="How the version's bytes travel.")]
Incarnation = Annotated[Slug, Meta(description="One life of a process, never used again.")]
LONGEST_NAME = 256
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Node = Annotated[Name, Meta(description="The host.")]
Text = Annotated[str, Meta(max_length=8192)]
Step = Annotated[int, Meta(ge=0, le=2**53, description="The training step.")]
Epoch = Annotated[int, Meta(ge=0, le=2**53, description="Which opening of the run; 0 is none.")]
Rank = Annotated[int, Meta(ge=0, le=2**31, description="Number of the process in its role.")]
Ranks = Annotated[
    int,
    Meta(
        ge=1,
        le=16_384,
        description="Ranks that each make a save of this name; the step waits for all of them.",
    ),
]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Bytes = Annotated[int, Meta(ge=0, le=2**62, description="Size in bytes.")]
Seconds = Annotated[float, Meta(ge=0, description="Seconds that it took.")]
Digest = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]{2,16}:[0-9a-f]{16,128}$",
        title="digest",
        description="Digest, as algorithm:hex.",
    ),
]
RelativePath = Annotated[
    str, Meta(max_length=4096, description="Relative to the run's checkpoint directory.")
]
EntryId = Annotated[
    str,
    Meta(
        pattern=r"^[0-9]{1,20}-[0-9]{1,20}$",
        title="entry id",
        description="Id of an entry of the events.",
    ),
]

Kind = Annotated[
    Literal["state_dict", "checkpoint", "weights"],
    Meta(description="What is saved: a state dict or a checkpoint (files), or weights (memory)."),
]
SaveStrategy = Annotated[
    Literal["unrestricted", "single_thread", "single_process", "single_node"],
    Meta(description="Which saves of a run may run at once; unrestricted asks nobody."),
]
Lease = Annotated[
    float,
    Meta(gt=0, le=86_400, description="Seconds for which its sender's last heartbeat holds."),
]
TrainerStatus = Literal["running", "require_sync", "stopped"]
ExplorerStatus = Literal["running", "require_sync", "stopped"]


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it is a slug; raise :class:`ValueError` otherwise."""
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(
            f"run id {run_id[:80]!r} is not a slug: use 1 to 63 letters, digits, dots, dashes "
            "and underscores, beginning with a letter or a digit"
        )
    return run_id


class Producer(Struct, frozen=True, kw_only=True):
    """A sender of events. ``incarnation`` is new whenever the sender starts anew."""

    role: Role
    rank: Rank
    node: Node
    incarnation: Incarnation


class Slot(Struct, frozen=True, kw_only=True):
    """What one save fills: one kind of one step, from one rank, under one name.

    Together with the envelope's epoch it identifies the slot; a save id is one attempt at it.
    """

    step: Step
    kind: Kind
    role: Role
    rank: Rank
    name: Annotated[Name, Meta(description="Which of the process's saves.")]


class Process(Struct, frozen=True, kw_only=True):
    """One life of an operating-system process: numbers are used again, its start is not."""

    host: Node
    pid: Annotated[int, Meta(ge=0, le=2**32, description="Its number on the host.")]
    started: Annotated[
        int, Meta(ge=0, le=2**62, description="When it started, in ticks that the host counts.")
    ]


class StepRef(Struct, frozen=True, order=True):
    """A step of an epoch. Orders by epoch first: a later epoch outranks an earlier one."""

    epoch: Epoch
    step: Step


class Registration(Struct, frozen=True, kw_only=True):
    """How many saves of a kind a step is to expect; registrations add up by distinct id."""

    registration_id: Annotated[Slug, Meta(description="Counts once, however often it comes.")]
    kind: Kind
    expected: Annotated[Count, Meta(description="Saves to wait for; an explicit 0 is ready.")]
    slots: Annotated[
        tuple[Slot, ...], Meta(description="Which ones, where that is known; any otherwise.")
    ] = ()

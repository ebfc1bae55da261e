"""Names and numbers that identify runs, processes, steps, slots and registrations."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from .errors import MalformedRunId

# A run id names a Redis hash tag and a folder: braces, colons and slashes must not appear in it.
RUN_ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_RUN_ID = re.compile(RUN_ID_PATTERN)

RunId = Annotated[str, Meta(pattern=RUN_ID_PATTERN, title="run id", description="Name of a run.")]
Slug = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,126}$", title="slug")]
Role = Annotated[Slug, Meta(description="Role of the process in the run, such as actor.")]
SaveId = Annotated[Slug, Meta(description="Name of one attempt at a slot, never used again.")]
Transport = Annotated[Slug, Meta(description="Transport of the version's bytes.")]
Incarnation = Annotated[Slug, Meta(description="Id of one start of a process, never used again.")]
LONGEST_NAME = 256
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
Node = Annotated[Name, Meta(description="Name of the host.")]
HostId = Annotated[
    str,
    Meta(
        pattern=r"^[0-9a-f]{16}$",
        title="host id",
        description="Identity of a host: of its boot, its process ids and its processes' folder.",
    ),
]
Text = Annotated[str, Meta(max_length=8192)]
# Every reader of JSON, such as the dashboard's pages, has whole numbers up to 2**53.
Step = Annotated[int, Meta(ge=0, le=2**53, description="The training step.")]
Epoch = Annotated[
    int,
    Meta(ge=0, le=2**53, description="Number of the run's opening, from 1; 0 before it is opened."),
]
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
Seconds = Annotated[float, Meta(ge=0, description="Duration in seconds.")]
# The algorithm is part of it: digests of host memory, devices and files differ in theirs.
Digest = Annotated[
    str,
    Meta(
        pattern=r"^[a-z0-9]{2,16}:[0-9a-f]{16,128}$",
        title="digest",
        description="Digest, as algorithm:hex.",
    ),
]
# Length alone is checked: the reducer, which opens paths, resolves them below its root.
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
    Meta(description="Kind of save: a state dict or a checkpoint (files), or weights (memory)."),
]
SaveStrategy = Annotated[
    Literal["unrestricted", "single_thread", "single_process", "single_node"],
    Meta(description="Saves of a run that may run at once; unrestricted saves need no turn."),
]
Lease = Annotated[
    float,
    Meta(gt=0, le=86_400, description="Seconds for which the sender's last heartbeat holds."),
]
MemoryTransport = Literal["shm", "ray", "redis"]
"""Transports of weights that keep a version for readers that come later."""
RunTransport = Literal[MemoryTransport, "collective"]
"""Transports that need no GPU."""
TransportName = Literal[RunTransport, "cuda-ipc"]
"""Transports of a ``Synchronizer``, and of a run."""
TrainerStatus = Literal["running", "require_sync", "stopped"]
ExplorerStatus = Literal["running", "require_sync", "stopped"]


def check_run_id(run_id: str) -> str:
    """Return ``run_id`` if it is a slug; raise :class:`MalformedRunId` otherwise."""
    if not _RUN_ID.fullmatch(run_id):
        raise MalformedRunId(run_id)
    return run_id


class Producer(Struct, frozen=True, kw_only=True):
    """Sender of events. Each start of the sender has a new ``incarnation``."""

    role: Role
    rank: Rank
    node: Node
    incarnation: Incarnation


REPORTER_ROLE = "explorer"
"""Role whose producers append to the reports of a run; all others append to its events."""


def reporter_incarnation(rank: int, token: str) -> str:
    """Return the incarnation of an explorer's start.

    It names the explorer, so that a report can never take the sequence of another role's producer:
    their incarnations are random digits.
    """
    return f"{REPORTER_ROLE}-{rank}-{token}"


def is_reporter(producer: Producer) -> bool:
    """Return True if a producer has the role and the incarnation of an explorer."""
    named = reporter_incarnation(producer.rank, "")
    return producer.role == REPORTER_ROLE and producer.incarnation.startswith(named)


class Slot(Struct, frozen=True, kw_only=True):
    """Place of one save: one kind of one step, from one rank, under one name.

    The envelope's epoch is part of the slot's identity. A save id is one attempt at the slot.
    """

    step: Step
    kind: Kind
    role: Role
    rank: Rank
    name: Annotated[Name, Meta(description="Name of the save in its process.")]


class Process(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Operating-system process, identified by its start too, as hosts use numbers again."""

    host: Node
    pid: Annotated[int, Meta(ge=0, le=2**32, description="Number of the process on its host.")]
    started: Annotated[
        int, Meta(ge=0, le=2**62, description="Start of the process, in the host's clock ticks.")
    ]
    host_id: HostId | None = None


class StepRef(Struct, frozen=True, order=True):
    """Step of an epoch. A later epoch orders above an earlier one, whatever the step."""

    epoch: Epoch
    step: Step


class Registration(Struct, frozen=True, kw_only=True):
    """Number of saves of a kind that a step expects; registrations of distinct ids add up."""

    registration_id: Annotated[
        Slug, Meta(description="Id of the registration; a repeated one counts once.")
    ]
    kind: Kind
    expected: Annotated[
        Count, Meta(description="Saves that the step waits for; 0 is complete at once.")
    ]
    slots: Annotated[
        tuple[Slot, ...], Meta(description="Slots of the saves, if they are known by name.")
    ] = ()

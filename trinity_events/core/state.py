"""What the fold knows of a run. Plain data: it encodes to a snapshot and back."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from trinity_schemas import (
    ChosenTransport,
    ExplorerStatus,
    Kind,
    Producer,
    PublishedPart,
    Registration,
    SaveProof,
    SaveStrategy,
    Slot,
    StepRef,
    TrainerStatus,
)

ORIGIN = "0-0"
KINDS: tuple[Kind, ...] = ("state_dict", "checkpoint", "weights")


class Attempt(Struct, kw_only=True, omit_defaults=True):
    """A save that is under way in the current epoch: it waits for its turn, or runs."""

    slot: Slot
    holder: Producer
    since: int
    """Milliseconds at which it asked, or at which it started when it did."""
    lease: float | None = None
    """Seconds for which its sender's heartbeats hold; None when it sends none."""
    started: bool = False


class SlotState(Struct, kw_only=True, omit_defaults=True):
    """One slot of a step: its attempts by save id, and the first that finished."""

    slot: Slot
    waiting: dict[str, int] = field(default_factory=dict)
    """Save id to the milliseconds at which the attempt asked for its turn."""
    running: dict[str, int] = field(default_factory=dict)
    """Save id to the milliseconds at which the attempt started."""
    progress: dict[str, int] = field(default_factory=dict)
    """Save id of a running attempt to the bytes it has written so far, where it says so."""
    failed: dict[str, str] = field(default_factory=dict)
    """Save id to the reason."""
    proof: SaveProof | None = None
    path: str | None = None
    others: dict[str, SaveProof] = field(default_factory=dict)
    """Finished attempts in other staged folders than ``path``'s, by folder; empty for none."""


class KindState(Struct, kw_only=True, omit_defaults=True):
    """One kind of one step."""

    registrations: dict[str, Registration] = field(default_factory=dict)
    slots: dict[str, SlotState] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    """Saves of one role and name to the ranks that each make one, where the saves say so."""
    committed_at: int | None = None
    with_state_dict: bool = False
    """Of a checkpoint: whether it rests on the step's state dict too, decided by its commit."""
    own_state_dict: bool = False
    """Of a checkpoint: whether its commit registers a state dict, to be saved to its folder."""
    later_failure: str | None = None
    """Of a state dict: why an attempt failed at a slot that had a finished one, before the commit
    of the checkpoint that may need it."""
    outcome: Literal["ready", "superseded"] | None = None
    failure: str | None = None
    """Reason of the failure that was announced, which a retry may still overcome."""
    compacted: bool = False
    """Whether its registrations and slots were dropped, since it is ready and not the newest."""
    finished: int = 0
    """Slots that have a finished attempt."""
    folder: str | None = None
    """The staged folder that all of them were written to, once it is decided; empty for none."""

    @property
    def is_failed(self) -> bool:
        """Whether its failure was announced, and no retry has overcome it."""
        return self.outcome is None and self.failure is not None

    @property
    def settled(self) -> bool:
        """Whether nothing more will be announced of it, unless a retry succeeds."""
        return self.outcome is not None or self.failure is not None


class VersionState(Struct, kw_only=True):
    """A weight version in the making."""

    ranks: tuple[int, ...]
    transport: str
    opened_at: int
    parts: dict[int, PublishedPart] = field(default_factory=dict)


class DeltaBases(Struct, frozen=True, kw_only=True):
    """A ready version of which only what changed was published, and what that rests on."""

    version: StepRef
    bases: tuple[StepRef, ...]


class StepState(Struct, kw_only=True, omit_defaults=True):
    """One step of the current epoch."""

    kinds: dict[Kind, KindState] = field(default_factory=dict)
    version: VersionState | None = None


class ReadyPointer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest ready step of a kind."""

    at: StepRef
    entry_id: str
    path: str | None = None
    digest: str | None = None
    resumed: bool = False
    """Whether a resume set it, to a step whose folder has its final name."""

    @property
    def named(self) -> bool:
        """Whether a folder with the step's final name is part of it."""
        return self.path is not None or self.resumed


class ExplorerState(Struct, kw_only=True, omit_defaults=True):
    """What one explorer last said of itself."""

    status: ExplorerStatus = "running"
    version: StepRef | None = None
    digest: str | None = None
    applied_at: int | None = None
    heard_at: int | None = None
    """Milliseconds of its last event."""
    requested_at: int | None = None
    """Milliseconds at which it asked for weights that it has not applied yet."""
    wanted: StepRef | None = None
    """The oldest version that it asked for."""


class Refusal(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A weight version that a consumer did not use, for it is not what was published."""

    at: int
    """Milliseconds."""
    by: str
    node: str
    """The consumer's host."""
    version: StepRef
    rank: int | None = None
    """Whose part is at fault, where one is."""
    chunk: int | None = None
    """Which chunk of the part, where one is at fault."""
    reason: str


class TrainerWaits(Struct, frozen=True, kw_only=True):
    """Wait of the trainer, as it was last told."""

    what: str
    step: int
    have: int
    expected: int
    missing: tuple[str, ...]
    since: int
    """Milliseconds at which the wait began."""


class DetachedConsumer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A consumer group that the log no longer waits for, since ``entry_id`` said so."""

    entry_id: str
    position: str
    pending: int = 0
    idle: float = 0.0
    oldest_pending: str | None = None
    """None also where its event is of a version that did not tell."""


class Anomaly(Struct, frozen=True, kw_only=True):
    """Something in the log that should not be there, and that changed nothing."""

    entry_id: str
    name: str
    detail: str


class MonitorState(Struct, kw_only=True, omit_defaults=True):
    """The state of a run after ``position``. Only :class:`.Monitor` changes it."""

    run_id: str
    position: str = ORIGIN
    epoch: int = 0
    opened_at: int | None = None
    """Milliseconds at which the run was first opened."""
    closed: str | None = None
    """Reason with which the present epoch was closed."""
    closed_error: str | None = None
    """What went wrong, where it was not closed by itself."""
    closed_at: int | None = None
    """Milliseconds at which the present epoch was closed."""
    trainer: TrainerStatus | None = None
    trainer_step: int = 0
    trainer_waits: TrainerWaits | None = None
    """Wait of the trainer that has lasted for some seconds."""
    steps: dict[int, StepState] = field(default_factory=dict)
    forgotten_through: int = -1
    """Steps of the epoch up to this one that are not in ``steps`` were settled and dropped."""
    ready: dict[Kind, ReadyPointer] = field(default_factory=dict)
    complete_checkpoints: list[int] = field(default_factory=list, name="whole")
    """Steps of this line of the run whose checkpoint is whole, in order; the last many."""
    lineage: list[StepRef] = field(default_factory=list)
    """Earlier epochs that the present one goes on from, each with its last step that counts."""
    pending_promotions: dict[str, int] = field(default_factory=dict, name="carried")
    """Folders that were complete when an epoch opened, and may not have their name yet."""
    versions: list[StepRef] = field(default_factory=list)
    """Ready weight versions that are not retired, oldest first."""
    delta_bases: list[DeltaBases] = field(default_factory=list, name="resting")
    """Those of them that rest on others."""
    strategy: SaveStrategy = "unrestricted"
    """Which saves of the current epoch may run at once."""
    transport: ChosenTransport | None = None
    """How the current epoch's weights are to travel, and why so, where its opening says."""
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Saves under way in the current epoch, by save id, oldest first."""
    queue: dict[str, list[str]] = field(default_factory=dict)
    """Groups that wait for their turn, first come first, to the save ids that wait in them."""
    turns: dict[str, str] = field(default_factory=dict)
    """Save ids that have their turn, to their group: all of one group."""
    explorers: dict[str, ExplorerState] = field(default_factory=dict)
    refused: int = 0
    """How often a consumer refused a weight version."""
    refusals: list[Refusal] = field(default_factory=list)
    """The last few."""
    detached: dict[str, DetachedConsumer] = field(default_factory=dict)
    """The last few, by stream and group."""
    sequences: dict[str, int] = field(default_factory=dict)
    """Producer incarnation to the last sequence seen of it."""
    entries: int = 0
    announced: int = 0
    dead_letters: int = 0
    anomaly_counts: dict[str, int] = field(default_factory=dict)
    anomalies: list[Anomaly] = field(default_factory=list)
    """The last few."""


SNAPSHOT_VERSION = 2
"""Version of the layout of snapshots, to be raised with every change of what a field means.

A snapshot of another version is folded anew from the log: its fields may not be what they seem.
"""


class SnapshotVersion(msgspec.DecodeError):
    """A snapshot has the layout of another version."""


class _Snapshot(NamedTuple):
    version: int
    state: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_snapshots = msgspec.msgpack.Decoder(_Snapshot)
_unversioned = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_decoder = msgspec.msgpack.Decoder(MonitorState)


def encode_state(state: MonitorState) -> bytes:
    """Encode a snapshot of the state, with the version of its layout."""
    return _encoder.encode((SNAPSHOT_VERSION, state))


def decode_state(snapshot: bytes) -> MonitorState:
    """Decode the state of a snapshot.

    Raises:
        SnapshotVersion: for a snapshot of another version.
        msgspec.DecodeError: for anything else.
    """
    try:
        version = _version_of(snapshot)
        if version != SNAPSHOT_VERSION:
            raise SnapshotVersion(
                f"it is of version {version}, and this program reads version {SNAPSHOT_VERSION}"
            )
        return _decoder.decode(_snapshots.decode(snapshot).state)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def _version_of(snapshot: bytes) -> int:
    """Return the version of a snapshot; the first had the state alone, a map."""
    try:
        return _snapshots.decode(snapshot).version
    except msgspec.DecodeError:
        if "run_id" in _unversioned.decode(snapshot):
            return 1
        raise

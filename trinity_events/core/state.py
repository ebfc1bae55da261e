"""State of a run, as plain data that encodes to a snapshot and back."""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec
from msgspec import Struct, field

from trinity_schemas import (
    ChosenTransport,
    ExplorerStatus,
    Kind,
    PauseMode,
    Producer,
    ProofCheck,
    ProofStatus,
    PublishedPart,
    Registration,
    SaveProof,
    SaveStrategy,
    SettingChange,
    SkippedCheckpoint,
    Slot,
    StepRef,
    TrainerStatus,
)

from ..checkpoints.layout import parse_staged_folder
from ..errors import StructuredError
from .learning import Learning
from .ledger import Ledger
from .ordinal_ranges import Range

# As in `log/position.py`: the core has no I/O, and imports no log.
ORIGIN = "0-0"
KINDS: tuple[Kind, ...] = ("state_dict", "checkpoint", "weights")


class Attempt(Struct, kw_only=True, omit_defaults=True):
    """Attempt of the current epoch that waits for its turn, or runs."""

    slot: Slot
    holder: Producer
    since: int
    """Milliseconds at which it asked for its turn, or at which it started."""
    lease: float | None = None
    """Seconds for which a heartbeat of its sender holds; None for a sender without heartbeats."""
    started: bool = False


class SlotState(Struct, kw_only=True, omit_defaults=True):
    """Slot of a step: its attempts by save id, and the proof of a finished one."""

    slot: Slot
    waiting: dict[str, int] = field(default_factory=dict)
    """Save id to the milliseconds at which the attempt asked for its turn."""
    running: dict[str, int] = field(default_factory=dict)
    """Save id to the milliseconds at which the attempt started."""
    progress: dict[str, int] = field(default_factory=dict)
    """Save id of a running attempt to the bytes it has written, if it reports them."""
    failed: dict[str, str] = field(default_factory=dict)
    """Save id of a failed attempt to the reason."""
    proof: SaveProof | None = None
    path: str | None = None
    others: dict[str, SaveProof] = field(default_factory=dict)
    """Finished attempts in other staged folders than ``path``'s, by folder.

    The key is empty for an attempt outside of staging.
    """
    rewritten: int | None = None
    """Bytes of a later attempt at the same path, which are on disk in place of the proof's."""

    @property
    def folder(self) -> str:
        """Return the staged folder of ``path``; empty outside of staging."""
        return parse_staged_folder(self.path) or ""

    @property
    def folders(self) -> set[str]:
        """Return the staged folders of all finished attempts; empty for one outside of staging."""
        return {self.folder, *self.others}

    @property
    def nbytes(self) -> int:
        """Return the bytes that a finished slot has at its path; 0 without a finished attempt."""
        if self.rewritten is not None:
            return self.rewritten
        return 0 if self.proof is None else self.proof.bytes


class KindState(Struct, kw_only=True, omit_defaults=True):
    """Kind of a step."""

    registrations: dict[str, Registration] = field(default_factory=dict)
    slots: dict[str, SlotState] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    """Role and name of a save to the number of ranks that each make one, if the saves report it."""
    committed_at: int | None = None
    with_state_dict: bool = False
    """True for a checkpoint that rests on the step's state dict too; its commit decides it."""
    own_state_dict: bool = False
    """True for a checkpoint whose commit registers a state dict, to be saved to its folder."""
    later_failure: str | None = None
    """Reason for which a second attempt at a state dict's slot failed, before the commit of the
    checkpoint that may need it."""
    outcome: Literal["ready", "superseded"] | None = None
    failure: str | None = None
    """Reason of the failure that was announced, which a retry may still overcome."""
    compacted: bool = False
    """True if its registrations and slots were dropped, as it is settled and not the newest."""
    finished: int = 0
    """Slots that have a finished attempt."""
    folder: str | None = None
    """Staged folder of its saves, once it is complete.

    For saves outside of staging it is empty, and None once the kind is compacted.
    """

    @property
    def is_failed(self) -> bool:
        """Return True if its failure was announced, and no retry has overcome it."""
        return self.outcome is None and self.failure is not None

    @property
    def settled(self) -> bool:
        """Return True if it is ready, superseded or failed: only a retry may change that."""
        return self.outcome is not None or self.failure is not None


class VersionState(Struct, kw_only=True):
    """Weight version that is being published."""

    ranks: tuple[int, ...]
    transport: str
    opened_at: int
    parts: dict[int, PublishedPart] = field(default_factory=dict)


class DeltaBases(Struct, frozen=True, kw_only=True):
    """Ready delta version, and the versions that its parts rest on."""

    version: StepRef
    bases: tuple[StepRef, ...]


class StepState(Struct, kw_only=True, omit_defaults=True):
    """Step of the current epoch."""

    kinds: dict[Kind, KindState] = field(default_factory=dict)
    version: VersionState | None = None


class ReadyPointer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Newest ready step of a kind."""

    at: StepRef
    entry_id: str
    path: str | None = None
    digest: str | None = None
    resumed: bool = False
    """True if a resume set it, to a step whose folder has its final name."""

    @property
    def has_folder(self) -> bool:
        """Return True if it includes a folder with the step's final name."""
        return self.path is not None or self.resumed


class EnginePause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Pause of an explorer's engine that has not ended."""

    since: int
    """Milliseconds of the event that reports it."""
    incarnation: str
    """Start of the explorer: another one is not paused."""
    version: StepRef
    """Version that is to be installed."""
    mode: PauseMode
    lease: float
    """Seconds after which it counts as over."""
    in_flight: int = 0
    """Requests that were under way."""


class ProcessLease(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Lease of the trainer of the current epoch, or of an explorer."""

    holder: Producer
    lease: float
    """Seconds without a heartbeat after which the process is silent."""
    silent_at: int | None = None
    """Milliseconds at which the lease was found to have expired; None while it holds."""


class ExplorerState(Struct, kw_only=True, omit_defaults=True):
    """Status of an explorer, from its last events."""

    status: ExplorerStatus = "running"
    endpoint: str | None = None
    """URL of the server that it drives."""
    version: StepRef | None = None
    digest: str | None = None
    proof: ProofStatus | None = None
    """Result of the checks of what it serves; None if it reported none."""
    pause: EnginePause | None = None
    """Pause of its engine that has not ended."""
    aborted: int = 0
    """Requests that its pauses cut short, and that were issued again."""
    applied_at: int | None = None
    heard_at: int | None = None
    """Milliseconds of its last event."""
    requested_at: int | None = None
    """Milliseconds at which it asked for weights that it has not applied."""
    # Snapshots keep the earlier name. msgspec ignores unknown fields, and an old snapshot would
    # else decode without a request.
    requested_version: StepRef | None = field(default=None, name="wanted")
    """The oldest version that it asked for."""
    lease: ProcessLease | None = None
    """Its lease, while it runs and renews one."""

    @property
    def is_lost(self) -> bool:
        """Return True if its lease has expired: its host may be off, or its link cut."""
        return self.lease is not None and self.lease.silent_at is not None

    @property
    def runs(self) -> bool:
        """Return True if it has not stopped, and is not lost."""
        return self.status != "stopped" and not self.is_lost

    @property
    def shown_status(self) -> str:
        """Status for people and metrics: ``lost``, or the one that it published last."""
        return "lost" if self.is_lost else self.status

    @property
    def last_heard_at(self) -> int | None:
        """Milliseconds of its last event, or of the last heartbeat of one that is lost."""
        if self.lease is None or self.lease.silent_at is None:
            return self.heard_at
        return max(self.heard_at or 0, self.lease.silent_at - round(1000 * self.lease.lease))


class Refusal(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Weight version that a consumer did not use, because its bytes were not the published ones."""

    at: int
    """Milliseconds of its event."""
    by: str
    """The consumer's role and rank."""
    node: str
    """The consumer's host."""
    version: StepRef
    rank: int | None = None
    """Rank whose part is at fault, if it is known."""
    chunk: int | None = None
    """Index of the chunk at fault in the part, if it is known."""
    check: ProofCheck | None = None
    """Check that the consumer's engine failed; None if the bytes were damaged before."""
    reason: str


class ExcludedExplorer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Explorer whose answers the trainer takes no more in the current epoch."""

    at: int
    """Milliseconds of the event."""
    malformed: int
    """Number of its answers that were malformed."""
    reason: str
    """Fault of the last one."""
    failed: int = 0
    """Number of its requests that failed in a row."""


class RewardError(Struct, frozen=True, kw_only=True):
    """First error of a cause for which answers could not be judged."""

    at: int
    """Milliseconds of the entry that reports it."""
    entry_id: str
    """Entry with the traceback and the answer."""
    sentence: str


class RaisedAlarm(Struct, frozen=True, kw_only=True):
    """Alarm whose cause is not gone."""

    at: int
    """Milliseconds of the entry that raised it."""
    entry_id: str
    step: int
    value: float
    threshold: float
    sentence: str
    """Cause, without a full stop."""


class OpenWait(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Wait of a process that it has reported, and that has not ended."""

    by: str
    """The waiting process's role and rank."""
    incarnation: str
    """Start of the waiting process."""
    what: str
    """Object of the wait, in words."""
    waits_for: tuple[str, ...] = ()
    """Processes that it waits for, by role and rank; the first of them."""
    unnamed: int = 0
    """Number of further processes that it waits for."""
    since: int
    """Milliseconds at which the wait began."""
    deadline: float | None = None
    """Seconds after which it gives up, from the beginning."""
    heard_at: int | None = None
    """Milliseconds of its last report."""
    step: int | None = None
    """Step whose saves or weights it waits for, if it waits for some."""
    is_outage: bool = False
    """True if it waits for something outside of the run."""


class ProcessHost(Struct, frozen=True, kw_only=True):
    """Host of a process."""

    node: str
    """Name of the host, which another one may have too."""
    host_id: str
    """Identity of the host; a process id of one host says nothing on another."""


class Profile(Struct, frozen=True, kw_only=True):
    """Trace of a training step that a rank wrote."""

    step: int
    by: str
    """The rank's role and rank."""
    path: str
    """Path below the run's folder."""


class DetachedConsumer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Consumer group that no longer keeps the log from being trimmed, since ``entry_id``."""

    entry_id: str
    position: str
    pending: int = 0
    idle: float = 0.0
    oldest_pending: str | None = None
    """Id of the oldest entry without an acknowledgement; None also for events of older versions."""


class Anomaly(Struct, frozen=True, kw_only=True):
    """Entry of the log that is out of order or unexpected."""

    entry_id: str
    name: str
    detail: str


class Evaluation(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Evaluation of a weight version on a set of held-out questions."""

    version: StepRef
    since: int
    """Milliseconds at which it started, or ended."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Results of an evaluation that has finished."""
    failure: str | None = None
    """Reason for which it was given up."""


class EvaluatedSet(Struct, kw_only=True, omit_defaults=True):
    """Evaluations of one set of held-out questions."""

    open: list[Evaluation] = field(default_factory=list)
    """Evaluations that have started and not ended, oldest first."""
    last: Evaluation | None = None
    """Evaluation that ended last."""
    through: StepRef | None = None
    """Newest version of the lineage that needs no evaluation any more."""


class ScoredStep(Struct, kw_only=True, omit_defaults=True):
    """Step whose weights were evaluated, and may be those of the best checkpoint."""

    at: StepRef
    value: float
    is_complete: bool = False
    """True once the checkpoint of the step is complete."""


class BestScores(Struct, kw_only=True, omit_defaults=True):
    """Scores by which the best checkpoint is chosen: its own, and the newest ones."""

    name: str
    """Name of the set of held-out questions."""
    metric: str
    mode: Literal["max", "min"]
    scores: list[ScoredStep] = field(default_factory=list)


class MonitorState(Struct, kw_only=True, omit_defaults=True):
    """State of a run after ``position``. Only :class:`.Monitor` changes it."""

    run_id: str
    position: str = ORIGIN
    epoch: int = 0
    opened_at: int | None = None
    """Milliseconds at which the run was first opened."""
    closed: str | None = None
    """Reason with which the current epoch was closed."""
    closed_error: str | None = None
    """Error that closed the current epoch, if there was one."""
    closed_at: int | None = None
    """Milliseconds at which the current epoch was closed."""
    command: str | None = None
    """Command that continues the run, if the log has it."""
    is_closed_for_good: bool = False
    """True if the run failed, and the command that began it would fail again."""
    trainer: TrainerStatus | None = None
    trainer_step: int = 0
    trainer_lease: ProcessLease | None = None
    """Lease of the trainer, while it runs and renews one."""
    learning: Learning = field(default_factory=Learning)
    """Rewards and pace of the trained steps."""
    changed_settings: list[SettingChange] = field(default_factory=list)
    """Settings of the current epoch that differ from the epoch that it resumes."""
    skipped_checkpoints: list[SkippedCheckpoint] = field(default_factory=list)
    """Checkpoints that the current epoch passed over when it resumed."""
    waits: dict[str, OpenWait] = field(default_factory=dict)
    """Open waits by name, in the order of their reports."""
    stacks: dict[str, str] = field(default_factory=dict)
    """Process, as role and rank, to the entry with the stacks that were last taken of it."""
    ledger: Ledger | None = None
    """Fates of the ordinals of the current lineage, once some were dispatched or restored."""
    evaluations: dict[str, EvaluatedSet] = field(default_factory=dict)
    """Evaluations by the name of their set."""
    steps: dict[int, StepState] = field(default_factory=dict)
    forgotten_through: int = -1
    """Last step that was settled and dropped; earlier steps that ``steps`` lacks were too."""
    ready: dict[Kind, ReadyPointer] = field(default_factory=dict)
    # This and two fields below have earlier names in snapshots, as
    # `ExplorerState.requested_version` has.
    best: BestScores | None = None
    """Scores of the best checkpoint; None unless the run keeps one."""
    complete_checkpoints: list[int] = field(default_factory=list, name="whole")
    """Last steps with a complete checkpoint, in order, of the current epoch and its lineage."""
    lineage: list[StepRef] = field(default_factory=list)
    """Earlier epochs that the current one continues, each with its last step that counts."""
    pending_promotions: dict[str, int] = field(default_factory=dict, name="carried")
    """Folders that were complete when an epoch opened, and may not have their name yet."""
    versions: list[StepRef] = field(default_factory=list)
    """Ready weight versions that are not retired, oldest first."""
    delta_bases: list[DeltaBases] = field(default_factory=list, name="resting")
    """Delta versions among ``versions``, with their bases."""
    strategy: SaveStrategy = "unrestricted"
    """Saves of the current epoch that may run at once."""
    transport: ChosenTransport | None = None
    """Transport of the current epoch's weights and its reason, if its opening reports them."""
    attempts: dict[str, Attempt] = field(default_factory=dict)
    """Saves under way in the current epoch, by save id, oldest first."""
    queue: dict[str, list[str]] = field(default_factory=dict)
    """Group that waits for its turn to its waiting save ids, in the order of the requests."""
    turns: dict[str, str] = field(default_factory=dict)
    """Save id that has its turn to its group; all are of one group."""
    explorers: dict[str, ExplorerState] = field(default_factory=dict)
    unlisted_explorers: list[Range] = field(default_factory=list)
    """Ranks of the explorers that ``explorers`` no longer has, as its limit was reached."""
    hosts: dict[str, ProcessHost] = field(default_factory=dict)
    """Host of the last process of each role and rank, as far as their events name it."""
    excluded: dict[str, ExcludedExplorer] = field(default_factory=dict)
    """Explorers that the trainer has excluded in the current epoch, by name."""
    reward_errors: dict[str, RewardError] = field(default_factory=dict)
    """First reward errors of the current epoch by cause: type and place of the error."""
    alarms: dict[str, RaisedAlarm] = field(default_factory=dict)
    """Raised alarms of the current epoch by name."""
    refused: int = 0
    """Number of refused weight versions."""
    refusals: list[Refusal] = field(default_factory=list)
    """Last refusals."""
    detached: dict[str, DetachedConsumer] = field(default_factory=dict)
    """Last detached consumer groups, by stream and group."""
    profiles: list[Profile] = field(default_factory=list)
    """Last profiles of training steps."""
    sequences: dict[str, int] = field(default_factory=dict)
    """Producer's incarnation to its last sequence."""
    entries: int = 0
    announced: int = 0
    dead_letters: int = 0
    anomaly_counts: dict[str, int] = field(default_factory=dict)
    anomalies: list[Anomaly] = field(default_factory=list)
    """Last anomalies."""

    @property
    def silent_trainer(self) -> ProcessLease | None:
        """Lease of the trainer if it has expired: its host may be off, or its link cut."""
        lease = self.trainer_lease
        return None if lease is None or lease.silent_at is None else lease

    @property
    def trainer_status(self) -> str | None:
        """Reason for which the run was closed, or the status of its trainer."""
        return self.closed or ("silent" if self.silent_trainer else self.trainer)


SNAPSHOT_VERSION = 2
"""Version of the layout of snapshots; raise it with every change of a field's meaning.

The reducer does not read a snapshot of another version: it folds the log again.
"""


class SnapshotVersion(StructuredError, msgspec.DecodeError):
    """Snapshot with the layout of another version."""

    version: int | None
    expected: int
    text = "it is of version {version}, and this program reads version {expected}"


class _Snapshot(NamedTuple):
    version: int
    # Undecoded until the version is known, which says how to decode it.
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
        SnapshotVersion: The snapshot is of another version.
        msgspec.DecodeError: The bytes are no snapshot.
    """
    try:
        version = _read_version(snapshot)
        if version != SNAPSHOT_VERSION:
            raise SnapshotVersion(version, SNAPSHOT_VERSION)
        return _decoder.decode(_snapshots.decode(snapshot).state)
    # msgspec raises these for text that is not UTF-8, and for values that are nested too deep.
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from None


def _read_version(snapshot: bytes) -> int:
    """Return the version of a snapshot; version 1 was a bare map of the state."""
    try:
        return _snapshots.decode(snapshot).version
    except msgspec.DecodeError:
        if "run_id" in _unversioned.decode(snapshot):
            return 1
        raise

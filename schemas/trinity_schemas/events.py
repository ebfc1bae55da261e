"""Events of a run, as one tagged union. Changes only ever add optional fields."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from .errors import ResumeContradiction
from .identity import (
    REPORTER_ROLE,
    Bytes,
    Count,
    Digest,
    EntryId,
    Epoch,
    ExplorerStatus,
    Kind,
    Lease,
    Name,
    Node,
    Process,
    Producer,
    Rank,
    Ranks,
    Registration,
    RelativePath,
    SaveId,
    SaveStrategy,
    Seconds,
    Slot,
    Slug,
    Step,
    StepRef,
    Text,
    TrainerStatus,
    Transport,
)
from .proof import ProofCheck, WeightsProof
from .rollouts import (
    Attempts,
    DropReason,
    Ordinal,
    OrdinalRanges,
    Samples,
    TrainedLedger,
    check_ranges,
)


def _kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() else c for c in name).lstrip("-")


class _Event(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", tag=_kebab):
    """Base of all events: frozen, with the class name in kebab case as tag."""


MOST_PHASES = 32
"""Phases of a report, and fates of tokens: twice as many as any process has."""
Phase = Annotated[Slug, Meta(description="Activity of a process, such as `generating`.")]
TokenFate = Annotated[Slug, Meta(description="Fate of sampled tokens, such as `trained`.")]
Tokens = Annotated[
    dict[TokenFate, Annotated[int, Meta(ge=0, le=2**62)]],
    Meta(max_length=MOST_PHASES, description="Sampled tokens by fate."),
]


# --- the run -------------------------------------------------------------------------------


class ChosenTransport(Struct, frozen=True, kw_only=True):
    """Transport of the run's weights, and the reason for it."""

    name: Transport
    reason: Annotated[Text, Meta(description="Reason for the choice.")]


class RunOpened(_Event, frozen=True):
    """A trainer opened a new epoch of the run and starts at step 0."""

    config_digest: Annotated[Digest | None, Meta(description="Digest of the configuration.")] = None
    config: Annotated[
        Text | None, Meta(description="Configuration as JSON, without URLs and secrets.")
    ] = None
    save_strategy: SaveStrategy = "unrestricted"
    transport: Annotated[
        ChosenTransport | None, Meta(description="Transport of the weights, and the reason.")
    ] = None
    command: Annotated[
        Text | None, Meta(description="Command that continues the run, without passwords.")
    ] = None


class SettingChange(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Setting with another value than in the epoch that wrote the checkpoint, as data only."""

    name: Annotated[Name, Meta(description="Path of the setting, such as trainer.learning_rate.")]
    before: Annotated[
        Text | None, Meta(description="Earlier value as JSON, cut if long; absent for none.")
    ] = None
    after: Annotated[
        Text | None, Meta(description="New value as JSON, cut if long; absent for none.")
    ] = None


class SkippedCheckpoint(Struct, frozen=True, kw_only=True):
    """Checkpoint that a resume passed over for an older one."""

    step: Step
    reason: Annotated[Text, Meta(description="Fault of the checkpoint.")]


MOST_CHANGES = 256
"""Changed settings of an event. The configuration next to them has every value."""
MOST_SKIPPED = 64
"""Checkpoints of an event that were passed over, the newest ones."""


class RunResumed(_Event, frozen=True):
    """A trainer opened a new epoch of the run and resumes from ``step``."""

    step: Step
    checkpoint: Annotated[
        StepRef | None, Meta(description="Checkpoint that it loads, by the epoch that wrote it.")
    ] = None
    config: Annotated[
        Text | None, Meta(description="Configuration as JSON, without URLs and secrets.")
    ] = None
    save_strategy: SaveStrategy = "unrestricted"
    transport: Annotated[
        ChosenTransport | None, Meta(description="Transport of the weights, and the reason.")
    ] = None
    command: Annotated[
        Text | None, Meta(description="Command that continues the run, without passwords.")
    ] = None
    changed: Annotated[
        tuple[SettingChange, ...],
        Meta(max_length=MOST_CHANGES, description="Settings that changed, and take effect."),
    ] = ()
    skipped: Annotated[
        tuple[SkippedCheckpoint, ...],
        Meta(max_length=MOST_SKIPPED, description="Newer checkpoints that were passed over."),
    ] = ()

    def __post_init__(self) -> None:
        if self.checkpoint is not None and self.checkpoint.step != self.step:
            raise ResumeContradiction(self.step, self.checkpoint.step)


RunOutcome = Annotated[Literal["finished", "interrupted", "failed"], Meta(description="Outcome.")]


class RunClosed(_Event, frozen=True):
    """The run's current epoch ended; ``error`` is the cause of a failure."""

    reason: RunOutcome
    step: Annotated[Step | None, Meta(description="Last training step, if known.")] = None
    error: Annotated[Text | None, Meta(description="Error that ended the run.")] = None
    command: Annotated[
        Text | None, Meta(description="Command that continues the run, without passwords.")
    ] = None
    is_lasting: Annotated[
        bool, Meta(description="True if the command that began the run would fail again.")
    ] = False


# --- saves ---------------------------------------------------------------------------------


class ThreadCountRegistered(_Event, frozen=True):
    """A step expects a number of saves of a kind."""

    step: Step
    registration: Registration


class SaveRequested(_Event, frozen=True):
    """A worker waits for its turn to begin an attempt, under a limiting save strategy.

    Without a ``process``, the sender's incarnation takes its place. A sender without a ``lease``
    sends no heartbeats, and only the end of the save ends its turn.
    """

    save_id: SaveId
    slot: Slot
    process: Annotated[Process | None, Meta(description="Process that writes the save.")] = None
    lease: Lease | None = None
    ranks: Ranks | None = None


class SaveStarted(_Event, frozen=True):
    """A worker began an attempt at a slot.

    A worker with a ``lease`` sends heartbeats. It is taken for dead once its last heartbeat is
    older than the lease.
    """

    save_id: SaveId
    slot: Slot
    path: RelativePath | None = None
    lease: Lease | None = None
    ranks: Ranks | None = None


class SaveProgressed(_Event, frozen=True):
    """A running attempt reports its progress. The sender limits the rate; it proves nothing."""

    save_id: SaveId
    slot: Slot
    bytes: Annotated[Bytes, Meta(description="Bytes written so far.")]
    total: Annotated[Bytes | None, Meta(description="Bytes to write, if known.")] = None


class SaveFinished(_Event, frozen=True):
    """An attempt is durable at its path."""

    save_id: SaveId
    slot: Slot
    path: RelativePath | None = None
    bytes: Bytes = 0
    seconds: Seconds = 0.0
    digest: Digest | None = None
    ranks: Ranks | None = None
    files: Annotated[
        tuple[RelativePath, ...],
        Meta(max_length=256, description="What the save wrote below its path, if not all of it."),
    ] = ()


class SaveFailed(_Event, frozen=True):
    """An attempt ended without a result."""

    save_id: SaveId
    slot: Slot
    error_type: Annotated[Name, Meta(description="Class of the error.")]
    message: Annotated[Text, Meta(description="Message of the error.")] = ""
    followed: Annotated[
        bool, Meta(description="True if it was given up because another worker's attempt failed.")
    ] = False


class StepCommitted(_Event, frozen=True):
    """All saves of a kind of a step are dispatched.

    It repeats the registrations, so that this event alone tells the expected saves. It may have
    the training step's metrics, for views.
    """

    step: Step
    kind: Kind
    registrations: Annotated[
        tuple[Registration, ...], Meta(description="Registrations of the expected saves, repeated.")
    ] = ()
    metrics: Annotated[dict[str, float], Meta(description="Metrics of the training step.")] = {}


# --- weight versions -----------------------------------------------------------------------


class VersionOpened(_Event, frozen=True):
    """Ranks begin to publish a weight version."""

    step: Step
    ranks: Annotated[
        tuple[Rank, ...], Meta(max_length=16_384, description="Ranks that publish a part.")
    ]
    transport: Transport


class PartDelta(Struct, frozen=True, kw_only=True):
    """Figures of a part that holds the changes since an earlier version."""

    base: Annotated[StepRef, Meta(description="Full version that it rests on.")]
    whole: Annotated[Bytes, Meta(description="Bytes of all tensors in full.")]
    dense: Annotated[Count, Meta(description="Tensors that travelled in full.")]
    delta: Annotated[Count, Meta(description="Tensors whose changed elements travelled.")]
    skip: Annotated[Count, Meta(description="Tensors that did not change.")]
    changed: Annotated[int, Meta(ge=0, le=2**62, description="Changed elements that travelled.")]
    elements: Annotated[
        int, Meta(ge=0, le=2**62, description="Elements of the tensors counted by `delta`.")
    ]


class VersionPartPublished(_Event, frozen=True):
    """One rank's part of a version is complete and readable."""

    step: Step
    rank: Rank
    manifest_digest: Annotated[
        Digest, Meta(description="Digest of the manifest, which seals the part.")
    ]
    bytes: Bytes
    tensors: Annotated[Count, Meta(description="Tensors in the part.")]
    chunks: Annotated[Count, Meta(description="Chunks in the part.")]
    seconds: Seconds = 0.0
    delta: Annotated[PartDelta | None, Meta(description="Figures of a part that is a delta.")] = (
        None
    )
    save_id: Annotated[SaveId | None, Meta(description="Attempt that ends with it.")] = None


class VersionRetired(_Event, frozen=True):
    """The version is superseded and its memory may be freed."""

    epoch: Epoch
    step: Step


class AppliedPhases(Struct, frozen=True, kw_only=True):
    """Seconds that a consumer spent on a version."""

    fetch: Annotated[
        Seconds, Meta(description="Seconds until all bytes were fetched and verified.")
    ]
    pause: Annotated[Seconds, Meta(description="Seconds for which the engine was held.")]


class WeightsApplied(_Event, frozen=True):
    """A consumer serves this version from now on."""

    version: Annotated[StepRef, Meta(description="Version that it serves.")]
    digest: Annotated[Digest, Meta(description="Digest of the bytes that it installed.")]
    bytes: Bytes
    verified_at: Annotated[
        float, Meta(description="Unix seconds at which the last byte was verified.")
    ]
    phases: AppliedPhases
    proof: Annotated[
        WeightsProof | None, Meta(description="Checks of what it computes with, if known.")
    ] = None


PauseMode = Literal["wait", "keep", "retract", "abort"]


class GenerationPaused(_Event, frozen=True):
    """An explorer's engine stands still, so that a version can be installed.

    The pause ends with ``generation-resumed``, with the explorer's process, or with its lease.
    """

    version: Annotated[StepRef, Meta(description="Version that is to be installed.")]
    mode: Annotated[
        PauseMode,
        Meta(
            description="Treatment of requests under way: `wait` for their end, `keep` them with "
            "their caches, `retract` their caches, or `abort` them."
        ),
    ]
    lease: Annotated[
        Seconds, Meta(description="Seconds after which the explorer no longer waits for its end.")
    ]
    in_flight: Annotated[Count, Meta(description="Requests that were under way.")] = 0


class GenerationResumed(_Event, frozen=True):
    """An explorer's engine generates again, or is out of service until another version is whole."""

    version: Annotated[StepRef, Meta(description="Version that was to be installed.")]
    serves: Annotated[
        StepRef | None, Meta(description="Version that the engine serves; none out of service.")
    ] = None
    aborted: Annotated[
        Count, Meta(description="Requests that were cut short, and are issued again.")
    ] = 0
    seconds: Annotated[Seconds, Meta(description="Seconds that the pause lasted.")] = 0.0


class VersionRefused(_Event, frozen=True):
    """A consumer did not use a version, because the bytes it read are not the published ones.

    The envelope's producer is the consumer, with its host. It goes on serving its earlier version.
    """

    version: Annotated[StepRef, Meta(description="Version that it refused.")]
    reason: Annotated[Text, Meta(description="Reason, in words.")]
    rank: Annotated[Rank | None, Meta(description="Rank whose part is at fault, if known.")] = None
    chunk: Annotated[
        Count | None, Meta(description="Index of the chunk at fault, from 0, if known.")
    ] = None
    check: Annotated[
        ProofCheck | None,
        Meta(description="Check that its engine failed; none if the bytes were damaged before."),
    ] = None


# --- announcements, written by the reducer alone -------------------------------------------


class SaveProof(Struct, frozen=True, kw_only=True):
    """Finished slot that a ready step rests on."""

    slot: Slot
    save_id: SaveId
    bytes: Bytes
    digest: Digest | None = None


class PublishedPart(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank's part of a ready weight version."""

    rank: Rank
    manifest_digest: Digest
    bytes: Bytes
    base: Annotated[
        StepRef | None, Meta(description="Full version that it rests on, for a delta.")
    ] = None


class StepReady(_Event, frozen=True):
    """A kind of a step is proven complete. Announced once per (epoch, step, kind).

    Weights have ``version_digest`` and ``parts``. Files have ``save_count``, ``saves`` (the first
    of them) and, if they were written to a staged folder, its ``path``.
    """

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]
    saves: Annotated[
        tuple[SaveProof, ...], Meta(description="Finished slots that it rests on.")
    ] = ()
    save_count: Annotated[Count, Meta(description="Number of finished slots.")] = 0
    path: Annotated[
        RelativePath | None, Meta(description="Staged folder, which becomes global_step_N.")
    ] = None
    parts: Annotated[
        tuple[PublishedPart, ...], Meta(description="Parts of all ranks, for weights.")
    ] = ()
    version_digest: Annotated[
        Digest | None, Meta(description="One digest of all parts, for weights.")
    ] = None
    transport: Transport | None = None


class StepFailed(_Event, frozen=True):
    """A kind of a step failed. Not final: a retry can still make it ready."""

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]
    reason: Annotated[Text, Meta(description="Reason, in words.")]


class StepSuperseded(_Event, frozen=True):
    """A kind of a step completed, or was given up, after ``by`` had taken its place."""

    epoch: Epoch
    step: Step
    kind: Kind
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]
    by: Annotated[StepRef, Meta(description="Newer step that took its place.")]


class SaveGranted(_Event, frozen=True):
    """The reducer answers ``save-requested``: the attempt may start.

    It is an announcement, because it follows from the log. Only the reducer writes announcements,
    so no other process can grant a turn.
    """

    epoch: Epoch
    save_id: SaveId
    slot: Slot
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]
    lease: Annotated[
        Seconds, Meta(description="Seconds without a heartbeat that end the turn; 0 for none.")
    ]


class EpochOpened(_Event, frozen=True):
    """A new epoch of the run is open; follows ``run-opened`` or ``run-resumed``."""

    epoch: Epoch
    step: Annotated[Step, Meta(description="Step that the trainer starts from; 0 at first.")]
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]
    config: Annotated[
        Text | None, Meta(description="Configuration as JSON, without URLs and secrets.")
    ] = None


class EpochClosed(_Event, frozen=True):
    """An epoch of the run is closed; follows ``run-closed``."""

    epoch: Epoch
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]
    reason: RunOutcome
    step: Annotated[Step | None, Meta(description="Last training step, if known.")] = None
    error: Annotated[Text | None, Meta(description="Error that ended the run.")] = None


class TrainingEnded(_Event, frozen=True):
    """The trainer takes no further step in this epoch; follows its status ``stopped``."""

    epoch: Epoch
    step: Step
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]


class PublicationStarted(_Event, frozen=True):
    """Ranks begin to publish a version, which readers may prefetch; follows ``version-opened``."""

    epoch: Epoch
    step: Step
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]
    ranks: Annotated[
        tuple[Rank, ...], Meta(max_length=16_384, description="Ranks that publish a part.")
    ]
    transport: Transport


class VersionResent(_Event, frozen=True):
    """A ready version was sent to its collective group again, as an explorer requested."""

    epoch: Epoch
    step: Step
    caused_by: Annotated[EntryId, Meta(description="Event that it follows from.")]


# --- status --------------------------------------------------------------------------------


class TrainerStatusChanged(_Event, frozen=True):
    """The trainer's status changed."""

    status: Annotated[TrainerStatus, Meta(description="New status.")]
    step: Step = 0
    lease: Lease | None = None
    """Lease of the sender, which renews it while it runs; None where it does not."""


class ExplorerStatusChanged(_Event, frozen=True):
    """An explorer's status changed; the envelope's producer is the explorer."""

    status: Annotated[ExplorerStatus, Meta(description="New status.")]
    endpoint: Annotated[
        Annotated[str, Meta(max_length=2048)] | None,
        Meta(description="URL of the server that it drives; null for none."),
    ] = None
    lease: Lease | None = None
    """Lease of the sender, which renews it while it runs; None where it does not, or as before."""


class SyncRequested(_Event, frozen=True):
    """An explorer asks the trainer to publish; its own ``weights-applied`` ends the request."""

    oldest_version: Annotated[
        StepRef | None, Meta(description="Oldest version that it accepts; any newer by default.")
    ] = field(default=None, name="wanted")


class ResendRequested(_Event, frozen=True):
    """An explorer asks for a version again, which was sent to a group before it had joined."""

    version: Annotated[StepRef, Meta(description="Version that it missed; a newer one will do.")]


# --- rollouts --------------------------------------------------------------------------------


class ReissuedRollout(Struct, frozen=True, kw_only=True):
    """Ordinal that is asked for again, with the reason why its earlier attempt counts no more."""

    ordinal: Ordinal
    attempt: Attempts
    reason: Annotated[
        Slug, Meta(description="Reason, such as deadline, failed, malformed or stale.")
    ]


class RolloutsDispatched(_Event, frozen=True):
    """The trainer asked explorers for the samples of prompts, for the first time or again."""

    ordinals: Annotated[
        OrdinalRanges, Meta(description="Ordinals that are asked for the first time.")
    ] = ()
    reissued: Annotated[
        tuple[ReissuedRollout, ...], Meta(description="Ordinals that are asked for again.")
    ] = ()
    oldest: Annotated[
        StepRef | None, Meta(description="Oldest weight version that may serve them.")
    ] = None
    exact: Annotated[
        bool, Meta(description="True if no other version than `oldest` may serve them.")
    ] = False
    fingerprint: Annotated[Digest | None, Meta(description="Fingerprint of the task set.")] = None
    dropped: Annotated[
        dict[DropReason, OrdinalRanges],
        Meta(
            max_length=64,
            description=(
                "Ordinals that were given up since the last step, by reason, of a trainer that "
                "takes no further step."
            ),
        ),
    ] = {}

    def __post_init__(self) -> None:
        for ranges in (self.ordinals, *self.dropped.values()):
            check_ranges(ranges)


class StepTrained(_Event, frozen=True):
    """The trainer took an optimizer step; it tells the fates of ordinals."""

    step: Step
    trained: Annotated[OrdinalRanges, Meta(description="Ordinals whose groups were trained.")] = ()
    dropped: Annotated[
        dict[DropReason, OrdinalRanges],
        Meta(
            max_length=64,
            description="Ordinals that were given up since the step before, by reason.",
        ),
    ] = {}
    staleness: Annotated[
        dict[int, Count], Meta(description="Staleness in steps to the number of samples.")
    ] = {}
    tokens: Annotated[
        Tokens, Meta(description="Sampled tokens whose fate was decided since the step before.")
    ] = {}
    metrics: Annotated[dict[str, float], Meta(description="Metrics of the training step.")] = {}

    def __post_init__(self) -> None:
        for ranges in (self.trained, *self.dropped.values()):
            check_ranges(ranges)


class ExplorerExcluded(_Event, frozen=True):
    """The trainer takes no more answers of an explorer in this epoch.

    Some of its answers were malformed, or its requests failed while other explorers answered.
    """

    explorer: Annotated[Name, Meta(description="Name of the explorer, as its answers have it.")]
    malformed: Annotated[Count, Meta(description="Number of its answers that were malformed.")]
    reason: Annotated[Text, Meta(description="Fault of the last one.")]
    failed: Annotated[Count, Meta(description="Number of its requests that failed in a row.")] = 0


# Bounds count characters, of up to four bytes each: all texts of a report take 96 KiB at most.
LONGEST_TRACEBACK = 8192
"""Characters of a traceback: the innermost frames, which name the fault, take a few hundred."""
LONGEST_ANSWER = 4096
"""Characters of an excerpt of a prompt or a response. A report of an error stays below 100 KiB."""


class RewardErrorReported(_Event, frozen=True):
    """A reward function failed for an answer: it raised, hung, died, or returned no finite number.

    The first error of each cause is reported. Type and place of the error are its cause.
    """

    explorer: Annotated[Name, Meta(description="Name of the explorer.")]
    epoch: Epoch
    ordinal: Ordinal
    attempt: Attempts
    sample: Annotated[int, Meta(ge=0, description="Index of the sample in its group.")]
    error_type: Annotated[Name, Meta(description="Type of the error, such as KeyError.")]
    message: Annotated[Text, Meta(description="Sentence about the error.")]
    held_out: Annotated[
        bool, Meta(description="True if the ordinal is one of a set of held-out questions.")
    ] = False
    place: Annotated[
        str,
        Meta(max_length=512, description="File and line that raised it; empty if it is unknown."),
    ] = ""
    traceback: Annotated[
        str,
        Meta(max_length=LONGEST_TRACEBACK, description="End of the traceback, if there is one."),
    ] = ""
    prompt: Annotated[
        str, Meta(max_length=LONGEST_ANSWER, description="Excerpt of the prompt.")
    ] = ""
    response: Annotated[
        str, Meta(max_length=LONGEST_ANSWER, description="Excerpt of the response.")
    ] = ""


class LedgerRestored(_Event, frozen=True):
    """The trainer resumes with the ledger of its checkpoint; ordinals without a fate are open."""

    ledger: TrainedLedger
    digest: Annotated[Digest, Meta(description="Digest of the encoded ledger.")]


class ProfileWritten(_Event, frozen=True):
    """The sender wrote a trace of a training step, in a format that Perfetto reads."""

    step: Step
    path: RelativePath
    bytes: Annotated[Bytes, Meta(description="Size of the file.")] = 0


class AlarmRaised(_Event, frozen=True):
    """A measurement of training is beyond its threshold. It changes nothing about the run."""

    alarm: Annotated[Slug, Meta(description="Name of the alarm, as its setting in `alarms`.")]
    step: Step
    value: Annotated[float, Meta(description="Measured value.")]
    threshold: Annotated[float, Meta(description="Threshold that it is beyond.")]
    sentence: Annotated[Text, Meta(description="Cause, as a sentence without its full stop.")]


class AlarmCleared(_Event, frozen=True):
    """The cause of an alarm is gone."""

    alarm: Annotated[Slug, Meta(description="Name of the alarm.")]
    step: Step


# --- evaluation --------------------------------------------------------------------------------


class EvaluationStarted(_Event, frozen=True):
    """The trainer asks explorers to answer a set of held-out questions with one weight version.

    The version is not retired before the evaluation has finished or failed.
    """

    name: Annotated[Slug, Meta(description="Name of the set of questions.")]
    version: Annotated[StepRef, Meta(description="Version that is evaluated.")]
    questions: Annotated[Count, Meta(description="Questions of the set.")]
    samples: Annotated[Samples, Meta(description="Answers that are sampled to each question.")] = 1
    fingerprint: Annotated[Digest | None, Meta(description="Fingerprint of the questions.")] = None


class BestBy(Struct, frozen=True):
    """Metric of an evaluation by which the best checkpoint is chosen."""

    metric: Annotated[Name, Meta(description="Name of the metric, such as mean.")]
    mode: Annotated[Literal["max", "min"], Meta(description="Direction of what is better.")] = "max"


class EvaluationFinished(_Event, frozen=True):
    """All answers of an evaluation are judged; it names the version that gave them."""

    name: Annotated[Slug, Meta(description="Name of the set of questions.")]
    version: Annotated[StepRef, Meta(description="Version that is evaluated.")]
    metrics: Annotated[
        dict[str, float], Meta(description="Mean reward and pass@k, with their intervals.")
    ]
    answers: Annotated[Count, Meta(description="Answers that were judged.")] = 0
    seconds: Annotated[Seconds, Meta(description="Seconds from its start.")] = 0.0
    best_by: Annotated[
        BestBy | None,
        Meta(description="Metric by which the checkpoint of this step may be the best, to keep."),
    ] = None


class EvaluationFailed(_Event, frozen=True):
    """An evaluation was given up; training goes on."""

    name: Annotated[Slug, Meta(description="Name of the set of questions.")]
    version: Annotated[StepRef, Meta(description="Version that was to be evaluated.")]
    reason: Annotated[Text, Meta(description="Reason, in words.")]


# --- waits -------------------------------------------------------------------------------------


class WaitStarted(_Event, frozen=True):
    """The sender has waited for longer than a threshold, and still waits."""

    wait_id: Annotated[Slug, Meta(description="Name of the wait, never used again.")]
    what: Annotated[Text, Meta(description="Object of the wait, in words.")]
    waits_for: Annotated[
        tuple[Name, ...],
        Meta(max_length=16_384, description="Processes that it waits for, as role-rank."),
    ] = ()
    seconds: Annotated[Seconds, Meta(description="Seconds that it has waited so far.")] = 0.0
    deadline: Annotated[
        Seconds | None, Meta(description="Seconds after which it gives up, from the beginning.")
    ] = None
    step: Annotated[Step | None, Meta(description="Step whose saves or weights it waits for.")] = (
        None
    )
    is_outage: Annotated[
        bool,
        Meta(
            description="True if it waits for something outside of the run, which fails: no "
            "process is at fault."
        ),
    ] = False


class WaitEnded(_Event, frozen=True):
    """A wait that was told has ended."""

    wait_id: Annotated[Slug, Meta(description="Name of the wait.")]
    outcome: Annotated[
        Literal["over", "deadline", "cancelled"], Meta(description="How the wait ended.")
    ]
    seconds: Annotated[Seconds, Meta(description="Seconds that it lasted.")] = 0.0


class StacksTaken(_Event, frozen=True):
    """Stacks of a process for which the sender has waited until its deadline."""

    process: Annotated[Name, Meta(description="The process, as role-rank.")]
    node: Node
    pid: Annotated[int, Meta(ge=1, le=2**32, description="Number of the process on its host.")]
    stacks: Annotated[
        str,
        Meta(
            max_length=16_384,
            description="Stacks of its threads, innermost call first; empty if it wrote none.",
        ),
    ] = ""


# --- the time of processes ---------------------------------------------------------------------


class PhasesMeasured(_Event, frozen=True):
    """A process reports how it has used its time since its start. A later report replaces it.

    A process is in exactly one phase at a time, so that the seconds add up to its age.
    """

    seconds: Annotated[
        dict[Phase, Seconds],
        Meta(max_length=MOST_PHASES, description="Seconds by phase since the process started."),
    ]
    phase: Annotated[Phase, Meta(description="Phase at the time of the report.")]
    tokens: Annotated[
        Tokens, Meta(description="Tokens that the process sampled since its start, by their fate.")
    ] = {}
    samples: Annotated[Count, Meta(description="Answers that it judged since its start.")] = 0
    gpus: Annotated[Seconds, Meta(description="GPUs that the process holds.")] = 0.0
    cores: Annotated[Count, Meta(description="Processor cores that it computes with.")] = 0
    is_last: Annotated[bool, Meta(description="True if the process ends with this report.")] = False


# --- time: the leading reducer appends these events, so that the fold needs no clock --------


class ExpiredAttempt(Struct, frozen=True, kw_only=True):
    """Attempt that will send no more events."""

    save_id: SaveId
    slot: Slot


class LeaseExpired(_Event, frozen=True):
    """A process sent no heartbeat for its lease: its attempts failed, it is silent or lost.

    Not final: an attempt that finishes later counts, if its slot has no other finished attempt.
    """

    holder: Annotated[Producer, Meta(description="Process that was silent.")]
    lease: Annotated[Seconds, Meta(description="Seconds without a heartbeat, at least.")]
    attempts: Annotated[
        tuple[ExpiredAttempt, ...], Meta(description="Attempts that it had under way.")
    ] = ()


class DeadlineReached(_Event, frozen=True):
    """The time for a kind of a step after its commit is over; the fold checks if it is complete."""

    step: Step
    kind: Kind
    seconds: Annotated[Seconds, Meta(description="Seconds since the commit, at least.")]


class ConsumerDetached(_Event, frozen=True):
    """A consumer group was idle for too long and no longer keeps the log from being trimmed."""

    group: Annotated[Name, Meta(description="Name of the consumer group.")]
    stream: Annotated[Slug, Meta(description="Stream that it read: events or announcements.")]
    position: Annotated[EntryId, Meta(description="Last entry that was delivered to it.")]
    pending: Annotated[Count, Meta(description="Entries delivered and not acknowledged.")] = 0
    idle: Annotated[Seconds, Meta(description="Seconds since it last asked for entries.")] = 0.0
    oldest_pending: Annotated[
        EntryId | None, Meta(description="Oldest entry that was not acknowledged.")
    ] = None


Event = (
    RunOpened
    | RunResumed
    | RunClosed
    | ThreadCountRegistered
    | SaveRequested
    | SaveGranted
    | SaveStarted
    | SaveProgressed
    | SaveFinished
    | SaveFailed
    | StepCommitted
    | VersionOpened
    | VersionPartPublished
    | VersionRetired
    | StepReady
    | StepFailed
    | StepSuperseded
    | WeightsApplied
    | GenerationPaused
    | GenerationResumed
    | VersionRefused
    | TrainerStatusChanged
    | ExplorerStatusChanged
    | SyncRequested
    | ResendRequested
    | RolloutsDispatched
    | StepTrained
    | ExplorerExcluded
    | RewardErrorReported
    | LedgerRestored
    | ProfileWritten
    | AlarmRaised
    | AlarmCleared
    | EvaluationStarted
    | EvaluationFinished
    | EvaluationFailed
    | WaitStarted
    | WaitEnded
    | StacksTaken
    | PhasesMeasured
    | LeaseExpired
    | DeadlineReached
    | ConsumerDetached
    | EpochOpened
    | EpochClosed
    | TrainingEnded
    | PublicationStarted
    | VersionResent
)
Announcement = (
    StepReady
    | StepFailed
    | StepSuperseded
    | VersionRetired
    | SaveGranted
    | EpochOpened
    | EpochClosed
    | TrainingEnded
    | PublicationStarted
    | VersionResent
)

EVENT_TYPES: tuple[type[Struct], ...] = Event.__args__
ANNOUNCEMENT_TYPES: tuple[type[Struct], ...] = Announcement.__args__

SenderRole = Literal["trainer", "worker", "explorer", "reducer"]
# A report of another role's event is refused by it (core/decisions/report_checks.py).
SENT_BY: dict[type[Struct], SenderRole] = {
    RunOpened: "trainer",
    RunResumed: "trainer",
    RunClosed: "trainer",
    ThreadCountRegistered: "trainer",
    SaveRequested: "worker",
    SaveGranted: "reducer",
    SaveStarted: "worker",
    SaveProgressed: "worker",
    SaveFinished: "worker",
    SaveFailed: "worker",
    StepCommitted: "trainer",
    VersionOpened: "worker",
    VersionPartPublished: "worker",
    VersionRetired: "reducer",
    StepReady: "reducer",
    StepFailed: "reducer",
    StepSuperseded: "reducer",
    WeightsApplied: "explorer",
    GenerationPaused: "explorer",
    GenerationResumed: "explorer",
    VersionRefused: "explorer",
    TrainerStatusChanged: "trainer",
    ExplorerStatusChanged: "explorer",
    SyncRequested: "explorer",
    ResendRequested: "explorer",
    RolloutsDispatched: "trainer",
    StepTrained: "trainer",
    ExplorerExcluded: "trainer",
    RewardErrorReported: "explorer",
    LedgerRestored: "trainer",
    ProfileWritten: "worker",
    AlarmRaised: "trainer",
    AlarmCleared: "trainer",
    EvaluationStarted: "trainer",
    EvaluationFinished: "trainer",
    EvaluationFailed: "trainer",
    WaitStarted: "worker",
    WaitEnded: "worker",
    StacksTaken: "worker",
    PhasesMeasured: "worker",
    LeaseExpired: "reducer",
    DeadlineReached: "reducer",
    ConsumerDetached: "reducer",
    EpochOpened: "reducer",
    EpochClosed: "reducer",
    TrainingEnded: "reducer",
    PublicationStarted: "reducer",
    VersionResent: "reducer",
}
"""Role that sends each event. The reducer sends announcements, and events of time and trimming."""

REPORT_TYPES: frozenset[type[Struct]] = frozenset(
    {
        *(event for event, role in SENT_BY.items() if role == REPORTER_ROLE),
        # Any process sends these, an explorer as a report.
        WaitStarted,
        WaitEnded,
        StacksTaken,
        PhasesMeasured,
    }
)
"""Events that an explorer may report: its own, and those about its waits."""


def event_tag(event: type[Struct] | Struct) -> str:
    """Return the kebab-case tag of an event on the wire."""
    return str(event.__struct_config__.tag)

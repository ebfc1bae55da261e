"""Errors for users. Each message is one sentence that says how to proceed."""

from __future__ import annotations

from collections.abc import Sequence


class TrinityError(Exception):
    """Base of all errors that this package raises on purpose."""

    is_lasting = False
    """True for an error that the same command, started again, ends with too."""


class ServerUnreachable(TrinityError):
    """No server answers where the URL points."""


class ServerRefuses(ServerUnreachable):
    """A server answers with an error reply: it is loading, full, read-only or a replica."""


class ServerTooOld(TrinityError):
    """The server lacks commands that the pipeline relies on."""


class InvalidUrl(TrinityError):
    """The URL is not that of a Redis server."""


class PermissionDenied(TrinityError):
    """The server's access rules refuse this user."""


class InvalidRunId(TrinityError):
    """The run id is not a slug."""


class RunOpenedTwice(TrinityError):
    """One opening of a run was opened again."""


class RunNotFound(TrinityError):
    """The server has no such run."""


class CheckpointRootUnusable(TrinityError):
    """The checkpoint root cannot be written."""


class FolderTaken(TrinityError, OSError):
    """A run's folder belongs to another log, of another server or an earlier one."""

    def __str__(self) -> str:
        return str(self.args[0])


class PublishError(TrinityError):
    """An event could not be written within its deadline."""


class BufferFull(PublishError):
    """The publisher's buffer is full while no server accepts events; the event was dropped."""


class DeadlineExceeded(TrinityError):
    """A wait exceeded its deadline; the message says what was missing."""


class TurnNotGranted(DeadlineExceeded):
    """A save was granted no turn before its deadline."""


class SaveError(TrinityError):
    """One or more background saves failed; ``failures`` holds all their errors."""

    def __init__(self, message: str, failures: tuple[BaseException, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    @classmethod
    def of(cls, failed: Sequence[tuple[str, BaseException]], *others: BaseException) -> SaveError:
        """Make the error of failed saves, given with their names; ``others`` are further errors."""
        (what, first), count = failed[0], len(failed) + len(others)
        more = f" (and {count - 1} more)" if count > 1 else ""
        made = cls(
            f"background save {what} failed{more}: {type(first).__name__}: {first}: "
            "fix this, and save the step again; until then it is not ready",
            (*(error for _, error in failed), *others),
        )
        made.__cause__ = first
        return made


class StaleEpoch(TrinityError):
    """The run has a newer epoch than this process, so the fold ignores its events."""


class EpochBehind(TrinityError):
    """The counter of epochs is behind the log, whose newest epoch took no number from it.

    Args:
        run_id: The run.
        epoch: Newest epoch in the log.
        counted: Last number that an opening took.
    """

    def __init__(self, run_id: str, epoch: int, counted: int) -> None:
        super().__init__(
            f"the log of run {run_id} is in epoch {epoch}, which an event opened without taking a "
            f"number, and the last number taken is {counted}: start a reducer of the run, which "
            "raises it"
        )
        self.run_id = run_id
        self.epoch = epoch
        self.counted = counted


class GroupDetached(TrinityError):
    """A consumer group was idle for too long, and the log was trimmed without it."""


class LogLost(TrinityError):
    """The server lost entries of the log: it failed over, or lost its data."""


class KeyConflict(TrinityError):
    """A key of a run's log has another type: a foreign program wrote it."""


class LogExhausted(TrinityError):
    """A stream has an entry with the largest possible id, and accepts no more until repaired."""


class CheckpointHeld(TrinityError):
    """A checkpoint is being removed or is absent, so no lease on it is possible."""


class VersionUnavailable(TrinityError):
    """The requested weight version does not exist, or no longer exists."""


class SharedMemoryUnusable(TrinityError):
    """Weights cannot be published through this host's shared memory."""


class GpuUnusable(TrinityError):
    """This process cannot publish or pull weights through GPU memory."""


class RayUnusable(TrinityError):
    """This process cannot publish or pull weights through a Ray cluster."""


class GroupBroken(TrinityError):
    """The collective group of trainer and explorers broke: a member died or hangs."""


class StepNotReady(TrinityError):
    """A step never becomes ready, because a newer one took its place."""


class RankFailed(TrinityError):
    """Another rank of the training loop failed."""


class CorruptVersion(TrinityError):
    """The read bytes of a weight version differ from the published bytes.

    ``rank`` is that of the corrupt part, ``chunk`` the index of the chunk in it, if known.
    """

    def __init__(self, message: str, rank: int | None = None, chunk: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.chunk = chunk


class IncompatibleWeights(TrinityError):
    """A version's tensors do not fit the model that installs them."""

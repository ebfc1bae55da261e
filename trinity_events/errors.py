"""Errors that a user can cause or must hear of. Each message is one sentence with a way out."""

from __future__ import annotations

from collections.abc import Sequence


class TrinityError(Exception):
    """Base of all errors that this package raises on purpose."""


class ServerUnreachable(TrinityError):
    """No server answers where the URL points."""


class ServerRefuses(ServerUnreachable):
    """A server answers, with an error reply: it is loading, full, read-only or a replica."""


class ServerTooOld(TrinityError):
    """The server lacks commands that the pipeline relies on."""


class InvalidUrl(TrinityError):
    """The URL is not one of a Redis server."""


class PermissionDenied(TrinityError):
    """The server's access rules refuse this user."""


class InvalidRunId(TrinityError):
    """The run id is not a slug."""


class RunOpenedTwice(TrinityError):
    """One opening of a run was opened again."""


class RunNotFound(TrinityError):
    """No such run on this server."""


class CheckpointRootUnusable(TrinityError):
    """The checkpoint root cannot be written."""


class FolderTaken(TrinityError, OSError):
    """A run's folder belongs to another log, of another server or of before."""

    def __str__(self) -> str:
        return str(self.args[0])


class PublishError(TrinityError):
    """An event could not be written within its deadline."""


class BufferFull(PublishError):
    """A publisher holds as much as it may while no server takes it; the event was not kept."""


class DeadlineExceeded(TrinityError):
    """A wait ended without what it waited for; the message says what was missing."""


class TurnNotGranted(DeadlineExceeded):
    """A save waited for its turn in vain."""


class SaveError(TrinityError):
    """One or more background saves failed; ``failures`` has them all."""

    def __init__(self, message: str, failures: tuple[BaseException, ...] = ()) -> None:
        super().__init__(message)
        self.failures = failures

    @classmethod
    def of(cls, failed: Sequence[tuple[str, BaseException]], *others: BaseException) -> SaveError:
        """Of saves in words with what they raised; ``others`` is what failed beside them."""
        (what, first), count = failed[0], len(failed) + len(others)
        more = f" (and {count - 1} more)" if count > 1 else ""
        made = cls(
            f"background save {what} failed{more}: {type(first).__name__}: {first}: "
            "mend that, and save the step again; until then it is not ready",
            (*(error for _, error in failed), *others),
        )
        made.__cause__ = first
        return made


class StaleEpoch(TrinityError):
    """The run has a newer epoch than this process was given: its word counts no more."""


class GroupDetached(TrinityError):
    """A consumer group was idle for too long, and the log was trimmed without it."""


class LogLost(TrinityError):
    """The server has less of the log than it had: it failed over, or lost its data."""


class KeyConflict(TrinityError):
    """A key of a run's log is of another type: something else wrote it."""


class LogExhausted(TrinityError):
    """A stream has an entry with the largest id there is: it takes no more until it is mended."""


class CheckpointHeld(TrinityError):
    """A checkpoint is being removed, or is not there, and cannot be held for reading."""


class VersionUnavailable(TrinityError):
    """The weight version asked for is not there, or no longer there."""


class SharedMemoryUnusable(TrinityError):
    """Weights cannot be published through this host's shared memory."""


class GpuUnusable(TrinityError):
    """Weights cannot travel through a GPU's memory from here."""


class RayUnusable(TrinityError):
    """Weights cannot travel through a Ray cluster from here."""


class GroupBroken(TrinityError):
    """The collective group of trainer and explorers broke: somebody in it died, or hangs."""


class CorruptVersion(TrinityError):
    """What was read of a weight version is not what was published.

    ``rank`` is of the part that is at fault, ``chunk`` of the chunk in it, where there is one.
    """

    def __init__(self, message: str, rank: int | None = None, chunk: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.chunk = chunk


class IncompatibleWeights(TrinityError):
    """A version's tensors do not fit the model they are to be installed in."""

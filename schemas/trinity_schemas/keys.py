"""The names of the Redis keys. Braces make one hash tag, so one transaction covers a run."""

from __future__ import annotations

from typing import NamedTuple

from .identity import check_run_id

# A stream, so that a reducer that serves every run waits for new ones instead of polling.
RUN_INDEX = "trinity:runs"


class RunKeys(NamedTuple):
    """Keys of one run; all hash to one slot of a cluster."""

    events: str
    announcements: str
    experiences: str
    dead: str
    snapshot: str
    position: str
    epoch: str
    fence: str
    leader: str
    current: str
    holds: str
    doomed: str
    identity: str
    folder: str

    @classmethod
    def of(cls, run_id: str) -> RunKeys:
        """The keys of ``run_id``. Raises ValueError when it is not a slug."""
        return cls(*(f"{_tag(run_id)}:{field}" for field in cls._fields))


def explorer_key(run_id: str, epoch: int, rank: int) -> str:
    """By which an explorer of an epoch holds its rank; of the run's hash tag too."""
    return f"{_tag(run_id)}:explorer:{epoch}:{rank}"


def heartbeat_key(run_id: str, incarnation: str) -> str:
    """What a process that saves keeps alive; lapsed, its attempts have failed."""
    return f"{_tag(run_id)}:alive:{incarnation}"


def grant_key(run_id: str, save_id: str) -> str:
    """Where one attempt hears that its turn has come."""
    return f"{_tag(run_id)}:grant:{save_id}"


def _tag(run_id: str) -> str:
    return f"trinity:{{{check_run_id(run_id)}}}"


def _part(run_id: str, epoch: int, step: int, rank: int) -> str:
    # The tag is the part, not the run: a cluster may spread the parts of a version.
    return f"trinity-weights:{{{check_run_id(run_id)}.{epoch}.{step}.{rank}}}"


def manifest_key(run_id: str, epoch: int, step: int, rank: int) -> str:
    """Where one rank's part of a version keeps its manifest."""
    return f"{_part(run_id, epoch, step, rank)}:manifest"


def chunk_key(run_id: str, epoch: int, step: int, rank: int, index: int) -> str:
    """Where one rank's part of a version keeps its ``index``-th chunk."""
    return f"{_part(run_id, epoch, step, rank)}:{index}"


def leases_key(run_id: str, epoch: int, step: int, rank: int) -> str:
    """Who reads one rank's part of a version, and until when by the server's clock."""
    return f"{_part(run_id, epoch, step, rank)}:leases"


def meeting_key(run_id: str) -> str:
    """Where a trainer says where its collective group meets."""
    return f"trinity-weights:{{{check_run_id(run_id)}}}:meeting"

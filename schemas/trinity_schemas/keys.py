"""Names of the Redis keys. Braces make one hash tag, so that one transaction covers a run."""

from __future__ import annotations

from typing import NamedTuple

from .identity import check_run_id

# A stream, so that a reducer of all runs waits for new runs instead of polling.
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
    # Field names are the names of live keys: a rename loses what a run has stored.
    doomed: str
    identity: str
    folder: str
    rollouts: str
    evaluations: str
    judged: str
    promoted: str
    reports: str
    reported: str

    @classmethod
    def of(cls, run_id: str) -> RunKeys:
        """Return the keys of ``run_id``. Raises ValueError if it is not a slug."""
        return cls(*(f"{_tag(run_id)}:{field}" for field in cls._fields))


def explorer_key(run_id: str, epoch: int, rank: int) -> str:
    """Return the key by which an explorer of an epoch holds its rank."""
    return f"{_tag(run_id)}:explorer:{epoch}:{rank}"


def heartbeat_key(run_id: str, incarnation: str) -> str:
    """Return the key that a saving process, trainer or explorer keeps alive by heartbeats."""
    return f"{_tag(run_id)}:alive:{incarnation}"


def grant_key(run_id: str, save_id: str) -> str:
    """Return the key on which an attempt waits for its turn."""
    return f"{_tag(run_id)}:grant:{save_id}"


def _tag(run_id: str) -> str:
    # Checked here, as a brace in a run's name would end the hash tag early.
    return f"trinity:{{{check_run_id(run_id)}}}"


def _part(run_id: str, epoch: int, step: int, rank: int) -> str:
    # The tag is the part, not the run: a cluster may spread the parts of a version.
    return f"trinity-weights:{{{check_run_id(run_id)}.{epoch}.{step}.{rank}}}"


def manifest_key(run_id: str, epoch: int, step: int, rank: int) -> str:
    """Return the key of the manifest of one rank's part of a version."""
    return f"{_part(run_id, epoch, step, rank)}:manifest"


def chunk_key(run_id: str, epoch: int, step: int, rank: int, index: int) -> str:
    """Return the key of the ``index``-th chunk of one rank's part of a version."""
    return f"{_part(run_id, epoch, step, rank)}:{index}"


def leases_key(run_id: str, epoch: int, step: int, rank: int) -> str:
    """Return the key of the readers' leases of one rank's part of a version.

    Leases end by the server's clock.
    """
    return f"{_part(run_id, epoch, step, rank)}:leases"


def meeting_key(run_id: str) -> str:
    """Return the key at which a trainer publishes the rendezvous of its collective group."""
    # On the chunks' server, whose rights are those of the weights: it holds the group's token.
    return f"trinity-weights:{{{check_run_id(run_id)}}}:meeting"


def payload_key(run_id: str, name: str) -> str:
    """Return the key of the payload of an answer, on the server of the weights."""
    # The tag is the payload, not the run: a cluster may spread the payloads of a run.
    return f"trinity-weights:{{{check_run_id(run_id)}.{name}}}:payload"

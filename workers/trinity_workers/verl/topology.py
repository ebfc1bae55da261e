"""What trainer and rollouts are told of each other before weights travel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from trinity_events.errors import SharedMemoryUnusable
from trinity_events.weights.transports.shared_memory import SHARED_MEMORY, available, free_bytes

from ..config import TransportChoice, TransportName
from ..launch.transport import ENOUGH


class OpenedRun(Struct, frozen=True, kw_only=True):
    """The run, as the trainer's rank 0 has it."""

    run_id: str
    epoch: int
    transport: TransportChoice
    """As the configuration says."""
    taken: TransportName | None = None
    """How the version before travelled, if it arrived."""
    said: str
    """Position of the newest event: what comes of this update is later."""
    announced: str
    """Position of the newest announcement."""


class ProcessLocation(Struct, frozen=True, kw_only=True):
    """Where one process is."""

    host: str
    """Equal for two processes that share memory by files."""
    room: bool
    """Whether there is enough of that for weights."""
    opened: OpenedRun | None = None


class Topology(Struct, frozen=True, kw_only=True):
    """What everybody is told."""

    opened: OpenedRun
    transport: TransportName
    rollouts: int
    """How many processes receive."""


def this_location(opened: OpenedRun | None = None) -> ProcessLocation:
    """Where this process is."""
    if not available():
        return ProcessLocation(host=_host(None), room=False, opened=opened)
    return ProcessLocation(host=_host(SHARED_MEMORY), room=free_bytes() >= ENOUGH, opened=opened)


def _host(shared: Path | None) -> str:
    """One boot of one machine, and of its shared memories the one that is seen from here."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.exists() else "?"
    return f"{booted}/{shared.stat().st_dev if shared else '-'}"


def topology_of(places: Sequence[ProcessLocation], rollouts: int) -> Topology:
    """What comes of where everybody is; the trainer's rank 0 is among them.

    Raises SharedMemoryUnusable when that was asked for, and somebody is on another host.
    """
    opened = next(place.opened for place in places if place.opened is not None)
    return Topology(
        opened=opened,
        transport=transport_between(opened.transport, places, opened.taken),
        rollouts=rollouts,
    )


def transport_between(
    asked: TransportChoice, places: Sequence[ProcessLocation], taken: TransportName | None = None
) -> TransportName:
    """How weights travel: as asked; else through shared memory where all are on one host.

    veRL's processes are in one Ray cluster, so that its object store reaches them all. What was
    taken before is taken again where it can be: the versions themselves take room.
    """
    together = len({place.host for place in places}) == 1
    if asked == "shm" and not together:
        raise SharedMemoryUnusable(
            "veRL's trainer and rollouts are on several hosts, or in several containers, which "
            "share no memory: leave the transport out, or ask for ray or redis"
        )
    if asked != "auto":
        return asked
    if taken == "ray" or not together:
        return "ray"
    return "shm" if taken == "shm" or all(place.room for place in places) else "ray"

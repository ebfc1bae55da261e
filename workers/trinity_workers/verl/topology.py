"""Exchange of locations between trainer and rollouts, before weights are transferred."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from trinity_events.errors import SharedMemoryUnusable
from trinity_events.system.shared_memory import SHARED_MEMORY, available, free_bytes
from trinity_schemas import RunTransport

from ..launch.transport import ENOUGH
from .settings import TransportChoice


class OpenedRun(Struct, frozen=True, kw_only=True):
    """Run as the trainer's rank 0 has opened it."""

    run_id: str
    epoch: int
    transport: TransportChoice
    """Transport in the configuration."""
    previous_transport: RunTransport | None = None
    """Transport of the previous version, if it arrived."""
    newest_entry: str
    """Position of the newest entry; entries of this update are later."""
    announced: str
    """Position of the newest announcement."""


class ProcessLocation(Struct, frozen=True, kw_only=True):
    """Location of one process."""

    host: str
    """Identity of the host and its shared memory; equal for processes that share files in it."""
    room: bool
    """True if the shared memory is large enough for weights."""
    opened: OpenedRun | None = None


class Topology(Struct, frozen=True, kw_only=True):
    """Topology that every process receives."""

    opened: OpenedRun
    transport: RunTransport
    rollouts: int
    """Number of receiving processes."""


def this_location(opened: OpenedRun | None = None) -> ProcessLocation:
    """Return the location of this process."""
    if not available():
        return ProcessLocation(host=_host(None), room=False, opened=opened)
    return ProcessLocation(host=_host(SHARED_MEMORY), room=free_bytes() >= ENOUGH, opened=opened)


def _host(shared: Path | None) -> str:
    """Return an identity of the host's current boot, and of the shared memory visible here."""
    # Containers of one host have the same boot id, and each a /dev/shm of its own by default.
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.exists() else "?"
    return f"{booted}/{shared.stat().st_dev if shared else '-'}"


def find_topology(places: Sequence[ProcessLocation], rollouts: int) -> Topology:
    """Return the topology for the locations of all processes, including the trainer's rank 0.

    Raises SharedMemoryUnusable if the transport is shm and a process is on another host.
    """
    opened = next(place.opened for place in places if place.opened is not None)
    return Topology(
        opened=opened,
        transport=transport_between(opened.transport, places, opened.previous_transport),
        rollouts=rollouts,
    )


def transport_between(
    requested: TransportChoice,
    places: Sequence[ProcessLocation],
    previous: RunTransport | None = None,
) -> RunTransport:
    """Return the requested transport; for "auto" shared memory if all are on one host, else Ray.

    veRL's processes are in one Ray cluster, so its object store reaches all of them. The previous
    transport is reused if possible: another one would store the versions twice.
    """
    together = len({place.host for place in places}) == 1
    if requested == "shm" and not together:
        raise SharedMemoryUnusable("verl hosts")
    if requested != "auto":
        return requested
    if previous == "ray" or not together:
        return "ray"
    # After the first version it is the versions themselves that fill the memory.
    return "shm" if previous == "shm" or all(place.room for place in places) else "ray"

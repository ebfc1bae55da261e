"""Choice of the transport of the weights, by the places of a run's processes."""

from __future__ import annotations

from typing import NamedTuple

from trinity_events.errors import GpuUnusable, GroupBroken, RayUnusable, SharedMemoryUnusable
from trinity_events.system.shared_memory import SHARED_MEMORY, available, free_bytes
from trinity_schemas import ChosenTransport

from ..config.sections.sync import SyncConfig, WeightsPath

ENOUGH = 1 << 30
"""Free bytes below which shared memory is not chosen unasked; a container often has 64 MiB."""


class Chosen(NamedTuple):
    """Chosen transport, and one sentence with the reason."""

    name: WeightsPath
    reason: str

    def to_field(self) -> ChosenTransport:
        """Return the choice as a field of the event that opens the run."""
        return ChosenTransport(name=self.name, reason=self.reason)


NONE = Chosen("none", "the trainer's ranks generate with the weights that they hold")


def chosen_transport(
    sync: SyncConfig, *, explorers_here: bool, one_host: bool = True, reads_ray: bool = True
) -> Chosen:
    """Return the transport that was asked for, or the fastest that every explorer can use.

    Args:
        sync: The run's method, and the transport that was asked for.
        explorers_here: Whether every explorer is in the trainer's Ray cluster; else they may be
            anywhere.
        one_host: Whether that cluster is this host alone.
        reads_ray: Whether the processes that pull the weights are Ray's, as those of an engine
            with processes of its own are not.

    Raises:
        SharedMemoryUnusable: when it was asked for, and the host has none.
        RayUnusable: when it was asked for, and explorers are not in the cluster.
        GpuUnusable: when a GPU's memory was asked for, and explorers are not in the cluster.
        GroupBroken: when a collective group was asked for, and torch was built without one.
    """
    if sync.method == "checkpoint":
        return Chosen("files", "as sync.method says")
    # Checked here, so that a run is refused before anything of it starts.
    if sync.method == "nccl":
        import torch.distributed

        if not torch.distributed.is_available():
            raise GroupBroken("torch")
        return Chosen("collective", "as sync.method says")
    choice = sync.transport
    if choice == "auto":
        return _best(explorers_here, one_host, reads_ray)
    if choice == "shm" and not available():
        raise SharedMemoryUnusable("chosen", SHARED_MEMORY)
    if choice == "ray" and not explorers_here:
        raise RayUnusable("outside")
    if choice == "cuda-ipc" and not explorers_here:
        raise GpuUnusable("outside")
    return Chosen(choice, "as sync.transport (--weights) says")


def _best(explorers_here: bool, one_host: bool, reads_ray: bool) -> Chosen:
    # First: what is elsewhere reads neither this host's memory nor this cluster's store.
    if not explorers_here:
        return Chosen("redis", "explorers may be on any host")
    if not reads_ray and not (one_host and available() and free_bytes() >= ENOUGH):
        return Chosen("redis", "the engine's processes are none of Ray's, and may be on any host")
    if not one_host:
        return Chosen("ray", "every explorer is in this Ray cluster, on any of its hosts")
    if not available():
        return Chosen("ray", f"every explorer is in this Ray cluster, and {SHARED_MEMORY} is none")
    if free_bytes() < ENOUGH:
        return Chosen(
            "ray",
            f"every explorer is in this Ray cluster, and less than {ENOUGH >> 30} GiB of "
            f"{SHARED_MEMORY} was free at its start",
        )
    return Chosen(
        "shm", f"every explorer is on this host, and {SHARED_MEMORY} had room at its start"
    )

"""The Ray cluster of a run: started or joined, with room reserved for all of its processes."""

from __future__ import annotations

import logging
import math
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
from msgspec import Struct

from trinity_events.errors import SharedMemoryUnusable, TrinityError
from trinity_events.system.counts import format_count

from ..worker_group.placement import Needs, local_gpus, node_gpus, placement_options
from .processes import local_ray

ANSWER_DEADLINE = 5.0
"""Seconds in which a Ray cluster answers at its address. Ray itself tries for minutes."""
_TOLD_AFTER = 5.0
"""Seconds without room after which it is said that the run waits for it."""
# RFC 9113: the preface (section 3.4), then an empty frame of settings (sections 4.1 and 6.5).
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""Begin of an HTTP/2 connection, which Ray's server answers with its settings."""
_SETTINGS = 4
"""Type of the frame that answers it, in its fourth byte."""

Notify = Callable[[str], None]


class ClusterUnreachable(TrinityError):
    """The Ray cluster of the run cannot be joined.

    Attributes:
        address: Value of RAY_ADDRESS.
        reason: Reason why it cannot.
    """

    address: str
    reason: str
    text = (
        "no Ray cluster can be joined at RAY_ADDRESS={address} ({reason}): start one with ray "
        "start --head, with the same versions of Ray and Python, set RAY_AUTH_MODE=token if it "
        "asks for a token, or leave RAY_ADDRESS out"
    )


class NoRoom(TrinityError):
    """The Ray cluster has no room for the run.

    Attributes:
        address: Address of the cluster.
        deadline: Seconds that were waited for room.
        lacking: Clause with the needs of the run, and the nodes of the cluster.
    """

    address: str | None
    deadline: float
    lacking: str
    text = (
        "the Ray cluster at {address} has no room for the run within {deadline:g} s: {lacking}: "
        "wait for other jobs to end, add nodes, or ask for less with trainer.ranks, trainer.cpus, "
        "explorer.count or explorer.cpus"
    )


class Node(Struct, frozen=True):
    """Node of a Ray cluster."""

    node_id: str
    host: str
    address: str

    def __str__(self) -> str:
        return self.host if self.host == self.address else f"{self.host} ({self.address})"


class Placement:
    """Places of a run's processes in a Ray cluster.

    Args:
        group: Placement group of the run, which is ready.
        needs: The needs that it was made for, with the GPUs of each process.
        joined: True for a cluster that was there before the run.
    """

    def __init__(self, group: Any, needs: Needs, *, joined: bool) -> None:
        self._group = group
        self.needs = needs
        self.joined = joined

    @property
    def trainer(self) -> dict[str, Any]:
        """Options of the trainer's actor. It waits while rank 0 works, and shares its place."""
        return placement_options(self._group, 0, num_cpus=0)

    def explorer(self, rank: int) -> dict[str, Any]:
        """Return the options of an explorer's actor."""
        place = self.needs.ranks + rank
        return placement_options(
            self._group,
            place,
            num_cpus=self.needs.explorer_cpus,
            num_gpus=self.needs.explorer_gpus or 0,
        )

    def beside(self, place: int) -> dict[str, Any]:
        """Return the options of a task beside the process in a place, which takes no CPU of it."""
        # Not tried again: a task that fails is the answer.
        return placement_options(self._group, place, num_cpus=0, max_retries=0)

    def nodes(self) -> dict[Node, list[int]]:
        """Return the nodes on which the run has places, each with its places."""
        import ray

        table: Any = ray.util.placement_group_table(self._group)
        nodes = {
            node["NodeID"]: Node(
                node["NodeID"], node["NodeManagerHostname"], node["NodeManagerAddress"]
            )
            for node in ray.nodes()  # type: ignore[no-untyped-call]
        }
        places: dict[Node, list[int]] = {}
        for place, node in sorted(table["bundles_to_node_id"].items()):
            places.setdefault(nodes[node], []).append(place)
        return places

    def has_rank(self, places: list[int]) -> bool:
        """Return True if one of the places is a rank's."""
        return places[0] < self.needs.ranks

    def format_places(self) -> str:
        """Return the places of the run as text."""
        parts = []
        for node, places in self.nodes().items():
            ranks = sum(place < self.needs.ranks for place in places)
            counts = {"rank": ranks, "explorer": len(places) - ranks}
            counted = " and ".join(
                format_count(count, what) for what, count in counts.items() if count
            )
            parts.append(f"{counted} on {node}")
        return ", ".join(parts)


@asynccontextmanager
async def reserve_places(
    needs: Needs, address: str | None, *, deadline: float, notify: Notify
) -> AsyncIterator[Placement]:
    """Join the Ray cluster at the address for the block, or start one, and reserve room in it.

    A cluster that was joined goes on when the block ends, without the run's processes.

    Args:
        needs: Processes of the run.
        address: ``HOST:PORT`` or ``auto``; None starts a cluster on this host.
        deadline: Seconds to wait for room.
        notify: Tells the user that the run waits for room.

    Raises:
        ClusterUnreachable: if there is no such cluster, or it cannot be joined.
        GpusMissing: if it has fewer GPUs than the settings ask for.
        NoRoom: if it has no room within the deadline.
    """
    cluster = local_ray(math.ceil(needs.cpus)) if address is None else _joined(address)
    async with cluster:
        needs = needs.with_gpus(node_gpus())
        group = await _reserved(needs, address, deadline, notify)
        yield Placement(group, needs, joined=address is not None)


def check_one_host(room: Placement, transport: str) -> None:
    """Raise SharedMemoryUnusable if the run's places are on several hosts.

    Args:
        room: Places of the run.
        transport: Transport of the weights, which needs memory that its processes share.
    """
    hosts = sorted({node.host for node in room.nodes()})
    if len(hosts) > 1:
        raise SharedMemoryUnusable("hosts", hosts=tuple(hosts), transport=transport)


async def check_gpus(needs: Needs, address: str | None) -> None:
    """Raise GpusMissing unless the GPUs are there that the settings ask for.

    A cluster is joined for it, and left again; on this host nothing is started.
    """
    if not needs.asks_for_gpus:
        return
    if address is None:
        needs.with_gpus([await anyio.to_thread.run_sync(local_gpus)])
        return
    async with _joined(address):
        needs.with_gpus(node_gpus())


@asynccontextmanager
async def _joined(address: str, answer_deadline: float = ANSWER_DEADLINE) -> AsyncIterator[None]:
    import ray

    def join() -> None:
        answering = _answering(address, answer_deadline)
        ray.init(address=answering, log_to_driver=False, logging_level=logging.ERROR)

    try:
        await anyio.to_thread.run_sync(join)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ClusterUnreachable(address, reason) from None
    try:
        yield
    finally:
        ray.shutdown()


def _answering(address: str, deadline: float) -> str:
    """Return the address of a cluster that answers, as ``HOST:PORT``.

    Raises OSError or ValueError otherwise.
    """
    # Private in Ray 2.60: ray.init() itself resolves `auto` with it.
    from ray._private.services import canonicalize_bootstrap_address

    if "://" in address:
        raise ValueError("only HOST:PORT and auto are supported, on a host of the cluster")
    bootstrap_address: str = canonicalize_bootstrap_address(address) or address
    host, _, port = bootstrap_address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), deadline) as peer:
            peer.sendall(_GREETING)
            # The header of one frame: length, type in the fourth byte, flags, and stream.
            answer = peer.recv(9)
    except TimeoutError:
        raise OSError(f"{bootstrap_address} does not answer within {deadline:g} s") from None
    except OSError as error:
        raise OSError(f"{bootstrap_address} does not answer: {error}") from None
    if len(answer) < 4 or answer[3] != _SETTINGS:
        raise OSError(f"{bootstrap_address} is no server of Ray")
    return bootstrap_address


async def _reserved(needs: Needs, address: str | None, deadline: float, notify: Notify) -> Any:
    """Return a placement group of the run, once Ray has reserved it."""
    import ray

    # On as few nodes as possible, and on more where these are full.
    group = ray.util.placement_group(needs.bundles(), strategy="PACK")
    began, reported = anyio.current_time(), False
    # In short waits: a cancellation does not reach the thread, and waits for its end.
    while not await anyio.to_thread.run_sync(group.wait, 0.5):
        waited = anyio.current_time() - began
        if waited > deadline:
            raise NoRoom(address, deadline, _lacking(needs))
        if waited > _TOLD_AFTER and not reported:
            reported = True
            notify(f"waiting for room in the Ray cluster: {_lacking(needs)}")
    return group


def _lacking(needs: Needs) -> str:
    """Return what the run needs and what the cluster has."""
    import ray

    nodes: list[Any] = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    free: Any = ray.available_resources()  # type: ignore[no-untyped-call]
    names = ("CPU", "GPU") if needs.uses_gpus else ("CPU",)
    sizes = Counter(
        " and ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in names)
        for node in nodes
    )
    has = ", ".join(f"{count} with {size}" for size, count in sizes.items())
    available = " and ".join(f"{free.get(name, 0):g} {name}s" for name in names)
    return f"it needs {needs.format()}; of the nodes ({has}), {available} are free"

"""Check that every node of a run has what its processes share: folders, and the servers.

The launcher writes a file, each node reads it and writes one of its own, and the launcher reads
those. So a folder of the same name that is another one is found out too.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, ClassVar, Literal

import anyio
import anyio.to_thread
from msgspec import Struct

from trinity_events.errors import TrinityError
from trinity_events.server import LOG_SERVER, WEIGHTS_SERVER, connect_sync

from ..config.train_config import RunConfig
from .cluster import Node, Placement

DEADLINE = 120.0
"""Seconds in which every node answers; one that has run nothing yet starts a process first."""
_VISIBLE = 5.0
"""Seconds after which a file is seen through a network's file system, whose caches are older."""
_LAUNCHER = "launcher"


Fault = Literal["unseen", "unwritable", "model", "server", "process", "other folder", "silent"]


class NotShared(TrinityError):
    """A node does not have what the run's processes share.

    Attributes:
        node: The node.
        fault: ``unseen`` if it does not read the launcher's files, ``unwritable`` if it cannot
            write its own, ``other folder`` if the launcher does not read those, ``silent`` if it
            does not answer. Else what it lacks.
        place: Folder that it lacks.
        reason: Error of the node.
    """

    node: str
    fault: Fault
    place: Path
    reason: str = ""
    _folder: ClassVar = (
        ": mount the same folder there, at the same path, or set checkpoints.root to such a one"
    )
    texts: ClassVar = {
        "unseen": "node {node} of the Ray cluster does not see what is written to the checkpoint "
        "folder {place}" + _folder,
        "unwritable": "node {node} of the Ray cluster cannot write to the checkpoint folder "
        "{place} ({reason})" + _folder,
        "model": "node {node} of the Ray cluster does not see the model in {place} (config.json): "
        "copy or mount it there, at the same path",
        "server": "node {node} of the Ray cluster does not reach a server of the run: {reason}",
        "process": "node {node} of the Ray cluster cannot run a part of the run ({reason}): "
        "install the same version of trinity-events[workers] on every node",
        "other folder": "node {node} of the Ray cluster writes to a checkpoint folder {place} that "
        "is not the launcher's: mount the same folder there, or set checkpoints.root to such a one",
        "silent": "node {node} of the Ray cluster did not say within {reason} if it sees {place}: "
        "does its storage hang?",
    }


class NodeFault(Struct, frozen=True):
    """Fault of one node, for NotShared."""

    fault: Fault
    place: Path
    reason: str = ""


class Probe(Struct, frozen=True, kw_only=True):
    """Questions to one node."""

    folder: Path
    """Folder of the probe files, in the run's checkpoint folder."""
    writes: str | None
    """Name of the file to write; None for a node without ranks, which only reads."""
    model: Path | None
    """Folder of the user's model; None for the built-in one, which the launcher makes."""
    redis_url: str
    weights_url: str


def answer(probe: Probe) -> NodeFault | None:
    """Return what is wrong on this node; None if nothing is."""
    checkpoints = probe.folder.parent
    if _read(probe.folder / _LAUNCHER) != probe.folder.name:
        return NodeFault("unseen", checkpoints)
    if probe.writes is not None:
        try:
            (probe.folder / probe.writes).write_text(probe.folder.name)
        except OSError as error:
            return NodeFault("unwritable", checkpoints, error.strerror or "")
    if probe.model is not None and not (probe.model / "config.json").is_file():
        return NodeFault("model", probe.model)
    servers = ((probe.redis_url, LOG_SERVER), (probe.weights_url, WEIGHTS_SERVER))
    for url, setting in servers:
        try:
            with connect_sync(url, setting=setting):
                pass
        except TrinityError as error:
            return NodeFault("server", checkpoints, str(error))
    return None


async def check_shared_storage(room: Placement, config: RunConfig) -> None:
    """Check from every node on which the run has a place.

    Raises:
        NotShared: if a node lacks something, naming the node and the way out.
    """
    folder = config.checkpoint_folder / f".probe-{secrets.token_hex(8)}"
    folder.mkdir(parents=True)
    try:
        # The random name is the content: a file of an earlier probe proves nothing.
        (folder / _LAUNCHER).write_text(folder.name)
        nodes = await anyio.to_thread.run_sync(room.nodes)
        unanswered = dict(nodes)
        with anyio.move_on_after(DEADLINE):
            async with anyio.create_task_group() as tasks:
                for node, places in nodes.items():
                    # Explorers only read: their nodes may have the folder mounted without the right
                    # to write.
                    writes = f"node-{places[0]}" if room.has_rank(places) else None
                    probe = Probe(
                        folder=folder,
                        writes=writes,
                        model=Path(config.model.path) if config.model.path else None,
                        redis_url=config.redis_url,
                        weights_url=config.weights_url,
                    )
                    tasks.start_soon(
                        _check, node, _asked(room, places[0], probe), probe, unanswered
                    )
        if unanswered:
            silent = str(next(iter(unanswered)))
            raise NotShared(silent, "silent", config.checkpoint_folder, f"{DEADLINE:g} s")
    finally:
        await anyio.to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))


def _asked(room: Placement, place: int, probe: Probe) -> Awaitable[NodeFault | None]:
    import ray

    task: Any = ray.remote(answer).options(**room.beside(place))
    reply: Awaitable[NodeFault | None] = task.remote(probe)
    return reply


async def _check(
    node: Node, reply: Awaitable[NodeFault | None], probe: Probe, unanswered: dict[Node, list[int]]
) -> None:
    from ray.exceptions import RayError

    checkpoints = probe.folder.parent
    try:
        wrong = await reply
    except RayError as error:
        wrong = NodeFault("process", checkpoints, str(error).strip().splitlines()[-1])
    if wrong is None and probe.writes is not None:
        written = await anyio.to_thread.run_sync(_read, probe.folder / probe.writes)
        if written != probe.folder.name:
            wrong = NodeFault("other folder", checkpoints)
    if wrong is not None:
        raise NotShared(str(node), wrong.fault, wrong.place, wrong.reason)
    del unanswered[node]


def _read(path: Path) -> str | None:
    """Return a file's text, once it is there; None if it does not come."""
    give_up = time.monotonic() + _VISIBLE
    while True:
        try:
            return path.read_text()
        except OSError:
            if time.monotonic() > give_up:
                return None
            # It blocks, as it runs in a Ray task or in a thread.
            time.sleep(0.1)

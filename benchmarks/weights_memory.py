"""Memory that a version takes beside the models, at both ends of each transport."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trinity_events.server import open_client
from trinity_events.weights import (
    ChunkStore,
    CollectiveStore,
    PartRef,
    RayStore,
    RedisChunkStore,
    SharedMemoryStore,
    load_version,
)
from trinity_events.weights.devices.staging_memory import StagingMemory
from trinity_schemas import StepReady

from .measure import Rounds, Row, say
from .original_design import start_ray
from .transport_peers import Turn, end
from .weights_peer import DEADLINE, KEPT, RUN, Model, apply, published

STAGED = Rounds("at most", 1.1)
"""Maximum ratio to the model's size: one copy, and a margin for bytes in transit."""
_VERSIONS = 5
_EVERY = 0.001
_STREAM, _SNAPSHOT, _APPLY, _LOAD = "publisher", "publisher of snapshots", "consumer", "joiner"


WAYS = (
    ("shm", _STREAM, _APPLY),
    ("shm", _SNAPSHOT, _LOAD),
    ("redis", _STREAM, _APPLY),
    ("redis", _SNAPSHOT, _LOAD),
    ("ray", _STREAM, _APPLY),
    ("collective", _STREAM, _APPLY),
)
_NAMES = {"shm": "shared memory", "redis": "Redis", "ray": "Ray", "collective": "collective group"}


class Cluster(NamedTuple):
    """Address of the Ray cluster, if there is one."""

    address: str
    auth: str
    """Authentication mode that Ray put into the environment of the process that started it."""


class Peak(NamedTuple):
    """Bytes in excess of those before the first version."""

    own: int
    """Bytes of memory private to the process."""
    shared: int
    """Bytes of memory that it shares with others: segments, Ray's object store."""


NOTES = (
    f"Memory: of {_VERSIONS} versions one after the other, of which {KEPT} are kept; looked at "
    "every millisecond. Ratios there are of the peak of a process's own memory to the model's "
    "size. Shared is what it maps together with others: segments, Ray's object store. Over Redis "
    "the versions are in the server's memory.",
    "A joiner fills a model that serves no requests, directly; a consumer holds what it will copy "
    "until all of it is verified, unless that can be read where it lies.",
)


def memory_rows(turn: Turn, url: str, *, ray: bool) -> list[Row]:
    """Measure both ends of each transport, each in a process of its own."""
    rows = []
    for transport, publisher, consumer in WAYS:
        if transport == "ray" and not ray:
            continue
        say(f"  {turn.name}: memory, {_NAMES[transport]}, {publisher}, {consumer}")
        peaks = measured(transport, publisher, consumer, turn.model, url)
        for who, peak in zip((publisher, consumer), peaks, strict=True):
            rows.append(_row(turn, transport, who, peak))
    return rows


def measured(
    transport: str, publisher: str, consumer: str, model: Model, url: str
) -> tuple[Peak, Peak]:
    """Return the memory peaks of both ends."""
    with (
        _cluster(transport, model) as where,
        end(serve, transport, publisher, model, url, where) as ours,
        end(serve, transport, consumer, model, url, where) as theirs,
    ):
        if transport == "collective":
            ours.ask("listen")
            theirs.ask("join")
            ours.ask("set up")
        for process in (ours, theirs):
            process.ask("watch")
        for step in range(1, 1 + _VERSIONS):
            theirs.ask("take", ours.ask("publish", step))
        return ours.ask("peak"), theirs.ask("peak")


@contextmanager
def _cluster(transport: str, model: Model) -> Iterator[Cluster]:
    if transport != "ray":
        yield Cluster("", "")
        return
    import ray

    start_ray(object_store=(KEPT + 3) * model.nbytes + (200 << 20))
    try:
        auth = os.environ.get("RAY_AUTH_MODE", "disabled")
        yield Cluster(ray.get_runtime_context().gcs_address, auth)
    finally:
        ray.shutdown()


def _listen(store: CollectiveStore) -> None:
    store.listen(1)  # drop the result, which cannot leave its process


def serve(
    requests: Connection, transport: str, role: str, model: Model, url: str, where: Cluster
) -> None:
    """Answer requests for one end until the pipe is closed."""
    store = _store(transport, role, url, where)
    do = (_publisher if role in (_STREAM, _SNAPSHOT) else _consumer)(store, role, model)
    watch = Watch()
    methods: dict[str, Callable[..., Any]] = {"watch": watch.begin, "peak": watch.peak, **do}
    if isinstance(store, CollectiveStore):
        methods["listen"] = partial(_listen, store)
        methods["join"] = store.join
        methods["set up"] = lambda: store.set_up(1, 1, DEADLINE)
    try:
        while True:
            what, *arguments = requests.recv()
            requests.send(methods[what](*arguments))
    except EOFError:
        store.close()


def _store(transport: str, role: str, url: str, where: Cluster) -> ChunkStore:
    if transport == "shm":
        return SharedMemoryStore()
    if transport == "redis":
        return RedisChunkStore(open_client(url))
    if transport == "collective":
        return CollectiveStore(open_client(url), RUN, role)
    os.environ["RAY_AUTH_MODE"] = where.auth
    import ray

    ray.init(address=where.address, log_to_driver=False, logging_level=logging.ERROR)
    return RayStore()


def _publisher(store: ChunkStore, role: str, model: Model) -> dict[str, Callable[..., Any]]:
    source, staging, parts = model.parameters(1.0), StagingMemory(), deque[PartRef]()

    def publish(step: int) -> StepReady:
        part, tensors = PartRef(RUN, 1, step, 0), list(source.values())
        if role == _SNAPSHOT:
            tensors = staging.copy(tensors)
        ready = published(store, part, zip(source, tensors, strict=True))
        parts.append(part)
        while len(parts) > KEPT:
            store.delete(parts.popleft())
        return ready

    return {"publish": publish}


def _consumer(store: ChunkStore, role: str, model: Model) -> dict[str, Callable[..., Any]]:
    module = torch.nn.ParameterDict(model.parameters())

    def take(ready: StepReady) -> None:
        if role == _LOAD:
            load_version(store, RUN, ready, module)
        else:
            apply(store, module, ready, digests=True)

    return {"take": take}


class Watch:
    """Thread that samples this process's memory."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._before = self._most = Peak(0, 0)
        self._thread = threading.Thread(target=self._look, daemon=True)

    def begin(self) -> None:
        """Begin to sample."""
        self._before = self._most = memory()
        self._thread.start()

    def peak(self) -> Peak:
        """Return the maximum memory in excess of that at the beginning."""
        self._ended.set()
        self._thread.join()
        return Peak(*(most - was for most, was in zip(self._most, self._before, strict=True)))

    def _look(self) -> None:
        while not self._ended.is_set():
            self._most = Peak(*map(max, zip(self._most, memory(), strict=True)))
            time.sleep(_EVERY)


def memory() -> Peak:
    """Return the present memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return Peak(*(1024 * int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")))


def _row(turn: Turn, transport: str, who: str, peak: Peak) -> Row:
    shared = f", shared {peak.shared / 2**20:,.1f} MiB" if peak.shared >= 1 << 20 else ""
    return Row(
        what=f"{turn.name}, peak extra memory of a {who}, {_NAMES[transport]}",
        figure=f"{peak.own / 2**20:,.1f} MiB{shared}",
        peer="the model",
        peer_figure=f"{turn.model.nbytes / 2**20:,.0f} MiB",
        ratio=peak.own / turn.model.nbytes,
        target=STAGED if who == _SNAPSHOT else None,
    )

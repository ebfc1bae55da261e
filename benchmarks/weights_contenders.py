"""Paths of a version from this process to another, each timed alone."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from trinity_events.weights import PartRef
from trinity_events.weights.devices.staging_memory import StagingMemory
from trinity_events.weights.publishing.part_writer import LastLayout
from trinity_schemas import StepReady

from .original_design import LAST
from .weights_peer import (
    BLOCK,
    KEPT,
    RUN,
    Model,
    Peer,
    mapped_file,
    published,
    store_of,
    undigested,
)

SMALL = 16 << 10
"""Bytes of a tensor below which its copies cost less than the calls for it."""


class Timed(NamedTuple):
    """Seconds of one version."""

    all: float
    publish: float = 0.0
    """Seconds until all is published, for which the training loop is stalled."""


class Contenders:
    """Publishing ends of all transports, with a model of their own.

    Args:
        model: Shape of the model.
        others: Receiving processes; each takes every version unless others are chosen.
        url: URL of a Redis server.
        versions: Versions that are kept at a time.
    """

    def __init__(self, model: Model, others: list[Peer], url: str, versions: int = KEPT) -> None:
        self.others = others
        self.newest: StepReady | None = None
        self._source = model.parameters(1.0)
        self._stores = {name: store_of(name, url) for name in ("shm", "redis")}
        self._layouts = {name: LastLayout() for name in self._stores}
        self._published: dict[str, list[int]] = {name: [] for name in self._stores}
        self._steps = count()
        self._staging = StagingMemory()
        self._versions = versions

    def close(self) -> None:
        """Release the stores and the model."""
        for store in self._stores.values():
            store.close()

    def through(
        self,
        transport: str,
        *,
        digests: bool = True,
        along: bool = False,
        late: int = 0,
        at_rest: bool = False,
    ) -> Timed:
        """Publish a version, and let the other processes apply it.

        Args:
            transport: Name of the transport.
            digests: If False, no digest is computed.
            along: If True, the other processes prefetch.
            late: Number of processes, the last ones, that begin only at the announcement.
            at_rest: If True, their models serve no requests, and receive chunks as they are
                prefetched.
        """
        number = self._number()
        began = time.perf_counter()
        with nullcontext() if digests else undigested("publishing.part_writer"):
            readers = self.others[: len(self.others) - late] if along else []
            ready, seconds = self._publish(transport, readers, at_rest=at_rest)
        for other in self.others:
            other.say(*(("load", ready) if at_rest else ("apply", transport, digests, ready)))
        applied = [other.wait() for other in self.others]
        return self._done(transport, began, seconds, ready, applied, number)

    def in_place(self) -> Timed:
        """Publish through shared memory, and let the other processes serve from the segment."""
        number = self._number()
        began = time.perf_counter()
        ready, seconds = self._publish("shm", self.others)
        for other in self.others:
            other.say("adopt", ready)
        served = [other.wait() for other in self.others]
        return self._done("shm", began, seconds, ready, served, number)

    def snapshot(self) -> Timed:
        """Copy all tensors to memory from which they could be published."""
        began = time.perf_counter()
        self._staging.copy(list(self._source.values()))
        return Timed(time.perf_counter() - began)

    def _number(self) -> float:
        """Set the last tensor to a new number, which bf16 represents exactly."""
        number = float(1 + next(self._steps) % 100)
        self._source[LAST][-1] = number
        return number

    def _publish(
        self, transport: str, readers: list[Peer], *, at_rest: bool = False
    ) -> tuple[StepReady, float]:
        part, began = PartRef(RUN, 1, next(self._steps), 0), time.perf_counter()
        for other in readers:
            other.say("along", part, at_rest)
        layout = self._layouts[transport]
        ready = published(self._stores[transport], part, self._source, layout)
        return ready, time.perf_counter() - began

    def _done(
        self,
        transport: str,
        began: float,
        seconds: float,
        ready: StepReady,
        values: list[float],
        number: float,
    ) -> Timed:
        all_of_it = time.perf_counter() - began
        if any(value != number for value in values):
            raise RuntimeError(f"over {transport} {values} was applied, not {number}")
        steps = self._published[transport]
        steps.append(ready.step)
        while len(steps) > self._versions:
            self._stores[transport].delete(PartRef(RUN, 1, steps.pop(0), 0))
        self.newest = ready
        return Timed(all_of_it, seconds)


@contextmanager
def bare_copies(
    model: Model, other: Peer, bare: Path
) -> Iterator[tuple[Callable[[], Timed], Callable[[], Timed]]]:
    """Yield the limits: the same copies unchecked, through a mapped file; and one copy."""
    flat, target = (memoryview(bytearray(model.nbytes)) for _ in range(2))
    mapped = memoryview(mapped_file(bare, model.nbytes, mmap.PROT_READ | mmap.PROT_WRITE))

    def pipeline() -> Timed:
        began = time.perf_counter()
        other.say("copy")
        for begin in range(0, model.nbytes, BLOCK):
            mapped[begin : begin + BLOCK] = flat[begin : begin + BLOCK]
            other.tell(b"there")
        other.wait()
        return Timed(time.perf_counter() - began)

    def copy() -> Timed:
        began = time.perf_counter()
        target[:] = flat
        return Timed(time.perf_counter() - began)

    yield pipeline, copy


def torch_copies(model: Model) -> Callable[[], Timed]:
    """Return torch's own two copies: of all tensors into one piece, and out of it into others."""
    source, target = (list(model.parameters().values()) for _ in range(2))
    flat = torch.empty(model.nbytes // source[0].itemsize, dtype=source[0].dtype)
    views = torch.split(flat, model.elements)

    def copies() -> Timed:
        began = time.perf_counter()
        torch.cat(source, out=flat)
        torch._foreach_copy_(target, views)
        return Timed(time.perf_counter() - began)

    return copies


@contextmanager
def contenders(
    model: Model, other: Peer, url: str, bare: Path
) -> Iterator[dict[str, Callable[[], Timed]]]:
    """Yield the contenders by name."""
    ours = Contenders(model, [other], url)
    try:
        with bare_copies(model, other, bare) as (pipeline, copy):
            them = {
                "shm": lambda: ours.through("shm", along=True),
                "shm, at rest": lambda: ours.through("shm", along=True, at_rest=True),
                "shm, announced first": lambda: ours.through("shm"),
                "shm, no digests": lambda: ours.through("shm", digests=False),
                "shm, in place": ours.in_place,
                "snapshot": ours.snapshot,
                "redis": lambda: ours.through("redis"),
                "pipeline": pipeline,
                "copy": copy,
            }
            if model.nbytes < model.tensors * SMALL:
                them["torch"] = torch_copies(model)
            yield them
    finally:
        ours.close()

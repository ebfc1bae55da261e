"""The other end of the weight benchmarks: a process that takes versions into a model of its own."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from trinity_events.server import open_client
from trinity_events.weights import (
    ChunkStore,
    PartRef,
    PartWriter,
    PublishedPartReport,
    RedisChunkStore,
    SharedMemoryStore,
    adopt,
    check_fit,
    install,
    load_version,
    pull_version,
)
from trinity_events.weights.speculative_load import SpeculativeLoad
from trinity_events.weights.transports.base import SupportsPrefetch, Taker
from trinity_schemas import PublishedPart, StepReady, version_digest

from .original_design import LAST

RUN = "bench-weights"
KEPT = 2
"""Versions that are there at a time, as in a run."""
BLOCK = 16 << 20
"""Of the bare pipeline."""
DEADLINE = 300.0
_NO_DIGEST = "xxh3:" + "0" * 32


class Model(NamedTuple):
    """Tensors that look like a model's: so many, of so many elements each, bf16."""

    tensors: int
    elements: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tensors * self.elements * 2

    def parameters(self, fill: float = 0.0) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        one = {"dtype": torch.bfloat16}
        return {
            f"layer{number}": torch.full((self.elements,), fill, **one)  # type: ignore[call-overload]
            for number in reversed(range(self.tensors))
        }


def store_of(name: str, url: str) -> ChunkStore:
    """The end of a transport."""
    return SharedMemoryStore() if name == "shm" else RedisChunkStore(open_client(url))


@contextmanager
def undigested(*modules: str) -> Iterator[None]:
    """Within it nothing is digested in these modules."""
    patches = [mock.patch(f"trinity_events.weights.{one}.digest", unsealed) for one in modules]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def unsealed(_: Any) -> str:
    """In a digest's place."""
    return _NO_DIGEST


class Peer:
    """The process, as the benchmark sees it: it answers each request when it is done."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, *request: Any) -> None:
        """Ask for something, and do not wait."""
        self._connection.send(request)

    def tell(self, message: bytes) -> None:
        """Say something while it is at it."""
        self._connection.send_bytes(message)

    def wait(self) -> Any:
        """The answer."""
        if not self._connection.poll(DEADLINE):
            raise TimeoutError(f"the other process did not answer within {DEADLINE:g} s")
        return self._connection.recv()

    def ask(self, *request: Any) -> Any:
        """Both."""
        self.say(*request)
        return self.wait()


@contextmanager
def peer(model: Model, url: str, bare: Path | None) -> Iterator[Peer]:
    """A process with a model of zeros; without a bare file it copies no bare blocks."""
    with process_of(get_context("spawn"), serve, model, url, bare) as started:
        yield started


@contextmanager
def process_of(
    processes: BaseContext, serve: Callable[..., None], *arguments: Any
) -> Iterator[Peer]:
    """A process that answers what it is asked through its first argument."""
    ours, theirs = processes.Pipe()
    # Typeshed has Process in each kind of context, and not in what they have in common.
    started = processes.Process(target=serve, args=(theirs, *arguments), daemon=True)  # type: ignore[attr-defined]
    started.start()
    theirs.close()
    try:
        yield Peer(ours)
    finally:
        ours.close()
        started.join(10)
        started.kill()
        started.join()


def serve(requests: Connection, model: Model, url: str, bare: Path | None) -> None:
    """Answer until nobody asks any more."""
    # As explorers do, of which each has its share of the cores.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    module = torch.nn.ParameterDict(model.parameters())
    flat = mapped = memoryview(b"")
    if bare is not None:
        flat = memoryview(bytearray(model.nbytes))
        mapped = memoryview(mapped_file(bare, model.nbytes, mmap.PROT_READ))
    shared = SharedMemoryStore()
    stores: dict[str, ChunkStore] = {"shm": shared, "redis": store_of("redis", url)}
    ahead = SpeculativeLoad()
    along: Along | None = None
    serving: torch.nn.ParameterDict | None = None
    served, held = ExitStack(), ExitStack()
    try:
        while True:
            what, *arguments = requests.recv()
            if along is not None:  # what it reads is announced
                along.end()
                along = None
            if what == "along":
                part, at_rest = arguments
                along = Along(shared, part, ahead.begin(module) if at_rest else None)
            elif what == "apply":
                transport, digests, ready = arguments
                requests.send(apply(stores[transport], module, ready, digests=digests))
            elif what == "load":
                [ready] = arguments
                ahead.note(module, load_version(shared, RUN, ready, module, ahead=ahead))
                ahead.abandon()
                requests.send(float(module.get_parameter(LAST).detach()[-1]))
            elif what == "adopt":
                [ready] = arguments
                version = served.enter_context(pull_version(stores["shm"], RUN, ready))
                serving = serving or torch.nn.ParameterDict(model.parameters())
                adopt(serving, version)
                before, held = held, served.pop_all()
                before.close()
                requests.send(float(serving.get_parameter(LAST).detach()[-1]))
            elif what == "hold":
                ready, seconds = arguments
                with pull_version(stores["shm"], RUN, ready):
                    time.sleep(seconds)
                requests.send(None)
            else:
                copy_blocks(requests, mapped, flat)
                requests.send(None)
    except EOFError:
        held.close()
        for store in stores.values():
            store.close()


class Along:
    """Reads a part along with its publisher, until it is announced."""

    def __init__(self, store: SupportsPrefetch, part: PartRef, taker: Taker | None) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=store.prefetch, args=([part], self._stop, DEADLINE, taker)
        )
        self._thread.start()

    def end(self) -> None:
        """The part was announced."""
        self._stop.set()
        self._thread.join()


def apply(store: ChunkStore, module: torch.nn.Module, ready: StepReady, *, digests: bool) -> float:
    """As an explorer does; returns a number of the model's last tensor, to see that it is there."""
    if not digests:
        with undigested("pull"):
            return apply(store, module, ready, digests=True)
    with pull_version(store, RUN, ready) as version:
        install(check_fit(module, version))
    return float(module.get_parameter(LAST).detach()[-1])


def published(
    store: ChunkStore, part: PartRef, tensors: Iterable[tuple[str, torch.Tensor]]
) -> StepReady:
    """Publish a part; what would be announced of it."""
    writer = PartWriter(store, part)
    for name, tensor in tensors:
        writer.add(name, tensor)
    return announced(part, writer.seal())


def announced(part: PartRef, report: PublishedPartReport) -> StepReady:
    """As the reducer announces it."""
    told = PublishedPart(rank=0, manifest_digest=report.manifest_digest, bytes=report.bytes)
    return StepReady(
        epoch=part.epoch,
        step=part.step,
        kind="weights",
        caused_by="1-0",
        parts=(told,),
        version_digest=version_digest([(0, report.manifest_digest)]),
    )


def copy_blocks(requests: Connection, source: memoryview, target: memoryview) -> None:
    """Copy each block as soon as it is said to be there."""
    for begin in range(0, len(target), BLOCK):
        requests.recv_bytes()
        target[begin : begin + BLOCK] = source[begin : begin + BLOCK][: len(target) - begin]


def mapped_file(path: Path, nbytes: int, protection: int) -> mmap.mmap:
    """A file in shared memory, its pages in place."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(
            descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection
        )
    finally:
        os.close(descriptor)

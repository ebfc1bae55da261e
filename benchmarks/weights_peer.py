"""Receiving process of the weight benchmarks, which applies versions to a model of its own."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from trinity_events.weights.applying.speculative_load import SpeculativeLoad
from trinity_events.weights.publishing.part_writer import LastLayout
from trinity_events.weights.transports.base import OnPart, SupportsPrefetch
from trinity_schemas import PublishedPart, StepReady, version_digest

from .original_design import LAST

RUN = "bench-weights"
KEPT = 2
"""Versions that are kept at a time, as in a run."""
BLOCK = 16 << 20
"""Bytes per block of the bare pipeline."""
DEADLINE = 300.0
_NO_DIGEST = "xxh3:" + "0" * 32


class Model(NamedTuple):
    """Shape of a model: a number of bf16 tensors of equal size."""

    tensors: int
    elements: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tensors * self.elements * 2

    def parameters(self, fill: float = 0.0) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""
        options = {"dtype": torch.bfloat16}
        return {
            f"layer{number}": torch.full((self.elements,), fill, **options)  # type: ignore[call-overload]
            for number in reversed(range(self.tensors))
        }


def store_of(name: str, url: str) -> ChunkStore:
    """Open the receiving or sending end of a transport."""
    return SharedMemoryStore() if name == "shm" else RedisChunkStore(open_client(url))


@contextmanager
def undigested(*modules: str) -> Iterator[None]:
    """Disable digests in these modules during the block."""
    patches = [
        mock.patch(f"trinity_events.weights.{module}.digest", unsealed) for module in modules
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def unsealed(*_: Any) -> str:
    """Return a constant in place of a digest."""
    return _NO_DIGEST


class Peer:
    """Proxy of the receiving process, which answers each request once it is done."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, *request: Any) -> None:
        """Send a request without waiting."""
        self._connection.send(request)

    def tell(self, message: bytes) -> None:
        """Send data while the process handles a request."""
        self._connection.send_bytes(message)

    def wait(self) -> Any:
        """Return the answer to the last request."""
        if not self._connection.poll(DEADLINE):
            raise TimeoutError(f"the other process did not answer within {DEADLINE:g} s")
        return self._connection.recv()

    def ask(self, *request: Any) -> Any:
        """Send a request and return its answer."""
        self.say(*request)
        return self.wait()


@contextmanager
def peer(model: Model, url: str, bare: Path | None) -> Iterator[Peer]:
    """Start a process with a model of zeros; it copies bare blocks only if ``bare`` is given."""
    with process_of(get_context("spawn"), serve, model, url, bare) as started:
        yield started


@contextmanager
def process_of(
    processes: BaseContext, serve: Callable[..., None], *arguments: Any
) -> Iterator[Peer]:
    """Start a process that answers requests from its first argument."""
    ours, theirs = processes.Pipe()
    # Typeshed declares Process in each kind of context, but not in their common base.
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
    """Answer requests until the pipe is closed."""
    # As in explorers, each of which has its share of the cores.
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
    served, current = ExitStack(), ExitStack()
    try:
        while True:
            what, *arguments = requests.recv()
            if along is not None:  # the prefetched part is announced
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
                filled = load_version(shared, RUN, ready, module, ahead=ahead)
                ahead.record(module, filled.manifests)
                ahead.abandon()
                requests.send(float(module.get_parameter(LAST).detach()[-1]))
            elif what == "adopt":
                [ready] = arguments
                version = served.enter_context(pull_version(stores["shm"], RUN, ready))
                serving = serving or torch.nn.ParameterDict(model.parameters())
                adopt(serving, version)
                before, current = current, served.pop_all()
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
        current.close()
        for store in stores.values():
            store.close()


class Along:
    """Thread that prefetches a part until it is announced."""

    def __init__(self, store: SupportsPrefetch, part: PartRef, on_part: OnPart | None) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=store.prefetch, args=([part], self._stop, DEADLINE, on_part)
        )
        self._thread.start()

    def end(self) -> None:
        """End the prefetch, since the part was announced."""
        self._stop.set()
        self._thread.join()


def apply(store: ChunkStore, module: torch.nn.Module, ready: StepReady, *, digests: bool) -> float:
    """Apply a version as an explorer does; return an element of the last tensor, as a check."""
    if not digests:
        with undigested("reading.pull"):
            return apply(store, module, ready, digests=True)
    with pull_version(store, RUN, ready) as version:
        install(check_fit(module, version))
    return float(module.get_parameter(LAST).detach()[-1])


def published(
    store: ChunkStore,
    part: PartRef,
    tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
    last_layout: LastLayout | None = None,
) -> StepReady:
    """Publish a part, all at once from a mapping; return the announcement of its version."""
    writer = PartWriter(store, part, last_layout=last_layout)
    if isinstance(tensors, Mapping):
        writer.add_all(list(tensors), list(tensors.values()))
    else:
        for name, tensor in tensors:
            writer.add(name, tensor)
    return announced(part, writer.seal())


def announced(part: PartRef, report: PublishedPartReport) -> StepReady:
    """Return the announcement as the reducer makes it."""
    published_part = PublishedPart(
        rank=0, manifest_digest=report.manifest_digest, bytes=report.bytes
    )
    return StepReady(
        epoch=part.epoch,
        step=part.step,
        kind="weights",
        caused_by="1-0",
        parts=(published_part,),
        version_digest=version_digest([(0, report.manifest_digest)]),
    )


def copy_blocks(requests: Connection, source: memoryview, target: memoryview) -> None:
    """Copy each block as soon as it is reported complete."""
    for begin in range(0, len(target), BLOCK):
        requests.recv_bytes()
        target[begin : begin + BLOCK] = source[begin : begin + BLOCK][: len(target) - begin]


def mapped_file(path: Path, nbytes: int, protection: int) -> mmap.mmap:
    """Map a file in shared memory, with its pages in place."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return mmap.mmap(
            descriptor, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=protection
        )
    finally:
        os.close(descriptor)

"""Weights from a trainer's GPU to an explorer's, by each transport that supports GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from trinity_events.server import EmbeddedServer, open_client
from trinity_events.weights import (
    ChunkStore,
    CollectiveStore,
    CudaStore,
    PartRef,
    SharedMemoryStore,
)
from trinity_events.weights.devices.staging_memory import StagingMemory
from trinity_events.weights.publishing.part_writer import LastLayout

from .environment import Stage
from .measure import Findings, Noise, Row, say, taking_turns
from .original_design import LAST
from .report import GPU
from .transport_peers import Turn, row
from .weights_peer import DEADLINE, KEPT, RUN, Model, Peer, apply, process_of, published

TITLE = "weights from a GPU to a GPU, from publish to applied in another process"
PLACE = GPU
_WARM = 3
WAYS = {"cuda": "CUDA IPC", "shm": "shared memory", "collective": "collective group (NCCL)"}
DEVICE_COPIES, PINNED_COPIES, PINNED_COPY = (
    "three bare copies on the GPU",
    "one bare copy to pinned memory, and one back",
    "one bare copy to pinned memory",
)


class Size(NamedTuple):
    """Models, and the expected duration."""

    turns: tuple[Turn, ...]
    takes: str


SIZES = {
    "tiny": Size((Turn("1 MiB in 20 tensors", Model(20, 26_214), 2),), "20 s"),
    "small": Size((Turn("512 MiB in 200 tensors", Model(200, 1_342_177), 5),), "40 s"),
    "full": Size(
        (
            Turn("64 MiB in 200 tensors", Model(200, 167_772), 10),
            Turn("1 GiB in 200 tensors", Model(200, 2_684_354), 5),
            Turn("20,000 small tensors", Model(20_000, 1_024), 5),
        ),
        "2 min",
    ),
}


def missing() -> str | None:
    """Return why this benchmark cannot run here, or None."""
    return (
        None if torch.cuda.is_available() else "this machine has no GPU, or torch is built without"
    )


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Measure each model through each transport."""
    rows: list[Row] = []
    with EmbeddedServer(on.folder, "weights", durable=False).attached() as url:
        for turn in size.turns:
            say(f"  {turn.name}")
            rows += measured(turn, url, noise)
    shared = "one GPU, which both processes share" if _explorer_gpu() == 0 else "two GPUs"
    notes = [
        f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {shared}. Tensors are bf16. "
        "Ratios are of speeds: above 1, ours is faster. Each side digests every version once.",
        "CUDA IPC makes three copies on the GPU: into the published part, out of it, and into the "
        "model; digests are taken on the GPU between them.",
        "Where both ranks share a GPU, NCCL takes them for two hosts and sends through a socket: "
        "the figure then shows that the path works, not what NVLink would give.",
    ]
    return Findings(rows, notes)


def measured(turn: Turn, url: str, noise: Noise) -> list[Row]:
    """Measure one model."""
    _share_gpu("trainer")
    with process_of(get_context("spawn"), serve, turn.model, url) as other:
        trainer = _Trainer(turn.model, url, other)
        try:
            them: dict[str, Callable[[], float]] = {
                name: lambda name=name: trainer.through(name)  # type: ignore[misc]
                for name in WAYS
            }
            them |= {
                "stall": trainer.snapshot,
                DEVICE_COPIES: trainer.device_copies,
                PINNED_COPIES: trainer.pinned_copies,
                PINNED_COPY: trainer.pinned_copy,
            }
            taking_turns(them, _WARM, Noise())
            seconds = taking_turns(them, turn.rounds, noise)
        finally:
            trainer.close()
    limits = {"cuda": DEVICE_COPIES, "shm": PINNED_COPIES, "collective": PINNED_COPIES}
    rows = [
        row(turn, f"{title}, applied", seconds[name], limits[name], seconds[limits[name]])
        for name, title in WAYS.items()
    ]
    stall = row(turn, "stall of a snapshot", seconds["stall"], PINNED_COPY, seconds[PINNED_COPY])
    return [*rows, stall]


class _Trainer:
    """The trainer's process: a model on a GPU, and the sending end of each transport."""

    def __init__(self, model: Model, url: str, other: Peer) -> None:
        self._model = model
        self._other = other
        self._source = {name: tensor.cuda() for name, tensor in model.parameters(1.0).items()}
        collective = CollectiveStore(open_client(url), RUN, "trainer-0")
        self._stores: dict[str, ChunkStore] = {
            "cuda": CudaStore(),
            "shm": SharedMemoryStore(),
            "collective": collective,
        }
        self._layouts = {name: LastLayout() for name in self._stores}
        self._published: dict[str, list[int]] = {name: [] for name in self._stores}
        self._steps = count(1)
        self._staging = StagingMemory()
        self._flat = torch.ones(model.nbytes, dtype=torch.uint8, device="cuda")
        self._copies = [torch.empty_like(self._flat) for _ in range(3)]
        self._pinned = torch.empty(model.nbytes, dtype=torch.uint8, pin_memory=True)
        collective.listen(1)
        other.ask("join")
        collective.set_up(1, 1, DEADLINE)

    def close(self) -> None:
        """Release the transports and the model."""
        for store in self._stores.values():
            store.close()
        self._source.clear()
        self._copies.clear()

    def through(self, transport: str) -> float:
        """Publish a version, let the explorer apply it, and return the seconds of both."""
        step = next(self._steps)
        number = float(1 + step % 100)
        self._source[LAST][-1] = number
        torch.cuda.synchronize()
        began = time.perf_counter()
        part, layout = PartRef(RUN, 1, step, 0), self._layouts[transport]
        ready = published(self._stores[transport], part, self._source, layout)
        applied = self._other.ask("apply", transport, ready)
        seconds = time.perf_counter() - began
        if applied != number:
            raise RuntimeError(f"through {transport} {applied} was applied, not {number}")
        steps = self._published[transport]
        steps.append(step)
        while len(steps) > KEPT:
            self._stores[transport].delete(PartRef(RUN, 1, steps.pop(0), 0))
        return seconds

    def snapshot(self) -> float:
        """Return the seconds until the training loop may go on after a snapshot."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        self._staging.copy(list(self._source.values()))
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        self._staging.settle()
        return seconds

    def device_copies(self) -> float:
        """Return the seconds of as many copies on the GPU as CUDA IPC makes."""
        return _timed(lambda: [buffer.copy_(self._flat) for buffer in self._copies])

    def pinned_copies(self) -> float:
        """Return the seconds of a copy to pinned memory and one back."""

        def both() -> None:
            self._pinned.copy_(self._flat, non_blocking=True)
            self._copies[0].copy_(self._pinned, non_blocking=True)

        return _timed(both)

    def pinned_copy(self) -> float:
        """Return the seconds of a copy to pinned memory."""
        return _timed(lambda: self._pinned.copy_(self._flat, non_blocking=True))


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _explorer_gpu() -> int:
    """Return the explorer's GPU: another than the trainer's, where there is one."""
    return 1 if torch.cuda.device_count() > 1 else 0


def _share_gpu(host: str) -> None:
    """Name this process another host to NCCL, if both processes have one GPU."""
    if _explorer_gpu() == 0:
        os.environ |= {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo"}


def serve(requests: Connection, model: Model, url: str) -> None:
    """Run the explorer's process until the trainer closes the pipe."""
    _share_gpu("explorer")
    torch.cuda.set_device(_explorer_gpu())
    module = torch.nn.ParameterDict(
        {name: tensor.cuda() for name, tensor in model.parameters().items()}
    )
    collective = CollectiveStore(open_client(url), RUN, "explorer-1")
    stores: dict[str, ChunkStore] = {
        "cuda": CudaStore(),
        "shm": SharedMemoryStore(),
        "collective": collective,
    }
    try:
        while True:
            what, *arguments = requests.recv()
            if what == "join":
                collective.join()
                requests.send(None)
            else:
                transport, ready = arguments
                requests.send(apply(stores[transport], module, ready, digests=True))
    except EOFError:
        for store in stores.values():
            store.close()

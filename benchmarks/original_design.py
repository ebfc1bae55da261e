"""Small models of the design that this project replaces, for its speed only.

Trinity-RFT reports each save to a monitor, by a call to a Ray actor. The monitor counts, and writes
a file once a step's count is zero. A process that waits for the step reads that file once per
second. Weights are sent to a Ray actor as a whole, and fetched from it tensor by tensor.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trinity_events.errors import DeadlineExceeded

if TYPE_CHECKING:
    import torch

    from .weights_peer import Model

LAST = "layer0"
"""Name of the tensor that is sent last."""

POLL_EVERY = 1.0
"""Seconds between two reads of the file, as in the original."""


class CountingMonitor:
    """Monitor that counts the saves of each step and writes the newest complete step to a file."""

    def __init__(self, file: str) -> None:
        self._file = Path(file)
        self._running: Counter[int] = Counter()

    def register(self, step: int, saves: int) -> None:
        """Expect this number of saves of the step."""
        self._running[step] += saves

    def finished(self, step: int) -> None:
        """Count one finished save of the step."""
        self._running[step] -= 1
        if self._running[step] == 0:
            self._file.write_text(str(step))


class FilePoller:
    """Thread that polls the file, and records when each step was first seen."""

    def __init__(self, file: Path, every: float = POLL_EVERY) -> None:
        self._file = file
        self._every = every
        self._seen: dict[int, float] = {}
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="poller", daemon=True)

    def __enter__(self) -> FilePoller:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait_for(self, step: int, deadline: float = 30.0) -> float:
        """Return the time at which the step was seen."""
        with self._changed:
            if not self._changed.wait_for(lambda: step in self._seen, deadline):
                raise DeadlineExceeded(f"step {step} was not in {self._file}", deadline)
            return self._seen[step]

    def _poll(self) -> None:
        while not self._stop.wait(self._every):
            text = self._file.read_text() if self._file.exists() else ""
            if text:
                with self._changed:
                    self._seen.setdefault(int(text), time.perf_counter())
                    self._changed.notify_all()


def start_ray(object_store: int) -> None:
    """Start a Ray cluster without its output."""
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=object_store,
    )


ELSEWHERE = "elsewhere"
"""Custom resource of the second of two nodes."""


@contextmanager
def ray_of(nodes: int, object_store: int) -> Iterator[None]:
    """Start a Ray cluster with one or two nodes on this machine; this process is on the first."""
    import ray

    if nodes == 1:
        start_ray(object_store)
        try:
            yield
        finally:
            ray.shutdown()
        return
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster()
    cluster.add_node(num_cpus=1, object_store_memory=object_store, include_dashboard=False)
    try:
        other = {ELSEWHERE: 100}
        cluster.add_node(num_cpus=1, object_store_memory=object_store, resources=other)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def placed(made: Any, nodes: int) -> Any:
    """Place an actor's class on the last of ``nodes`` nodes."""
    return made.options(num_cpus=0, resources={ELSEWHERE: 1} if nodes > 1 else None)


def delays(folder: Path, samples: int) -> tuple[list[float], list[float]]:
    """Return the seconds from a save's end until it is seen, and those of the actor call alone.

    Saves end at random times between two polls.
    """
    import ray

    file = folder / "latest_iteration.txt"
    seen: list[float] = []
    calls: list[float] = []
    start_ray(object_store=80 << 20)
    try:
        monitor: Any = ray.remote(CountingMonitor).remote(str(file))
        with FilePoller(file) as poller:
            for step in range(1, samples + 1):
                ray.get(monitor.register.remote(step, 1))
                time.sleep(random.uniform(0, POLL_EVERY))
                began = time.perf_counter()
                ray.get(monitor.finished.remote(step))
                calls.append(time.perf_counter() - began)
                seen.append(poller.wait_for(step) - began)
    finally:
        ray.shutdown()
    return seen, calls


class WeightKeeper:
    """Actor that keeps the newest state dict."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}

    def put(self, state: dict[str, torch.Tensor]) -> None:
        """Store a version."""
        self._state = state

    def get(self, name: str) -> torch.Tensor:
        """Return one tensor of the version."""
        return self._state[name]


class WeightTaker:
    """Actor with a model that fetches each of its tensors from the keeper."""

    def __init__(self, model: Model, keeper: Any) -> None:
        self._parameters = model.parameters()
        self._keeper = keeper

    def pull(self) -> float:
        """Fetch the version; return an element of the last tensor, as a check."""
        import ray

        for name, parameter in self._parameters.items():
            parameter.copy_(ray.get(self._keeper.get.remote(name)))
        return float(self._parameters[LAST][-1])

    def pull_whole(self, references: list[Any]) -> float:
        """Copy a version that was put as a whole, whose arrays are views of the object store."""
        import ray

        state = ray.get(references[0])
        for name, parameter in self._parameters.items():
            raw = parameter.view(torch_bytes())
            raw.numpy()[:] = state[name]
        return float(self._parameters[LAST][-1])


def torch_bytes() -> torch.dtype:
    """Return the dtype of bytes; torch is imported on demand."""
    import torch

    return torch.uint8


class WeightsThroughRay:
    """Transfer of a version from this process through one actor to another.

    Args:
        model: Shape of the model.
        versions: Versions for which Ray's object store has space.
        nodes: Nodes of the Ray cluster; the receiving actor is on the last.
    """

    def __init__(self, model: Model, versions: int = 4, nodes: int = 1) -> None:
        self._model = model
        self._versions = versions
        self._nodes = nodes
        self._exits = ExitStack()
        self._synced = 0

    def __enter__(self) -> WeightsThroughRay:
        import ray

        room = self._versions * self._model.nbytes + (200 << 20)
        self._exits.enter_context(ray_of(self._nodes, room))
        self._source = self._model.parameters()
        self._keeper: Any = ray.remote(WeightKeeper).options(num_cpus=0).remote()
        taker = placed(ray.remote(WeightTaker), self._nodes)
        self._taker = taker.remote(self._model, self._keeper)
        self.sync()  # starts all actors and touches their memory
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def sync(self) -> float:
        """Return the seconds of one version."""
        import ray

        self._synced = 1 + self._synced % 100
        self._source[LAST][-1] = self._synced
        began = time.perf_counter()
        ray.get(self._keeper.put.remote(self._source))
        applied = ray.get(self._taker.pull.remote())
        return self._checked(applied, time.perf_counter() - began)

    def sync_with_care(self) -> float:
        """Return the seconds of one version that is put once, as arrays, and then copied."""
        import ray

        self._synced = 1 + self._synced % 100  # integers that bf16 represents exactly
        self._source[LAST][-1] = self._synced
        began = time.perf_counter()
        arrays = {name: tensor.view(torch_bytes()).numpy() for name, tensor in self._source.items()}
        reference = ray.put(arrays)
        applied = ray.get(self._taker.pull_whole.remote([reference]))
        return self._checked(applied, time.perf_counter() - began)

    def _checked(self, applied: float, seconds: float) -> float:
        if applied != self._synced:
            raise RuntimeError(f"through Ray {applied} was applied, not {self._synced}")
        return seconds

"""Save of the weights as a Hugging Face folder, from any engine, while training continues."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from logging import Logger
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from trinity_events.checkpoints.layout import MODEL_FOLDER
from trinity_events.coordinator import PlannedSave
from trinity_events.core.file_versions import WEIGHTS_SAVE
from trinity_events.errors import DeadlineExceeded

from ..engines.adapter_folder import write_adapter_folder
from ..engines.base import NamedTensors, TrainEngine, trained_module
from ..engines.model_folder import write_model_folder
from ..engines.sharded import saved_part, write_model_description
from ..learning.finite import finite_tensors
from ..runtime.collective_errors import CollectiveBroken
from ..runtime.collectives import raise_together, rank_and_world
from .full_tensors import full_tensors
from .publishing import buffer_names, drain

if TYPE_CHECKING:
    from trinity_events import CheckpointCoordinator

QUEUED_BYTES = 256 << 20
"""Maximum bytes of gathered tensors that wait for the disk, unless one tensor is larger."""
DEADLINE = 300.0
"""Seconds that the training loop waits for the disk to take one tensor."""


class QueueLimits(NamedTuple):
    """Limits of the tensors that wait for the disk."""

    nbytes: int = QUEUED_BYTES
    """Maximum bytes, unless one tensor is larger."""
    deadline: float = DEADLINE
    """Seconds to wait for the disk to take one tensor."""


LIMITS = QueueLimits()
"""Limits by default."""


class SaveTarget(NamedTuple):
    """Name of a save, and its kind."""

    name: str
    is_state_dict: bool = True
    """False for a part of a checkpoint."""


VERSION = SaveTarget(WEIGHTS_SAVE)
"""Save that explorers take for a version."""


def save_huggingface(
    engine: TrainEngine,
    local_path: str,
    global_step: int,
    coordinator: CheckpointCoordinator,
    logger: Logger,
    *,
    target: SaveTarget = VERSION,
    tensors: NamedTensors | None = None,
    limits: QueueLimits = LIMITS,
) -> None:
    """Save the weights as the Hugging Face folder of a step, as one save of rank 0. Collective.

    All ranks gather the tensors one by one. Rank 0 copies them to a bounded queue, from which a
    thread writes, so that the call returns before the files are durable. The folder is
    ``huggingface`` below ``local_path``, and the save's digest is that of its list of digests. An
    engine with adapters saves these alone, in a folder that PEFT loads. A save with parameters that
    are not finite fails, and its folder is not complete.

    Args:
        engine: The engine.
        local_path: Folder of the step's files.
        global_step: The training step.
        coordinator: Runs the save and publishes its events.
        logger: Logs the folder of the save.
        target: Name and kind of the save; by default those of a version.
        tensors: Full tensors; by default those of ``engine.get_per_tensor_param()``.
        limits: Limits of the tensors that wait for the disk.

    Raises:
        DeadlineExceeded: on rank 0, if the disk, or the save's turn, took longer.
        PeerFailed: on the other ranks then.
        CollectiveBroken: if a rank died or was too slow.
    """
    folder = Path(local_path) / MODEL_FOLDER[-1]
    queue: TensorQueue | None = None
    error: Exception | None = None
    if rank_and_world()[0] == 0:
        queue = TensorQueue(*limits)
        try:
            coordinator.save_async(
                target.name,
                PlannedSave(
                    save=partial(
                        _write, engine, folder, queue, buffer_names(trained_module(engine))
                    ),
                    nbytes=_count_bytes(engine, is_converted=tensors is not None),
                    cancel=queue.close,  # else the gathers would wait for its room
                ),
                global_step,
                is_state_dict=target.is_state_dict,
                path=folder,
            )
            logger.info("step %d: saves %s in the background", global_step, folder)
        except Exception as caught:
            error = caught
    try:
        gathered = full_tensors(engine) if tensors is None else tensors
        # The thread of the save checks them, beside training.
        error = drain(gathered, queue, error, buffers=None)
    # Also if it is interrupted: the save's thread would wait for tensors for ever.
    except BaseException as caught:
        broken = CollectiveBroken("gather", str(caught), global_step)
        if queue is not None:
            queue.end(broken)
        if isinstance(caught, Exception):
            raise broken from caught
        raise
    # Before the exchange: the thread of the save need not wait for other ranks.
    if queue is not None:
        queue.end(error)
    raise_together(error)


def _count_bytes(engine: Any, *, is_converted: bool) -> int | None:
    """Return the bytes of the parameters that are saved; None if a rank does not know them all.

    Of parameters that are converted before, it is a lower bound: those of bfloat16.
    """
    module = trained_module(engine)
    # A rank of Megatron has a list of chunks, and one of FSDP1 flat shards.
    if not isinstance(module, torch.nn.Module) or FullyShardedDataParallel.fsdp_modules(module):
        return None
    dtypes = getattr(engine, "published_dtypes", {})
    total = 0
    for name, parameter in module.named_parameters():
        size: int = dtypes.get(name, parameter.dtype).itemsize
        total += parameter.numel() * (min(size, 2) if is_converted else size)
    return total


def _write(engine: Any, folder: Path, queue: TensorQueue, buffers: frozenset[str]) -> None:
    write = write_adapter_folder if saved_part(engine) == "adapter" else write_model_folder
    with queue:
        write(
            folder,
            partial(write_model_description, engine),
            finite_tensors(queue, str(folder), exempt=buffers),
        )


class TensorQueue:
    """Bounded queue of copied tensors, from the training thread to the thread of a save.

    The consumer iterates over it in a ``with`` block; after the block, tensors are discarded.

    Args:
        limit: Maximum bytes in the queue, unless one tensor is larger.
        deadline: Seconds that the producer waits for room.
    """

    def __init__(self, limit: int, deadline: float) -> None:
        self._limit = limit
        self._deadline = deadline
        self._changed = threading.Condition()
        self._tensors: deque[tuple[str, torch.Tensor]] = deque()
        self._bytes = 0
        self._error: Exception | None = None
        self._ended = self._closed = False

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a copy on the CPU, once there is room. Raises DeadlineExceeded."""
        give_up = time.monotonic() + self._deadline
        with self._changed:
            # A tensor above the limit enters an empty queue, or it never would.
            while self._bytes and self._bytes + tensor.nbytes > self._limit and not self._closed:
                if not self._changed.wait(give_up - time.monotonic()):
                    raise DeadlineExceeded(
                        f"{name} was not written",
                        self._deadline,
                        "is the disk slow, or does the save wait for its turn (see trinity-events "
                        "explain)?",
                    )
            if self._closed:
                return  # the save failed, and has said so; the other ranks gather on
        # Outside of the lock, as a copy from a GPU takes long; there is one producer, so that no
        # other tensor takes its room meanwhile.
        copy = tensor.detach().to("cpu", copy=True)
        with self._changed:
            self._tensors.append((name, copy))
            self._bytes += copy.nbytes
            self._changed.notify_all()

    def end(self, error: Exception | None = None) -> None:
        """End the tensors; the consumer raises the error, if there is one."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def __enter__(self) -> TensorQueue:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Discard the tensors, and all that are still to come."""
        with self._changed:
            self._closed = True
            self._tensors.clear()
            self._bytes = 0
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tensors or self._ended)
                if self._error is not None:
                    raise self._error
                if not self._tensors:
                    return
                name, tensor = self._tensors.popleft()
                self._bytes -= tensor.nbytes
                self._changed.notify_all()
            yield name, tensor
            # Not held while waiting for the next one.
            del tensor

"""A process group of one trainer's rank 0 and any number of explorers."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ....errors import GroupBroken

logger = logging.getLogger(__name__)


def current_gpu() -> int | None:
    """Return the index of this thread's GPU; None without one, or where NCCL cannot use it."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    try:
        return torch.cuda.current_device()
    except RuntimeError as error:  # CUDA was initialised before this process was forked
        logger.warning("this process cannot use its GPU, so its group uses Gloo: %s", error)
        return None


def gpu_identity(index: int | None) -> str | None:
    """Return the name by which NCCL tells GPUs apart: the host's and the GPU's own.

    NCCL refuses two ranks on one GPU of one host, and takes ``NCCL_HOSTID`` for the host's name.
    """
    if index is None:
        return None
    uuid = torch.cuda.get_device_properties(index).uuid
    return f"{os.environ.get('NCCL_HOSTID', '')}/{uuid}"


def backend_for(gpus: Sequence[str | None]) -> str:
    """NCCL where each rank has a GPU of its own, else Gloo: NCCL takes no two ranks on one."""
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def open_store(host: str, port: int, timeout: float, *, master: bool) -> Any:
    """The key-value store at which the ranks of a group find each other."""
    return TCPStore(
        host,
        port,
        is_master=master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


class ProcessGroup:
    """The process group. Rank 0 sends, the others receive; every wait ends within the timeout.

    ``address`` is the one that others reach this process at; NCCL finds out by itself.

    Raises GroupBroken when it cannot be made, and so do its methods when a peer is gone.
    """

    def __init__(
        self,
        store: Any,
        generation: int,
        rank: int,
        world: int,
        backend: str,
        timeout: float,
        address: str,
    ) -> None:
        self._timeout = timedelta(seconds=timeout)
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        # Raw groups, since a process group of torch.distributed's own needs a world that both the
        # trainer and the explorers are in.
        prefixed = PrefixStore(f"weights-{generation}", store)
        try:
            if backend == "nccl":
                self._group: Any = _nccl_group(prefixed, rank, world, self._timeout)
                # NCCL connects its ranks at their first collective: one that hangs is found here.
                self.wait(self.broadcast(torch.zeros(1, device=self.device)))
            else:
                self._group = _gloo_group(prefixed, rank, world, self._timeout, address)
        except RuntimeError as error:
            raise GroupBroken(f"the collective group could not be made: {_first(error)}") from None

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send rank 0's tensor to all; the tensor is the group's until :meth:`wait`."""
        try:
            return self._group.broadcast(tensor, 0)
        except RuntimeError as error:
            raise _broken(error) from None

    def wait(self, work: Any) -> None:
        """Wait for what was begun."""
        try:
            work.wait(self._timeout)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise _broken(error) from None

    def close(self) -> None:
        """Leave it: whoever waits in it hears of it."""
        group, self._group = self._group, None
        if group is not None:
            try:
                group.abort()
            except RuntimeError as error:
                logger.debug("a collective group ended with %s", error)


def _nccl_group(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0  # else connecting to a rank that hangs takes for ever
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    with _without_teardown():
        return dist.ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def _without_teardown() -> Iterator[None]:
    """Make groups whose timeouts end their collectives, and not the process.

    By default torch's watchdog ends a process whose collective timed out. A trainer must outlive
    its explorers, so the watchdog only aborts the communicator here. Torch reads the variable when
    a group is made.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "2"  # CleanUpOnly, in torch's ErrorHandlingMode
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _gloo_group(store: Any, rank: int, world: int, timeout: timedelta, address: str) -> Any:
    made: Any = dist.ProcessGroupGloo
    options = made._Options()
    options._timeout = timeout
    # By default it takes what the host's name stands for, which often is the loopback.
    options._devices = [made.create_device(hostname=address)]
    return made(store, rank, world, options)


def _broken(error: RuntimeError) -> GroupBroken:
    return GroupBroken(
        f"the collective group broke, because a peer died or was too slow: {_first(error)}"
    )


def _first(error: RuntimeError) -> str:
    return str(error).split("\n", 1)[0][:300]

"""Process group of one trainer's rank 0 and any number of explorers."""

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
    """Return the index of this thread's GPU, or None if there is none or NCCL cannot use it."""
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    try:
        return torch.cuda.current_device()
    except RuntimeError as error:  # CUDA was initialised before this process was forked
        logger.warning("this process cannot use its GPU, so its group uses Gloo: %s", error)
        return None


def gpu_identity(index: int | None) -> str | None:
    """Return the name by which NCCL distinguishes GPUs: host name and GPU id.

    NCCL refuses two ranks on one GPU of one host. It uses ``NCCL_HOSTID`` as the host name.
    """
    if index is None:
        return None
    uuid = torch.cuda.get_device_properties(index).uuid
    return f"{os.environ.get('NCCL_HOSTID', '')}/{uuid}"


def backend_for(gpus: Sequence[str | None]) -> str:
    """Return "nccl" if each rank has its own GPU, which NCCL requires, else "gloo"."""
    return "nccl" if None not in gpus and len(set(gpus)) == len(gpus) else "gloo"


def open_store(host: str, port: int, timeout: float, *, master: bool) -> Any:
    """Open the key-value store through which the ranks of a group connect."""
    return TCPStore(
        host,
        port,
        is_master=master,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
    )


class ProcessGroup:
    """Process group in which rank 0 sends and the others receive; every wait has a timeout.

    ``address`` is the address at which other ranks reach this process. NCCL finds its own.

    The constructor raises GroupBroken if the group cannot be made. The methods raise it if a peer
    is gone.
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
        # These are raw groups: a torch.distributed group requires one world of trainer and
        # explorers.
        prefixed = PrefixStore(f"weights-{generation}", store)
        try:
            if backend == "nccl":
                self._group: Any = _nccl_group(prefixed, rank, world, self._timeout)
                # NCCL connects its ranks at their first collective, so a rank that hangs is found
                # here.
                self.wait(self.broadcast(torch.zeros(1, device=self.device)))
            else:
                self._group = _gloo_group(prefixed, rank, world, self._timeout, address)
        except RuntimeError as error:
            raise GroupBroken("build", reason=_first_line(error)) from None

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Begin to send rank 0's tensor to all; the group uses the tensor until :meth:`wait`."""
        try:
            return self._group.broadcast(tensor, 0)
        except RuntimeError as error:
            raise _broken(error) from None

    def wait(self, work: Any) -> None:
        """Wait for a collective that was begun."""
        try:
            work.wait(self._timeout)
            if self.device.type == "cuda":
                # NCCL's wait orders the stream only; the host must not reuse the bucket before.
                torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise _broken(error) from None

    def close(self) -> None:
        """Leave the group; ranks that wait in it get an error."""
        group, self._group = self._group, None
        if group is not None:
            try:
                group.abort()
            except RuntimeError as error:
                logger.debug("a collective group ended with %s", error)


def _nccl_group(store: Any, rank: int, world: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.config.blocking = 0  # A blocking group waits forever for a rank that hangs.
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(math.ceil(timeout.total_seconds())))
    with _without_teardown():
        return dist.ProcessGroupNCCL(store, rank, world, options)


@contextmanager
def _without_teardown() -> Iterator[None]:
    """Make groups whose timeouts abort their collectives but not the process.

    By default torch's watchdog ends a process whose collective timed out. A trainer must outlive
    its explorers, so here the watchdog only aborts the communicator. Torch reads the variable when
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
    # The default is the address of the host's name, often the loopback address.
    options._devices = [made.create_device(hostname=address)]
    return made(store, rank, world, options)


def _broken(error: RuntimeError) -> GroupBroken:
    return GroupBroken("peer", reason=_first_line(error))


def _first_line(error: RuntimeError) -> str:
    # torch appends a stack in C++, which says nothing to a user.
    return str(error).split("\n", 1)[0][:300]

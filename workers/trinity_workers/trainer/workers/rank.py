"""One rank of a run's training processes: its device, and the process group that it joins."""

from __future__ import annotations

from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ...config.train_config import RunConfig
from ...runtime.network import meet_through
from ...worker_group.dispatch import Dispatch
from ...worker_group.placement import threads
from ...worker_group.ranks import DistRankInfo
from ...worker_group.registered import register
from ...worker_group.worker import Worker


class TrainingRank(Worker):
    """Rank that computes with others in a process group.

    Args:
        config: The run.
        rank: Which of its trainers.
        own_gpu: Whether every trainer was given a GPU of its own.
    """

    def __init__(self, config: RunConfig, rank: int, *, own_gpu: bool = False) -> None:
        self._config = config
        self._rank = rank
        self._device = compute_device(own_gpu)
        self._timeout = timedelta(seconds=config.sync.timeout)
        self._store: TCPStore | None = None

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def address(self) -> tuple[str, int]:
        """Return the address where the ranks meet; rank 0 listens there from now on."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        # The system chooses the port. The other ranks learn of it from this result, so that a wait
        # for them would never end.
        self._store = TCPStore(
            host, 0, is_master=True, timeout=self._timeout, wait_for_workers=False
        )
        return host, self._store.port

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def join(self, host: str, port: int) -> None:
        """Join the process group of all ranks."""
        config = self._config
        # Ranks on one host would each start a thread for every core of it.
        torch.set_num_threads(threads(config.trainer.cpus, config.trainer.rank_count))
        # Before the group is made, since Gloo and NCCL read the variables then.
        meet_through(host)
        if self._store is None:
            self._store = TCPStore(host, port, timeout=self._timeout)
        dist.init_process_group(
            process_group_backend(self._device, cpu_offload=config.trainer.cpu_offload),
            store=self._store,
            rank=self._rank,
            world_size=config.trainer.rank_count,
            timeout=self._timeout,
        )
        torch.manual_seed(config.seed)

    def rank_info(self) -> DistRankInfo:
        """Return the place of this rank: a replica, or one of those that share one."""
        trainer = self._config.trainer
        place, tensor = divmod(self._rank, trainer.tensor_ranks)
        replica, context = divmod(place, trainer.context_parallel)
        return DistRankInfo(tp_rank=tensor, dp_rank=replica, pp_rank=0, cp_rank=context)


def compute_device(own_gpu: bool) -> torch.device:
    """The GPU that Ray gave this rank alone, else the CPU: NCCL takes no two ranks on one GPU."""
    cuda = own_gpu and torch.cuda.is_available()
    return torch.device("cuda", 0) if cuda else torch.device("cpu")


def process_group_backend(device: torch.device, *, cpu_offload: bool) -> str:
    """Return the backend of the ranks' group; offloaded gradients are reduced on the CPU too."""
    if device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if cpu_offload else "nccl"

"""Base of workers that a group calls."""

from __future__ import annotations

from typing import Any

from trinity_events.coordinator import this_process
from trinity_schemas import Process

from .dispatch import Dispatch
from .ranks import DistRankInfo
from .registered import MethodTable, make_method_table, register
from .wire import pack, unpack


class Worker:
    """One rank of a worker group, in a process of its own."""

    def execute(self, method: str, is_answering: bool, /, *args: Any, **options: Any) -> Any:
        """Call a method, on behalf of a group.

        Args:
            method: Name of a registered method.
            is_answering: False if the group leaves this rank's answer out; then it is not sent.
            args: Positional arguments of the method, packed.
            options: Keyword arguments, packed.
        """
        given = {name: unpack(option) for name, option in options.items()}
        answer = getattr(self, method)(*map(unpack, args), **given)
        # Ranks of a replica have equal answers: one of them crosses the network.
        return pack(answer) if is_answering else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def process(self) -> Process:
        """Return the process that the worker runs in."""
        return this_process()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def method_table(self) -> MethodTable:
        """Return the registered methods of the worker, whose class its caller need not import."""
        return make_method_table(type(self))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def rank_info(self) -> DistRankInfo:
        """Return the place of this rank in its layout; without another layout, all are replicas."""
        import torch.distributed as dist

        return DistRankInfo(tp_rank=0, dp_rank=dist.get_rank(), pp_rank=0, cp_rank=0)

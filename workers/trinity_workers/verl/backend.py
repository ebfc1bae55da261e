"""Registration of ``trinity`` with veRL, which imports this ``custom_backend_module``."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from .receiver import WeightReceiver
from .sender import WeightSender
from .settings import NAME, parse_settings
from .streaming import Weights, drain
from .topology import ProcessLocation, Topology, find_topology, this_location

logger = logging.getLogger(__name__)


@CheckpointEngineRegistry.register(NAME)
class TrinityCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Checkpoint engine of one process, as veRL's trainers and rollouts construct it.

    Args:
        bucket_size: Ignored veRL argument, in bytes; chunks have the best size for the transport.
        is_master: True for the trainer's rank 0, which publishes.
        options: See :class:`~trinity_workers.verl.settings.Settings`.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False, **options: Any) -> None:
        del bucket_size
        self._settings = parse_settings(options)
        self._sender = WeightSender(self._settings) if is_master else None
        self._receiver: WeightReceiver | None = None
        self._sending = asyncio.Lock()

    def prepare(self) -> dict[str, Any]:
        """Return the location of this process; on the trainer's rank 0 also open the run.

        Raises PublishError, ServerUnreachable or PermissionDenied if there is no log.
        """
        return {"place": this_location(self._sender.open() if self._sender else None)}

    @classmethod
    def build_topology(
        cls, trainer_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return each process's arguments of :meth:`init_process_group`, from all prepared data."""
        places: list[ProcessLocation] = [entry["place"] for entry in metadata]
        meeting = find_topology(places, rollout_world_size)
        return (
            {"rank": [None] * trainer_world_size, "meeting": [meeting] * trainer_world_size},
            {
                "rank": list(range(rollout_world_size)),
                "meeting": [meeting] * rollout_world_size,
            },
        )

    def init_process_group(self, rank: int | None, meeting: Topology) -> None:
        """Record the topology. ``rank`` is the rollout's; None in a trainer."""
        if self._sender is not None:
            self._sender.meet(meeting)
        if rank is None:
            return
        # Kept from update to update: it has connections, and the base of later deltas.
        receiver, self._receiver = self._receiver, None
        if receiver is not None and (receiver.run_id, receiver.rank) != (
            meeting.opened.run_id,
            rank,
        ):
            receiver.close()
            receiver = None
        self._receiver = receiver or WeightReceiver(self._settings, rank, meeting)
        self._receiver.meet(meeting)

    async def send_weights(
        self, weights: Weights, global_steps: int | None = None
    ) -> dict[str, float] | None:
        """Publish the weights as the version of that step; all ranks gather, rank 0 sends.

        Calls run one after the other: an update that failed elsewhere may still be gathering.
        """
        async with self._sending:
            if self._sender is not None:
                return await self._sender.send(weights, global_steps)
            # A gather needs every rank, also those that publish nothing.
            await drain(weights, None)
            return None

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of that step's version, or raise; see :class:`WeightReceiver`."""
        assert self._receiver is not None, "veRL calls init_process_group before"
        async for named in self._receiver.receive(global_steps):
            yield named

    def finalize(self) -> None:
        """Finish the update: a rollout reports the version that it serves, and releases it."""
        if self._receiver is not None:
            self._receiver.finish()

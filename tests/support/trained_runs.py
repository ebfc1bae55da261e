"""A trained run for tests: its events on a server, and checkpoints with ledgers on the disk."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tests.support.event_histories import committed, finished, registration
from trinity_events.checkpoints.layout import MADE_FROM, TRAINER_STATE, VERIFIED, final_name
from trinity_events.core import Evidence
from trinity_events.core.ledger import Ledger
from trinity_events.core.ordinal_ranges import ranges
from trinity_schemas import RolloutsDispatched, StepTrained
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.rollouts.user_task import task_of
from trinity_workers.trainer.state import TrainerState

PROMPTS = 2


class TrainedRun:
    """A run that trains two prompts a step, and has asked for two more.

    Args:
        publisher: Publisher of the trainer's events.
        folder: The run's checkpoint directory.
    """

    def __init__(self, publisher, folder: Path) -> None:
        self.publisher = publisher
        self.folder = folder
        self.ledger = Ledger()
        self.fingerprint = task_of(TrainConfig()).fingerprint

    async def train(self, *steps: int, saved: bool = True) -> None:
        """Train steps, and save a checkpoint of each."""
        for step in steps:
            await self._dispatch(until=(step + 1) * PROMPTS)
            first = (step - 1) * PROMPTS
            ordinals = [first, first + 1]
            self.ledger.train(ordinals)
            await self.publisher.publish(StepTrained(step=step, trained=ranges(ordinals)))
            if saved:
                self.write_checkpoint(step)
                await self.announce_checkpoint(step)

    async def _dispatch(self, until: int) -> None:
        first, last = self.ledger.next, until - 1
        self.ledger.dispatch(first, last)
        dispatched = RolloutsDispatched(ordinals=((first, last),), fingerprint=self.fingerprint)
        await self.publisher.publish(dispatched)

    async def announce_checkpoint(self, step: int) -> None:
        """Publish the events of a whole checkpoint."""
        path = f"{self._staged(step)}/{TRAINER_STATE}"
        await self.publisher.publish(finished(step, kind="checkpoint", path=path))
        await self.publisher.publish(committed(step, "checkpoint", registration("checkpoint")))

    def write_checkpoint(self, step: int) -> Path:
        """Write the folder of a checkpoint, as the reducer leaves it."""
        folder = self.folder / final_name(step)
        folder.mkdir(parents=True)
        evidence = Evidence(epoch=self.publisher.epoch, step=step, kinds=("checkpoint",))
        (folder / VERIFIED).write_bytes(msgspec.json.encode(evidence))
        (folder / MADE_FROM).write_text(self._staged(step))
        (folder / "model.pt").write_bytes(b"weights")
        self.write_ledger(step)
        return folder

    def write_ledger(self, step: int, **changes: object) -> None:
        """Write the ledger of a checkpoint, with other values of its fields."""
        self.ledger.fingerprint = self.fingerprint
        ledger = msgspec.structs.replace(self.ledger.to_contract(step), **changes)
        file = self.folder / final_name(step) / TRAINER_STATE
        file.write_bytes(msgspec.json.encode(TrainerState(step=step, ledger=ledger)))

    def _staged(self, step: int) -> str:
        return f".staging/epoch_{self.publisher.epoch}_step_{step}_a"

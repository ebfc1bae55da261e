"""Earlier training of a run as its whole log has it, to compare a checkpoint with."""

from __future__ import annotations

from collections.abc import Collection

import anyio.lowlevel
import msgspec
from msgspec import Struct, field

from trinity_events.archive import Archive
from trinity_events.archive.export import whole_stream
from trinity_events.archive.format import ArchiveMissing
from trinity_events.core import Monitor, MonitorState
from trinity_events.core.ledger import Ledger
from trinity_events.log import RedisEventLog, Stream
from trinity_events.log.page_size import TURN
from trinity_events.replay import fold_one
from trinity_schemas import EnvelopeReader, RunOpened, RunResumed, StepRef, StepTrained


class LoggedTraining(Struct, kw_only=True):
    """Configurations and ledgers of a run's earlier training."""

    configs: dict[int, str] = field(default_factory=dict)
    """Configuration of an epoch, as JSON; epochs without one are absent."""
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    """Ledger after a step of the current lineage."""
    missing: str | None = None
    """Reason for which earlier entries of the log cannot be read."""


async def read_logged_training(
    log: RedisEventLog, archive: Archive, checkpoints: Collection[StepRef]
) -> LoggedTraining:
    """Fold the whole log; return the configurations and ledgers that belong to checkpoints.

    A snapshot is of no use: it has the last ledger alone. Where the archive of trimmed entries is
    not on this host, as after a move to a new machine, nothing is returned but the reason.
    """
    steps = {checkpoint.step for checkpoint in checkpoints}
    epochs = {checkpoint.epoch for checkpoint in checkpoints}
    training = LoggedTraining()
    monitor, decode = Monitor(MonitorState(run_id=log.run_id)), EnvelopeReader().decode
    state, number = monitor.state, 0
    try:
        async for entry in whole_stream(log, Stream.EVENTS, archive):
            number += 1
            if number % TURN == 0:
                await anyio.lowlevel.checkpoint()  # SIGINT ends a long fold
            envelope = fold_one(monitor, entry, decode).envelope
            if envelope is None or envelope.epoch != state.epoch:
                continue
            match envelope.event:
                case RunOpened(config=config) | RunResumed(config=config):
                    _drop_later_steps(training, state.trainer_step)
                    if state.epoch in epochs and config is not None:
                        training.configs.setdefault(state.epoch, config)
                case StepTrained(step=step) if step in steps and state.ledger is not None:
                    # An entry that was sent twice has no effect on the fold, and none here.
                    training.ledgers.setdefault(step, _copy(state.ledger))
    except ArchiveMissing as error:
        return LoggedTraining(missing=str(error))
    return training


def _drop_later_steps(training: LoggedTraining, resumed: int) -> None:
    """Remove the ledgers of steps that a new epoch does not continue."""
    for step in [step for step in training.ledgers if step > resumed]:
        del training.ledgers[step]


def _copy(ledger: Ledger) -> Ledger:
    # A copy by way of plain values: the fold goes on with the same ledger.
    return msgspec.convert(msgspec.to_builtins(ledger), Ledger)

"""State of the trainer's loop, which a checkpoint holds beside the model's and the optimizer's."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from trinity_events.checkpoints.layout import TRAINER_STATE
from trinity_events.errors import TrinityError
from trinity_schemas import TrainedLedger

from ..storage.durable_files import write_json


class UnusableTrainerState(TrinityError):
    """Raised if a checkpoint's state of the trainer's loop is missing or cannot be read.

    Attributes:
        path: File of the state.
        reason: Fault of the file, as a sentence without a way out.
    """

    is_lasting = True

    path: Path
    reason: str
    text = "{reason}: begin anew with --fresh, or resume from another checkpoint"


class TrainerState(Struct, frozen=True, kw_only=True):
    """State of the trainer's loop after a step."""

    step: int
    ledger: TrainedLedger
    """Fates of all prompts up to this step."""
    metrics: dict[str, float | None] = {}
    """Metrics of this step; null for a number that is not finite, which JSON does not have."""


def write_trainer_state(path: Path, state: TrainerState) -> None:
    """Write the state durably, complete or not at all. Raises OSError."""
    write_json(path, state)


def read_trainer_state(folder: Path, step: int) -> TrainerState:
    """Read the state from a checkpoint.

    Args:
        folder: Folder of the checkpoint.
        step: Step of the checkpoint.

    Raises:
        UnusableTrainerState: It is missing, damaged, or of another step.
    """
    path = folder / TRAINER_STATE
    try:
        state = msgspec.json.decode(path.read_bytes(), type=TrainerState)
    except FileNotFoundError:
        raise UnusableTrainerState(
            path,
            f"the checkpoint of step {step} has no {path}, which tells the prompts that were "
            "trained",
        ) from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UnusableTrainerState(path, f"{path} cannot be read ({error})") from None
    # A file that was copied from another checkpoint would train prompts twice, or never.
    for recorded_step in (state.step, state.ledger.step):
        if recorded_step != step:
            raise UnusableTrainerState(path, f"{path} is of step {recorded_step}, not of {step}")
    return state

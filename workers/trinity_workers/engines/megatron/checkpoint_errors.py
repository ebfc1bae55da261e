"""Errors of Megatron checkpoints that cannot be written or read."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from trinity_events.errors import TrinityError


class CheckpointRefused(TrinityError):
    """The checkpoint cannot be written or read as requested."""

    is_lasting = True


class ForeignCheckpoint(CheckpointRefused):
    """A checkpoint is incomplete, or is not of this engine, format or model.

    Attributes:
        path: Its folder or file.
        fault: ``incomplete`` without the file that is written last, ``FP8`` if a layer has a state
            of it, ``format`` for another one, ``values`` if a tensor lacks some, ``shape`` if it
            lacks a tensor of the model's.
        key: Name of the tensor or state, or of the format.
        missing: Number of values that it lacks.
        shape: Shape of the model's tensor.
    """

    path: Path
    fault: Literal["incomplete", "FP8", "format", "values", "shape"]
    key: str = ""
    missing: int = 0
    shape: tuple[int, ...] = ()
    texts: ClassVar = {
        "incomplete": "{path} holds no complete Megatron checkpoint (no metadata.json): its save "
        "was not finished, or it is of another format",
        "FP8": "{path} has a state of FP8 layers ({key}), which this engine does not use and "
        "Transformer Engine would unpickle: save the checkpoint without FP8",
        "format": "{path} is a checkpoint of the format {key}: only torch_dist can be read",
        "values": "{path} holds no complete {key}: {missing} values are missing",
        "shape": "{path} has no {key} of the shape {shape}: is huggingface/config.json beside it "
        "the one of this model?",
    }


class UnreadablePart(CheckpointRefused):
    """A rank could not read its part of a checkpoint.

    Attributes:
        rank: The rank.
        folder: Folder of the checkpoint.
        reason: Its error.
    """

    rank: int
    folder: Path
    reason: str
    text = "rank {rank} could not read {folder}: {reason}"


class OtherOptimizer(CheckpointRefused):
    """A training state is of an optimizer of another kind than the engine's.

    Attributes:
        folder: Folder of the state.
        fault: ``distributed`` if one of the two alone is spread over replicas, ``experts`` if one
            alone spreads experts over ranks.
        saved: True if the optimizer that saved the state does so.
    """

    folder: Path
    fault: Literal["distributed", "experts"]
    saved: bool

    def __str__(self) -> str:
        if self.fault == "distributed":
            saved, setting = ("a distributed", "true") if self.saved else ("an ordinary", "false")
            content = f"the state of {saved} optimizer, and the other kind cannot load it"
            way_out = f"set trainer.distributed_optimizer {setting}"
        else:
            saved, setting = ("", "2 or more") if self.saved else ("not ", "1")
            content = (
                f"the optimizer's state of experts that were {saved}spread over ranks, and one for "
                f"experts that are {'not ' if self.saved else ''}cannot load it"
            )
            way_out = f"set trainer.expert_parallel {setting}"
        return (
            f"{self.folder} holds {content}: {way_out}, or begin another run with the weights "
            "alone (trinity-events convert)"
        )


class UnsafePickle(CheckpointRefused):
    """A file of a checkpoint holds a pickle of a class that no checkpoint needs.

    Attributes:
        path: The file.
        name: Full name of the class or function.
    """

    path: Path
    name: str
    text = (
        "{path} was not loaded: its pickle names {name}, which no checkpoint needs and which could "
        "run code; use an older checkpoint, and find out who wrote the file"
    )


class UndecodableFile(CheckpointRefused):
    """A file of a checkpoint cannot be decoded.

    Attributes:
        path: The file.
        reason: Text of the decoder's error.
    """

    path: Path
    reason: str
    text = "{path} is damaged ({reason}): use an older checkpoint"


class MissingCheckpointFile(CheckpointRefused):
    """A file of a checkpoint is not there.

    Attributes:
        path: The file.
    """

    path: Path
    text = (
        "{path} is missing, so the checkpoint is not whole: restore the file, or use an older "
        "checkpoint"
    )

"""Errors of Megatron checkpoints that cannot be written or read."""

from __future__ import annotations

from pathlib import Path

from trinity_events.errors import TrinityError


class CheckpointRefused(TrinityError):
    """Raised if the checkpoint cannot be written or read as requested."""

    is_lasting = True


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

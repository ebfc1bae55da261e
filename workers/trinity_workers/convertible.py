"""Detection of folders that can be converted, without the slow imports of torch and Megatron."""

from __future__ import annotations

from pathlib import Path

from trinity_events.errors import TrinityError


class ConversionRefused(TrinityError):
    """Raised if there is no source to convert, or the target exists."""


def becomes_megatron(source: Path, target: Path) -> bool:
    """Return True if the source is to become a Megatron checkpoint.

    Raises ConversionRefused if it is neither format, or the target exists.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionRefused(f"{target} exists already: give another folder, or remove it")
    if not source.is_dir():
        raise ConversionRefused(f"{source} is no folder: give the folder of the model")
    if (source / "config.json").is_file():
        return True
    if not (source / "model" / "metadata.json").is_file():
        raise ConversionRefused(
            f"{source} is neither a Hugging Face folder (config.json) nor a Megatron checkpoint "
            "(model/metadata.json)"
        )
    if not (source / "huggingface" / "config.json").is_file():
        raise ConversionRefused(
            f"{source} lacks huggingface/config.json, which says what its weights are of: "
            "copy the model's there"
        )
    return False

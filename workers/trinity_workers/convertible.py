"""What can be converted, as its files tell; torch and megatron-core take seconds to import."""

from __future__ import annotations

from pathlib import Path

from trinity_events.errors import TrinityError


class ConversionRefused(TrinityError):
    """There is nothing to convert from, or something where the result is to be."""


def becomes_megatron(source: Path, target: Path) -> bool:
    """Whether the source is to become a Megatron checkpoint.

    Raises ConversionRefused when it can become nothing, or the target is there.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionRefused(
            f"{target} is there already: give a folder that is not, or remove it"
        )
    if not source.is_dir():
        raise ConversionRefused(f"{source} is no folder: give the one that the model is in")
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

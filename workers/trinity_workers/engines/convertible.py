"""Detection of folders that can be converted, without the slow imports of torch and Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from trinity_events.checkpoints.layout import FILE_DIGESTS, MODEL_FOLDER
from trinity_events.errors import TrinityError

SourceForm = Literal["huggingface", "megatron", "fsdp", "exported", "adapters"]
ADAPTER_CONFIG = "adapter_config.json"
"""File by which PEFT describes adapters."""


class ConversionRefused(TrinityError):
    """Raised if there is no source to convert, or the target exists."""


class ConversionSource(NamedTuple):
    """Folder to convert, and its form."""

    folder: Path
    form: SourceForm
    """A Hugging Face folder becomes a Megatron checkpoint, and every other form the former. A
    checkpoint is `exported` if it has its model in Hugging Face's format. It has `adapters` alone
    if it is of a run that trains them."""


class Conversion(Struct, frozen=True, kw_only=True):
    """Result of a conversion."""

    source: str
    target: str
    to: str
    tensors: int
    bytes: int


def find_source(source: Path, target: Path) -> ConversionSource:
    """Return the folder to convert: the source, or the model's folder in a checkpoint of a step.

    Raises ConversionRefused if it is of no known form, or the target exists.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionRefused(f"{target} exists already: give another folder, or remove it")
    if not source.is_dir():
        raise ConversionRefused(f"{source} is no folder: give the folder of the model")
    inner, described = MODEL_FOLDER
    folder = source / inner if (source / inner).is_dir() else source
    if any((place / ADAPTER_CONFIG).is_file() for place in (folder, folder / described)):
        return ConversionSource(folder, "adapters")
    if (folder / "config.json").is_file():
        return ConversionSource(folder, "huggingface")
    form: SourceForm | None = None
    if (folder / described / FILE_DIGESTS).is_file():
        form = "exported"
    elif (folder / "model" / "metadata.json").is_file():
        form = "megatron"
    elif any(folder.glob("model_world_size_*_rank_0.pt")):
        form = "fsdp"
    if form is None:
        raise ConversionRefused(
            f"{source} is neither a Hugging Face folder (config.json) nor a Megatron checkpoint "
            "(model/metadata.json) nor one of FSDP (model_world_size_N_rank_0.pt)"
        )
    if not (folder / described / "config.json").is_file():
        raise ConversionRefused(
            f"{folder} lacks huggingface/config.json, which says what its weights are of: "
            "copy the model's there"
        )
    return ConversionSource(folder, form)

"""Detection of folders that can be converted, without the slow imports of torch and Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct

from trinity_events.checkpoints.layout import FILE_DIGESTS, MODEL_FOLDER
from trinity_events.errors import TrinityError

SourceForm = Literal["huggingface", "megatron", "fsdp", "exported", "adapters"]
ADAPTER_CONFIG = "adapter_config.json"
"""File by which PEFT describes adapters."""


class ConversionRefused(TrinityError):
    """A model cannot be converted: its source lacks something, or the target exists."""


class SourceRefused(ConversionRefused):
    """There is no source to convert, or the target exists.

    Attributes:
        folder: Folder of the source, or the target.
        fault: ``target`` if that exists, ``absent`` without a source, ``form`` if it is of none
            that can be converted, ``description`` and ``unknown model`` for its configuration,
            ``weights`` without them, ``dtypes`` and ``dtype`` for its tensors.
        tensor: Name of a tensor.
        dtypes: Data types that are the fault.
        allowed: Data types that can be converted.
        reason: Error of the library that reads it.
    """

    folder: Path
    fault: Literal[
        "target", "absent", "form", "description", "unknown model", "weights", "dtypes", "dtype"
    ]
    tensor: str = ""
    dtypes: str = ""
    allowed: str = ""
    reason: str = ""
    texts: ClassVar = {
        "target": "{folder} exists already: give another folder, or remove it",
        "absent": "{folder} is no folder: give the folder of the model",
        "form": "{folder} is neither a Hugging Face folder (config.json) nor a Megatron checkpoint "
        "(model/metadata.json) nor one of FSDP (model_world_size_N_rank_0.pt)",
        "description": "{folder} lacks huggingface/config.json, which says what its weights are "
        "of: copy the model's there",
        "unknown model": "{folder}/config.json describes no model that can be converted: {reason}",
        "weights": "{reason}",
        "dtypes": "{folder}: the tensors of {tensor}, over all layers, have several dtypes "
        "({dtypes}), and a Megatron checkpoint stores them in one: save the model so",
        "dtype": "{folder}: {tensor} is {dtypes}, which cannot be converted: save it in one of "
        "{allowed}",
    }


class AdapterConversionRefused(ConversionRefused):
    """Adapters cannot be merged into their base.

    Attributes:
        folder: Folder of the adapters, their description, or their base.
        fault: ``kind`` if they are no plain LoRA, ``layer`` if the base lacks one, ``half`` if a
            matrix is missing, ``base`` if there is none, ``no adapters`` if the source has none.
        tensor: Name of the adapter's tensor.
    """

    folder: Path
    fault: Literal["kind", "layer", "half", "base", "no adapters"]
    tensor: str = ""
    texts: ClassVar = {
        "kind": "{folder} describes no plain LoRA: merge it with PEFT",
        "layer": "{folder} has no layer for the adapter {tensor}: give the adapters' own base with "
        "--base",
        "half": "{folder} lacks {tensor}, half of an adapter: copy the whole folder again",
        "base": "the base of the adapters is not in {folder}: give its folder with --base",
        "no adapters": "{folder} has no adapters: leave --adapter and --base out",
    }


class RankOfGroup(ConversionRefused):
    """This process is a rank of a group, and a conversion makes its own."""

    text = "this process is a rank of a group: convert in one of its own"


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
        raise SourceRefused(target, "target")
    if not source.is_dir():
        raise SourceRefused(source, "absent")
    inner, described = MODEL_FOLDER
    folder = source / inner if (source / inner).is_dir() else source
    if any((place / ADAPTER_CONFIG).is_file() for place in (folder, folder / described)):
        return ConversionSource(folder, "adapters")
    # Before the checkpoints: a folder of a model may lie in one, and is given for itself.
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
        raise SourceRefused(source, "form")
    if not (folder / described / "config.json").is_file():
        raise SourceRefused(folder, "description")
    return ConversionSource(folder, form)

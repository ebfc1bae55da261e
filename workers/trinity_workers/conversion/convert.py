"""Conversion of checkpoints to Hugging Face folders, and of these to Megatron, streaming.

It runs in one process without a GPU. A checkpoint does not depend on the layout, so one rank reads
and writes it, parameter by parameter. Memory holds a few of the largest parameters, whatever the
number of layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from trinity_events.checkpoints.layout import MODEL_FOLDER
from trinity_events.checkpoints.verification import VerifyMode
from trinity_events.system.open_folder import partial_folder
from trinity_events.weights.errors import UnfitTensor

from ..engines.base import NamedTensors
from ..engines.buffers import all_buffer_names, saved_buffers
from ..engines.convertible import (
    ADAPTER_CONFIG,
    AdapterConversionRefused,
    Conversion,
    RankOfGroup,
    SourceForm,
    SourceRefused,
    find_source,
)
from ..engines.megatron import leave
from ..engines.megatron.meta_model import MetaModel
from ..engines.megatron.model import is_tied
from ..engines.megatron.model_description import Description, read_description, write_description
from ..engines.model_folder import (
    OUTPUT_HEAD,
    SHARD_BYTES,
    FolderReader,
    check_all_used,
    copy_files,
    write_model_folder,
)
from ..engines.reshard import tensors_of_shards
from ..learning.finite import check_finite, finite_tensors
from ..learning.value_head import head_tensors
from ..storage.durable_files import make_folder, sync
from ..storage.load_verification import verify_checkpoint, write_manifest_together
from .adapters import SavedAdapters

_CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_M_MMAP_THRESHOLD = -3  # value in glibc's malloc.h


def convert(
    source: Path,
    target: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    adapter: bool = False,
    base: Path | None = None,
    verify: VerifyMode = "full",
) -> Conversion:
    """Convert a Hugging Face folder to a Megatron checkpoint, or any checkpoint to the former.

    A checkpoint has the form that an engine's ``save_checkpoint`` writes, or is the folder of a
    step. No code of it is run. Adapters are merged into their base.

    Args:
        source: Folder to convert.
        target: Folder to create; it appears complete or not at all.
        shard_bytes: Maximum size of a safetensors file, unless one tensor is larger.
        adapter: Write adapters alone, as a folder of PEFT.
        base: Folder of the adapters' base; by default the one that they were trained on.
        verify: Extent to which the source is compared with its manifest before it is read.

    Raises:
        CheckpointDamaged: if a file of the source is not as it was saved.
        ConversionRefused: if there is no model to convert, or the target exists.
        AdaptersRefused: if the base is not that of the adapters.
        UnsupportedModel: if megatron-core has no model of this configuration.
        UnsafePickle: if a Megatron checkpoint has a pickle of anything but its data.
        IncompatibleWeights: if the weights do not match the configuration: a tensor is missing, or
            has another shape, or the model has no place for it.
        NonFiniteWeights: if parameters have values that are not finite.
    """
    folder, form = find_source(source, target)
    if form != "adapters" and (adapter or base is not None):
        raise AdapterConversionRefused(source, "no adapters")
    # A folder of Hugging Face need not be of this project, and then has no list to compare.
    is_checkpoint = form != "huggingface" and not (folder / ADAPTER_CONFIG).is_file()
    verify_checkpoint(folder, verify, warn=is_checkpoint)
    _map_large_blocks()
    make_folder(target.parent)
    with partial_folder(target) as staging:
        with _alone() if form in {"huggingface", "megatron"} else nullcontext():
            if form == "huggingface":
                sizes = _to_megatron(folder, staging / "result")
                write_manifest_together(staging / "result")
            elif form == "adapters":
                saved = SavedAdapters(folder, base)
                sizes = (
                    saved.write_alone(staging / "result")
                    if adapter
                    else saved.write_merged(staging / "result", shard_bytes)
                )
            else:
                tensors = _TENSORS[form](folder)
                sizes = _to_huggingface(folder, tensors, staging / "result", shard_bytes)
        if target.is_dir():
            # Raises if it is not empty: nothing of the user's is replaced.
            target.rmdir()
        (staging / "result").rename(target)
        sync(target.parent)
    return Conversion(
        source=str(source),
        target=str(target),
        to="megatron" if form == "huggingface" else "adapter" if adapter else "huggingface",
        tensors=len(sizes),
        bytes=sum(sizes),
    )


def _map_large_blocks() -> None:
    """Make malloc map large blocks separately, so that freed tensors leave no holes in the heap.

    Otherwise the heap grows with the number of layers, by about a fifth of their size.
    """
    with suppress(OSError, AttributeError):  # another C library than glibc
        # 64 KiB. To set it also stops glibc from raising the threshold with each large block that
        # is freed, up to 32 MiB (mallopt(3)).
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def _to_megatron(source: Path, target: Path) -> list[int]:
    description = _description(source)
    reader = _reader(source)
    outline = MetaModel(description.config)
    used = {name for parameter in outline.parameters for name in outline.sources(parameter)}
    if is_tied(description.config):
        used.add(OUTPUT_HEAD)  # equal to the embedding, or the description would not say tied
    check_all_used(source, reader.names(), used)
    for key, names in outline.stored_together().items():
        dtypes = [
            reader.dtype(tensor_name) for name in names for tensor_name in outline.sources(name)
        ]
        outline.set_dtype(names, _check_dtypes(dtypes, key, source))

    def value(name: str) -> torch.Tensor:
        tensors = []
        for expected, empty in outline.tensors(name):
            tensor = reader.tensor(expected)
            if tensor.shape != empty.shape:
                raise UnfitTensor(
                    expected,
                    fault="file",
                    in_model=str(tuple(empty.shape)),
                    in_version=str(tuple(tensor.shape)),
                    folder=source,
                )
            check_finite([(expected, tensor)], str(source))
            tensors.append(tensor)
        # A small tensor maps much more of the file than its bytes, and layers store it far apart.
        reader.forget()
        return outline.mapping.to_megatron(name, tensors)

    outline.save(target / "model", value)
    write_description(target / MODEL_FOLDER[-1], description)
    return [tensor.nbytes for _, tensor in _read_planned(outline)]


def _to_huggingface(
    source: Path, tensors: NamedTensors, target: Path, shard_bytes: int
) -> list[int]:
    sizes: list[int] = []

    def counted() -> NamedTensors:
        for name, tensor in tensors:
            sizes.append(tensor.nbytes)
            yield name, tensor
            del tensor

    write_model_folder(
        target,
        lambda folder: copy_files(source / MODEL_FOLDER[-1], folder),
        counted(),
        shard_bytes=shard_bytes,
    )
    return sizes


def _read_megatron(source: Path) -> NamedTensors:
    # Use the checkpoint's dtypes: a model may be trained in another one than its configuration's.
    outline = MetaModel(_description(source / MODEL_FOLDER[-1]).config)
    outline.check_all_read(source / "model")
    for name, dtype in outline.saved_dtypes(source / "model"):
        outline.set_dtype([name], _check_dtypes([dtype], name, source))
    for name, whole in outline.load(source / "model"):
        yield from finite_tensors(outline.mapping.to_huggingface(name, whole), str(source))


def _read_fsdp_shards(source: Path) -> NamedTensors:
    """Yield the tensors of FSDP's shard files, a tied one under its first name alone."""
    model = _meta_model(source)
    buffers = [name for name, _ in saved_buffers(model)]
    names = [*(name for name, _ in model.named_parameters()), *buffers]
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    ties = {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }
    tensors = tensors_of_shards(source, names, ties=ties)
    return finite_tensors(tensors, str(source), exempt=buffers)


def _meta_model(source: Path) -> Any:
    """Return the model of a checkpoint, without values.

    A critic is a model for token classification.
    """
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    config = _description(source / MODEL_FOLDER[-1]).config
    # Their methods have no annotations.
    make: Any = AutoModelForTokenClassification if head_tensors(config) else AutoModelForCausalLM
    with torch.device("meta"):
        return make.from_config(config, trust_remote_code=False)


def _read_exported_folder(source: Path) -> NamedTensors:
    reader = _reader(source / MODEL_FOLDER[-1])
    buffers = all_buffer_names(_meta_model(source))
    for name in reader.names():
        tensor = reader.tensor(name)
        check_finite([(name, tensor)], str(source), exempt=buffers)
        yield name, tensor
        # Else this name holds one tensor while the next one is read.
        del tensor
        reader.forget()


_TENSORS: dict[SourceForm, Callable[[Path], NamedTensors]] = {
    "megatron": _read_megatron,
    "fsdp": _read_fsdp_shards,
    "exported": _read_exported_folder,
}
"""Full tensors of a checkpoint, by its form."""


def _read_planned(outline: MetaModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every Hugging Face tensor of the model in order, without values."""
    for name in outline.parameters:
        yield from outline.tensors(name)


def _description(folder: Path) -> Description:
    try:
        return read_description(folder)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise SourceRefused(folder, "unknown model", reason=reason) from None


def _check_dtypes(dtypes: Sequence[torch.dtype], key: str, source: Path) -> torch.dtype:
    """Return the one dtype of the tensors that a checkpoint stores under one key."""
    dtype, *others = dict.fromkeys(dtypes)
    if others:
        raise SourceRefused(source, "dtypes", key, _format_dtypes(dtypes))
    if dtype not in _CONVERTED:
        raise SourceRefused(
            source, "dtype", key, _format_dtypes([dtype]), _format_dtypes(_CONVERTED)
        )
    return dtype


def _format_dtypes(dtypes: Iterable[torch.dtype]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))


def _reader(folder: Path) -> FolderReader:
    try:
        return FolderReader(folder)
    except FileNotFoundError as error:
        raise SourceRefused(folder, "weights", reason=str(error)) from None


@contextmanager
def _alone() -> Iterator[None]:
    """Make a process group of this process alone, for the block."""
    if dist.is_initialized():
        raise RankOfGroup()
    # In memory, as there are no peers: it opens no port.
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        leave()
        dist.destroy_process_group()

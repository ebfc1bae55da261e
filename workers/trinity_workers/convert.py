"""Between Hugging Face folders and Megatron's distributed checkpoints, both ways, streaming.

One process and no GPU. A checkpoint is of every layout at once, so one rank writes and reads it.
The parameters lie in files that are mapped into memory, so that the system may write out what is
done with. What stays in memory is one tensor, one safetensors file that is written, and what
megatron-core's checkpoints join or cut themselves: the feed-forward layers' first weights, which
are the greater part of them. So memory grows with the model still, at about half of its size.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from safetensors.torch import save_file
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode

from trinity_events.errors import TrinityError

from .engines.base import NamedTensors
from .engines.files import make_folder, sync, sync_tree
from .engines.megatron import MegatronEngine, ModelOptions, ParallelLayout, leave

SHARD_BYTES = 512 << 20
_LARGE = 1 << 16


class ConversionRefused(TrinityError):
    """There is nothing to convert from, or something where the result is to be."""


class Conversion(Struct, frozen=True, kw_only=True):
    """What was converted."""

    source: str
    target: str
    to: str
    tensors: int
    bytes: int


def convert(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Conversion:
    """Convert a folder to the other format; which it is of, is seen from what is in it.

    A Megatron folder is what :meth:`MegatronEngine.save_checkpoint` writes: ``model`` and
    ``huggingface``. Megatron's checkpoints unpickle on load.

    Args:
        source: Folder to convert.
        target: Folder to make; it appears whole or not at all.
        dtype: Of the weights; as they are when left out.
        shard_bytes: Largest size of a safetensors file, unless one tensor is larger.

    Raises:
        ConversionRefused: when there is no model to convert, or the target is there.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConversionRefused(
            f"{target} is there already: give a folder that is not, or remove it"
        )
    to_megatron = (source / "config.json").is_file()
    if not to_megatron and not (source / "model" / "metadata.json").is_file():
        raise ConversionRefused(
            f"{source} is neither a Hugging Face folder (config.json) nor a Megatron checkpoint "
            "(model/metadata.json)"
        )
    make_folder(target.parent)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        with _alone():
            if to_megatron:
                count, size = _to_megatron(source, staging / "result", dtype)
            else:
                count, size = _to_huggingface(source, staging / "result", dtype, shard_bytes)
        if target.is_dir():
            target.rmdir()
        (staging / "result").rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return Conversion(
        source=str(source),
        target=str(target),
        to="megatron" if to_megatron else "huggingface",
        tensors=count,
        bytes=size,
    )


def _to_megatron(source: Path, target: Path, dtype: torch.dtype | None) -> tuple[int, int]:
    from .engines.megatron.stream import FolderReader

    reader = FolderReader(source)
    engine = _engine(source, dtype or reader.tensor(reader.names()[0]).dtype, load=True)
    engine.checkpoint_manager.checkpoint_save_contents = ["model"]
    engine.save_checkpoint(str(target))
    sizes = [one.tensor.nbytes for one in engine.local_shards()]
    return len(sizes), sum(sizes)


def _to_huggingface(
    source: Path, target: Path, dtype: torch.dtype | None, shard_bytes: int
) -> tuple[int, int]:
    from megatron.core import dist_checkpointing

    if dtype is None:
        # Not the configuration's: a model may have been trained in another one.
        entries = dist_checkpointing.load_tensors_metadata(str(source / "model"))
        dtype = next(iter(entries.values())).dtype
    engine = _engine(source / "huggingface", dtype, load=False)
    engine.load_checkpoint(str(source))
    shutil.copytree(source / "huggingface", target)
    found = write_safetensors(engine.get_per_tensor_param(), target, shard_bytes)
    sync_tree(target)
    return found


def write_safetensors(tensors: NamedTensors, folder: Path, shard_bytes: int) -> tuple[int, int]:
    """Write tensors as Hugging Face does, in files of at most so many bytes, and their index.

    Returns:
        How many tensors, and their bytes.
    """
    files: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    count = total = held_bytes = 0

    def flush() -> None:
        nonlocal held_bytes
        save_file(held, folder / f"part-{len(files)}", metadata={"format": "pt"})
        files.append(list(held))
        held.clear()
        held_bytes = 0

    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > shard_bytes:
            flush()
        held[name] = tensor.clone(memory_format=torch.contiguous_format)
        held_bytes += tensor.nbytes
        total += tensor.nbytes
        count += 1
    flush()
    where: dict[str, str] = {}
    for index, names in enumerate(files):
        file = f"model-{index + 1:05}-of-{len(files):05}.safetensors"
        if len(files) == 1:
            file = "model.safetensors"
        (folder / f"part-{index}").rename(folder / file)
        where |= dict.fromkeys(names, file)
    if len(files) > 1:
        index_of = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index_of, indent=2))
    return count, total


def _engine(folder: Path, dtype: torch.dtype, *, load: bool) -> MegatronEngine:
    with _InFiles():
        return MegatronEngine(
            folder,
            device=torch.device("cpu"),
            layout=ParallelLayout(),
            model=ModelOptions(dtype=dtype),
            load_weights=load,
        )


class _InFiles(TorchFunctionMode):
    """Lets large new tensors lie in files without names, which the system may write out."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is not torch.empty or made.nbytes < _LARGE:
            return made
        with tempfile.NamedTemporaryFile(prefix="trinity-convert-") as file:
            flat = torch.from_file(file.name, shared=True, size=made.numel(), dtype=made.dtype)
        return flat.view(made.shape)


@contextmanager
def _alone() -> Iterator[None]:
    """A process group of this process, for the block."""
    if dist.is_initialized():
        raise ConversionRefused("this process is a rank of a group: convert in one of its own")
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        leave()
        dist.destroy_process_group()

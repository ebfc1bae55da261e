"""Hugging Face folders: the one writer of their weights, and a reader of tensors by name."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import field
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trinity_events.checkpoints.layout import COMPLETING, FILE_DIGESTS
from trinity_events.errors import IncompatibleWeights
from trinity_events.weights.errors import AbsentTensor, UnsupportedWeights
from trinity_events.weights.reading.model_folder import FILE_DTYPES
from trinity_events.weights.tensors import DTYPES, as_bytes

from ..storage.huggingface_files import set_dtype
from ..storage.sealed_folders import begin_folder, seal

SHARD_BYTES = 512 << 20
"""Maximum bytes of a file's tensors, unless one tensor is larger."""
INDEX = "model.safetensors.index.json"
DTYPE_NAMES = {DTYPES[dtype]: name for name, dtype in FILE_DTYPES.items()}
"""Names of the dtypes in safetensors files."""
_NAMED_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
OUTPUT_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
"""Names of the output head and of the embedding in the models that Megatron supports."""
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)position_ids$")
"""Buffers that older releases of transformers saved, and that models compute: it ignores these."""
_WEIGHT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Data types that a configuration may name: smaller ones are of quantised weights."""
HEADER_BYTES = 64 << 10
"""Bytes that a file reserves for its header, which is written last: the tensors to come are not
known. A file ends where its header would take more."""


class UnusedTensors(IncompatibleWeights):
    """A folder has tensors for which a model has no place: they would be lost.

    Attributes:
        path: The folder.
        names: Names of the tensors.
    """

    tensor: str | None = field(init=False, default=None)
    path: Path
    names: tuple[str, ...]

    def __str__(self) -> str:
        more = f" and {len(self.names) - 1} other tensors" if len(self.names) > 1 else ""
        return (
            f"{self.path} has {self.names[0]}{more}, for which the model of its config.json has "
            "no place: is it the one of these weights?"
        )


def check_all_used(path: Path, names: Iterable[str], used: Collection[str]) -> None:
    """Raise UnusedTensors for names of a folder's tensors that are not among the used ones."""
    unused = sorted(name for name in names if name not in used and not _COMPUTED.search(name))
    if unused:
        raise UnusedTensors(path, tuple(unused))


def are_equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have one dtype, one shape and the same values."""
    return tensor.dtype == other.dtype and torch.equal(tensor, other)  # noqa: TID251  # one dtype


def has_separate_head(folder: Path) -> bool:
    """Return True if a folder has an output head that differs from the embedding."""
    try:
        reader = FolderReader(folder)
    except FileNotFoundError:
        return False
    if not {OUTPUT_HEAD, EMBEDDING} <= {*reader.names()}:
        return False
    return not are_equal(reader.tensor(OUTPUT_HEAD), reader.tensor(EMBEDDING))


def write_model_folder(
    folder: Path,
    describe: Callable[[Path], None],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write a Hugging Face folder durably, its list of digests last; return the tensors' bytes.

    Memory holds one tensor. A configuration that names another dtype than that of most weights is
    corrected. Without the list of digests, the folder is not complete.

    Args:
        folder: Folder to write to; files that it has are replaced.
        describe: Writes all files but those of the weights: configuration and tokenizer.
        tensors: Full tensors by Hugging Face name.
        shard_bytes: Maximum bytes of a file's tensors, unless one tensor is larger.
    """
    begin_folder(folder)
    describe(folder)
    with WeightsWriter(folder, shard_bytes) as writer:
        for name, tensor in tensors:
            writer.add(name, tensor)
            del tensor
    if writer.dtype is not None:
        set_dtype(folder, str(writer.dtype).removeprefix("torch."))
    seal(folder)
    return writer.nbytes


def copy_files(source: Path, target: Path) -> None:
    """Copy a folder, except for weights and the list of digests."""
    left_out = shutil.ignore_patterns(
        "*.safetensors", "*.bin", "*.pth", INDEX, FILE_DIGESTS, COMPLETING
    )
    shutil.copytree(source, target, ignore=left_out, dirs_exist_ok=True)


class WeightsWriter:
    """Writer of safetensors files with an index, to be used in a ``with`` block.

    Files get their names at the end of the block, when their number is known. A block that raises
    removes them.

    Args:
        folder: Folder to write to.
        shard_bytes: Maximum bytes of a file's tensors, unless one tensor is larger.
        header_bytes: Bytes of a file that its header may take.
    """

    def __init__(
        self, folder: Path, shard_bytes: int = SHARD_BYTES, header_bytes: int = HEADER_BYTES
    ) -> None:
        self._header_bytes = header_bytes
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._file: _SafetensorsWriter | None = None
        self._files: list[list[str]] = []
        """Names of the tensors in each file."""
        self.nbytes = 0
        """Bytes of all tensors so far."""
        self._dtypes: Counter[torch.dtype] = Counter()

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        if failed is None:
            self._finish()
            return
        if self._file is not None:
            self._file.close()
        # Files of an earlier, whole folder stay: only those without a final name are this block's.
        for number in range(len(self._files)):
            self._partial(number).unlink(missing_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor. Raises IncompatibleWeights for a dtype that the format lacks."""
        if tensor.dtype not in DTYPE_NAMES:
            raise UnsupportedWeights(name, fault="saved", dtype=str(tensor.dtype))
        if self._file is None or not self._file.has_room(name, tensor, self._shard_bytes):
            self._next_file()
        assert self._file is not None
        self._file.add(name, tensor)
        self._files[-1].append(name)
        self.nbytes += tensor.nbytes
        if tensor.dtype in _WEIGHT_DTYPES:
            self._dtypes[tensor.dtype] += tensor.numel()

    @property
    def dtype(self) -> torch.dtype | None:
        """Data type of most values so far; None without values of a dtype for weights."""
        return max(self._dtypes, key=self._dtypes.__getitem__, default=None)

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.finish()
        self._files.append([])
        self._file = _SafetensorsWriter(
            self._partial(len(self._files) - 1).open("wb"), self._header_bytes
        )

    def _finish(self) -> None:
        if self._file is None:  # a model without tensors has a file too
            self._next_file()
        assert self._file is not None
        self._file.finish()
        # Only now, and without a list of digests: a reader takes no mixture of two versions for
        # whole.
        for stale in (*self._folder.glob("model*.safetensors"), self._folder / INDEX):
            stale.unlink(missing_ok=True)
        count, where = len(self._files), dict[str, str]()
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            if count == 1:
                file = "model.safetensors"
            self._partial(number).replace(self._folder / file)
            where |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": where}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2))

    def _partial(self, number: int) -> Path:
        return self._folder / f".weights-{number}.tmp"


class _SafetensorsWriter:
    """One safetensors file: room for its header, then the tensors one after the other."""

    def __init__(self, file: BinaryIO, header_bytes: int) -> None:
        self._file = file
        self._header_bytes = header_bytes
        # The format: 8 bytes of the header's length, the header, then the tensors' bytes.
        file.seek(8 + self._header_bytes)
        self._entries = ['"__metadata__":{"format":"pt"}']
        self._header = len(self._entries[0]) + 2  # with both braces
        self._end = 0

    def has_room(self, name: str, tensor: torch.Tensor, shard_bytes: int) -> bool:
        """Return True if the tensor may be appended."""
        entry = len(self._entry(name, tensor).encode()) + 1  # with its comma
        fits = not self._end or self._end + tensor.nbytes <= shard_bytes
        return fits and self._header + entry <= self._header_bytes

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor."""
        entry = self._entry(name, tensor)
        self._entries.append(entry)
        self._header += len(entry.encode()) + 1
        self._file.write(as_bytes(tensor))
        self._end += tensor.nbytes

    def finish(self) -> None:
        """Write the header, padded with spaces as the format allows, and close the file."""
        self._file.seek(0)
        # The reserved length, not the used one: the tensors' bytes are behind it already.
        self._file.write(self._header_bytes.to_bytes(8, "little"))
        self._file.write(f"{{{','.join(self._entries)}}}".encode().ljust(self._header_bytes))
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _entry(self, name: str, tensor: torch.Tensor) -> str:
        described = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + tensor.nbytes],
        }
        return f"{json.dumps(name)}:{json.dumps(described, separators=(',', ':'))}"


class FolderReader:
    """Reader of tensors by name from the safetensors files of a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        if index.is_file():
            self._where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        else:
            self._where = {
                name: path.name
                for path in sorted(folder.glob("*.safetensors"))
                for name in self._open(path.name).keys()  # noqa: SIM118  # no dictionary
            }
        if not self._where:
            raise FileNotFoundError(f"{folder} has no *.safetensors files to load weights from")

    @property
    def folder(self) -> Path:
        """The folder."""
        return self._folder

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._where)

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor. Raises IncompatibleWeights if the folder has none of that name."""
        self._check_name(name)
        tensor: torch.Tensor = self._open(self._where[name]).get_tensor(name)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Return the tensor's dtype without reading values.

        It comes from the header: a tensor of the library maps 64 KiB of the file as it is made, so
        that the dtypes of a model of many layers would take as much memory as several layers.
        """
        self._check_name(name)
        dtype = _NAMED_DTYPES.get(self._open(self._where[name]).get_slice(name).get_dtype())
        return self.tensor(name).dtype if dtype is None else dtype

    def forget(self) -> None:
        """Close the memory-mapped files: the pages that were read count as memory until then."""
        self._files.clear()

    def _check_name(self, name: str) -> None:
        if name not in self._where:
            raise AbsentTensor(name, fault="folder", folder=self._folder)

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._files:
            # only the file name: an index must not point outside of the folder
            path = self._folder / Path(file).name
            self._files[file] = safe_open(path, framework="pt", device="cpu")
        return self._files[file]

"""Weights in a Hugging Face folder, as a ready state dict announced them.

The folder has a list of its files' digests, whose own digest is in the announcement. So a reader
knows every byte of the version, wherever the folder lies: the reducer may be giving it its final
name just then.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
from anyio.from_thread import start_blocking_portal
from msgspec import Struct

from trinity_schemas import (
    Chunk,
    StepReady,
    StepRef,
    TensorEntry,
    WeightManifest,
)

from ...checkpoints.digest_list import parse_digests
from ...checkpoints.layout import (
    FILE_DIGESTS,
    MODEL_FOLDER,
    final_name,
    parse_staged_folder,
)
from ...client.checkpoint_lease import hold_step
from ...core.file_versions import weights_save
from ...errors import CheckpointHeld, VersionNotStored
from ...log.retry import retry_for
from ...system.open_folder import OpenFolder
from ..errors import CorruptFile, UnsupportedWeights
from ..part_bytes import PartBytes
from ..tensors import digest
from .pull import PulledVersion, Selection

WEIGHTS = ".safetensors"
"""Ending of the files that hold weights."""
LONGEST_HEADER = 100_000_000
"""Bytes of the longest header of such a file, which the safetensors library sets."""
_LONGEST_LIST = 16 << 20
"""Bytes read of a list of digests."""
_ALGORITHM = "xxh3:"
_LOOKS, _BETWEEN_LOOKS = 3, 0.05
"""Looks for a folder, and seconds between them: the reducer may replace one by two renames."""
FILE_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "C64": "complex64",
}
"""Dtypes of the contract by their names in safetensors files. The library's reader for torch has no
block scales and no packed numbers, so that no folder has them."""


class _Tensor(Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _DigestedFile(NamedTuple):
    name: str
    data: memoryview
    digest: str
    """Digest in the list, which the bytes must have."""


@contextmanager
def pull_folder(
    run_folder: Path,
    run_id: str,
    ready: StepReady,
    selection: Selection | None = None,
    *,
    redis_url: str | None = None,
    deadline: float = 0.0,
) -> Iterator[PulledVersion]:
    """Hold the announced version, whole and verified, until the block ends.

    Its tensors lie in the mapped files.

    Args:
        run_folder: The run's checkpoint directory.
        run_id: The run.
        ready: Announcement of a state dict.
        selection: Tensors to select, and the slice of each.
        redis_url: Server of the log, which has the lease on the step.
        deadline: Seconds to wait for that server if it is away.

    Raises:
        VersionUnavailable: when the files are gone, or are not to be found here.
        CorruptVersion: when they are not those announced.
        IncompatibleWeights: for a state dict of another form.
    """
    proof = weights_save(ready)
    if proof is None or proof.digest is None:
        raise UnsupportedWeights(fault="format", step=ready.step)
    with ExitStack() as exit_stack:
        # The lease is renewed by a task, in a thread of its own.
        portal = exit_stack.enter_context(start_blocking_portal())

        def hold() -> None:
            lease = hold_step(run_id, ready.step, redis_url=redis_url)
            exit_stack.enter_context(portal.wrap_async_context_manager(lease))

        try:
            retry_for(deadline, hold)
        except CheckpointHeld as error:
            weights = f"weights of step {ready.step}"
            raise VersionNotStored(weights, fault="checkpoint", reason=str(error)) from error
        files = _open_files(run_folder, ready, proof.digest)
        parts = tuple(
            (_check_file(file, run_id, ready, rank), PartBytes([_tensor_bytes(file)]))
            for rank, file in enumerate(files)
        )
        yield PulledVersion(
            ref=StepRef(ready.epoch, ready.step),
            digest=proof.digest,
            bytes=sum(manifest.nbytes for manifest, _ in parts),
            parts=parts,
            bases=(None,) * len(parts),
            selection=selection,
        )


def _open_files(run_folder: Path, ready: StepReady, announced: str) -> list[_DigestedFile]:
    """Map the version's files, from whichever of its places they are in."""
    places = [final_name(ready.step)]
    staged = parse_staged_folder(ready.path)
    if staged is not None:
        # First, where the files were when the step was announced.
        places.insert(0, staged)
    other: Path | None = None
    for look in range(_LOOKS):
        if look:
            time.sleep(_BETWEEN_LOOKS)
        for place in places:
            try:
                with (
                    OpenFolder.open_run(run_folder) as run,
                    run.below(*place.split("/"), *MODEL_FOLDER) as folder,
                ):
                    if (files := _map_files(folder, announced)) is not None:
                        return files
                    other = folder.path
            except (FileNotFoundError, NotADirectoryError):
                continue
    if other is not None:
        raise CorruptFile(file=str(other / FILE_DIGESTS), step=ready.step, fault="list")
    raise VersionNotStored(f"weights of step {ready.step}", fault="folder", place=str(run_folder))


def _map_files(folder: OpenFolder, announced: str) -> list[_DigestedFile] | None:
    """Map the files of weights; None unless the folder has the announced list of digests."""
    listed = folder.read(FILE_DIGESTS, _LONGEST_LIST)
    # The list seals all files, so that this one digest of the log is enough.
    if listed is None or f"sha256:{hashlib.sha256(listed).hexdigest()}" != announced:
        return None
    files = []
    for name, digested in parse_digests(listed.decode()).items():
        if name.endswith(WEIGHTS):
            # A link could lead to files of another user, or outside of the checkpoint.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(name, flags, dir_fd=folder.descriptor)
            try:
                size = os.fstat(descriptor).st_size
                # mmap refuses a file without bytes.
                data = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if size else b""
            finally:
                os.close(descriptor)
            files.append(_DigestedFile(name, memoryview(data), f"{_ALGORITHM}{digested}"))
    return files


def _tensor_bytes(file: _DigestedFile) -> memoryview:
    """Return the bytes after the header, whose length the file begins with."""
    # Format of safetensors: 8 bytes of length, a header in JSON, and the tensors' bytes.
    length = int.from_bytes(file.data[:8], "little")
    return file.data[8 + length :]


def _check_file(file: _DigestedFile, run_id: str, ready: StepReady, rank: int) -> WeightManifest:
    """Verify a file, and return its tensors as the manifest of a part.

    Raises CorruptVersion if its bytes are not those announced, or contradict themselves.
    """
    # Before the header is parsed, which may otherwise be anything.
    if digest(file.data) != file.digest:
        raise CorruptFile(file=file.name, step=ready.step, fault="digest")
    try:
        data = _tensor_bytes(file)
        entries = sorted(_entries(file), key=lambda entry: (entry.offset, entry.nbytes))
        return WeightManifest(
            run_id=run_id,
            epoch=ready.epoch,
            step=ready.step,
            rank=rank,
            tensors=tuple(entries),
            chunks=(Chunk(nbytes=len(data), digest=file.digest),),
        )
    except ValueError as error:  # msgspec's errors are ValueErrors too
        raise CorruptFile(
            file=file.name, step=ready.step, fault="contradiction", reason=str(error)
        ) from None


def _entries(file: _DigestedFile) -> Iterator[TensorEntry]:
    length = int.from_bytes(file.data[:8], "little")
    # The safetensors library has the same limit.
    if not 0 < length <= min(LONGEST_HEADER, len(file.data) - 8):
        raise ValueError(f"its header is said to be of {length} bytes")
    header = msgspec.json.decode(file.data[8 : 8 + length], type=dict[str, msgspec.Raw])
    header.pop("__metadata__", None)
    for name, raw in header.items():
        tensor = msgspec.json.decode(raw, type=_Tensor)
        if tensor.dtype not in FILE_DTYPES:
            raise UnsupportedWeights(name, fault="dtype", dtype=tensor.dtype)
        begin, end = tensor.data_offsets
        entry = TensorEntry(
            name=name, dtype=FILE_DTYPES[tensor.dtype], shape=tensor.shape, offset=begin
        )
        if begin + entry.nbytes != end:
            raise ValueError(
                f"tensor {name!r} of {entry.nbytes} bytes is said to take {end - begin}"
            )
        yield entry

"""Publishing one rank's part of a version, chunk by chunk."""

from __future__ import annotations

import hashlib

import torch
from msgspec import Struct
from typing_extensions import Buffer

from trinity_schemas import Chunk, TensorEntry, WeightManifest, encode

from .base import ChunkStore, PartRef
from .tensors import as_bytes, digest, dtype_name

CHUNK_BYTES = 4 << 20


class PublishedPartReport(Struct, frozen=True, kw_only=True):
    """What was published."""

    manifest_digest: str
    bytes: int
    tensors: int
    chunks: int


class PartWriter:
    """Takes tensors one by one, lays them end to end and sends a chunk whenever one is full.

    Holds one chunk in memory, whatever the size of the model.
    """

    def __init__(self, store: ChunkStore, part: PartRef, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._store = store
        self._part = part
        self._buffer = memoryview(bytearray(chunk_bytes))
        self._filled = 0
        self._offset = 0
        self._tensors: list[TensorEntry] = []
        self._chunks: list[Chunk] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor. Raises TypeError for a dtype that cannot travel."""
        entry = TensorEntry(
            name=name,
            dtype=dtype_name(tensor.dtype),
            shape=tuple(tensor.shape),
            offset=self._offset,
        )
        data = as_bytes(tensor)
        self._tensors.append(entry)
        self._offset += len(data)
        while len(data):
            room = len(self._buffer) - self._filled
            taken = data[:room]
            self._buffer[self._filled : self._filled + len(taken)] = taken
            self._filled += len(taken)
            data = data[room:]
            if self._filled == len(self._buffer):
                self._flush()

    def seal(self) -> PublishedPartReport:
        """Send what is left and the manifest: from now on the part can be read."""
        if self._filled:
            self._flush()
        manifest = encode(
            WeightManifest(
                run_id=self._part.run_id,
                epoch=self._part.epoch,
                step=self._part.step,
                rank=self._part.rank,
                tensors=tuple(self._tensors),
                chunks=tuple(self._chunks),
            )
        )
        self._store.put_manifest(self._part, manifest)
        return PublishedPartReport(
            manifest_digest=manifest_digest(manifest),
            bytes=self._offset,
            tensors=len(self._tensors),
            chunks=len(self._chunks),
        )

    def discard(self) -> None:
        """Take back what was sent of a part that will not be sealed."""
        self._store.delete(self._part, len(self._chunks))

    def _flush(self) -> None:
        data = self._buffer[: self._filled]
        self._store.put_chunk(self._part, len(self._chunks), data)
        self._chunks.append(Chunk(nbytes=len(data), digest=digest(data)))
        self._filled = 0


def manifest_digest(manifest: Buffer) -> str:
    """The digest that seals an encoded manifest, and through it every chunk."""
    return f"sha256:{hashlib.sha256(manifest).hexdigest()}"

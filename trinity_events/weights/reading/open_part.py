"""Open part of a version: its manifest is checked, and its chunks are verified here.

Every reader verifies through this module, so that a version is whole or an error (invariant 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import NamedTuple

from trinity_schemas import ContractError, PublishedPart, WeightManifest, decode_manifest

from ...errors import CorruptVersion, VersionUnavailable
from ..publishing.publish import manifest_digest
from ..tensors import digest
from ..transports.base import ChunkStore, PartRef, PartSource, TensorSource


class OpenPart(NamedTuple):
    """Part that its transport protects until it is closed."""

    ref: PartRef
    source: PartSource | TensorSource
    manifest: WeightManifest
    harm: str
    """Ending of the error for a chunk that is not what was published."""

    @property
    def sizes(self) -> list[int]:
        """Sizes of the chunks. They are safe: the manifest's digest is from the log."""
        return [chunk.nbytes for chunk in self.manifest.chunks]

    def check(self, index: int, data: memoryview | None, digested: str | None = None) -> None:
        """Verify a chunk in memory, as transports ask for. Raises as :meth:`check_received`."""
        length, pieces = (None, ()) if data is None else (len(data), (data,))
        self.check_received(index, length, digested, pieces)

    def check_received(
        self,
        index: int,
        length: int | None,
        digested: str | None,
        pieces: Sequence[memoryview] = (),
    ) -> None:
        """Verify a chunk that was received.

        Args:
            index: Index of the chunk.
            length: Its length in bytes; None if it is missing.
            digested: Its digest, if that was computed on arrival.
            pieces: Its bytes. A digest that was computed before the seal is no proof of a fault, so
                that bytes at hand are digested again.

        Raises:
            VersionUnavailable: when the chunk is missing.
            CorruptVersion: when it is not the published one.
        """
        if length is None:
            raise VersionUnavailable(f"chunk {index} of the {self.ref} is no longer there")
        chunk = self.manifest.chunks[index]
        if length == chunk.nbytes and digested != chunk.digest and pieces:
            digested = digest(*pieces)
        if (length, digested) != (chunk.nbytes, chunk.digest):
            raise CorruptVersion(
                f"chunk {index} of the {self.ref} is not what was published: {self.harm}",
                self.ref.rank,
                index,
            )


def open_part(
    store: ChunkStore,
    exit_stack: ExitStack,
    ref: PartRef,
    announced: PublishedPart,
    *,
    harm: str,
    needed_by: PartRef | None = None,
) -> OpenPart:
    """Open a part until ``exit_stack`` closes, and check its manifest.

    Args:
        store: Store that has the part.
        exit_stack: Closes the part.
        ref: The part.
        announced: The part as it was announced.
        harm: Ending of the error for a chunk that is not what was published.
        needed_by: Part that rests on this one, for the error message.

    Raises:
        VersionUnavailable: when the part is gone.
        CorruptVersion: when its manifest is not the announced one.
    """
    source = store.open(ref)
    if source is None:
        what = f"the {ref}" if needed_by is None else f"the {needed_by} rest on the {ref}, which"
        raise VersionUnavailable(f"{what} are not there: {store.missing(ref)}")
    exit_stack.enter_context(closing(source))
    return OpenPart(ref, source, _manifest(source.manifest, ref, announced), harm)


def _manifest(raw: bytes, part: PartRef, announced: PublishedPart) -> WeightManifest:
    """Decode and check a manifest. Raises CorruptVersion unless it is the announced one."""
    if manifest_digest(raw) != announced.manifest_digest:
        what = f"the manifest of the {part} is not the one that was announced"
        raise CorruptVersion(what, part.rank)
    try:
        manifest = decode_manifest(raw)
    except ContractError as error:
        what = f"the manifest of the {part} contradicts itself: {error}"
        raise CorruptVersion(what, part.rank) from None
    named = PartRef(manifest.run_id, manifest.epoch, manifest.step, manifest.rank)
    if named != part:
        raise CorruptVersion(f"the manifest of the {part} is of the {named}", part.rank)
    if manifest.nbytes != announced.bytes:
        raise CorruptVersion(
            f"the manifest of the {part} is of {manifest.nbytes} bytes, "
            f"{announced.bytes} were announced",
            part.rank,
        )
    return manifest

"""Verify that a model holds the published tensors.

Chunks are verified where they are read. A fault between there and the model's memory, or a later
change of the model, shows only in a digest of the model's own tensors.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from typing_extensions import Buffer

from trinity_schemas import (
    MAX_UNPROVEN,
    Chunk,
    Probes,
    ProofStatus,
    TensorEntry,
    WeightManifest,
    WeightsProof,
)

from ..compatibility import find_targets, find_ties
from ..devices.digests import ALGORITHM as ON_DEVICE
from ..devices.digests import digest_all
from ..errors import CorruptTensor
from ..reading.pull import Selection, get_slice
from ..slices import contains, full_slice
from ..tensors import (
    DTYPES,
    Digesting,
    as_bytes,
    as_dense,
    digest,
    dtype_name,
    flat_bytes,
)

_LAYER = re.compile(r"^(?:.*?\.)?\d+(?=\.)")
"""Path of a layer: a name up to its first number."""


class InstallChecks:
    """Checks of a module that a version has filled, before it serves.

    By default all tensors are compared, and nothing else is checked.
    """

    compares_chunks = False
    """Compare by digests of chunks, too, where a version has none of single tensors."""

    def select(self, names: Collection[str]) -> Collection[str]:
        """Return the names of the tensors to compare, of those that the version brings."""
        return names

    def finish(self, probes: Probes | None, proof: WeightsProof) -> WeightsProof:
        """Return the proof after further checks of the module.

        Args:
            probes: Probes of the version, if it has any.
            proof: Result of the comparison.

        Raises:
            NotAsPublished: The module does not compute with what was published.
            ProofTooWeak: The proof is less than is asked for.
        """
        return proof


ALL_COMPARED = InstallChecks()


def find_probes(manifests: Iterable[WeightManifest]) -> Probes | None:
    """Return the probes of a version; None if no part of it has any."""
    return next((manifest.probes for manifest in manifests if manifest.probes is not None), None)


def select_layers(names: Iterable[str], count: int, turn: int) -> set[str]:
    """Return the names of ``count`` layers, so that consecutive turns go round all of them.

    A tensor outside of the numbered layers, such as an embedding, belongs to a layer of its module.
    """
    layers: dict[str, list[str]] = {}
    for name in names:
        numbered = _LAYER.match(name)
        layer = name.rpartition(".")[0] if numbered is None else numbered[0]
        layers.setdefault(layer, []).append(name)
    ordered = list(layers.values())
    places = {(turn * count + index) % len(ordered) for index in range(count)} if ordered else set()
    return {name for place in places for name in ordered[place]}


def check_installed(
    module: torch.nn.Module,
    manifests: Sequence[WeightManifest],
    selection: Selection | None = None,
    *,
    cast: bool = False,
    checks: InstallChecks = ALL_COMPARED,
) -> WeightsProof:
    """Compare digests of the model's tensors with the publisher's, and make further checks.

    The version needs digests of its tensors. Only tensors and shards that the model holds in full
    are compared. Its layers compute with these as they lie.

    Args:
        module: The model.
        manifests: Manifests of the version's parts.
        selection: Selection that the version was pulled with.
        cast: Allow another floating-point dtype in the model. A wider one is compared after it is
            converted back, which loses nothing of what was published; a narrower one is not.
        checks: Tensors to compare, and further checks.

    Returns:
        The proof: of all tensors of the model, or of those of the selection. A tensor that shares
        the memory of a compared one, as a tied output layer does, is proven with it.

    Raises:
        CorruptVersion: naming the first tensor that differs.
    """
    proof = _compare_digests(module, manifests, selection, cast=cast, checks=checks)
    return checks.finish(find_probes(manifests), proof)


def _compare_digests(
    module: torch.nn.Module,
    manifests: Sequence[WeightManifest],
    selection: Selection | None,
    *,
    cast: bool,
    checks: InstallChecks,
) -> WeightsProof:
    began = time.monotonic()
    targets = find_targets(module)
    selected = [
        name
        for name in dict.fromkeys(entry.name for each in manifests for entry in each.tensors)
        if selection is None or name in selection
    ]
    names = frozenset(checks.select(selected))
    compared: set[str] = set()
    skipped: set[str] = set()
    for manifest in manifests:
        entries = [entry for entry in manifest.tensors if entry.name in names]
        digested = [entry for entry in entries if entry.digest is not None]
        # A delta always has a digest, by which it is verified before it is applied.
        if not checks.compares_chunks and all(entry.encoding != "dense" for entry in digested):
            skipped |= {entry.name for entry in entries}
            continue
        installed = _InstalledPart(targets, manifest, selection or {})
        for entry in digested:
            matches = installed.matches_tensor(entry)
            if matches is False:
                raise CorruptTensor(fault="installed", tensor=entry.name, step=manifest.step)
            (compared if matches else skipped).add(entry.name)
        if checks.compares_chunks and len(digested) < len(entries):
            for entry, is_same in installed.compare_chunks({entry.name for entry in entries}):
                (compared if is_same else skipped).add(entry.name)
    # A tensor counts only if all of its shards were compared.
    compared -= skipped
    if not compared:
        return WeightsProof(status="unproven", checks=("names",), unproven_count=len(targets))
    expected = targets.keys() if selection is None else selection.keys() & targets.keys()
    ties = find_ties(targets, compared)
    proven = {id(targets[name]) for name in (*compared, *ties)}
    unproven = sorted(name for name in expected if id(targets[name]) not in proven)
    return make_proof(len(compared), unproven, time.monotonic() - began)


class _InstalledPart:
    """Tensors of a model that one part of a version has filled.

    Args:
        targets: The model's tensors by name.
        manifest: Manifest of the part.
        selection: Selected slices of tensors; those that it lacks were selected in full.
    """

    def __init__(
        self,
        targets: Mapping[str, torch.Tensor],
        manifest: WeightManifest,
        selection: Selection,
    ) -> None:
        self._targets = targets
        self._manifest = manifest
        self._selection = selection

    def matches_tensor(self, entry: TensorEntry) -> bool | None:
        """Return True if a tensor has its entry's digest; None if that cannot be seen."""
        data = self._read(entry)
        return data if isinstance(data, bool | None) else digest(as_bytes(data)) == entry.digest

    def compare_chunks(self, names: Collection[str]) -> Iterator[tuple[TensorEntry, bool]]:
        """Yield each entry without a digest, with True once chunks with its bytes are compared.

        A chunk is compared as a whole, with zeros between its tensors. What it has of a tensor that
        cannot be read, or of a delta, leaves all of it uncompared: its entries come with False.

        Args:
            names: Tensors to compare.

        Raises CorruptVersion for the first chunk that differs.
        """
        entries, begin, first = self._manifest.tensors, 0, 0
        for entry in entries:  # without elements it may lie in no chunk, and has nothing to compare
            if entry.name in names and entry.digest is None and not entry.part_bytes:
                yield entry, True
        algorithm = (
            self._manifest.chunks[0].digest.partition(":")[0] if self._manifest.chunks else ""
        )
        digests = _CHUNK_DIGESTS.get(algorithm)
        read: dict[int, Any] = {}
        for chunk in self._manifest.chunks:
            end = begin + chunk.nbytes
            # Entries are sorted by offset: tensors that end before this chunk are in no later one.
            while first < len(entries) and _end(entries[first]) <= begin:
                read.pop(first, None)
                first += 1
            places = []
            for place in range(first, len(entries)):
                if entries[place].offset >= end:
                    break
                places.append(place)
            yielded = [
                entry
                for entry in (entries[place] for place in places)
                if entry.name in names and entry.digest is None and entry.part_bytes
            ]
            if yielded:
                for place in places:
                    # A tensor may span many chunks, and reading one of a GPU costs a copy.
                    if place not in read and digests is not None:
                        data = self._read(entries[place])
                        read[place] = data if isinstance(data, bool | None) else digests.view(data)
                tensors = [(entries[place], read.get(place)) for place in places]
                outcome = _matches_chunk(chunk, begin, tensors, digests)
                if outcome is False:
                    raise CorruptTensor(
                        fault="installed" if len(places) == 1 else "chunk",
                        tensor=entries[places[0]].name,
                        last=entries[places[-1]].name,
                        step=self._manifest.step,
                    )
                yield from ((entry, bool(outcome)) for entry in yielded)
            begin = end

    def _read(self, entry: TensorEntry) -> torch.Tensor | bool | None:
        """Return what was published, on the model's device, if a tensor has it.

        Return None if that cannot be seen, and False if it does not have them.
        """
        if entry.name not in self._targets:
            return None
        whole = full_slice(entry.global_shape or entry.shape)
        target_box, box = self._selection.get(entry.name) or whole, get_slice(entry)
        if not contains(target_box, box):
            return None
        tensor = self._targets[entry.name].detach()[box.inside(target_box)]
        dtype = DTYPES[entry.dtype]
        if tensor.dtype == dtype:
            return tensor
        if torch.promote_types(tensor.dtype, dtype) != tensor.dtype:
            return None  # a narrower dtype has lost bits
        # Widening loses nothing, so the way back gives the published bits.
        narrow = tensor.to(dtype)
        # Compared as bytes: as numbers NaN differs from itself, and -0.0 equals 0.0.
        is_same = flat_bytes(narrow.to(tensor.dtype)) == flat_bytes(tensor.contiguous())
        return narrow if bool(is_same.all()) else False


class _ChunkDigests(NamedTuple):
    """Algorithm of chunks' digests, and the form in which it reads tensors."""

    view: Callable[[torch.Tensor], Any]
    """Returns the bytes of a tensor, where they are digested."""
    digest: Callable[[int, Sequence[tuple[int, Any]]], str]
    """Returns the digest of a chunk: its size, and the offset and bytes of each piece of it."""


def _digest_on_host(nbytes: int, pieces: Sequence[tuple[int, memoryview]]) -> str:
    joined: list[Buffer] = []
    at = 0
    for begin, data in pieces:
        joined += [bytes(max(0, begin - at)), data]
        at = begin + len(data)
    # The empty piece makes the call valid without further ones.
    return digest(b"", *joined, bytes(nbytes - at))


def _digest_on_device(nbytes: int, pieces: Sequence[tuple[int, torch.Tensor]]) -> str:
    chunk = pieces[0][1].new_zeros(nbytes)  # uint8 (nbytes,)
    # One operation for all: a copy of its own takes longer than the bytes of a small tensor.
    torch._foreach_copy_(
        [chunk[begin : begin + len(data)] for begin, data in pieces], [data for _, data in pieces]
    )
    [whole] = digest_all([chunk])
    return whole


_CHUNK_DIGESTS = {
    digest(b"").partition(":")[0]: _ChunkDigests(as_bytes, _digest_on_host),
    ON_DEVICE: _ChunkDigests(lambda tensor: flat_bytes(as_dense(tensor)), _digest_on_device),
}
"""Algorithms by the names that begin their digests. A sink digests all its chunks by one."""


def _matches_chunk(
    chunk: Chunk,
    begin: int,
    tensors: Sequence[tuple[TensorEntry, Any]],
    digests: _ChunkDigests | None,
) -> bool | None:
    """Return True if tensors have the bytes of a chunk; None if that cannot be seen.

    Args:
        chunk: The chunk.
        begin: Its offset in the part.
        tensors: Entries with bytes in it, each with the bytes of all of its tensor.
        digests: Algorithm of the part's chunks; None if it is unknown.
    """
    if any(data is False for _, data in tensors):
        return False
    if digests is None or any(data is None or entry.encoding != "dense" for entry, data in tensors):
        return None
    pieces, end = [], begin + chunk.nbytes
    for entry, data in tensors:
        start, stop = max(entry.offset, begin), min(_end(entry), end)
        if start < stop:
            # Gaps between aligned tensors are zeros in the part.
            pieces.append((start - begin, data[start - entry.offset : stop - entry.offset]))
    return digests.digest(chunk.nbytes, pieces) == chunk.digest


def _end(entry: TensorEntry) -> int:
    return entry.offset + entry.part_bytes


def make_proof(compared: int, unproven: Sequence[str], seconds: float) -> WeightsProof:
    """Return the proof of a model into which was looked.

    Args:
        compared: Number of tensors that are as they were published.
        unproven: Tensors that were not compared.
        seconds: Seconds that it took.
    """
    status: ProofStatus = "proven" if not unproven else "partly" if compared else "unproven"
    return WeightsProof(
        status=status,
        checks=("names", "served"),
        tensors=compared,
        unproven=tuple(unproven[:MAX_UNPROVEN]),
        unproven_count=len(unproven),
        seconds=seconds,
    )


def model_digest(module: torch.nn.Module) -> str:
    """Return a digest of the names, dtypes, shapes and bytes of all tensors that a version fills.

    Two models have the same digest only if they would generate alike.
    """
    hasher = Digesting()
    # Sorted, since models may register their tensors in different orders.
    for name, target in sorted(find_targets(module).items()):
        tensor = target.detach()
        hasher.update(f"{name}:{dtype_name(tensor.dtype)}:{tuple(tensor.shape)}:".encode())
        hasher.update(as_bytes(tensor))
    return hasher.digest()

"""Verify that a model holds the published tensors.

Chunks are verified where they are read. A fault between there and the model's memory, or a later
change of the model, shows only in a digest of the model's own tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch

from trinity_schemas import MAX_UNPROVEN, WeightManifest, WeightsProof

from ..compatibility import find_targets, find_ties
from ..errors import CorruptTensor
from ..reading.pull import Selection, get_slice
from ..slices import contains, full_slice
from ..tensors import DTYPES, Digesting, as_bytes, digest, dtype_name


def check_installed(
    module: torch.nn.Module,
    manifests: Iterable[WeightManifest],
    selection: Selection | None = None,
    *,
    cast: bool = False,
) -> WeightsProof:
    """Compare digests of the model's tensors with the publisher's.

    The version needs digests of its tensors. Only tensors and shards that the model holds in full
    are compared. Its layers compute with these as they lie.

    Args:
        module: The model.
        manifests: Manifests of the version's parts.
        selection: Selection that the version was pulled with.
        cast: Skip the tensors that have another dtype in the model.

    Returns:
        The proof: of all tensors of the model, or of those of the selection. A tensor that shares
        the memory of a compared one, as a tied output layer does, is proven with it.

    Raises:
        CorruptVersion: naming the first tensor that differs.
    """
    digested = [
        (entry, manifest.step)
        for manifest in manifests
        for entry in manifest.tensors
        if entry.digest is not None
        if selection is None or entry.name in selection
    ]
    # A delta always has a digest, by which it is verified before it is applied.
    if all(entry.encoding != "dense" for entry, _ in digested):
        return WeightsProof(status="unproven", checks=("names",))
    began = time.monotonic()
    targets = find_targets(module)
    compared: set[str] = set()
    skipped: set[str] = set()
    for entry, step in digested:
        target_box = (selection or {}).get(entry.name) or full_slice(
            entry.global_shape or entry.shape
        )
        box = get_slice(entry)
        if not contains(target_box, box) or (
            cast and targets[entry.name].dtype != DTYPES[entry.dtype]
        ):
            skipped.add(entry.name)
            continue
        tensor = targets[entry.name].detach()[box.inside(target_box)]
        if digest(as_bytes(tensor)) != entry.digest:
            raise CorruptTensor(fault="installed", tensor=entry.name, step=step)
        compared.add(entry.name)
    compared -= skipped
    names = targets.keys() if selection is None else selection.keys() & targets.keys()
    ties = find_ties(targets, compared)
    proven = {id(targets[name]) for name in (*compared, *ties)}
    unproven = sorted(name for name in names if id(targets[name]) not in proven)
    return make_proof(len(compared), unproven, time.monotonic() - began)


def make_proof(compared: int, unproven: Sequence[str], seconds: float) -> WeightsProof:
    """Return the proof of a model into which was looked.

    Args:
        compared: Number of tensors that are as they were published.
        unproven: Tensors that were not compared.
        seconds: Seconds that it took.
    """
    return WeightsProof(
        status="partly" if unproven else "proven",
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
    for name, target in sorted(find_targets(module).items()):
        tensor = target.detach()
        hasher.update(f"{name}:{dtype_name(tensor.dtype)}:{tuple(tensor.shape)}:".encode())
        hasher.update(as_bytes(tensor))
    return hasher.digest()

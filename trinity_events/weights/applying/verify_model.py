"""Verify that a model holds the published tensors.

Chunks are verified where they are read. A fault between there and the model's memory, or a later
change of the model, shows only in a digest of the model's own tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trinity_schemas import WeightManifest

from ...weights.errors import CorruptTensor
from ..compatibility import find_targets
from ..reading.pull import Selection, get_slice
from ..slices import contains, full_slice
from ..tensors import DTYPES, Digesting, as_bytes, digest, dtype_name


def check_installed(
    module: torch.nn.Module,
    manifests: Iterable[WeightManifest],
    selection: Selection | None = None,
    *,
    cast: bool = False,
) -> int:
    """Compare digests of the model's tensors with the publisher's.

    The version needs digests of its tensors. Only dense tensors, and dense shards, that the model
    holds in full are compared.

    Args:
        module: The model.
        manifests: Manifests of the version's parts.
        selection: Selection that the version was pulled with.
        cast: Skip the tensors that have another dtype in the model.

    Returns:
        Number of tensors and shards that were compared; 0 without digests.

    Raises:
        CorruptVersion: naming the first tensor that differs.
    """
    digested = [
        (entry, manifest.step)
        for manifest in manifests
        for entry in manifest.tensors
        if entry.digest is not None and entry.encoding == "dense"
        if selection is None or entry.name in selection
    ]
    targets = find_targets(module) if digested else {}
    proven = 0
    for entry, step in digested:
        target_box = (selection or {}).get(entry.name) or full_slice(
            entry.global_shape or entry.shape
        )
        box = get_slice(entry)
        if not contains(target_box, box):
            continue
        if cast and targets[entry.name].dtype != DTYPES[entry.dtype]:
            continue
        tensor = targets[entry.name].detach()[box.inside(target_box)]
        if digest(as_bytes(tensor)) != entry.digest:
            raise CorruptTensor(fault="installed", tensor=entry.name, step=step)
        proven += 1
    return proven


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

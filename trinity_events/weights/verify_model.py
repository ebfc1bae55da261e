"""Whether a model has what was published, tensor by tensor.

Chunks are verified where they are read. What lies between that and the model's own memory, or was
done to the model since, is seen only by digesting the model's tensors themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trinity_schemas import WeightManifest

from ..errors import CorruptVersion
from .compatibility import targets_of
from .pulled_version import Selection, slice_of
from .slices import contains, full_slice
from .tensors import DTYPES, as_bytes, digest


def check_installed(
    module: torch.nn.Module,
    manifests: Iterable[WeightManifest],
    wanted: Selection | None = None,
    *,
    cast: bool = False,
) -> int:
    """Digest the model's tensors, and compare that with what their publisher digested.

    Only of versions that were published with digests of their tensors, and only those tensors, or
    shards of them, that came in full and that the model holds all of.

    Args:
        module: The model.
        manifests: Of the version's parts.
        wanted: What of the version the model has, as it was pulled.
        cast: Whether some may be of another dtype in the model; these are not compared.

    Returns:
        How many tensors and shards were compared: 0 where there is nothing to compare with.

    Raises:
        CorruptVersion: naming the first that is not what was published.
    """
    digested = [
        (entry, manifest.step)
        for manifest in manifests
        for entry in manifest.tensors
        if entry.digest is not None and entry.encoding == "dense"
        if wanted is None or entry.name in wanted
    ]
    targets = targets_of(module) if digested else {}
    proven = 0
    for entry, step in digested:
        held = (wanted or {}).get(entry.name) or full_slice(entry.global_shape or entry.shape)
        box = slice_of(entry)
        if not contains(held, box):
            continue
        if cast and targets[entry.name].dtype != DTYPES[entry.dtype]:
            continue
        found = targets[entry.name].detach()[box.inside(held)]
        if digest(as_bytes(found)) != entry.digest:
            raise CorruptVersion(
                f"{entry.name!r} of the model is not what was published as step {step}, though all "
                "that was read of it was: something else wrote it"
            )
        proven += 1
    return proven

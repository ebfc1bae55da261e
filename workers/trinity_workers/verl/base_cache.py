"""Cache of the last full version at a rollout, for later delta versions."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from trinity_events.weights import PulledVersion
from trinity_events.weights.deltas.reconstruct import FullPart
from trinity_schemas import StepReady


class BaseCache:
    """Parts of the last full version, kept while versions are deltas of it.

    So a rollout on a host of its own receives a full version once, and afterwards only deltas. The
    cache takes the memory of one version.
    """

    def __init__(self) -> None:
        self._parts: dict[str, FullPart] = {}
        self._resources = ExitStack()

    @property
    def digests(self) -> Collection[str]:
        """Manifest digests of the cached parts, which need not be pulled."""
        return self._parts.keys()

    def complete(self, version: PulledVersion) -> PulledVersion:
        """Return the version completed with the cached parts that are its base."""
        bases = tuple(
            self._parts[manifest.base.manifest_digest] if manifest.base and base is None else base
            for (manifest, _), base in zip(version.parts, version.bases, strict=True)
        )
        return version._replace(bases=bases)

    def add(self, ready: StepReady, version: PulledVersion, resources: ExitStack) -> None:
        """Cache the parts on which later versions may be based; ``resources`` keep the version."""
        bases: dict[str, FullPart] = {}
        for announced, (manifest, buffer), base in zip(
            ready.parts, version.parts, version.bases, strict=True
        ):
            if manifest.base is None:
                entries = {entry.key: entry for entry in manifest.tensors}
                bases[announced.manifest_digest] = FullPart(manifest, entries, buffer)
            elif base is not None:
                bases[manifest.base.manifest_digest] = base
        # A delta of a cached base adds none, and leaves its own memory to the update.
        if bases.keys() - self._parts.keys():
            self.forget()
            self._parts, self._resources = bases, resources.pop_all()

    def forget(self) -> None:
        """Release the cached parts."""
        self._parts = {}
        self._resources.close()

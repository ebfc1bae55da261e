"""Full versions that a rollout keeps, because later ones may rest on them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

from trinity_events.weights import PulledVersion
from trinity_events.weights.deltas.reconstruct import FullPart
from trinity_schemas import StepReady


class BaseCache:
    """The parts of the last full version, for as long as versions rest on it.

    On a host of its own a rollout so receives a full version once, and then only what changed; it
    costs room for one version.
    """

    def __init__(self) -> None:
        self._parts: dict[str, FullPart] = {}
        self._held = ExitStack()

    @property
    def known(self) -> Collection[str]:
        """Manifest digests of parts that need not be pulled."""
        return self._parts.keys()

    def completed(self, version: PulledVersion) -> PulledVersion:
        """The version with those parts that it rests on, and that are kept here."""
        bases = tuple(
            self._parts[manifest.base.manifest_digest] if manifest.base and base is None else base
            for (manifest, _), base in zip(version.parts, version.bases, strict=True)
        )
        return version._replace(bases=bases)

    def keep(self, ready: StepReady, version: PulledVersion, held: ExitStack) -> None:
        """Keep what later versions may rest on; ``held`` is what holds the version."""
        found: dict[str, FullPart] = {}
        for announced, (manifest, buffer), base in zip(
            ready.parts, version.parts, version.bases, strict=True
        ):
            if manifest.base is None:
                entries = {entry.key: entry for entry in manifest.tensors}
                found[announced.manifest_digest] = FullPart(manifest, entries, buffer)
            elif base is not None:
                found[manifest.base.manifest_digest] = base
        if found.keys() - self._parts.keys():
            self.forget()
            self._parts, self._held = found, held.pop_all()

    def forget(self) -> None:
        """Let go of them."""
        self._parts = {}
        self._held.close()

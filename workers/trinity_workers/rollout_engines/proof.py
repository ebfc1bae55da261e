"""Proof of what an engine serves: its checks, and what they leave open.

1. A version is served after its checks have passed, and never with less proof than is asked for.
2. A version is proven if each tensor was compared, partly proven if some were or probes agreed, and
   unproven otherwise. Probes alone never prove it: they see no change below their tolerance.
3. An answer has the weakest status of the versions that sampled it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from trinity_events.errors import NotAsPublished, ProofTooWeak
from trinity_schemas import Probes, ProofStatus, StepRef, WeightsProof

ProofName = Literal["names", "served", "probes", "all"]
"""Checks of a version before it is served.

`names`: each tensor was given once, and loaded. `served`: what the engine computes with is compared
with what was published, too. `probes`: its log-probabilities of fixed sequences are compared with
the publisher's, too. `all`: all three.
"""

STATUSES: tuple[ProofStatus, ...] = ("unproven", "partly", "proven")
"""Statuses of a proof, the weakest first."""
PROBE_TOLERANCES = {"float32": 5e-4, "float16": 0.2, "bfloat16": 1.0}
"""Largest difference of a probe's log-probability in nats, by the coarser of both sides' dtypes.

Three times or more what vLLM differed by with the same bytes at 250 million random weights: 5.4e-5
in float32 and 0.30 in bfloat16 (docs/proof.md). Kernels add up products in different orders.
"""
MEAN_SHARE = 0.15
"""Share of the tolerance that the mean difference may have: rounding evens out, a fault does not.

With the same bytes the mean was about a fourth of the largest difference: 1.2e-5 in float32 and
0.072 in bfloat16 at 250 million weights, where this limit is 7.5e-5 and 0.15.
"""
_KEPT_STATUSES = 256
"""Versions of which the status is kept: a turn spans a few."""


@dataclass(frozen=True, kw_only=True)
class ProofOptions:
    """Checks that an engine makes, and what it serves by their result."""

    checks: ProofName = "served"
    min_status: ProofStatus = "unproven"
    """Weakest status of a version that is served."""
    layers: int | None = None
    """Number of layers that are compared with each version, in turn; None compares all."""
    tolerance: float | None = None
    """Largest difference of a probe in nats; None is that of the data type."""

    @property
    def compares_tensors(self) -> bool:
        """Return True if what the engine computes with is compared."""
        return self.checks in ("served", "all")

    @property
    def runs_probes(self) -> bool:
        """Return True if probes are computed."""
        return self.checks in ("probes", "all")

    @property
    def best_status(self) -> ProofStatus:
        """Return the strongest status that the checks can give."""
        if self.compares_tensors:
            return "proven" if self.layers is None else "partly"
        return "partly" if self.runs_probes else "unproven"

    def select(self, names: Collection[str], turn: int) -> Collection[str]:
        """Return the names of the tensors that are compared in a turn, of a version's."""
        if not self.compares_tensors:
            return ()
        if self.layers is None:
            return names
        # Here, since it imports torch, which configurations do not need.
        from trinity_events.weights.applying.verify_model import select_layers

        return select_layers(names, self.layers, turn)

    def check_probes(
        self,
        proof: WeightsProof,
        probes: Probes,
        logprobs: Sequence[Sequence[float]],
        *,
        engine: str,
        step: int,
        dtype: str,
    ) -> WeightsProof:
        """Return the proof with the result of probes.

        Args:
            proof: Result of the other checks.
            probes: Probes of the version.
            logprobs: The engine's log-probabilities, of each token but the first of its sequence.
            engine: Name of the engine, for the error.
            step: Step of the version.
            dtype: Data type in which the engine computes.

        Raises:
            NotAsPublished: They differ by more than the tolerance.
        """
        tolerance = self.tolerance
        if tolerance is None:
            tolerance = max(PROBE_TOLERANCES.get(name, 0.0) for name in (dtype, probes.dtype))
        largest, mean = compare_logprobs(probes.logprobs.to_rows(), logprobs)
        detail = ""
        # `not <=`, as a comparison with NaN is false.
        if not largest <= tolerance:
            detail = f"a probe differs by {largest:.3g} nats, and may by {tolerance:g}"
        elif not mean <= tolerance * MEAN_SHARE:
            detail = (
                f"probes differ by {mean:.3g} nats in the mean, and may by "
                f"{tolerance * MEAN_SHARE:g}"
            )
        if detail:
            raise NotAsPublished(step=step, engine=engine, fault="probes", detail=detail)
        return replace(
            proof,
            status="partly" if proof.status == "unproven" else proof.status,
            checks=(*proof.checks, "probes"),
            probes=probes.count,
            difference=largest,
        )

    def require(self, proof: WeightsProof, *, engine: str, step: int) -> WeightsProof:
        """Return the proof if it is enough to serve its version by.

        A version without the probes that are asked for is partly proven at most.

        Raises:
            ProofTooWeak: It is weaker than is asked for.
        """
        lacks_probes = self.runs_probes and "probes" not in proof.checks
        if lacks_probes and proof.status == "proven":
            proof = replace(proof, status="partly")
        if STATUSES.index(proof.status) >= STATUSES.index(self.min_status):
            return proof
        fault: Literal["tensors", "probes", "no probes"] = "tensors"
        if lacks_probes:
            fault = "no probes"
        elif self.checks == "probes":
            fault = "probes"
        raise ProofTooWeak(
            step=step,
            engine=engine,
            status=proof.status,
            minimum=self.min_status,
            fault=fault,
            tensors=proof.unproven,
            count=proof.unproven_count,
        )


class ProofRecord:
    """Statuses of the versions that an engine has served."""

    def __init__(self) -> None:
        self._statuses: dict[StepRef, ProofStatus] = {}

    def add(self, version: StepRef, status: ProofStatus) -> None:
        """Record the status of a version, before it is served."""
        self._statuses[version] = status
        while len(self._statuses) > _KEPT_STATUSES:
            # The oldest: dictionaries keep the order of entry.
            del self._statuses[next(iter(self._statuses))]

    def get_weakest(self, versions: Iterable[StepRef]) -> ProofStatus:
        """Return the weakest status of versions; `unproven` for one that is not recorded."""
        return find_weakest(self._statuses.get(version, "unproven") for version in versions)


def find_weakest(statuses: Iterable[ProofStatus]) -> ProofStatus:
    """Return the weakest of some statuses; `unproven` without any."""
    return min(statuses, key=STATUSES.index, default="unproven")


def compare_logprobs(
    published: Sequence[Sequence[float]], computed: Sequence[Sequence[float]]
) -> tuple[float, float]:
    """Return the largest and the mean difference in nats, infinite if one is no number."""
    differences = [
        abs(one_side - other_side)
        for published_row, computed_row in zip(published, computed, strict=True)
        for one_side, other_side in zip(published_row, computed_row, strict=True)
    ]
    if not all(map(math.isfinite, differences)):
        return math.inf, math.inf
    return max(differences, default=0.0), math.fsum(differences) / max(len(differences), 1)

"""How much of a run the fold keeps, so that its state stays small."""

from __future__ import annotations

KEPT_VERSIONS = 2
KEPT_BASES = 64
"""That one version rests on: as many as ranks began with a full version at other times."""
KEPT_STEPS = 128
KEPT_STEPS_AT_MOST = 4096
KEPT_ANOMALIES = 32
KEPT_PENDING_PROMOTIONS = 16
KEPT_PRODUCERS = 16_384
REORDERED_PRODUCERS = 4096
"""Of fewer, none is forgotten soon, and their order is not kept."""
KEPT_ATTEMPTS = 8
"""Of a slot, failed, waiting and running each."""
KEPT_EXPLORERS = 4096
KEPT_DETACHED = 32
KEPT_REFUSALS = 64
KEPT_COMPLETE_CHECKPOINTS = 1024
KEPT_LINEAGE = 1024
KEPT_UNDER_WAY = 16_384
"""Attempts under way at once; of more, the oldest are given up."""
EXPIRED_AT_ONCE = 1000
"""Attempts that one event fails; more would outgrow what an event may take."""
LONGEST_REASON = 4000
LONGEST_REFUSAL = 500
"""Characters that are kept of why a version was refused."""
MOST_PROOFS = 2048
"""Saves that an announcement lists; it counts them all."""

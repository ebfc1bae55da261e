"""Limits of the state of a run, so that it stays small."""

from __future__ import annotations

# Two: a reader that pulls the newest version can finish when the next one becomes ready.
KEPT_VERSIONS = 2
"""Ready weight versions that are not retired, besides their bases."""
KEPT_EVALUATED = 2
"""Versions that open evaluations keep from being retired, besides the newest ones."""
KEPT_SETS = 64
"""Sets of held-out questions whose evaluations are known."""
KEPT_RESULTS = 64
"""Metrics kept of the last evaluation of a set."""
# Even: pairs become one point.
KEPT_REWARDS = 48
"""Points of the mean reward at which pairs become one; a sparkline has no more columns."""
KEPT_STEP_TIMES = 20
"""Last trained steps by whose times the pace is known."""
KEPT_BASES = 64
"""Distinct base versions stored for one delta version; ranks may have different bases."""
KEPT_STEPS = 128
"""Steps kept in the state; the oldest steps beyond that are dropped once they are over."""
# A run whose saves never end would keep its steps for ever.
KEPT_STEPS_AT_MOST = 4096
"""Steps kept in the state; the oldest steps beyond that are dropped in any case."""
KEPT_ANOMALIES = 32
"""Anomalies kept with their details; all are counted."""
KEPT_PENDING_PROMOTIONS = 16
"""Folders of earlier epochs that may still lack their final name."""
# Far more than the processes of a run: duplicates of a dropped producer count as new events.
KEPT_PRODUCERS = 16_384
"""Producers whose last sequence is known; the one that was silent longest is dropped first."""
REORDERED_PRODUCERS = 4096
"""Producers from which on their order of last use is kept, as dropping one needs it."""
KEPT_ATTEMPTS = 8
"""Attempts kept for each slot: failed, waiting, running, and finished elsewhere, each."""
KEPT_EXPLORERS = 4096
"""Explorers whose status is known; the one that was silent longest is dropped first."""
SHORTEST_EXPLORER_LEASE = 1.0
"""Shortest lease of an explorer in seconds: a shorter one would only add events of its expiry."""
KEPT_UNLISTED = 1024
"""Ranges of ranks of explorers that were dropped; beyond it the lowest are no longer counted."""
KEPT_HOSTS = 2 * KEPT_EXPLORERS
"""Processes whose host is known: explorers, ranks and others; the first to begin goes first."""
KEPT_EXCLUDED = 64
"""Excluded explorers that are known; the one that was excluded first is dropped first."""
KEPT_REWARD_ERRORS = 16
"""Causes of reward errors whose first error is kept; further causes are anomalies."""
KEPT_ALARMS = 32
"""Raised alarms that are known; the one that was raised first is dropped first."""
KEPT_DETACHED = 32
"""Detached consumer groups that are remembered."""
KEPT_PROFILES = 64
"""Last profiles of training steps that the state keeps."""
KEPT_REFUSALS = 64
"""Refusals kept with their details; all are counted."""
# The option --keep-checkpoints takes no larger number (`reducer/policy.py`).
KEPT_COMPLETE_CHECKPOINTS = 1024
"""Steps that are remembered to have a complete checkpoint."""
KEPT_LINEAGE = 1024
"""Earlier epochs that are remembered."""
KEPT_UNDER_WAY = 16_384
"""Attempts under way at once; the oldest ones beyond that are ended."""
EXPIRED_AT_ONCE = 1000
"""Attempts that one event fails, so that it stays below the limit of an event's size."""
MOST_EPOCHS_AT_ONCE = 2**26
"""Epochs by which one opening may be ahead of the newest one.

Trainers take numbers in turn, so an opening is more than one ahead only if openings before it were
lost or could not be decoded. 2**26 is one opening a second for two years: no log that a trainer
wrote is folded otherwise. And 2**27 invented openings, of 30 GB, are needed to reach 2**53, the
largest epoch of the contract; without a bound, one was enough.
"""
# The reason of a deadline names every save that is missing, of any number of ranks.
LONGEST_REASON = 4000
"""Characters of an announced reason."""
LONGEST_REFUSAL = 500
"""Characters kept of the reason of a refusal."""
MOST_PROOFS = 2048
"""Saves that an announcement lists; it counts them all."""
KEPT_EXCEPTIONS = 65_536
"""Ranges of ordinals above the ledger's mark that have a fate."""
KEPT_DROP_REASONS = 64
"""Reasons for dropped ordinals that are counted by name; later ones are counted together."""
KEPT_WAITS = 256
"""Open waits that are known; the oldest one is dropped first."""
KEPT_WAIT_NAMES = 16
"""Processes kept by name for one open wait; all are counted."""
LONGEST_WAIT = 500
"""Characters kept of the object of a wait."""

"""Schedule of synchronisations: the steps that a weight version may serve, for each sync style."""

from __future__ import annotations

from .sections.sync import SyncConfig


def names_exact_version(sync: SyncConfig) -> bool:
    """Return True if each request names the one version that may serve it."""
    return sync.style == "fixed"


def publishes_on_demand(sync: SyncConfig) -> bool:
    """Return True if the trainer publishes once an explorer asks for a version."""
    return sync.style == "explorer_driven"


def requests_once_ready(sync: SyncConfig) -> bool:
    """Return True if the trainer asks for the rollouts of a version once it is ready."""
    return sync.style == "fully_async"


def least_bound(sync: SyncConfig) -> int:
    """Return the least staleness that every step's rollouts can keep to.

    The newest version of the last step before a publication is ``interval - 1`` steps old. Under
    ``fixed``, explorers are ``offset`` steps further behind.
    """
    behind = sync.offset if names_exact_version(sync) else 0
    return sync.interval - 1 + behind


def staleness_bound(sync: SyncConfig) -> int:
    """Return the maximum staleness of a token that is trained on, in optimizer steps.

    By default, ``fixed`` has what its schedule gives, and other styles one version more than the
    newest.
    """
    if sync.max_staleness is not None:
        return sync.max_staleness
    # One version behind the newest: `interval` steps more than the `interval - 1` of that.
    return least_bound(sync) if names_exact_version(sync) else 2 * sync.interval - 1


def last_step_served(sync: SyncConfig, step: int) -> int:
    """Return the last training step that rollouts of the version of ``step`` are asked for."""
    if names_exact_version(sync):  # A resumed run may publish between two steps of the schedule.
        return (step // sync.interval + 1) * sync.interval + sync.offset
    # A token of this version is trained on as the update of step + 1 at the earliest, with
    # staleness 0.
    return step + staleness_bound(sync) + 1


def oldest_usable(sync: SyncConfig, step: int) -> int:
    """Return the oldest version whose tokens training step ``step`` may use; any if negative."""
    return step - 1 - staleness_bound(sync)

"""Schedule of synchronisations: the steps that a weight version may serve, for each sync style."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .train_config import SyncConfig, TrainConfig

STYLE_ALIASES = {"dynamic_by_trainer": "trainer_driven", "dynamic_by_explorer": "explorer_driven"}
"""Names that Trinity-RFT has for styles, and the styles."""


def names_exact_version(sync: SyncConfig) -> bool:
    """Return True if each request names the one version that may serve it."""
    return sync.style == "fixed"


def publishes_on_demand(sync: SyncConfig) -> bool:
    """Return True if the trainer publishes once an explorer asks for a version."""
    return sync.style == "explorer_driven"


def asks_once_ready(sync: SyncConfig) -> bool:
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
    return least_bound(sync) if names_exact_version(sync) else 2 * sync.interval - 1


def last_step_served(sync: SyncConfig, step: int) -> int:
    """Return the last training step that rollouts of the version of ``step`` are asked for."""
    if names_exact_version(sync):  # A resumed run may publish between two steps of the schedule.
        return (step // sync.interval + 1) * sync.interval + sync.offset
    return step + staleness_bound(sync) + 1


def oldest_usable(sync: SyncConfig, step: int) -> int:
    """Return the oldest version whose tokens training step ``step`` may use; any if negative."""
    return step - 1 - staleness_bound(sync)


def prompts_open(config: TrainConfig, *, begun: int, version: int, oldest_named: int | None) -> int:
    """Return the number of prompts that may be open when a version is published.

    Args:
        config: The run.
        begun: Training steps whose groups were taken.
        version: Step of the version.
        oldest_named: Oldest version that an open request names; None without one.
    """
    sync, prompts = config.sync, config.rollouts.prompts_per_step
    if sync.when_stale == "drop" and not names_exact_version(sync):
        return min(config.window, (config.steps - begun) * prompts)
    last = config.last_step_served(version)
    if (
        sync.when_stale == "pace"
        and config.rollouts.order == "arrival"
        and oldest_named is not None
    ):
        # Whatever is overtaken is trained on in time: all that is open is, whatever its order.
        last = min(last, oldest_named + config.staleness_bound + 1)
    return max(last - begun, 0) * prompts


def contradictions(
    sync: SyncConfig, named: Callable[[str], str]
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield what cannot work: the fields' paths, and a sentence with the reason.

    Args:
        sync: The section.
        named: Names a field, given by its path, in the sentences.
    """
    style, offset, bound = (named(f"sync.{name}") for name in ("style", "offset", "max_staleness"))
    if sync.offset and not names_exact_version(sync):
        yield (
            ("sync.offset", "sync.style"),
            f"{offset} is {sync.offset}, and only {style} fixed has steps at which explorers "
            f"synchronise: leave it out, or choose {style} fixed",
        )
    least = least_bound(sync)
    if sync.max_staleness is not None and sync.max_staleness < least:
        lags = names_exact_version(sync) and sync.offset
        behind = f" with {offset} {sync.offset}" if lags else ""
        yield (
            ("sync.max_staleness", "sync.interval", "sync.offset", "sync.style"),
            f"{bound} is {sync.max_staleness}, and {named('sync.interval')} {sync.interval}"
            f"{behind} makes rollouts {least} optimizer steps old: choose at least {least}, or "
            "publish more often",
        )
    if asks_once_ready(sync) and sync.method == "nccl":
        yield (
            ("sync.style", "sync.method"),
            f"a collective group makes the trainer wait for each explorer, and {style} "
            f"fully_async lets neither wait: choose another {named('sync.method')}, or {style} "
            "trainer_driven",
        )

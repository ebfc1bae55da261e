"""Goodput of a run as text: its headline, and its tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.table import Table

from ..analysis.goodput import FATES, Goodput, Straggler, Waste
from ..diagnostics.phase_names import (
    CHUNK_SERVER_ROLE,
    DISCARDS_WRITER_ROLE,
    LOG_SERVER_ROLE,
    STANDBY_ROLE,
    WRITER_ROLE,
)

_ROLES = {
    "trainer": "trainer",
    "actor": "ranks",
    "explorer": "explorers",
    "reducer": "reducer",
    STANDBY_ROLE: "reducer",
    WRITER_ROLE: "writers",
    DISCARDS_WRITER_ROLE: "writers",
    LOG_SERVER_ROLE: "servers",
    CHUNK_SERVER_ROLE: "servers",
}
"""Role to its column; other roles keep their names."""
_SHOWN = 8
"""Causes, and stragglers, that the tables show; JSON has all of them."""
_LEAST = 0.0005
"""Least share of a cause that is shown: less than that is 0.1 % by rounding."""
_NAMES = {
    "environment": "in environments",
    "installing": "installing weights",
    "publishing": "publishing weights",
    "folding": "folding the log",
    "writing": "writing the record",
    "waiting-rollouts": "waiting for rollouts",
    "waiting-tail": "waiting for others' answers",
    "waiting-weights": "waiting for weights",
    "waiting-requests": "waiting for requests",
    "waiting-evaluation": "waiting for an evaluation",
    "waiting-trainer": "waiting for the trainer",
    "waiting-samples": "waiting for samples",
    "standing-by": "standing by",
    "lost": "lost by a death",
    "down": "down after a death",
}
"""Fate of seconds to its words; others are words themselves."""
_TOKENS = {
    "stale": "were older than the bound of staleness",
    "filtered": "were of groups of equal rewards",
    "surplus": "were of answers that came after another one, or too late",
    "failed": "were of requests that failed",
    "aborted": "were cut short by a weight version",
    "malformed": "were of malformed answers",
    "excluded": "were of excluded explorers",
}
"""Fate of tokens to its words, as the cause of waste."""


def format_headline(goodput: Goodput) -> str:
    """Return the goodput in one sentence; a run that reports no times says so."""
    if not sum(goodput.seconds.values()):
        return "its processes have reported no times"
    sampled = sum(goodput.tokens.values()) - goodput.tokens.get("evaluated", 0)
    tokens = f", and {goodput.trained_tokens:.1%} of {sampled:,} sampled tokens were trained on"
    return (
        f"{goodput.productive:.1%} of {sum(goodput.worker_seconds.values()):,.0f} worker-seconds "
        f"were productive{tokens if sampled else ''}"
    )


def format_rates(goodput: Goodput) -> str:
    """Return effective samples and tokens a second and device."""
    return (
        f"{goodput.samples_per_device_second:.3g} samples and "
        f"{goodput.tokens_per_device_second:,.3g} tokens a second and {goodput.device}, "
        f"on {goodput.devices:.3g} {goodput.device}s over {goodput.elapsed:,.0f} s"
    )


def format_unmeasured(goodput: Goodput) -> str:
    """Return the processes that the seconds lack, as one line; empty if there are none."""
    return f"not measured: {', '.join(goodput.unmeasured)}" if goodput.unmeasured else ""


def format_fate(fate: str) -> str:
    """Return the fate of worker-seconds in words."""
    return _NAMES.get(fate, fate)


def seconds_table(goodput: Goodput) -> Table:
    """Return the shares of worker-seconds by fate and role; each column adds up to 100 %."""
    columns = _add_up_roles(goodput)
    table = Table(box=None, pad_edge=False, title=None)
    table.add_column("worker-seconds")
    for name in columns:
        table.add_column(name, justify="right")
    totals = {name: sum(seconds.values()) for name, seconds in columns.items()}
    fates = dict.fromkeys([*FATES, *goodput.seconds])
    for fate in (fate for fate in fates if goodput.seconds.get(fate)):
        shares = (
            f"{seconds[fate] / totals[name]:.1%}" if seconds.get(fate) else ""
            for name, seconds in columns.items()
        )
        table.add_row(format_fate(fate), *shares)
    table.add_row("seconds", *(f"{total:,.1f}" for total in totals.values()))
    return table


def tokens_table(goodput: Goodput) -> Table:
    """Return the sampled tokens by fate."""
    table = Table(box=None, pad_edge=False)
    table.add_column("tokens")
    table.add_column("", justify="right")
    table.add_column("", justify="right")
    total = sum(goodput.tokens.values())
    for fate, count in goodput.tokens.items():
        table.add_row(fate, f"{count:,}", f"{count / total:.1%}")
    table.add_row("sampled", f"{total:,}", "")
    return table


def format_waste(goodput: Goodput) -> Iterator[str]:
    """Yield one line for each of the greatest causes of waste."""
    total = sum(goodput.tokens.values())
    shown = [
        waste
        for waste in goodput.waste
        if waste.share >= _LEAST or (total and waste.tokens / total >= _LEAST)
    ]
    for waste in shown[:_SHOWN]:
        share = f"{waste.share:6.1%}" if waste.seconds else f"{'':6}"
        yield f"{share}  {_format_waste(waste, total)}"
    if len(shown) > _SHOWN:
        yield f"{'':6}  and {len(shown) - _SHOWN} more: see --json"


def format_stragglers(stragglers: Sequence[Straggler]) -> Iterator[str]:
    """Yield one line for each of the slowest processes."""
    for straggler in stragglers[:_SHOWN]:
        yield (
            f"{straggler.process} on {straggler.host}: {straggler.measure} takes "
            f"{_format_seconds(straggler.seconds)}, {straggler.ratio:.1f} times the others' median "
            f"of {_format_seconds(straggler.others)} ({straggler.excess:,.1f} s in all)"
        )


def _format_waste(waste: Waste, total: int) -> str:
    lost = f"{waste.tokens:,} tokens ({waste.tokens / total:.1%})" if waste.tokens else ""
    if waste.kind == "died":
        also = f", with {lost} under way" if lost else ""
        return f"{waste.subject} on {waste.detail} died{also}"
    if waste.kind == "old-checkpoint":
        also = f", and {lost} trained before count no more" if lost else ""
        return f"the checkpoint of {waste.subject} was old: {waste.detail}{also}"
    if waste.kind == "tokens":
        bound = f" ({waste.detail})" if waste.detail else ""
        return f"{lost} {_TOKENS.get(waste.subject, f'were dropped as {waste.subject}')}{bound}"
    return format_fate(waste.subject)


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def list_shares(goodput: Goodput) -> dict[str, dict[str, float]]:
    """Return the part of each fate in the seconds of each role, and of all."""
    return {
        name: {
            fate: seconds[fate] / sum(seconds.values())
            for fate in goodput.seconds
            if seconds.get(fate)
        }
        for name, seconds in _add_up_roles(goodput).items()
    }


def _add_up_roles(goodput: Goodput) -> dict[str, Mapping[str, float]]:
    """Return the seconds by fate of each role under the name of its column, and of all."""
    sums: dict[str, defaultdict[str, float]] = {}
    for worker in goodput.workers:
        role = worker.process.rpartition("-")[0]
        column = sums.setdefault(_ROLES.get(role, role), defaultdict(float))
        for fate, seconds in worker.seconds.items():
            column[fate] += seconds
    return {**sums, "all": goodput.seconds}

"""What the demo ends with."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.table import Table

from trinity_events.core import RunSummary
from trinity_events.core.summary import Spread

from ..explorer import ExplorationResult
from ..trainer import TrainingResult

TRANSPORTS = {
    "redis": "a Redis server",
    "shm": "shared memory",
    "ray": "Ray's object store",
    "collective": "a collective group",
}


class DemoSummary(Struct, frozen=True, kw_only=True):
    """The run's figures. Rewards are shares of exactly right answers; times are seconds."""

    run_id: str
    seconds: float
    warm_up_steps: int
    reward_first_third: float
    reward_last_third: float
    score_first_third: float
    score_last_third: float
    held_out_before: float | None
    held_out_after: float | None
    staleness_mean: float
    training_seconds: float
    reducer_restarts: int
    transport: str
    sharded: bool
    """Whether every rank published what it holds, or rank 0 everything."""
    log: RunSummary
    redis_url: str
    checkpoint_folder: str
    replay_command: str


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third; of all where there are fewer than three."""
    third = max(1, len(values) // 3)
    first, last = values[:third], values[-third:]
    return (sum(first) / len(first), sum(last) / len(last)) if values else (0.0, 0.0)


def summarize(
    *,
    training: TrainingResult,
    exploration: Sequence[ExplorationResult],
    log: RunSummary,
    seconds: float,
    warm_up_steps: int,
    reducer_restarts: int,
    transport: str,
    sharded: bool,
    redis_url: str,
    checkpoint_folder: str,
    replay_command: str,
) -> DemoSummary:
    """Put what the parts returned and what the log says together."""
    reward_first, reward_last = thirds(training.rewards)
    score_first, score_last = thirds(training.scores)
    measured = next((one for one in exploration if one.accuracy_before is not None), None)
    return DemoSummary(
        run_id=log.run_id,
        seconds=seconds,
        warm_up_steps=warm_up_steps,
        reward_first_third=reward_first,
        reward_last_third=reward_last,
        score_first_third=score_first,
        score_last_third=score_last,
        held_out_before=measured.accuracy_before if measured else None,
        held_out_after=measured.accuracy_after if measured else None,
        staleness_mean=sum(training.staleness) / max(1, len(training.staleness)),
        training_seconds=training.seconds,
        reducer_restarts=reducer_restarts,
        transport=transport,
        sharded=sharded,
        log=log,
        redis_url=redis_url,
        checkpoint_folder=checkpoint_folder,
        replay_command=replay_command,
    )


def summary_table(summary: DemoSummary) -> Table:
    """The summary for people."""
    log = summary.log
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = [
        ("run", summary.run_id),
        (
            "steps",
            f"{log.steps} in {summary.seconds:.0f} s ({summary.training_seconds:.0f} s of it "
            f"training, after {summary.warm_up_steps} steps of supervised warm-up)",
        ),
        (
            "reward",
            f"{summary.reward_first_third:.2f} -> {summary.reward_last_third:.2f}, mean of "
            "the first and the last third of the steps (exactly right answers)",
        ),
        ("verifier's score", f"{summary.score_first_third:.2f} -> {summary.score_last_third:.2f}"),
    ]
    if summary.held_out_before is not None and summary.held_out_after is not None:
        rows.append(
            (
                "held-out questions",
                f"{summary.held_out_before:.2f} -> {summary.held_out_after:.2f} "
                "of sampled answers right",
            )
        )
    rows += [
        (
            "weight versions",
            f"{log.versions_published} published over {TRANSPORTS[summary.transport]} "
            f"{'by every rank' if summary.sharded else 'by rank 0'}, "
            f"{log.versions_applied} applied, {log.versions_refused} refused, "
            f"{log.versions_superseded_unpulled} superseded before they were "
            f"pulled, {log.versions_unaccounted} unaccounted for",
        ),
        (
            "weight bytes",
            f"{log.versions_published - log.versions_delta} versions in full and "
            f"{log.versions_delta} as what changed: {_mebibytes(log.bytes_published)} published, "
            f"{_mebibytes(log.bytes_saved)} saved",
        ),
        ("staleness", f"{summary.staleness_mean:.2f} versions, in the mean over the steps"),
        ("stall", _spread(log.stall)),
        ("transfer", _spread(log.transfer)),
        ("pause", _spread(log.pause)),
        (
            "control plane",
            f"{log.events_per_step:.1f} events, {log.event_bytes_per_step:.0f} bytes a step",
        ),
        (
            "checkpoints",
            f"{log.checkpoints_ready} ready, {log.failures} failed saves, in "
            f"{summary.checkpoint_folder}",
        ),
        ("log", summary.redis_url),
        ("replay it", summary.replay_command),
    ]
    if log.refusals:
        rows.append(("refused weights", " ".join([_refusals(log), *log.suspects])))
    for name, text in rows:
        table.add_row(name, text)
    return table


def _refusals(log: RunSummary) -> str:
    return (
        f"{log.refusals} times, an explorer found that what it read was not what was published "
        f"(see trinity-events verify {log.run_id})."
    )


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


def _spread(spread: Spread) -> str:
    return f"{spread.median * 1000:.1f} ms median, {spread.p99 * 1000:.1f} ms p99"

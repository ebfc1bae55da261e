"""Summary of a run, which its command prints at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct, field, structs
from rich.table import Table
from rich.text import Text

from trinity_events.analysis.summary import RunSummary
from trinity_events.core.reward_errors import REWARD_ERRORS
from trinity_events.system.counts import format_count
from trinity_events.views.learning import format_seconds
from trinity_schemas import Envelope, EvaluationFailed, EvaluationFinished, StepTrained

from ..trainer import TrainingResult
from .results import Outcome

_AGES = 4
"""Ages of answers that are listed, the youngest; of more, the number is told."""
_LISTED = 8
"""Failed steps that are listed; of more, the number is told."""
TRANSPORTS = {
    "redis": "a Redis server",
    "shm": "shared memory",
    "cuda-ipc": "the memory of a GPU",
    "ray": "Ray's object store",
    "collective": "a collective group",
    "files": "files",
}


class NewestCheckpoint(Struct, frozen=True, kw_only=True):
    """The newest checkpoint of the run that is ready."""

    step: int
    folder: str | None
    """None where its saves named no folder."""


class FailedStep(Struct, frozen=True, kw_only=True):
    """A step of which a save failed, and that no retry has made ready."""

    step: int
    kinds: list[str]


class Ending(Struct, frozen=True, kw_only=True):
    """End of a run, and what can be done next."""

    outcome: Outcome
    error: str | None = None
    failed_steps: list[FailedStep] = field(default_factory=list)
    newest_checkpoint: NewestCheckpoint | None = None
    next_command: str | None = None
    """Command that goes on with a run that did not finish."""


class EvaluationResults(Struct, frozen=True, kw_only=True):
    """First and last results of a set of held-out questions."""

    first_step: int
    first: dict[str, float]
    last_step: int
    last: dict[str, float]
    finished: int = 1
    """Evaluations that finished."""
    failed: int = 0
    """Evaluations that were given up."""
    answers: int = 0
    """Answers of the last one that finished."""
    seconds: float = 0.0
    """Seconds from the first request of the last one that finished to its last reward."""
    reason: str | None = None
    """Why the last one was given up; None if it finished."""


class LoggedEvaluations(Struct):
    """Evaluations, as far as the log tells them."""

    sets: dict[str, EvaluationResults] = field(default_factory=dict)

    def add(self, envelope: Envelope) -> None:
        """Add an evaluation that ended."""
        event = envelope.event
        if isinstance(event, EvaluationFinished):
            earlier, step = self.sets.get(event.name), event.version.step
            self.sets[event.name] = EvaluationResults(
                # An evaluation that failed has a place in the table and no first result.
                first_step=earlier.first_step if earlier and earlier.first else step,
                first=earlier.first if earlier and earlier.first else event.metrics,
                last_step=step,
                last=event.metrics,
                finished=earlier.finished + 1 if earlier else 1,
                failed=earlier.failed if earlier else 0,
                answers=event.answers,
                seconds=event.seconds,
            )
        elif isinstance(event, EvaluationFailed):
            step = event.version.step
            earlier = self.sets.get(event.name) or EvaluationResults(
                first_step=step, first={}, last_step=step, last={}, finished=0
            )
            self.sets[event.name] = structs.replace(
                earlier, failed=earlier.failed + 1, reason=event.reason
            )


class LoggedMetrics(Struct):
    """Metrics of the training steps, as far as the log tells them."""

    rewards: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    staleness: list[float] = field(default_factory=list)

    def add(self, envelope: Envelope) -> None:
        """Add the metrics of a trained step."""
        event = envelope.event
        if isinstance(event, StepTrained) and "reward" in event.metrics:
            self.rewards.append(event.metrics["reward"])
            # Zero for loops of users that report none; the table has the row all the same.
            self.scores.append(event.metrics.get("score", 0.0))
            self.staleness.append(event.metrics.get("staleness", 0.0))


class DemoSummary(Struct, frozen=True, kw_only=True):
    """The run's figures: rewards are means over samples, times are seconds."""

    run_id: str
    outcome: Outcome
    error: str | None
    """Why the run did not finish."""
    seconds: float
    warm_up_steps: int
    reward_first_third: float
    reward_last_third: float
    score_first_third: float
    score_last_third: float
    evaluations: dict[str, EvaluationResults]
    """First and last results by set of held-out questions."""
    staleness_mean: float
    training_seconds: float | None
    """None where the run did not come to the end of its training."""
    reducer_restarts: int
    transport: str
    sharded: bool
    """True if every rank published its shards; else rank 0 published full tensors."""
    log: RunSummary
    redis_url: str
    checkpoint_folder: str
    failed_steps: list[FailedStep]
    newest_checkpoint: NewestCheckpoint | None
    replay_command: str
    next_command: str | None


def thirds(values: Sequence[float]) -> tuple[float, float]:
    """Means of the first and of the last third; of all where there are fewer than three."""
    # At least one: a run of one or two steps has a first and a last step.
    third = max(1, len(values) // 3)
    first, last = values[:third], values[-third:]
    return (sum(first) / len(first), sum(last) / len(last)) if values else (0.0, 0.0)


class RunFacts(Struct, frozen=True, kw_only=True):
    """Facts of a run that the launcher knows; the summary has them under the same names."""

    seconds: float
    warm_up_steps: int
    reducer_restarts: int
    transport: str
    sharded: bool
    redis_url: str
    checkpoint_folder: str
    replay_command: str


def summarize(
    facts: RunFacts,
    *,
    ending: Ending,
    metrics: TrainingResult | LoggedMetrics,
    evaluations: LoggedEvaluations,
    log: RunSummary,
) -> DemoSummary:
    """Put what the parts returned and what the log says together."""
    reward_first, reward_last = thirds(metrics.rewards)
    score_first, score_last = thirds(metrics.scores)
    return DemoSummary(
        run_id=log.run_id,
        outcome=ending.outcome,
        error=ending.error,
        reward_first_third=reward_first,
        reward_last_third=reward_last,
        score_first_third=score_first,
        score_last_third=score_last,
        evaluations=evaluations.sets,
        staleness_mean=sum(metrics.staleness) / max(1, len(metrics.staleness)),
        # The log has no duration of training alone: only the trainer's result does.
        training_seconds=metrics.seconds if isinstance(metrics, TrainingResult) else None,
        log=log,
        failed_steps=ending.failed_steps,
        newest_checkpoint=ending.newest_checkpoint,
        next_command=ending.next_command,
        **structs.asdict(facts),
    )


def summary_table(summary: DemoSummary) -> Table:
    """Return the summary for people: ten rows, and more only where something went wrong.

    The whole of it is what ``--json`` prints.
    """
    log = summary.log
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    rows = [("run", summary.run_id)]
    if summary.outcome != "finished":
        rows.append((summary.outcome.upper(), summary.error or "before its last step"))
    rows.append(("steps", f"{log.steps} in {_format_time(summary)}"))
    if log.steps:
        rows.append(
            ("reward", _format_thirds(summary.reward_first_third, summary.reward_last_third))
        )
    # A reward function without parts has no score: it would repeat the reward.
    if (scores := (summary.score_first_third, summary.score_last_third)) != (
        summary.reward_first_third,
        summary.reward_last_third,
    ) and any(scores):
        rows.append(("score", _format_thirds(*scores)))
    rows += [(name, _evaluated(results)) for name, results in summary.evaluations.items()]
    rows += [
        ("weights", _format_weights(summary)),
        ("answers", _format_answers(summary)),
        *_dropped_rows(log),
    ]
    if log.refusals:
        rows.append(("REFUSED", " ".join([_refusals(log), *log.suspects])))
    rows += [
        *_failed_rows(summary.failed_steps),
        ("checkpoints", f"{log.checkpoints_ready} ready; {_newest(summary.newest_checkpoint)}"),
        *_next_rows(summary),
    ]
    for name, text in rows:
        # Upper case is for what went wrong: it must not be as dim as the other names.
        style = "bold bright_red" if name.split()[0].isupper() else ""
        table.add_row(Text(name, style), Text(text, style))
    return table


def _format_thirds(first: float, last: float) -> str:
    return f"{first:.3g} -> {last:.3g} (means of the first and the last third of the steps)"


def _format_time(summary: DemoSummary) -> str:
    """Return the seconds of the run, and of its training if it came to the end of that."""
    whole = format_seconds(summary.seconds)
    if summary.training_seconds is None:
        return whole
    pace = format_seconds(summary.training_seconds / max(1, summary.log.steps))
    warm_up = f", after {summary.warm_up_steps} of warm-up" if summary.warm_up_steps else ""
    return f"{whole}: {pace} a step{warm_up}"


def _format_weights(summary: DemoSummary) -> str:
    log = summary.log
    # No version travels: zeros would look like a fault.
    if summary.transport == "none":
        return "stay where they are: the trainer's ranks generated"
    saved = f", {_mebibytes(log.bytes_saved)} saved by sending changes" if log.bytes_saved else ""
    return (
        f"{format_count(log.versions_published, 'version')} ({_mebibytes(log.bytes_published)}) by "
        f"{TRANSPORTS[summary.transport]}{saved}; {log.versions_applied} of them were "
        f"installed, each with a pause of {log.pause.median * 1000:.0f} ms"
    )


def _format_answers(summary: DemoSummary) -> str:
    """Return how old the answers were, and how many prompts were asked again."""
    samples = sum(summary.log.staleness.values())
    shares = [
        f"{number / samples:.0%} {format_count(late, 'step')} old"
        for late, number in summary.log.staleness.items()
    ]
    again = f"; asked again: {_issued_again(summary.log.reissued)}" if summary.log.reissued else ""
    if not shares:
        return f"{summary.staleness_mean:.2g} steps old in the mean{again}"
    more = f", {format_count(len(shares) - _AGES, 'more age')}" if len(shares) > _AGES else ""
    return f"{samples:,} trained on: {', '.join(shares[:_AGES])}{more}{again}"


def _next_rows(summary: DemoSummary) -> list[tuple[str, str]]:
    """Return what can be done next: continue the run, or look at it and use what it made."""
    if summary.next_command is not None:
        start = _from(summary.newest_checkpoint)
        return [
            ("go on", f"from {start}: {summary.next_command}"),
            ("replay", summary.replay_command),
        ]
    folder = summary.newest_checkpoint and summary.newest_checkpoint.folder
    # The replay's command has what names the log: its folder, or its server.
    replay = summary.replay_command
    looks = [replay.replace(f"replay {summary.run_id}", "dashboard")]
    if " --" not in replay:  # samples reads the folder alone, and knows no server
        looks.append(replay.replace(" replay ", " samples "))
    use = f"; trinity-events convert {folder} ./model" if folder else ""
    return [("look", "; ".join(looks)), ("replay", f"{replay}{use}")]


def _evaluated(results: EvaluationResults) -> str:
    """Return the first and the last mean reward of a set, with their intervals."""
    failed = f"{results.failed} failed" if results.failed else ""
    if not results.finished:
        return failed
    first = f"{_mean(results.first)} at step {results.first_step}"
    last = f" -> {_mean(results.last)} at step {results.last_step}" if results.finished > 1 else ""
    errors = results.last.get(REWARD_ERRORS, 0.0)
    unjudged = f", without {errors:.0f} answers whose rewards failed" if errors else ""
    return f"reward {first}{last}{unjudged}{failed and f', {failed}'}"


def _mean(metrics: Mapping[str, float]) -> str:
    low, high = (metrics.get(f"mean_{end}", 0.0) for end in ("low", "high"))
    return f"{metrics.get('mean', 0.0):.2f} ({low:.2f} to {high:.2f})"


def _issued_again(reissued: Mapping[str, int]) -> str:
    """Return the number of prompts that were issued again, by reason."""
    reasons = ", ".join(f"{number} {reason}" for reason, number in reissued.items())
    return f"{format_count(sum(reissued.values()), 'prompt')}: {reasons}"


def _dropped_rows(log: RunSummary) -> list[tuple[str, str]]:
    """Return rows of dropped prompts and of samples whose reward failed; none without any."""
    rows = []
    if log.dropped:
        reasons = ", ".join(f"{number} {reason}" for reason, number in log.dropped.items())
        rows.append(("DROPPED", f"{format_count(sum(log.dropped.values()), 'prompt')}: {reasons}"))
    if log.reward_errors:
        scored = f"{log.reward_errors} samples have rewards.error_score, since their rewards failed"
        rows.append(("REWARD ERRORS", scored))
    return rows


def _refusals(log: RunSummary) -> str:
    return (
        f"{format_count(log.refusals, 'time')}, an explorer found that what it read was not what "
        f"was published (see trinity-events verify {log.run_id})."
    )


def _failed_rows(failed: Sequence[FailedStep]) -> list[tuple[str, str]]:
    if not failed:
        return []
    steps = [f"{failure.step} ({' and '.join(failure.kinds)})" for failure in failed]
    more = f", and {len(steps) - _LISTED} before them" if len(steps) > _LISTED else ""
    # The last ones: what failed lately is what the user looks for.
    return [("FAILED saves", f"of step {', '.join(steps[-_LISTED:])}{more}")]


def _from(checkpoint: NewestCheckpoint | None) -> str:
    return "step 1" if checkpoint is None else f"the checkpoint of step {checkpoint.step}"


def _newest(checkpoint: NewestCheckpoint | None) -> str:
    if checkpoint is None:
        return "no checkpoint to resume from"
    where = "" if checkpoint.folder is None else f", in {checkpoint.folder}"
    return f"the newest of step {checkpoint.step}{where}"


def _mebibytes(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"

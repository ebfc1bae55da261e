"""Whole runs of two ways on the same warmed policies, a pair for each seed."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from trinity_workers.algorithms.presets import merged
from trinity_workers.launch.warm_up import warm_up
from trinity_workers.learning.policy import create_policy
from trinity_workers.tasks import built_in_task

from ..environment import Stage
from ..measure import Findings, Noise, Row, ratio, say, spread
from .plan import COMMON, NEW_TOKENS, SEEDS, STUDIED, LearningRun, Settings
from .results import LearningResult, Results
from .running import perform
from .statistics import level, paired_differences, t_interval


class Size(NamedTuple):
    """Seeds, steps of each run, steps between two measurements, and the expected duration."""

    seeds: tuple[int, ...]
    steps: int
    measured_every: int
    takes: str


SIZES = {
    "tiny": Size((0,), 2, 1, "4 min"),
    "small": Size(SEEDS, 40, 10, "15 min"),
    "full": Size(SEEDS, 150, 25, "40 min"),
}


def compare_ways(
    on: Stage,
    size: Size,
    noise: Noise,
    ways: Mapping[str, Settings],
    *,
    shape: Mapping[str, Any] | None = None,
) -> Findings:
    """Train in two ways, seed by seed, and compare the second with the first.

    Args:
        on: Stage of the benchmark.
        size: Size of the runs.
        noise: Variation of the machine.
        ways: Name and settings of each way.
        shape: Sizes of the policy, if they are not the usual ones.
    """
    results: dict[str, list[LearningResult]] = {way: [] for way in ways}
    for seed in size.seeds:
        folder = on.folder / f"policy-{seed}"
        create_policy(folder, seed, **(shape or {}))
        _, accuracy = warm_up(folder, built_in_task(STUDIED, seed), seed)
        say(f"  the policy of seed {seed} answers {accuracy:.2f} right")
        for way, settings in ways.items():
            noise.beat()
            say(f"  {way}, seed {seed}")
            common = {
                "seed": seed,
                "steps": size.steps,
                "model": {"path": str(folder)},
                "task": {"name": STUDIED},
                "trainer": {"ranks": 1, "warmup_steps": min(20, size.steps // 4)},
                "rollouts": {"max_new_tokens": NEW_TOKENS[STUDIED]},
                "sync": {"style": "fixed"},
                "checkpoints": {"interval": size.measured_every},
            }
            run = LearningRun(
                family=STUDIED,
                way=way,
                seed=seed,
                settings=merged(merged(COMMON, common), settings),
            )
            results[way].append(perform(run, Results(on.folder / "results")))
    notes = [
        f"{STUDIED}, {len(size.seeds)} seeds, {size.steps} steps of "
        f"{COMMON['rollouts']['prompts_per_step']} x {COMMON['rollouts']['samples_per_prompt']} "
        f"answers of at most {NEW_TOKENS[STUDIED]} tokens, one explorer, style `fixed`. "
        "The level is the mean share of exact answers in the last three measurements, each on the "
        "same held-out questions by the trainer's model. A difference has the 95 % interval of "
        "Student's t over the seeds' pairs.",
        *(
            f"Share of exact answers by step, {way}: {_format_curve(of_way)}."
            for way, of_way in results.items()
        ),
    ]
    return Findings([*_compare(results)], notes)


def _compare(results: dict[str, list[LearningResult]]) -> list[Row]:
    (peer, theirs), (_, ours) = results.items()
    levels = [[level(result) for result in of_way] for of_way in (ours, theirs)]
    gains = [
        [level(result) - result.curve[0].exact for result in of_way] for of_way in (ours, theirs)
    ]
    seconds = [[result.step_seconds or 0.0 for result in of_way] for of_way in (ours, theirs)]
    difference = t_interval(paired_differences(ours, theirs)).shown(signed=True)
    return [
        Row(
            what="seconds of a training step",
            figure=f"{fmean(seconds[0]):.3g} s",
            peer=peer,
            peer_figure=f"{fmean(seconds[1]):.3g} s",
            ratio=ratio(*seconds),
            spread=spread(seconds[0]),
        ),
        Row(
            what=f"level, and its difference: {difference}",
            figure=f"{fmean(levels[0]):.3f}",
            peer=peer,
            peer_figure=f"{fmean(levels[1]):.3f}",
        ),
        Row(
            what="level over that of the warmed policy",
            figure=f"{fmean(gains[0]):+.3f}",
            peer=peer,
            peer_figure=f"{fmean(gains[1]):+.3f}",
        ),
    ]


def _format_curve(results: list[LearningResult]) -> str:
    points = zip(*(result.curve for result in results), strict=True)
    return ", ".join(
        f"{measured[0].step}: {fmean(point.exact for point in measured):.3f}" for measured in points
    )

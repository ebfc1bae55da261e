"""Learning and step time with explorers of vLLM and of Hugging Face's generate.

The same runs of `trinity-events train` on the same warmed policies, one at a time: a pair for each
seed. The policy is one that vLLM's attention takes on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from trinity_workers.algorithms.presets import merged
from trinity_workers.launch.warm_up import warm_up
from trinity_workers.learning.policy import create_policy
from trinity_workers.tasks import built_in_task

from .engines import missing as missing  # noqa: PLC0414 - read by the command
from .environment import Stage
from .learning.plan import COMMON, NEW_TOKENS, SEEDS, STUDIED, LearningRun
from .learning.results import LearningResult, Results
from .learning.running import perform
from .learning.statistics import level, paired_differences, t_interval
from .measure import Findings, Noise, Row, ratio, say, spread
from .report import ENGINES

TITLE = "vLLM and Hugging Face's generate, in whole runs that learn"
PLACE = ENGINES
POLICY = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
"""Shape of the policy: heads of 64, since vLLM's attention on a CPU takes no smaller ones."""
EXPLORERS: dict[str, dict[str, Any]] = {
    "huggingface": {},
    "vllm": {
        "engine_options": {"engine_args": {"max_num_seqs": 256, "kv_cache_memory_bytes": 1 << 28}}
    },
}


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


def run(on: Stage, size: Size, noise: Noise) -> Findings:
    """Train with both engines, seed by seed."""
    results: dict[str, list[LearningResult]] = {engine: [] for engine in EXPLORERS}
    for seed in size.seeds:
        folder = on.folder / f"policy-{seed}"
        create_policy(folder, seed, **POLICY)
        _, accuracy = warm_up(folder, built_in_task(STUDIED, seed), seed)
        say(f"  the policy of seed {seed} answers {accuracy:.2f} right")
        for engine, of_engine in results.items():
            noise.beat()
            say(f"  {engine}, seed {seed}")
            run = _make_run(engine, seed, size, folder)
            of_engine.append(perform(run, Results(on.folder / "results")))
    notes = [
        f"{STUDIED}, {len(size.seeds)} seeds, {size.steps} steps of "
        f"{COMMON['rollouts']['prompts_per_step']} x {COMMON['rollouts']['samples_per_prompt']} "
        f"answers of at most {NEW_TOKENS[STUDIED]} tokens, one rank, one explorer, style `fixed`. "
        "The level is the mean share of exact answers in the last three measurements, each on the "
        "same held-out questions by the trainer's model. A difference has the 95 % interval of "
        "Student's t over the seeds' pairs.",
        *(
            f"Share of exact answers by step, {engine}: {_format_curve(results[engine])}."
            for engine in EXPLORERS
        ),
    ]
    return Findings([*_compare(results)], notes)


def _make_run(engine: str, seed: int, size: Size, folder: Path) -> LearningRun:
    own = {
        "seed": seed,
        "steps": size.steps,
        "model": {"path": str(folder)},
        "task": {"name": STUDIED},
        "trainer": {"ranks": 1, "warmup_steps": min(20, size.steps // 4)},
        "explorer": {"engine": engine, **EXPLORERS[engine]},
        "rollouts": {"max_new_tokens": NEW_TOKENS[STUDIED]},
        "sync": {"style": "fixed"},
        "checkpoints": {"interval": size.measured_every},
    }
    return LearningRun(family=STUDIED, way=engine, seed=seed, settings=merged(COMMON, own))


def _compare(results: dict[str, list[LearningResult]]) -> list[Row]:
    ours, peer = results["vllm"], results["huggingface"]
    levels = [[level(result) for result in of_engine] for of_engine in (ours, peer)]
    gains = [
        [level(result) - result.curve[0].exact for result in of_engine]
        for of_engine in (ours, peer)
    ]
    seconds = [[result.step_seconds or 0.0 for result in of_engine] for of_engine in (ours, peer)]
    difference = t_interval(paired_differences(ours, peer)).shown(signed=True)
    return [
        Row(
            what="seconds of a training step",
            figure=f"{fmean(seconds[0]):.3g} s",
            peer="huggingface",
            peer_figure=f"{fmean(seconds[1]):.3g} s",
            ratio=ratio(*seconds),
            spread=spread(seconds[0]),
        ),
        Row(
            what=f"level, and its difference: {difference}",
            figure=f"{fmean(levels[0]):.3f}",
            peer="huggingface",
            peer_figure=f"{fmean(levels[1]):.3f}",
        ),
        Row(
            what="level over that of the warmed policy",
            figure=f"{fmean(gains[0]):+.3f}",
            peer="huggingface",
            peer_figure=f"{fmean(gains[1]):+.3f}",
        ),
    ]


def _format_curve(results: list[LearningResult]) -> str:
    points = zip(*(result.curve for result in results), strict=True)
    return ", ".join(
        f"{measured[0].step}: {fmean(point.exact for point in measured):.3f}" for measured in points
    )

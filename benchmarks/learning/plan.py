"""Plan of the runs: what each is of, and its settings as `trinity-events train` reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from trinity_workers.algorithms.presets import merged

Settings = dict[str, Any]

ALONE = "one process"
"""Way of a run without the pipeline: one process samples, judges and trains."""
SEEDS = (0, 1, 2)
STEPS = 300
MEASURED_EVERY = 25
"""Steps between two measurements on held-out questions."""
FAMILIES = ("spell-backward", "sort-digits", "complex-sums")
STUDIED = FAMILIES[0]
"""Family that the other styles and bounds are tried on."""
NEW_TOKENS = {"spell-backward": 7, "sort-digits": 11, "complex-sums": 9}
STYLES: dict[str, Settings] = {
    "fixed": {"style": "fixed"},
    "fully_async": {"style": "fully_async", "max_staleness": 1},
    "trainer_driven": {"style": "trainer_driven", "max_staleness": 1},
    "explorer_driven": {"style": "explorer_driven", "max_staleness": 1},
}
BOUNDS = (0, 1, 4)
_UNCORRECTED: Settings = {"algorithm": {"importance_sampling": {"weights": "none"}}}
COMMON: Settings = {
    "steps": STEPS,
    "trainer": {"ranks": 2, "learning_rate": 5e-4, "warmup_steps": 20, "schedule": "linear"},
    # The clipped ratio is that of the trainer's own policies, and the distance from the policy that
    # sampled is left to the weights: without them, old samples are taken for new ones.
    "algorithm": {"importance_sampling": {"ratio_to": "proximal", "weights": "token"}},
    "explorer": {"count": 1},
    "evaluation": {"sets": {}},
    "rollouts": {"prompts_per_step": 16, "samples_per_prompt": 16},
    "checkpoints": {"interval": MEASURED_EVERY, "keep": 0},
}


class LearningRun(Struct, frozen=True, kw_only=True):
    """One run of the plan."""

    family: str
    way: str
    """Style of the pipeline, a bound of fully_async, or :data:`ALONE`."""
    seed: int
    settings: Settings

    @property
    def name(self) -> str:
        """Name of the run, and of its files."""
        return f"{self.family}-{self.way.replace(' ', '-').replace('_', '-')}-{self.seed}"

    @property
    def alone(self) -> bool:
        """Return True for a run without the pipeline."""
        return self.way == ALONE


def bound_way(bound: int, *, corrected: bool) -> str:
    """Return the way of fully asynchronous runs with a bound on staleness."""
    if bound == 1 and corrected:
        return "fully_async"
    return f"bound {bound}" + ("" if corrected else " uncorrected")


def ways_of(family: str) -> dict[str, Settings]:
    """Return the ways that a family is run, and the settings of each beside the common ones."""
    ways: dict[str, Settings] = {ALONE: {}}
    styles = STYLES if family == STUDIED else ("fixed", "fully_async")
    ways |= {style: {"sync": STYLES[style]} for style in styles}
    if family != STUDIED:
        return ways
    for bound in BOUNDS:
        sync = {"sync": {"style": "fully_async", "max_staleness": bound}}
        ways[bound_way(bound, corrected=True)] = sync
        ways[bound_way(bound, corrected=False)] = merged(sync, _UNCORRECTED)
    return ways


def plan() -> Iterator[LearningRun]:
    """Yield all runs: those that each family needs first, then the others; seed after seed."""
    ways = {family: ways_of(family) for family in FAMILIES}
    first = (ALONE, "fixed", "fully_async")
    for seed in SEEDS:
        for family in FAMILIES:
            yield from (_run(family, way, seed, ways[family][way]) for way in first)
    for seed in SEEDS:
        for way, settings in ways[STUDIED].items():
            if way not in first:
                yield _run(STUDIED, way, seed, settings)


def _run(family: str, way: str, seed: int, beside: Mapping[str, Any]) -> LearningRun:
    own = {
        "seed": seed,
        "task": {"name": family},
        "rollouts": {"max_new_tokens": NEW_TOKENS[family]},
    }
    settings = merged(merged(COMMON, own), beside)
    return LearningRun(family=family, way=way, seed=seed, settings=settings)

"""Recorded samples of a simulated run, which agree with its events.

Ordinals, attempts, fates, staleness, sums of tokens and mean rewards are those of the events. A
sample's versions are some that its explorer applied. Texts and log-probabilities are drawn.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from trinity_schemas import (
    EnvelopeReader,
    MessageUndecodable,
    RolloutsDispatched,
    StepTrained,
    WeightsApplied,
)

from ..core.alarms import TRUNCATED_ANSWERS
from ..record.columns import SUMMARY_COLUMNS
from ..record.files import RecordedStep, RecordFile
from ..record.reader import TRAINED, RolloutRecord
from .simulated_run import MAX_STALENESS, SAMPLES, Plan, simulated_run
from .sources import RecordedSource

_LIMIT = 768
"""Tokens at which answers are cut off: more than 1.5 times the greatest mean of the demo."""
_PREVIEW = 80
"""Characters of the beginning, and of the end, of an answer, as in records of real runs."""
_TOKEN = re.compile(r"\s?[A-Za-z]+|\s?\d|\s?[^\w\s]|\s")
_SHOPS = (
    ("A bakery", "loaves"),
    ("A library", "books"),
    ("A depot", "crates"),
    ("A kiosk", "maps"),
)

Row = dict[str, Any]


def open_simulated_run(plan: Plan) -> RecordedSource:
    """Return the log of a simulated run, with its record."""
    source = RecordedSource.from_entries(plan.run_id, simulated_run(plan))
    source.record = SimulatedRecord(plan)
    return source


class _TrainedStep(NamedTuple):
    """Step of the current lineage."""

    epoch: int
    event: StepTrained
    explorers: dict[int, frozenset[int]]
    """Explorers that had applied a version, by its step."""


class SimulatedRecord(RolloutRecord):
    """Record without files: each read draws its rows again, from the same seeds."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(Path(plan.run_id), plan.run_id)
        self._plan = plan
        self._attempts: dict[int, int] = {}
        """Ordinal to the attempt that was trained on, if that is not the first."""

    @cached_property
    def _steps(self) -> dict[int, _TrainedStep]:
        decode, steps = EnvelopeReader().decode, {}
        every = frozenset(range(self._plan.explorers))
        applied: defaultdict[tuple[int, int], frozenset[int]] = defaultdict(frozenset)
        for entry in simulated_run(self._plan):
            try:
                envelope = decode(entry.payload)
            except MessageUndecodable:
                continue  # a planted fault
            epoch, event = envelope.epoch, envelope.event
            if isinstance(event, WeightsApplied):
                applied[epoch, event.version.step] |= {envelope.producer.rank}
            elif isinstance(event, RolloutsDispatched):
                self._attempts |= {again.ordinal: again.attempt for again in event.reissued}
            elif isinstance(event, StepTrained):
                window = range(event.step - 1 - MAX_STALENESS, event.step)
                # Processes begin with the epoch's first version: no event says so.
                explorers = {step: applied.get((epoch, step), every) for step in window}
                steps[event.step] = _TrainedStep(epoch, event, explorers)
        return steps

    def list_steps(
        self, *, superseded: bool = False, discarded: bool = False
    ) -> list[RecordedStep]:
        """Return the steps of the current lineage: the record has no others."""
        listed = []
        for step, (epoch, event, _) in self._steps.items():
            dropped = (RecordFile(epoch, step, 0, True),) if event.dropped else ()
            listed.append(RecordedStep(step, epoch, (RecordFile(epoch, step, 0),), True, dropped))
        return listed

    def read(
        self,
        recorded: RecordedStep,
        columns: Sequence[str] | None = SUMMARY_COLUMNS,
        *,
        ordinal: int | None = None,
        sample: int | None = None,
        discarded: bool = False,
    ) -> list[Row]:
        """Return samples of a step, with those texts and tokens that are read."""
        trained_step = self._steps[recorded.step]
        event = trained_step.event
        fates = event.dropped if discarded else {TRAINED: event.trained}
        has_texts = not {"prompt", "preview"}.isdisjoint(columns or ("prompt",))
        rows = [
            row | (_draw_texts(row, has_tokens=columns is None) if has_texts else {})
            for fate, ranges in fates.items()
            for row in self._draw_rows(trained_step, fate, ranges)
            if ordinal in (None, row["ordinal"]) and sample in (None, row["sample"])
        ]
        return sorted(rows, key=lambda row: (row["ordinal"], row["sample"]))

    def _draw_rows(
        self, trained_step: _TrainedStep, fate: str, ranges: Sequence[tuple[int, int]]
    ) -> Iterator[Row]:
        """Yield the samples of a fate, without their texts."""
        epoch, event, explorers = trained_step
        draw = random.Random(f"{epoch} {event.step} {fate}")  # noqa: S311
        ordinals = [ordinal for first, last in ranges for ordinal in range(first, last + 1)]
        draw.shuffle(ordinals)  # else the last ones would be the stale ones
        count, is_trained = len(ordinals) * SAMPLES, fate == TRAINED
        cut = round(event.metrics[TRUNCATED_ANSWERS] * count) if is_trained else 0
        lengths = _draw_lengths(draw, event.tokens[fate], count, cut)
        ages = sorted(Counter(event.staleness).elements()) if is_trained else [0] * count
        # Answers to an easy question are right together; of a filtered one, all are wrong.
        ease = [draw.gauss(0, 1) for _ in ordinals]
        luck = [ease[place // SAMPLES] + draw.gauss(0, 1.3) for place in range(count)]
        order = sorted(range(count), key=lambda place: (lengths[place] == _LIMIT, -luck[place]))
        rewarded = round(event.metrics["reward/mean"] * count) if is_trained else 0
        correct = {*order[:rewarded]}
        for group, ordinal in enumerate(ordinals):
            places = range(group * SAMPLES, (group + 1) * SAMPLES)
            mean = len(correct.intersection(places)) / SAMPLES
            deviation = (mean - mean**2) ** 0.5
            answers = [_split_versions(event.step - 1, ages[at], lengths[at]) for at in places]
            steps = {step for parts in answers for step, _ in parts}
            able = sorted(frozenset.intersection(*(explorers[step] for step in steps)))
            for sample, (at, parts) in enumerate(zip(places, answers, strict=True)):
                reward, is_truncated = float(at in correct), lengths[at] == _LIMIT
                advantage = (reward - mean) / (deviation + 1e-4)
                yield {
                    **{"fate": None if is_trained else fate, "ordinal": ordinal, "sample": sample},
                    **{"attempt": self._attempts.get(ordinal, 1), "question_set": "arithmetic"},
                    **{"explorer": f"explorer-{able[ordinal % len(able)]}", "proof": "proven"},
                    **{"staleness": ages[at], "version_count": len(parts)},
                    "versions": [
                        {"epoch": epoch, "step": step, "tokens": tokens} for step, tokens in parts
                    ],
                    **{"reward": reward, "reward_error": None, "judge_reply": None},
                    "reward_parts": {"correct": reward, "complete": float(not is_truncated)},
                    **{"is_truncated": is_truncated, "is_redacted": False},
                    **{"completion_tokens": lengths[at], "advantage": advantage},
                }


def _draw_lengths(draw: random.Random, total: int, count: int, cut: int) -> list[int]:
    """Draw the tokens of answers, of which some are cut off; their sum is the total."""
    weights = [draw.uniform(0.5, 1.5) for _ in range(count - cut)]
    remaining = total - cut * _LIMIT
    lengths = [int(remaining * weight / sum(weights)) for weight in weights]
    for place in range(remaining - sum(lengths)):
        lengths[place] += 1
    lengths += [_LIMIT] * cut
    draw.shuffle(lengths)
    return lengths


def _split_versions(newest: int, age: int, length: int) -> list[tuple[int, int]]:
    """Return the versions of an answer: explorers of a stale one went on with the next one."""
    oldest = newest - age
    return [(oldest, length)] if age < 1 else [(oldest, length // 2), (oldest + 1, -(-length // 2))]


def _draw_texts(row: Row, *, has_tokens: bool) -> Row:
    """Return the texts of a sample, and its tokens if they are read."""
    draw = random.Random(f"{row['ordinal']}")  # noqa: S311
    place, goods = draw.choice(_SHOPS)
    days, stock, gain = draw.randint(6, 14), draw.randint(40, 99), draw.randint(3, 29)
    prompt = f"{place} has {stock} {goods} and gets {gain} each day. How many after {days} days?"
    draw.seed(f"{row['ordinal']} {row['attempt']} {row['sample']}")
    slip = 0 if row["reward"] else draw.choice((-10, -2, -1, 1, 9, 10))
    stocks = [stock, *(stock + slip + gain * day for day in range(1, days + 1))]
    lines = [f"Start with {stock} {goods}, and count day by day.\n"]
    lines += [
        f"Day {day}: {stocks[day - 1]} + {gain} = {stocks[day]}.\n" for day in range(1, days + 1)
    ]
    lines += [f"That makes {stocks[-1]} {goods}. Wait, let me check that once more.\n"]
    passage, count = _TOKEN.findall("".join(lines)), row["completion_tokens"]
    end = [] if row["is_truncated"] else _TOKEN.findall(f" ... so the answer is {stocks[-1]}.")
    tokens = [*islice(cycle(passage), count - len(end)), *end]
    completion = "".join(tokens)
    texts = {"prompt": prompt, "preview": f"{completion[:_PREVIEW]} … {completion[-_PREVIEW:]}"}
    if not has_tokens:
        return texts
    is_trained, logprobs = row["fate"] is None, [round(-draw.expovariate(6), 2) for _ in tokens]
    drift = [round(logprob - draw.random() / 20, 2) for logprob in logprobs]
    return texts | {
        **{"prompt_messages": None, "completion_messages": None, "token_texts": tokens},
        **{"completion_mask": [True] * count, "logprobs": logprobs},
        "trainer_logprobs": drift if is_trained else None,
        "advantages": [row["advantage"]] * count if is_trained else None,
        "turns": [
            {"role": "prompt", "content": prompt, "tokens": len(_TOKEN.findall(prompt))},
            {"role": "policy", "content": completion, "tokens": count},
        ],
    }

"""Alarms on the health of training, by the metrics and the pace of its steps.

1. An alarm is raised once, and cleared once its cause is gone. It is an event, and never an action.
2. A threshold that is None judges nothing. A metric that is missing or not finite neither raises
   an alarm nor clears one.
3. A share is judged over :data:`PATIENCE` steps in a row, to raise as to clear: one step is noise.
   So is the rate of an explorer, over its own transfers: fast ones of others excuse none.
4. A pace is judged by the median of the same epoch, once that has :data:`_KNOWN_PACE` steps, and
   while a step is under way. The next step clears it.
5. Entropy that falls while the reward rises is a policy that has learned, and no alarm.
6. Histories are bounded, whatever the number of steps and of reward parts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from trinity_schemas import AlarmCleared, AlarmRaised

from .learning import REWARDS

PATIENCE = 5
"""Steps in a row after which a share is no noise of its batch."""
EQUAL_REWARDS = "rollout/equal_rewards"
"""Metric of a step: share of the groups whose rewards are all the same."""
TRUNCATED_ANSWERS = "rollout/truncated_answers"
EMPTY_ANSWERS = "rollout/empty_answers"
REPEATED_ANSWERS = "rollout/repeated_answers"
INFRA_FAILED_RATE = "rollout/infra_failed_rate"

_KNOWN_PACE = 5
"""Steps by which a median is known."""
_KEPT_PACE = 20
# Below it, a pause of the machine is many times the median of a fast step.
SHORTEST_STALL = 60.0
"""Seconds below which no step is stalled."""
_FIRST_STEPS = 10
"""Steps whose entropy and reward are those of the beginning."""
_HALF = 20
"""Steps of each of the two means that are compared of a reward part."""
_PARTS = 32
"""Reward parts with a history: as many as a step has metrics of."""
_PART = "reward_parts/"


class _JudgedShare(NamedTuple):
    """Alarm on a share that is too large."""

    metric: str
    words: str


_SHARES = {
    "equal_rewards": _JudgedShare(
        EQUAL_REWARDS, "of the groups have equal rewards, so that nothing is learned from them"
    ),
    "truncated_answers": _JudgedShare(
        TRUNCATED_ANSWERS, "of the answers met their limit of tokens"
    ),
    "empty_answers": _JudgedShare(EMPTY_ANSWERS, "of the answers are empty"),
    "repeated_answers": _JudgedShare(REPEATED_ANSWERS, "of the answers end in a loop of tokens"),
    "infra_failed_rate": _JudgedShare(
        INFRA_FAILED_RATE, "of the prompts were dropped because their requests or rewards failed"
    ),
}


class _Judgement(NamedTuple):
    value: float
    words: str
    is_bad: bool


class AlarmJudge:
    """Judge of the steps of one epoch.

    Args:
        thresholds: Threshold of each alarm by its name; None turns an alarm off.
        shortest_stall: Seconds below which no step is stalled.
    """

    def __init__(
        self, thresholds: Mapping[str, float | None], *, shortest_stall: float = SHORTEST_STALL
    ) -> None:
        self._shortest_stall = shortest_stall
        self._thresholds = {
            name: threshold for name, threshold in thresholds.items() if threshold is not None
        }
        self._raised: set[str] = set()
        self._streaks: dict[str, int] = {}
        """Steps in a row that contradict the present state of an alarm, or of an explorer."""
        self._slow: set[str] = set()
        """Explorers whose transfers are below the floor."""
        self._paces: deque[float] = deque(maxlen=_KEPT_PACE)
        self._first_entropies: list[float] = []
        self._first_rewards: list[float] = []
        self._rewards: deque[float] = deque(maxlen=_FIRST_STEPS)
        self._parts: dict[str, deque[float]] = {}

    def judge_step(
        self, step: int, metrics: Mapping[str, float], seconds: float | None = None
    ) -> list[AlarmRaised | AlarmCleared]:
        """Judge a trained step; return the alarms that it raises and clears.

        Args:
            step: Number of the step.
            metrics: Metrics of the step.
            seconds: Seconds since the step before; None for the first step of an epoch.
        """
        events: list[AlarmRaised | AlarmCleared] = []
        if "stalled_step" in self._raised:
            events.append(self._clear("stalled_step", step))
        if seconds is not None:
            self._paces.append(seconds)
        for name, verdict in self._judge_metrics(metrics):
            event = self._count(name, step, verdict)
            if event is not None:
                events.append(event)
        return events

    @property
    def stalled_after(self) -> float | None:
        """Seconds after which the step under way is stalled; None while no pace is known."""
        factor = self._thresholds.get("stalled_step")
        if factor is None or len(self._paces) < _KNOWN_PACE:
            return None
        return max(factor * statistics.median(self._paces), self._shortest_stall)

    def judge_stall(self, step: int, seconds: float, phase: str) -> AlarmRaised | None:
        """Return the alarm on a step that has not ended; None if it is raised, or not due.

        Args:
            step: Number of the step that is under way.
            seconds: Seconds since the step before.
            phase: Phase of the trainer, such as ``waiting-rollouts``.
        """
        bound = self.stalled_after
        if bound is None or seconds < bound or "stalled_step" in self._raised:
            return None
        median = statistics.median(self._paces)
        words = (
            f"step {step} has taken {seconds:.0f} s so far, and the median of the last "
            f"{len(self._paces)} steps is {median:.2g} s; the trainer is in phase {phase}"
        )
        value = seconds / median if median else seconds
        return self._raise("stalled_step", step, value, words)

    def judge_transfer(
        self, step: int, explorer: str, nbytes: int, seconds: float
    ) -> AlarmRaised | AlarmCleared | None:
        """Return the alarm that the weights of a step raise or clear, as an explorer got them.

        The first slow explorer raises it, and it is cleared once none is slow.
        """
        floor = self._thresholds.get("transfer_rate")
        if floor is None or nbytes <= 0 or seconds <= 0:
            return None
        rate = nbytes / seconds
        was_slow = explorer in self._slow
        if not self._has_turned(explorer, rate < floor, was_slow):
            return None
        self._slow ^= {explorer}
        if was_slow:
            return None if self._slow else self._clear("transfer_rate", step)
        if "transfer_rate" in self._raised:
            return None
        words = (
            f"{explorer} got the weights of step {step} at {rate / 1e6:.3g} MB/s, and the floor is "
            f"{floor / 1e6:.3g} MB/s"
        )
        return self._raise("transfer_rate", step, rate, words)

    def _judge_metrics(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, _Judgement]]:
        for name, share in _SHARES.items():
            threshold = self._thresholds.get(name)
            value = _read(metrics, share.metric)
            if threshold is not None and value is not None:
                words = f"{value:.0%} {share.words}"
                yield name, _Judgement(value, words, value >= threshold)
        if (verdict := self._judge_entropy(metrics)) is not None:
            yield "entropy_collapse", verdict
        if (verdict := self._judge_parts(metrics)) is not None:
            yield "reward_parts_apart", verdict

    def _judge_entropy(self, metrics: Mapping[str, float]) -> _Judgement | None:
        """Compare the entropy with that of the first steps."""
        threshold = self._thresholds.get("entropy_collapse")
        entropy = _read(metrics, "rollout_entropy")
        reward = _read(metrics, *REWARDS)
        if threshold is None or entropy is None or reward is None:
            return None
        self._rewards.append(reward)
        if len(self._first_entropies) < _FIRST_STEPS:
            self._first_entropies.append(entropy)
            self._first_rewards.append(reward)
            return None
        first = statistics.median(self._first_entropies)
        if first <= 0:
            return None
        value = entropy / first
        has_learned = statistics.fmean(self._rewards) > statistics.fmean(self._first_rewards)
        words = (
            f"the entropy of the answers is {entropy:.2g}, {value:.1%} of that of the first steps, "
            "and the reward is no higher than then"
        )
        return _Judgement(value, words, value < threshold and not has_learned)

    def _judge_parts(self, metrics: Mapping[str, float]) -> _Judgement | None:
        """Compare the shifts of the reward's parts: one rises while another falls.

        A shift is that of the mean of the last steps to the mean of as many before, in standard
        deviations within these. A steady slope has one of 3.5 at most.
        """
        threshold = self._thresholds.get("reward_parts_apart")
        if threshold is None:
            return None
        for name in metrics:
            value = _read(metrics, name) if name.startswith(_PART) else None
            if value is not None and (name in self._parts or len(self._parts) < _PARTS):
                self._parts.setdefault(name, deque(maxlen=2 * _HALF)).append(value)
        shifts = {
            name: _measure_shift(list(values))
            for name, values in self._parts.items()
            if name in metrics and len(values) == 2 * _HALF
        }
        if len(shifts) < 2:
            return None
        up, down = max(shifts, key=shifts.__getitem__), min(shifts, key=shifts.__getitem__)
        value = min(shifts[up], -shifts[down])
        words = (
            f"over the last {2 * _HALF} steps the reward part {up.removeprefix(_PART)} has risen "
            f"while {down.removeprefix(_PART)} has fallen"
        )
        return _Judgement(value, words, value >= threshold)

    def _count(
        self, name: str, step: int, verdict: _Judgement
    ) -> AlarmRaised | AlarmCleared | None:
        """Count a verdict; return the event of the last one of a streak (3)."""
        is_raised = name in self._raised
        if not self._has_turned(name, verdict.is_bad, is_raised):
            return None
        if is_raised:
            return self._clear(name, step)
        return self._raise(name, step, verdict.value, verdict.words)

    def _has_turned(self, name: str, is_bad: bool, was_bad: bool) -> bool:
        """Count a verdict; return True if :data:`PATIENCE` in a row say that a state is over."""
        streak = self._streaks.get(name, 0) + 1 if is_bad is not was_bad else 0
        has_turned = streak >= PATIENCE
        self._streaks[name] = 0 if has_turned else streak
        return has_turned

    def _raise(self, name: str, step: int, value: float, words: str) -> AlarmRaised:
        self._raised.add(name)
        threshold = self._thresholds[name]
        return AlarmRaised(
            alarm=name,
            step=step,
            value=value,
            threshold=threshold,
            sentence=f"{words} (alarms.{name} is {threshold:g})",
        )

    def _clear(self, name: str, step: int) -> AlarmCleared:
        self._raised.discard(name)
        return AlarmCleared(alarm=name, step=step)


def _measure_shift(values: list[float]) -> float:
    """Return the shift between the halves of a series, in standard deviations within them."""
    before, after = values[:_HALF], values[_HALF:]
    shift = statistics.fmean(after) - statistics.fmean(before)
    spread = math.sqrt((statistics.pvariance(before) + statistics.pvariance(after)) / 2)
    # Of constant halves, any shift is beyond all noise, and has a finite value on the wire.
    return shift / max(spread, abs(shift) / 1e3) if shift else 0.0


def _read(metrics: Mapping[str, float], *names: str) -> float | None:
    """Return the first of some metrics that is present; None if it is not finite."""
    value = next((metrics[name] for name in names if name in metrics), math.nan)
    return value if math.isfinite(value) else None

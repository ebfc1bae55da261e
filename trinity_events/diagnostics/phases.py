"""Phases of a process: for what it uses its time, measured by itself and reported to the log.

1. A process is in exactly one phase at a time: the seconds of all phases add up to its age.
2. The phase is that of the most important activity under way, in the order of :data:`PHASES`. So
   activities may overlap and end in any order, in tasks and in threads.
3. A report has sums since the start: a lost one costs no second, and a later one replaces it.
4. Reports are bounded: the pause before the next one grows with the age of the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trinity_schemas import ContractError, PhasesMeasured

from ..errors import TrinityError
from .phase_names import IDLE, PHASES, STARTING, find_pause

logger = logging.getLogger(__name__)

_IMPORTANCE = {phase: place for place, phase in enumerate(PHASES)}


class PhaseClock:
    """Clock of one process, which divides its time among phases, and counts what it sampled.

    Args:
        base: Phase while no activity is under way.
        now: Clock in seconds, which is never set back.
    """

    def __init__(self, base: str = IDLE, *, now: Callable[[], float] = time.monotonic) -> None:
        self._base = base
        self._now = now
        self._lock = threading.Lock()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._active: Counter[str] = Counter({STARTING: 1})
        self._phase = STARTING
        self._since = self.began = now()
        self._tokens: Counter[str] = Counter()
        self._samples = 0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block as an activity, unless a more important one is under way."""
        self._change(name, 1)
        try:
            yield
        finally:
            self._change(name, -1)

    def restart(self) -> None:
        """Begin again at no seconds; activities that are under way continue."""
        with self._lock:
            self._seconds.clear()
            self._since = self.began = self._now()

    @property
    def age(self) -> float:
        """Seconds since it began."""
        return self._now() - self.began

    def end_start(self) -> None:
        """End the phase ``starting``, in which a process begins."""
        with self._lock:
            self._book()
            del self._active[STARTING]
            self._choose()

    def count_tokens(self, fate: str, tokens: int) -> None:
        """Count sampled tokens: as ``sampled``, and later by what became of them here."""
        with self._lock:
            self._tokens[fate] += tokens

    def settle_tokens(self, fate: str) -> None:
        """Give the tokens that were sampled and have no fate the one that is named."""
        with self._lock:
            evaluated = self._tokens["evaluated"]
            others = self._tokens.total() - self._tokens["sampled"] - evaluated
            self._tokens[fate] += max(self._tokens["sampled"] - others, 0)

    def count_judged(self, answers: int) -> None:
        """Count answers that were judged."""
        with self._lock:
            self._samples += answers

    def report(self, *, gpus: float = 0.0, cores: int = 0, is_last: bool = False) -> PhasesMeasured:
        """Return the seconds by phase until now; they add up to the age of the clock."""
        with self._lock:
            self._book()
            return PhasesMeasured(
                seconds=dict(self._seconds),
                phase=self._phase,
                tokens=dict(self._tokens),
                samples=self._samples,
                gpus=gpus,
                cores=cores,
                is_last=is_last,
            )

    def _change(self, name: str, by: int) -> None:
        with self._lock:
            self._book()
            self._active[name] += by
            self._choose()

    def _book(self) -> None:
        """Add the time since the last change to the present phase."""
        now = self._now()
        self._seconds[self._phase] += now - self._since
        self._since = now

    def _choose(self) -> None:
        active = (name for name, count in self._active.items() if count > 0)
        # A phase of a user's own is less important than ours, and more than the base.
        self._phase = min(
            active, key=lambda name: _IMPORTANCE.get(name, len(PHASES)), default=self._base
        )


class PhaseReports:
    """Thread that reports the phases of a process until it is closed.

    Args:
        clock: Clock of the process.
        publish: Publishes a report without a wait; an error of it never disturbs the process.
        gpus: GPUs that the process holds.
        cores: Processor cores that it computes with.
    """

    def __init__(
        self,
        clock: PhaseClock,
        publish: Callable[[PhasesMeasured], None],
        *,
        gpus: float = 0.0,
        cores: int = 1,
    ) -> None:
        self._clock = clock
        self._publish = publish
        self._gpus = gpus
        self._cores = cores
        self._closing = threading.Event()
        # A daemon: a process that forgets to close it can end.
        self._thread = threading.Thread(target=self._run, name="phases", daemon=True)
        self._thread.start()

    def report(self, *, is_last: bool = False) -> None:
        """Publish the phases until now."""
        event = self._clock.report(gpus=self._gpus, cores=self._cores, is_last=is_last)
        try:
            self._publish(event)
        except (TrinityError, ContractError) as error:
            # The next report has everything again.
            logger.debug("the phases of this process were not reported: %s", error)

    def close(self) -> None:
        """Publish the last report."""
        if not self._closing.is_set():
            self._closing.set()
            self._thread.join()
            self.report(is_last=True)

    def __enter__(self) -> PhaseReports:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            self.report()
            if self._closing.wait(find_pause(self._clock.age)):
                return

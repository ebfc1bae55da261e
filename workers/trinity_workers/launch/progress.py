"""Progress of a run, which its command shows while it runs, from the run's own log."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path

import anyio
import redis
from rich.console import RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from trinity_events.analysis.causes import Cause, LiveFacts, find_causes, is_standstill
from trinity_events.core import Monitor, MonitorState
from trinity_events.core.handlers.rollouts import format_exclusion
from trinity_events.core.reward_errors import (
    format_evidence,
    format_reward_error,
    is_first_of_cause,
)
from trinity_events.core.skipped_updates import format_skipped_updates
from trinity_events.log import Entry, EventLog, PageSize, Stream
from trinity_events.replay import PAGE
from trinity_events.server import Deadline
from trinity_events.views.learning import format_pace
from trinity_events.views.terminal import Terminal, visible
from trinity_schemas import (
    AlarmRaised,
    ContractError,
    ExplorerExcluded,
    RewardErrorReported,
    StepTrained,
    decode_envelope,
)

from .failed_saves import FailedSaves

LOOK = 2.5
"""Seconds between two looks for the cause of a standstill, by default."""
CAUSES_EVERY = 60.0
"""Seconds after which the same cause is a line again where there is no terminal to redraw."""
LINES_EVERY = 10.0
"""Seconds between two lines where there is no terminal to redraw, by default."""
# Steps of the mean reward in the bar: the reward of one step is mostly noise.
_SMOOTHING = 20


class _Bar(Progress):
    """Progress bar with the first cause of a standstill below it."""

    cause = Text()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bar, and the cause while there is one."""
        yield from super().get_renderables()
        if self.cause:
            yield self.cause


class ProgressView:
    """Step, reward, weight version and staleness: a bar in a terminal, lines elsewhere.

    A failure is a line of its own, as soon as it is in the log, and is counted in the bar. Writes
    to standard error, so that standard output is the summary alone.

    Args:
        run_id: The run.
        steps: Training steps of the run.
        folder: The run's checkpoint directory, by which failed saves are named.
        look_every: Seconds between two looks for the cause of a standstill.
        lines_every: Seconds between two lines where there is no terminal to redraw.
    """

    def __init__(
        self,
        run_id: str,
        steps: int,
        folder: Path | None = None,
        *,
        look_every: float = LOOK,
        lines_every: float = LINES_EVERY,
    ) -> None:
        self._look_every = look_every
        self._lines_every = lines_every
        self._monitor = Monitor(MonitorState(run_id=run_id))
        self._steps = steps
        self.epoch = 0
        """Epoch that is shown; earlier ones are only folded."""
        self._rewards: list[float] = []
        self._metrics: dict[str, float] = {}
        self._failed = FailedSaves(folder)
        self._console = Terminal(stderr=True)
        self._bar: _Bar | None = None
        """Bar in the terminal, while the run is followed."""
        self._causes_shown: dict[tuple[str, str | None], float] = {}
        """Time at which each cause was last a line, by its reason and process."""
        self._printed_at = 0.0
        self._printed_step = 0

    async def follow(self, log: EventLog) -> None:
        """Show the run until cancelled; a server that is away is waited for."""
        wait = Deadline(None, f"run {log.run_id} is not shown")
        with _Bar(
            TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        ) as bar:
            self._bar = bar
            task = bar.add_task("", total=self._steps, shown="starting")
            page = PageSize(PAGE)
            while True:
                after = {Stream.EVENTS: self._monitor.state.position}
                ask = partial(log.read_blocking, after, seconds=5, limit=page.limit)
                entries = [entry for _, entry in await wait.retry(ask)]
                page.learn(entries)
                for entry in entries:
                    self._fold(entry)
                self._show(bar, task)

    async def show_causes(self, look: Callable[[], Awaitable[LiveFacts]]) -> None:
        """Show the first cause of a standstill as soon as it is known, and while it lasts.

        Args:
            look: Returns the facts about the run's processes and server at that moment.
        """
        before = None
        while True:
            await anyio.sleep(self._look_every)
            try:
                facts = await look()
            except (redis.RedisError, OSError):
                continue  # what follows the log waits for the server, and says so
            state = self._monitor.state
            causes = [] if state.epoch < self.epoch else find_causes(state, facts)
            cause = next((cause for cause in causes if is_standstill(cause, facts.now)), None)
            # Twice in a row: between two events a run may look as if it stood still.
            lasts = cause is not None and _name_cause(cause) == before
            before = None if cause is None else _name_cause(cause)
            self._show_cause(cause if lasts else None)

    def _show_cause(self, cause: Cause | None) -> None:
        # Every start waits for a while: a new user would take its waits for faults.
        state = self._monitor.state
        waits = cause is not None and cause.reason in ("waits", "no-explorer", "missing")
        is_start = waits and not self._rewards and not state.trainer_step
        word = "starting" if is_start else "first cause"
        style = "" if is_start else "bold red"
        sentence = "" if cause is None else f"{word}: {visible(cause.sentence, lines=False)}"
        if self._bar is not None:
            self._bar.cause = Text(sentence, style)
        if cause is None or self._console.is_terminal:
            return
        name, now = _name_cause(cause), time.monotonic()
        if now - self._causes_shown.get(name, -CAUSES_EVERY) >= CAUSES_EVERY:
            self._causes_shown[name] = now
            self.print_line(sentence, style=style or "dim")

    async def catch_up(self, log: EventLog) -> None:
        """Show what the log has by now, once :meth:`follow` was cancelled."""
        while entries := await log.read(self._monitor.state.position, limit=PAGE):
            for entry in entries:
                self._fold(entry)

    def print_line(self, text: str, style: str = "dim") -> None:
        """Print one line about what is being done, with its time where it is kept as a log."""
        if not self._console.is_terminal:
            text = f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}"
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _fold(self, entry: Entry) -> None:
        try:
            envelope = decode_envelope(entry.payload)
        except ContractError as error:
            self._monitor.set_aside(entry.id, error)
            return
        announced = [announcement.event for announcement in self._monitor.apply(entry.id, envelope)]
        if isinstance(envelope.event, RewardErrorReported):
            # Explorers outlive epochs: their envelopes bear none, and the event names its own.
            self._show_reward_error(entry.id, envelope.event)
        if envelope.epoch < self.epoch:
            return
        for line in self._failed.heard(envelope.event, announced):
            self.print_line(line, style="bold red")
        if isinstance(excluded := envelope.event, ExplorerExcluded):
            line = format_exclusion(excluded.explorer, excluded)
            self.print_line(visible(line, lines=False), style="bold red")
        if isinstance(alarm := envelope.event, AlarmRaised):
            self.print_line(visible(f"alarm: {alarm.sentence}", lines=False), style="bold red")
        if isinstance(envelope.event, StepTrained):
            for line in format_skipped_updates(envelope.event.step, envelope.event.metrics):
                self.print_line(line, style="bold red")
        if isinstance(envelope.event, StepTrained) and "reward" in envelope.event.metrics:
            self._metrics = envelope.event.metrics
            self._rewards.append(self._metrics["reward"])

    def _show_reward_error(self, entry_id: str, error: RewardErrorReported) -> None:
        """Show the first error of each cause, with its traceback and the answer."""
        if error.epoch >= self.epoch and is_first_of_cause(self._monitor.state, entry_id, error):
            line = f"a reward failed: {format_reward_error(error)}"
            self.print_line(visible(line, lines=False), style="bold red")
            for line in format_evidence(error):
                self._console.print(Text(visible(line, lines=False)), soft_wrap=True)

    def _show(self, bar: Progress, task: TaskID) -> None:
        state = self._monitor.state
        if state.epoch < self.epoch:
            return
        recent = self._rewards[-_SMOOTHING:]
        served = [
            explorer.version.step
            for explorer in state.explorers.values()
            if explorer.version is not None and explorer.version.epoch == state.epoch
        ]
        weights = state.ready.get("weights") or state.ready.get("state_dict")
        if weights is not None and weights.at.epoch != state.epoch:
            weights = None  # of the epoch that this one resumes
        failed = [f"FAILED {self._failed.format_steps()}"] if self._failed.steps else []
        shown = "  ".join(
            (
                f"reward {sum(recent) / len(recent):.2f}" if recent else "reward -",
                *([format_pace(state)] if format_pace(state) else []),
                f"weights {weights.at.step if weights else '-'}",
                f"served {min(served) if served else '-'}",
                f"staleness {self._metrics.get('staleness', 0):.1f}",
                *failed,
            )
        )
        bright = f"[bold bright_red]{escape(shown)}[/]" if failed else escape(shown)
        bar.update(task, completed=state.trainer_step, shown=bright)
        due = time.monotonic() - self._printed_at > self._lines_every
        if not self._console.is_terminal and due and state.trainer_step > self._printed_step:
            self._printed_at, self._printed_step = time.monotonic(), state.trainer_step
            self.print_line(f"step {state.trainer_step}/{self._steps}  {shown}")


def _name_cause(cause: Cause) -> tuple[str, str | None]:
    return cause.reason, cause.process

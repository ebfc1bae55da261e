"""Full-screen view of a run in a terminal, by textual (extra ``watch``)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import ClassVar

import redis
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, RichLog, Static

from ..analysis.causes import LiveFacts
from ..core import MonitorState
from ..errors import TrinityError
from ..log import DeadLetter
from ..replay import Folded, Followed
from .lines import format_folded
from .panels import explorers_panel, head_panel, lags_panel, transfers_panel, trouble_panel
from .terminal import visible

_KEPT_LINES = 500
"""Lines of events that can be scrolled back."""
_AGAIN = 2.0
"""Seconds after which a server that went away is asked again."""

_LAGS_EVERY = 3.0
"""Seconds between two reads of what lags behind the log."""

ReadLags = Callable[[], Awaitable[tuple[LiveFacts, Sequence[DeadLetter]]]]
Follow = Callable[[], AsyncGenerator[Followed, None]]


class WatchApp(App[None]):
    """Screen of a run: what holds now, what is wrong, what travels, and the last events.

    Args:
        run_id: The run.
        follow: Starts to follow the run's state.
        ahead: Milliseconds by which the server's clock is ahead of this host's.
        read_lags: Reads what lags and the last dead letter; None for a view without that panel.
    """

    CSS = """
    #fault { color: red; height: auto; display: none; }
    .panel { height: auto; border: round $primary; padding: 0 1; }
    #lags { display: none; }
    #events { height: 10; border: round $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("space", "hold", "Hold still"),
        Binding("e", "events", "Events"),
    ]

    def __init__(
        self,
        run_id: str,
        follow: Follow,
        ahead: float = 0.0,
        read_lags: ReadLags | None = None,
    ) -> None:
        super().__init__()
        self.title = visible(run_id, lines=False)
        self._follow = follow
        self._ahead = ahead
        self._read_lags = read_lags
        self._lags: tuple[LiveFacts, Sequence[DeadLetter]] | None = None
        self._is_paused = False
        self._state: MonitorState | None = None
        self.fault = ""
        """Reason for which the server gives no answer; empty while it does."""

    def compose(self) -> ComposeResult:
        """Make the panels, the most important first."""
        yield Static(id="fault")
        with VerticalScroll():
            for name, title in (
                ("head", "Run"),
                ("trouble", "Waits and errors"),
                ("transfers", "Saves and publications"),
                ("explorers", "Explorers"),
                ("lags", "Behind the log"),
            ):
                panel = Static(id=name, classes="panel")
                panel.border_title = title
                yield panel
        events = RichLog(id="events", max_lines=_KEPT_LINES, wrap=False, markup=False)
        events.border_title = "Events"
        yield events
        yield Footer()

    def on_mount(self) -> None:
        """Begin to follow the run, and let ages grow."""
        self.run_worker(self._read())
        if self._read_lags is not None:
            self.run_worker(self._follow_lags(self._read_lags))
        self.set_interval(1.0, self._show)

    def action_hold(self) -> None:
        """Hold the screen still, or let it go on."""
        self._is_paused = not self._is_paused
        self._show()

    def action_events(self) -> None:
        """Show or hide the events."""
        events = self.query_one("#events", RichLog)
        events.display = not events.display

    async def _read(self) -> None:
        """Follow the state; go on after the server was away."""
        import anyio

        while True:
            try:
                # Closed at once: a generator that is left to the collector keeps its connection.
                async with aclosing(self._follow()) as following:
                    async for state, folded in following:
                        self._state, self.fault = state, ""
                        self._write(folded)
                        self._show()
            except (redis.RedisError, OSError) as error:
                self.fault = f"the server does not answer ({error}): what follows is of the past"
                self._show()
            await anyio.sleep(_AGAIN)

    async def _follow_lags(self, read_lags: ReadLags) -> None:
        """Read what lags, again and again; what cannot be read is not shown."""
        import anyio

        while True:
            try:
                self._lags = await read_lags()
            except (redis.RedisError, OSError, TrinityError):
                self._lags = None  # the reader of the log shows that the server is away
            self._show()
            await anyio.sleep(_LAGS_EVERY)

    def _write(self, folded: list[Folded]) -> None:
        if not self.is_running:  # it quits, and its panels are gone
            return
        events = self.query_one("#events", RichLog)
        # Not more than can be scrolled back: the first read may have thousands.
        for entry in folded[-_KEPT_LINES:]:
            for line in format_folded(entry, has_id=False):  # 80 columns have no room for ids
                events.write(Text(visible(line, lines=False), no_wrap=True))

    def _show(self) -> None:
        if not self.is_running:
            return
        fault = self.query_one("#fault", Static)
        fault.display = bool(self.fault) or self._is_paused
        fault.update(Text(self.fault or "held still: press space to go on"))
        if self._state is None or self._is_paused:
            return
        # By the server's clock: ages must not depend on the clock of this host.
        state, now = self._state, int(time.time() * 1000 + self._ahead)
        for name, panel in (
            ("head", head_panel),
            ("trouble", trouble_panel),
            ("transfers", transfers_panel),
            ("explorers", explorers_panel),
        ):
            self.query_one(f"#{name}", Static).update(panel(state, now))
        lags = self.query_one("#lags", Static)
        lag_panel = None if self._lags is None else lags_panel(*self._lags)
        lags.display = lag_panel is not None
        lags.update("" if lag_panel is None else lag_panel)

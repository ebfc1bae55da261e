"""Pages of a dashboard in a browser: time until they are painted, frames, and scrubs."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.support.browser import NAMES, Page, browser

_WIDE, _HIGH = 1440, 1000
_TURNS = 60
"""Turns of the wheel, and moves of the pointer, of one measurement."""
_FRAMES = """(() => {
  window.frames_ = [];
  let last = performance.now();
  const beat = (now) => {
    window.frames_.push(now - last);
    last = now;
    requestAnimationFrame(beat);
  };
  requestAnimationFrame(beat);
})()"""
_TAKE_FRAMES = (
    "(() => { const found = window.frames_.slice(1); window.frames_ = []; return found; })()"
)


class InBrowser(NamedTuple):
    """Measurements of the pages of one run."""

    painted: float
    """Seconds from the address to the newest state and the timeline on the screen."""
    zoom: list[float]
    """Milliseconds of each frame while the timeline is zoomed and moved."""
    scrubs: list[float]
    """Seconds from a number to the state after that event on the screen."""


def has_browser() -> bool:
    """Return True if a browser is at hand."""
    return any(shutil.which(name) for name in NAMES)


def in_browser(
    port: int, run_id: str, events: int, scrubs: int, until_indexed: Callable[[], None]
) -> InBrowser:
    """Open the overview of a run, zoom and move its timeline, and scrub.

    Args:
        port: Port of the dashboard, which has not been asked for the run.
        run_id: The run.
        events: Events of its log.
        scrubs: Number of scrubs.
        until_indexed: Waits until every event is indexed.
    """
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        browser(Path(folder)) as page,
    ):
        began = time.perf_counter()
        address = f"http://127.0.0.1:{port}/#/{run_id}/overview"
        page.open(address, wide=_WIDE, high=_HIGH)
        page.wait_for("document.querySelector('.headline h1')")
        page.wait_for("document.querySelector('.timeline')?.dataset.shown")
        painted = time.perf_counter() - began
        until_indexed()
        page.evaluate(_FRAMES)
        zoom = _zoomed(page)
        draw = random.Random(events)
        return InBrowser(
            painted, zoom, [_scrubbed(page, draw.randint(1, events)) for _ in range(scrubs)]
        )


def _zoomed(page: Page) -> list[float]:
    """Zoom the timeline out and in, and drag it; return the milliseconds of the frames."""
    page.evaluate("document.querySelector('.timeline').scrollIntoView({ block: 'center' })")
    place = "document.querySelector('.lanes canvas').getBoundingClientRect()"
    left_edge, top, wide = page.evaluate(
        f"(({{ left, top, width }}) => [left, top, width])({place})"
    )
    at = {"x": left_edge + wide / 2, "y": top + 60}
    page.evaluate(_TAKE_FRAMES)
    for turn in range(_TURNS):
        by = 120 if turn < _TURNS / 2 else -120
        page.call(
            "Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=by, modifiers=2, **at
        )
    page.call("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **at)
    for move in range(_TURNS):
        to = {"x": at["x"] - 4 * move, "y": at["y"]}
        page.call("Input.dispatchMouseEvent", type="mouseMoved", button="left", buttons=1, **to)
    page.call("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **to)
    frames: list[float] = page.evaluate(_TAKE_FRAMES)
    return frames


def _scrubbed(page: Page, number: int) -> float:
    """Return the seconds until the state after an event is on the screen."""
    shown = json.dumps(f"{number:,}")
    milliseconds: float = page.evaluate(
        "new Promise((done) => { const began = performance.now();"
        f"const isShown = () => document.querySelector('.banner')?.innerText.includes({shown});"
        "const look = () => isShown() ? done(performance.now() - began) : "
        "requestAnimationFrame(look);"
        "const box = document.querySelector('.scrub-number');"
        f"box.value = '{number}'; box.dispatchEvent(new Event('change')); look(); }})"
    )
    return milliseconds / 1000

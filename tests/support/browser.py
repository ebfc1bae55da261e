"""A real browser: Chromium without a window, spoken to over pipes (DevTools protocol)."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.waits import PATIENCE

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--remote-debugging-pipe"),
    *("--disable-component-update", "--disable-sync", "--mute-audio"),
    "--disable-back-forward-cache",  # a page that was left would keep its live stream open
)


def chromium() -> str:
    """Return the browser's path; skip the test where there is none."""
    binary = next((path for name in NAMES if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip(f"no browser is at hand: install Chromium, found as one of {', '.join(NAMES)}")
    return binary


_MOVE = """
import os, sys
for end, descriptor in zip(sys.argv[1:3], (3, 4)):
    os.dup2(int(end), descriptor)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Program that becomes the browser, with its pipes where the browser looks for them."""


_STILL = """
document.fonts.status === "loaded" && document.getAnimations().every((animation) =>
  animation.playState !== "running" || animation.effect.getComputedTiming().endTime === Infinity)
"""
"""Condition of a page at rest; animations that never end, such as a pulse, do not count."""
_PAINTED_TWICE = """
new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))
"""


class Page:
    """Page of a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    @property
    def problems(self) -> list[str]:
        """Errors that the page has logged: exceptions, refused by policy, not found."""
        return self._browser.problems

    def call(self, method: str, **parameters: Any) -> Any:
        return self._browser.call(method, parameters, self._session)

    def another(self) -> Page:
        """Return a further page of the same browser."""
        return self._browser.page()

    def open(self, url: str, *, wide: int = 1280, high: int = 900, scheme: str = "light") -> None:
        """Open an address, in a window of a size, in light or dark."""
        self._browser.problems.clear()
        self._size(wide, high)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        # A new fragment alone would not load the page anew.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def _size(self, wide: int, high: int) -> None:
        size = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        reply = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true in the page."""
        give_up = time.monotonic() + PATIENCE
        while True:
            try:
                if self.evaluate(f"Boolean({expression})"):
                    return
            except AssertionError:
                pass  # the page is being replaced
            shown = self.problems[-3:]
            assert time.monotonic() < give_up, f"never true: {expression}; the page logged {shown}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def fit(self, highest: int) -> None:
        """Make the window as high as the page, or of a largest height."""
        wide, high = self.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        self._size(wide, min(high, highest))

    def screenshot(self) -> bytes:
        """Return the window as PNG, once what is painted and animated has come to rest."""
        self.wait_for(_STILL)
        self.evaluate(_PAINTED_TWICE)
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def zoom(self, selector: str) -> None:
        """Turn the wheel near the right edge of an element, with Ctrl held."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        right, top = self.evaluate(f"(({{right, top}}) => [right, top])({box})")
        turned = {"type": "mouseWheel", "deltaX": 0, "deltaY": -400, "modifiers": 2}
        self.call("Input.dispatchMouseEvent", x=right - 1, y=top + 40, **turned)

    def text(self, selector: str) -> str:
        """Return the text of the first element; empty without one."""
        return str(
            self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        )


class Browser:
    """Process of a browser, with a thread that reads what it says."""

    def __init__(self, profile: Path) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        # Above those that the browser expects, so that no move overwrites the other.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands, answers)]
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", _MOVE, *map(str, ends)),
                *(chromium(), *OPTIONS, f"--user-data-dir={profile}"),
            ],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands, answers, *ends):
            os.close(end)
        self.problems: list[str] = []
        self._number = 0
        self._replies: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def page(self) -> Page:
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attach = {"targetId": target, "flatten": True}
        page = Page(self, self.call("Target.attachToTarget", attach)["sessionId"])
        for domain in ("Runtime", "Log", "Page", "Network"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, parameters: dict[str, Any], session: str | None = None) -> Any:
        self._number += 1
        number = self._number
        command: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            try:
                reply = self._replies.get(timeout=PATIENCE)
            except queue.Empty:
                raise AssertionError(f"the browser did not answer {method}") from None
            if reply["id"] == number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._answers, 1 << 16):
            *messages, rest = (rest + data).split(b"\0")
            for message in messages:
                self._handle(json.loads(message))

    def _handle(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self._replies.put(message)
            return
        details = message["params"]
        if message["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(details["exceptionDetails"])[:600])
        elif message["method"] == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.problems.append(details["entry"]["text"] + " " + details["entry"].get("url", ""))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        os.close(self._commands)
        os.close(self._answers)


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """Run a browser until the block ends; yield its page."""
    running = Browser(profile)
    try:
        yield running.page()
    finally:
        running.close()

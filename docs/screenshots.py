"""Draws the pictures of docs/gallery.md and docs/dashboard.md into docs/pictures, from real runs.

Usage: python docs/screenshots.py [--only NAME ...] [--into FOLDER]

Example: python docs/screenshots.py --only overview --only explain

It needs Chromium and the extra all, and takes five minutes on two cores. PNG files have a palette
where Pillow is installed.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import anyio
from terminal_pictures import drawn, environment, printed, without_fonts

from tests.support.browser import Page, browser
from tests.support.dashboards import put_run, shared_dashboard
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.diagnostics.stacks import host_processes
from trinity_events.log import RedisEventLog
from trinity_events.replay import follow_state
from trinity_events.server import EmbeddedServer, connect
from trinity_events.views.watch import WatchApp
from trinity_schemas import Event, LeaseExpired, VersionRefused, decode_envelope

PICTURES = Path(__file__).parent / "pictures"
MOST_BYTES = 200_000
"""Largest file of a picture; a larger one ends the script."""
PATIENCE = 600.0
"""Seconds after which a run has not come to the state that a picture shows."""
WIDE, HIGH, PHONE = 1280, 800, 400
"""Width and height of a window, and width of a narrow one, in pixels."""
LOWEST, HIGHEST = 300, 1200
"""Bounds on the height of a window that shows a whole page."""
DEMO = Plan()
FLEET = Plan(run_id="fleet", ranks=64, explorers=936, steps=16, save_interval=5, faults=False)
LIVE, FINISHED = "words", "letters"
"""Runs of the demo: one that is looked at while it trains, and a short one before it."""
_KILLED, _STOPPED = "actor-1", ("explorer-0", "explorer-1")
_PAINTED = """(() => {
  const canvas = document.querySelector(".lanes canvas");
  if (!canvas || !canvas.width || !canvas.height) return false;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colors = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200)
    colors.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
  return colors.size > 5;
})()"""

_SPREAD = """(() => {
  const order = [...document.querySelectorAll(".sample-tools label")]
    .find((label) => label.innerText.startsWith("Order")).querySelector("select");
  order.value = "most spread";
  order.dispatchEvent(new Event("change"));
  const group = document.querySelector(".group");
  group.querySelector("summary").click();
  new MutationObserver((_, observer) => {
    const picks = [...group.querySelectorAll(".sample-pick")];
    if (!picks.length) return;
    observer.disconnect();
    (picks.find((pick) => pick.innerText.includes("reward 0")) ?? picks[0]).click();
  }).observe(group, { childList: true, subtree: true });
})()"""


def say(words: str) -> None:
    """Print a line of progress."""
    print(f"{time.strftime('%H:%M:%S')} {words}", flush=True)  # noqa: T201


class Studio:
    """Folder of the pictures, and the names of those that are wanted."""

    def __init__(self, page: Page, names: Sequence[str], folder: Path) -> None:
        self.page = page
        self._names, self._folder = names, folder

    def wants(self, *names: str) -> bool:
        """Return True if any of these pictures is wanted."""
        return not self._names or any(name in self._names for name in names)

    def keep_svg(self, name: str, picture: str) -> None:
        """Write a drawing."""
        self._keep(f"{name}.svg", picture.encode())

    def keep_page(self, name: str) -> None:
        """Write a picture of the page in its window."""
        self._keep(f"{name}.png", small(self.page.screenshot()))

    def _keep(self, name: str, data: bytes) -> None:
        if len(data) > MOST_BYTES:
            sys.exit(f"{name} has {len(data):,} bytes, more than {MOST_BYTES:,}")
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / name).write_bytes(data)
        say(f"{name}: {len(data) / 1000:.0f} kB")


def small(picture: bytes) -> bytes:
    """Return a PNG with a palette of 256 colours, or as it is where Pillow is not installed."""
    try:
        from PIL import Image
    except ImportError:
        return picture
    written = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    # Median cut would give the few pixels of a failure the colour of something else.
    image.quantize(256, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        written, "PNG", optimize=True
    )
    return min(written.getvalue(), picture, key=len)


# --- dashboards -----------------------------------------------------------------------------------


@contextmanager
def command(home: Path, *arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own; interrupt it when the block is left."""
    with log.open("w") as errors:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "trinity_events", *arguments],
            env=environment(home),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@contextmanager
def dashboard(home: Path, *arguments: str) -> Iterator[str]:
    """Serve a dashboard; yield its address."""
    with command(
        home, "dashboard", "--port", "0", *arguments, log=home / "dashboard.log"
    ) as process:
        assert process.stdout is not None
        match = re.search(r"http://[^ ]+:\d+/", process.stdout.readline())
        if match is None:
            sys.exit(f"the dashboard did not start: {(home / 'dashboard.log').read_text()}")
        yield match[0]


def ask(address: str, path: str, **query: Any) -> Any:
    """Ask a dashboard, and return its answer."""
    host = address.removeprefix("http://").rstrip("/")
    with closing(http.client.HTTPConnection(host, timeout=PATIENCE)) as connection:
        connection.request("GET", f"/api/{path}?{urlencode(query)}")
        answer = connection.getresponse()
        body = answer.read()
    if answer.status != http.client.OK:
        sys.exit(f"the dashboard answers {path} with {body.decode()}")
    return json.loads(body)


def until(met: Callable[[], Any], what: str) -> Any:
    """Wait for a condition; end the script after :data:`PATIENCE`."""
    give_up = time.monotonic() + PATIENCE
    while not (result := met()):
        if time.monotonic() > give_up:
            sys.exit(f"waited in vain for {what}")
        time.sleep(0.2)
    return result


class Run:
    """Run that a dashboard shows."""

    def __init__(self, studio: Studio, address: str, run_id: str) -> None:
        self.run_id = run_id
        self._studio, self._page, self._address = studio, studio.page, address
        until(lambda: self.now["progress"] == 1, f"the index of run {run_id}")

    @property
    def now(self) -> dict[str, Any]:
        """Newest state."""
        return dict(ask(self._address, f"runs/{self.run_id}/now"))

    def reaches(self, step: int) -> None:
        """Wait for a step of the trainer."""
        until(lambda: (self.now["step"] or 0) >= step, f"step {step} of run {self.run_id}")

    def last_event(self, producer: str) -> str:
        """Return the id of a producer's last event."""
        answer = ask(self._address, f"runs/{self.run_id}/events", producer=producer, limit=1)
        return str(answer["found"][0][1])

    def show(self, where: str = "overview", entry: str = "", **window: Any) -> None:
        """Open a page, of the newest state or of that after an entry."""
        self._page.open(f"{self._address}#/{self.run_id}/{where}/{entry}".rstrip("/"), **window)
        shows(self._page, where, past=bool(entry))

    def keep(
        self,
        name: str,
        where: str = "overview",
        entry: str = "",
        *,
        zoom: int = 0,
        look: float = 0,
        **window: Any,
    ) -> None:
        """Keep a picture of a page, if it is wanted.

        Args:
            name: Name of the picture.
            where: Name of the page.
            entry: Event after which the state is shown; empty for the newest state.
            zoom: Turns of the wheel by which the end of the timeline is brought nearer.
            look: Seconds for which the page is open before the picture.
            window: Arguments of :meth:`Page.open`; without ``high`` the whole page is shown.
        """
        if not self._studio.wants(name):
            return
        self.show(where, entry, **{"wide": WIDE, "high": LOWEST} | window)
        if "high" not in window:
            self._page.fit(HIGHEST)
            time.sleep(1)  # what was asked anew for the larger window is there
        for _ in range(zoom):
            self._page.zoom(".lanes canvas")
        time.sleep(max(look, 1 if zoom else 0))
        self._studio.keep_page(name)


def shows(page: Page, where: str, *, past: bool) -> None:
    """Wait until a page shows what it is to show."""
    page.wait_for(f"document.querySelector('main')?.dataset.page === {json.dumps(where)}")
    page.wait_for(f"document.body.classList.contains('past') === {str(past).lower()}")
    if where == "overview":
        page.wait_for("document.querySelector('.headline h1')")
        page.wait_for(_PAINTED)
    time.sleep(1)  # charts and the strip are painted


# --- the recorded demo, and a fleet ---------------------------------------------------------------


def event_of(matches: Callable[[Event], bool]) -> str:
    """Return the id of the recorded demo's last event of a kind."""
    last_id = ""
    for entry in simulated_run(DEMO):
        try:
            if matches(decode_envelope(entry.payload).event):
                last_id = entry.id
        except ValueError:
            continue  # the demo has one event that cannot be read
    return last_id


RECORDED = (
    *("overview", "overview-dark", "phone", "versions", "figures", "ledger", "health", "search"),
    *("past", "versions-past"),
)


def draw_recorded(studio: Studio) -> None:
    """Draw the pages of ``dashboard --demo``."""
    with (
        tempfile.TemporaryDirectory(prefix="t-") as folder,
        dashboard(Path(folder), "--demo") as address,
    ):
        demo = Run(studio, address, DEMO.run_id)
        demo.keep("overview")
        demo.keep("overview-dark", scheme="dark")
        demo.keep("phone", wide=PHONE, high=860)
        for name in ("versions", "figures", "ledger", "health"):
            demo.keep(name, name)
        demo.keep("search", "search", high=HIGH)
        failed = event_of(lambda event: isinstance(event, LeaseExpired))
        demo.keep("past", entry=failed)
        refused = event_of(
            lambda event: isinstance(event, VersionRefused) and event.version.step == 113
        )
        demo.keep("versions-past", "versions", refused)


def draw_fleet(studio: Studio) -> None:
    """Draw a simulated run of 1,000 workers."""
    with shared_dashboard(FLEET) as dashboard_of_fleet:
        Run(studio, f"http://127.0.0.1:{dashboard_of_fleet.port}/", FLEET.run_id).keep("fleet")


# --- a run that trains ----------------------------------------------------------------------------

RUNNING = (
    *("live", "samples", "goodput", "runs", "watch", "standstill", "explain", "html"),
    *("failed", "before"),
)


def draw_running(studio: Studio) -> None:
    """Draw a demo while it trains, stands still and fails."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder, ExitStack() as exits:
        home = Path(folder)
        url = exits.enter_context(EmbeddedServer(home).attached())
        if studio.wants("runs"):
            say("a short run of the demo, and the recorded one beside it")
            finish(home, "demo", "--run", FINISHED, "--steps", "12", "--save-interval", "4")
            anyio.run(put_recorded, url)
        say("a run of the demo, until it has trained for a while")
        demo = exits.enter_context(
            command(home, "demo", "--run", LIVE, *_LONG_DEMO, log=home / "demo.log")
        )
        address = exits.enter_context(dashboard(home))
        until(lambda: any(run["run"] == LIVE for run in ask(address, "runs")["runs"]), "the run")
        run = Run(studio, address, LIVE)
        run.reaches(150)
        run.keep("live")
        keep_samples(studio, run)
        run.keep("goodput", "ledger")
        if studio.wants("runs"):
            keep_runs(studio, address)
        if studio.wants("watch"):
            studio.keep_svg("watch", anyio.run(watched, url))
        if studio.wants("standstill", "explain"):
            draw_standstill(studio, run, home)
        if studio.wants("html"):
            draw_file(studio, home)
        if studio.wants("failed", "before"):
            draw_failure(run, demo)


_LONG_DEMO = ("--steps", "100000", "--explorers", "2", "--save-interval", "20")


def finish(home: Path, *arguments: str) -> str:
    """Run a command to its end, and return its output."""
    with command(home, *arguments, log=home / "command.log") as process:
        out, _ = process.communicate(timeout=PATIENCE)
    if process.returncode != 0:
        sys.exit(f"{' '.join(arguments)}: {(home / 'command.log').read_text()}")
    return out


async def put_recorded(url: str) -> None:
    """Put the recorded demo on the server."""
    async with connect(url) as client:
        await put_run(client, DEMO.run_id, simulated_run(DEMO))


def keep_runs(studio: Studio, address: str) -> None:
    """Keep a picture of the list of runs."""
    studio.page.open(address, wide=WIDE, high=LOWEST)
    studio.page.wait_for("document.querySelectorAll('tbody tr').length === 3")
    studio.keep_page("runs")


def keep_samples(studio: Studio, run: Run) -> None:
    """Keep a picture of the newest recorded step, with the tokens of a wrong answer."""
    if not studio.wants("samples"):
        return
    run.show("samples", wide=WIDE, high=HIGH)
    studio.page.wait_for("document.querySelectorAll('.group').length > 2")
    # The group whose answers differ most shows both what is right and what is not.
    studio.page.evaluate(_SPREAD)
    studio.page.wait_for("document.querySelector('.sample-view .token')")
    time.sleep(1)  # the answer that was clicked is there
    studio.keep_page("samples")


async def watched(url: str) -> str:
    """Return the screen of ``watch`` at 80 columns."""
    async with connect(url) as client:
        app = WatchApp(LIVE, partial(follow_state, RedisEventLog(client, LIVE)))
        async with app.run_test(size=(80, 36)) as pilot:
            give_up = time.monotonic() + PATIENCE
            while "explorer-1" not in app.export_screenshot():
                if time.monotonic() > give_up:
                    sys.exit("watch shows no explorer")
                await pilot.pause(0.5)
            await pilot.pause(3)  # a screen full of events
            picture = without_fonts(app.export_screenshot(title=f"watch {LIVE}"))
            app.workers.cancel_all()  # an event that comes while the screen closes finds no panel
    return picture


def draw_standstill(studio: Studio, run: Run, home: Path) -> None:
    """Draw the run while its explorers are stopped, and let them go on."""
    processes = host_processes(LIVE)
    pids = [processes[name].pid for name in _STOPPED]
    say("its explorers are stopped")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: any(wait["seconds"] > 15 for wait in waits(home)), "a wait of 15 seconds")
        if studio.wants("explain"):
            explain = ("explain", LIVE)
            shown = [(f"trinity-events {' '.join(explain)}", printed(home, *explain, columns=100))]
            studio.keep_svg("explain", drawn(shown, home, name="explain", columns=100))
        run.keep("standstill", look=8)  # a cause is shown once it lasts for five seconds
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    run.reaches(run.now["step"] + 20)


def waits(home: Path) -> list[dict[str, Any]]:
    """Return the waits that ``explain`` knows."""
    return list(json.loads(finish(home, "explain", LIVE, "--json")).get("waits", {}).values())


def draw_file(studio: Studio, home: Path) -> None:
    """Draw the run's pages from the one file that export writes."""
    path = home / f"{LIVE}.html"
    finish(home, "export", LIVE, "--html", "--output", str(path))
    studio.page.open(path.as_uri(), wide=WIDE, high=LOWEST)
    shows(studio.page, "overview", past=False)
    studio.page.fit(HIGHEST)
    time.sleep(1)
    studio.keep_page("html")


def draw_failure(run: Run, demo: subprocess.Popen[str]) -> None:
    """Kill a rank, and draw the run that failed of it, and its state just before."""
    say("one of its ranks is killed")
    os.kill(host_processes(LIVE)[_KILLED].pid, signal.SIGKILL)
    demo.communicate(timeout=PATIENCE)
    until(lambda: run.now["closed"], "the run's end")
    run.keep("failed")
    run.keep("before", entry=run.last_event(_KILLED), zoom=2)


# --- all of them ----------------------------------------------------------------------------------

STAGES: dict[tuple[str, ...], Callable[[Studio], None]] = {
    RECORDED: draw_recorded,
    ("fleet",): draw_fleet,
    RUNNING: draw_running,
}
NAMES = tuple(name for names in STAGES for name in names)


def main() -> None:
    """Draw the pictures that are asked for, all of them by default."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=NAMES,
        metavar="NAME",
        help=f"Draw this picture; may be given several times. One of {', '.join(NAMES)}.",
    )
    parser.add_argument("--into", type=Path, default=PICTURES, help="Folder of the pictures.")
    given = parser.parse_args()
    with ExitStack() as exits:
        profile: AbstractContextManager[str] = tempfile.TemporaryDirectory(
            prefix="t-", ignore_cleanup_errors=True
        )
        page = exits.enter_context(browser(Path(exits.enter_context(profile))))
        studio = Studio(page, given.only or (), given.into)
        for names, draw in STAGES.items():
            if studio.wants(*names):
                draw(studio)
    say(f"the pictures are in {given.into}")


if __name__ == "__main__":
    main()

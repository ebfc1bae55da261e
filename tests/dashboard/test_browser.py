"""The pages in a real browser: by keyboard, narrow and wide, live and from a file."""

from __future__ import annotations

import pytest
from msgspec import structs

from tests.support.browser import browser
from tests.support.dashboards import (
    SMALL,
    dashboard,
    dashboard_of,
    put_run,
    server_runs,
    shared_dashboard,
)
from trinity_events.dashboard import html_export
from trinity_events.dashboard.html_export import build_html, bundle
from trinity_events.dashboard.simulated_record import open_simulated_run
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.log import AsyncPublisher, new_producer
from trinity_schemas import RunClosed, TrainerStatusChanged

pytestmark = pytest.mark.processes

DEMO = Plan()
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def address():
    with shared_dashboard(DEMO) as served:
        yield f"http://127.0.0.1:{served.port}/"


PAINTED = """(() => {
  const canvas = document.querySelector(".lanes canvas");
  if (!canvas) return false;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const colors = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200)
    colors.add(data[at] << 16 | data[at + 1] << 8 | data[at + 2]);
  return colors.size > 8;
})()"""


def test_the_demo_is_read_and_scrubbed_by_keyboard_alone(page, address):
    page.open(address)
    page.wait_for("document.querySelector('.headline h1')?.innerText.includes('trainer-0 waits')")
    assert "reward-1 reports no wait" in page.text(".headline .cause")
    # Learning first, and what the run has reached.
    assert page.text(".tiles").split()[0] == "reward"
    assert "Step 120 · " in page.text(".progress-line")
    assert page.evaluate("document.querySelectorAll('.learning svg path').length") >= 8
    assert page.evaluate("document.querySelectorAll('.cells button').length") == DEMO.explorers
    page.wait_for(PAINTED)
    page.press(",")
    former = sum(1 for _ in simulated_run(DEMO)) - 1
    page.wait_for(f"document.querySelector('.banner')?.innerText.includes('{former:,}')")
    page.wait_for("location.hash.includes('/overview/')")
    page.press("l")
    page.wait_for("!document.querySelector('.banner')")
    page.press("2")
    page.wait_for("document.querySelectorAll('.matrix tbody tr').length === 47")
    assert page.text(".matrix tbody th") == "explorer-20"
    page.press("3")
    page.wait_for("document.querySelectorAll('.chart canvas').length === 10")
    page.press("4")
    page.wait_for("document.querySelector('.equation')?.innerText.includes('dispatched =')")
    page.press("5")
    page.wait_for("document.body.innerText.includes('points to failing memory of node-06')")
    page.press("6")
    page.wait_for("document.querySelectorAll('.group').length === 60")
    assert "512 samples of 64 questions" in page.text("main")
    page.evaluate("document.querySelector('.group summary').click()")
    page.wait_for("document.querySelector('.token')")
    page.press("7")
    page.wait_for("document.querySelectorAll('.found tbody tr').length === 50")
    page.press("?")
    page.wait_for("document.querySelector('dialog[open]')")
    assert page.problems == []


def test_an_address_leads_to_the_state_after_an_event(page, address):
    page.open(f"{address}#/{DEMO.run_id}/overview/1767258806917-0")
    page.wait_for("document.querySelector('.headline.bad h1')")
    assert "Step 40 checkpoint FAILED" in page.text(".headline")
    assert "lease-expired" in page.text(".page-top")
    page.evaluate("document.querySelector('.page-top summary').click()")
    page.wait_for("document.querySelector('.page-top pre')?.innerText.includes('steps.40')")
    assert page.problems == []


def test_pages_of_the_past_show_nothing_that_came_later(page, address):
    last = "Number([...document.querySelectorAll('.matrix thead button')].at(-1)?.innerText)"
    early = "1767258806917-0"  # while step 41 was published
    page.open(f"{address}#/{DEMO.run_id}/versions/{early}")
    page.wait_for(f"document.querySelector('.banner') && {last} === 41")
    assert page.evaluate("document.querySelectorAll('.matrix thead button').length") == 24
    page.evaluate(f"location.hash = '#/{DEMO.run_id}/figures/{early}'")
    page.wait_for("document.querySelector('main')?.dataset.page === 'figures'")
    page.wait_for("document.querySelectorAll('.chart canvas').length > 0")
    page.evaluate(f"location.hash = '#/{DEMO.run_id}/ledger/{early}'")
    page.wait_for("document.body.innerText.includes('for the newest state alone')")
    assert page.problems == []


def test_a_step_leads_to_its_events_and_its_proof(page, address):
    page.open(f"{address}#/{DEMO.run_id}/overview")
    page.wait_for("document.querySelector('.steps .link')")
    page.evaluate("document.querySelector('.steps .link').click()")
    page.wait_for("document.querySelectorAll('.proof-entries tbody tr').length === 41")
    assert "Step 120 checkpoint is ready." in page.text(".proof")
    assert page.evaluate("document.querySelector('[name=step]').value") == "120"
    page.evaluate("document.querySelector('.proof-entries .final .link').click()")
    page.wait_for("document.querySelector('.page-event')?.innerText.includes('announced')")
    assert page.problems == []


def test_a_chart_is_zoomed_with_all_others_and_shown_whole_again(page, address):
    page.open(f"{address}#/{DEMO.run_id}/figures")
    page.wait_for("document.querySelectorAll('.chart canvas').length === 10")
    shown = "document.querySelector('.figure-tools .tool').hidden"
    assert page.evaluate(shown)
    place = "document.querySelector('.u-over').getBoundingClientRect()"
    box = page.evaluate(f"(({{ left, top }}) => [left, top])({place})")
    at = {"x": box[0] + 40, "y": box[1] + 40, "button": "left", "clickCount": 1}
    page.call("Input.dispatchMouseEvent", type="mousePressed", **at)
    page.call("Input.dispatchMouseEvent", type="mouseMoved", **{**at, "x": box[0] + 140})
    page.call("Input.dispatchMouseEvent", type="mouseReleased", **{**at, "x": box[0] + 140})
    page.wait_for(f"!{shown}")
    page.evaluate("document.querySelector('.figure-tools .tool').click()")
    page.wait_for(shown)
    assert page.problems == []


def test_more_tabs_than_a_browser_opens_streams_show_a_recorded_run(address, tmp_path):
    with browser(tmp_path) as first:  # of its own: a new tab hides the one before
        for tab in (first, *(first.another() for _ in range(8))):
            tab.open(address)
            tab.wait_for("document.querySelector('.headline h1')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_a_narrow_screen(page, address, scheme):
    page.open(f"{address}#/{DEMO.run_id}/overview", wide=400, scheme=scheme)
    for name in ("overview", "versions", "figures", "ledger", "health", "samples", "search"):
        page.evaluate(f"location.hash = '#/{DEMO.run_id}/{name}'")
        page.wait_for(f"document.querySelector('main')?.dataset.page === '{name}'")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
    red = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
    assert (int(red) > 200) == (scheme == "light")
    assert page.problems == []


async def test_a_running_run_is_followed(client, log, run_id, page):
    plan = structs.replace(SMALL, run_id=run_id)
    await put_run(client, run_id, simulated_run(plan))
    async with dashboard(server_runs(client)) as at:
        await _in_thread(page.open, f"http://127.0.0.1:{at.port}/#/{run_id}")
        await _in_thread(page.wait_for, "document.querySelector('.pill.ok')")
        publisher = AsyncPublisher(log, 1, new_producer("trainer"))
        await publisher.publish(TrainerStatusChanged(status="running", step=4321))
        await _in_thread(
            page.wait_for, "document.querySelector('main')?.innerText.includes('4,321')"
        )
        rows = "document.querySelectorAll('.explorers tbody tr').length"
        assert await _in_thread(page.evaluate, rows) == SMALL.explorers
        await publisher.publish(RunClosed(reason="failed", error=HOSTILE))
        await _in_thread(page.wait_for, "document.querySelector('.headline.bad')")
        assert HOSTILE in await _in_thread(page.text, ".headline")
        await _in_thread(page.wait_for, "document.querySelector('.headline .link')")
        await _in_thread(page.evaluate, "document.querySelector('.headline .link').click()")
        await _in_thread(page.wait_for, "document.querySelector('.banner')")
        assert "4,321" in await _in_thread(page.text, "main")
        assert "failed" not in await _in_thread(page.text, ".headline")
        assert await _in_thread(page.evaluate, "document.title") != "taken"
        assert page.problems == []


async def _in_thread(call, *arguments):
    import anyio.to_thread

    return await anyio.to_thread.run_sync(call, *arguments)


async def test_a_token_in_the_address_opens_the_page_and_leaves_it(page):
    async with dashboard_of(SMALL, token="a-token-of-the-tests-own") as at:
        url = f"http://127.0.0.1:{at.port}/#token="
        await _in_thread(page.open, f"{url}another-token-of-the-tests")
        await _in_thread(page.wait_for, "document.body.innerText.includes('token is missing')")
        await _in_thread(page.open, f"{url}a-token-of-the-tests-own")
        await _in_thread(page.wait_for, "document.querySelector('.headline h1')")
        assert "token" not in await _in_thread(page.evaluate, "location.href")


async def test_an_exported_page_shows_the_run_from_its_file_alone(tmp_path, page):
    source = open_simulated_run(DEMO)
    path = tmp_path / "demo.html"
    path.write_text(await build_html(source))
    source.close()
    assert path.stat().st_size < 2_000_000
    await _in_thread(page.open, path.as_uri())
    await _in_thread(
        page.wait_for,
        "document.querySelector('.headline h1')?.innerText.includes('trainer-0 waits')",
    )
    await _in_thread(page.wait_for, PAINTED)
    for name in ("versions", "figures", "ledger", "health", "samples", "search"):
        await _in_thread(page.evaluate, f"location.hash = '#/{DEMO.run_id}/{name}'")
        await _in_thread(page.wait_for, f"document.querySelector('main').dataset.page === '{name}'")
    await _in_thread(page.evaluate, f"location.hash = '#/{DEMO.run_id}/samples'")
    await _in_thread(page.wait_for, "document.querySelectorAll('.group').length === 60")
    await _in_thread(page.press, ",")
    await _in_thread(page.wait_for, "document.body.classList.contains('past')")
    assert page.problems == []
    loaded = "performance.getEntriesByType('resource').map((entry) => entry.name)"
    assert await _in_thread(page.evaluate, loaded) == []


def test_modules_of_the_pages_can_be_joined_into_one():
    seen = []
    for name in html_export.MODULES:
        text = (html_export.STATIC / name).read_text()
        assert {match[2] for match in html_export.IMPORT.finditer(text)} <= set(seen)
        seen.append(name)
    assert {path.name for path in html_export.STATIC.glob("*.js")} == set(seen)
    assert "\nimport " not in bundle()
    assert "\nexport " not in bundle()

"""The command: what it shows, where it listens, and what it refuses."""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest
from msgspec import structs

from tests.support.acl_rules import rules
from tests.support.dashboards import SMALL, dashboard, put_run, server_runs
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE
from trinity_events.archive import Header, write_lines
from trinity_events.archive.format import bare_line
from trinity_events.archive.segments import Archive
from trinity_events.core import MonitorState
from trinity_events.core.fold import Monitor
from trinity_events.dashboard.html_export import build_html
from trinity_events.dashboard.simulated_run import simulated_run
from trinity_events.dashboard.sources import RecordedSource
from trinity_events.log import Stream
from trinity_events.server import connect

pytestmark = pytest.mark.processes


@contextmanager
def command(*arguments, stop=signal.SIGINT, **environment):
    """Run the command until the block ends; yield the address that it prints."""
    with subprocess.Popen(
        [sys.executable, "-m", "trinity_events", "dashboard", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process.stdout.readline()
        finally:
            process.send_signal(stop)
            _, errors = process.communicate(timeout=PATIENCE)
            assert process.returncode == 0
            assert errors == ""


def ask(address, path, token=None):
    host, port = re.search(r"http://([\w.]+):(\d+)/", address).groups()
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE)
    connection.request("GET", path, headers={"authorization": f"Bearer {token}"} if token else {})
    answer = connection.getresponse()
    status, body = answer.status, answer.read()
    connection.close()
    return status, body


def test_the_demo_is_served_without_a_server_of_logs():
    with command("--demo", TRINITY_REDIS_URL="redis://127.0.0.1:1") as address:
        status, body = ask(address, "/api/runs")
        assert status == 200
        assert b"demo-64-workers" in body


def test_an_exported_file_is_served(tmp_path):
    path = tmp_path / "small.jsonl"
    lines = (bare_line("events", entry) for entry in simulated_run(SMALL))
    write_lines(path, Header(run_id=SMALL.run_id), lines)
    with command(str(path), stop=signal.SIGTERM) as address:
        assert ask(address, f"/api/runs/{SMALL.run_id}/now")[0] == 200


def test_the_archived_log_in_a_folder_of_a_run_is_served(tmp_path):
    folder = tmp_path / SMALL.run_id
    folder.mkdir()
    Archive(folder, SMALL.run_id).add(Stream.EVENTS, list(simulated_run(SMALL)))
    with command(str(folder)) as address:
        assert ask(address, f"/api/runs/{SMALL.run_id}/now")[0] == 200


def test_beyond_loopback_a_token_is_made_and_printed():
    with command("--demo", "--host", "0.0.0.0") as address:
        token = re.search(r"#token=([\w-]{20,})", address)[1]
        assert ask(address, "/api/runs")[0] == 401
        assert ask(address, "/api/runs", token)[0] == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--demo", "--token", "short"], "less than 16 characters"),
        (["--demo", "--host", "203.0.113.7"], "cannot listen at 203.0.113.7"),
        (["/nowhere/there-is-none.jsonl"], "there-is-none.jsonl"),
        (["/"], "has no archived log"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(cli, arguments, words):
    ended = cli("dashboard", *arguments)
    assert ended.returncode == 1
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_the_base_install_says_what_is_missing():
    code = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from trinity_events.cli import main\n"
        "sys.argv = ['trinity-events', 'dashboard', '--demo']; main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ended.returncode == 1
    assert "pip install 'trinity-events[dashboard]'" in ended.stderr


@pytest.mark.server
async def test_the_rights_of_a_viewer_are_enough(tmp_path, run_id):
    users = tmp_path / "users.acl"
    users.write_text("\n".join([*rules(), "user admin on >ADMIN +@all ~*"]))
    with servers(tmp_path, 1, "--aclfile", str(users)) as [server]:
        async with connect(server.url_of("admin", "ADMIN")) as admin:
            await put_run(admin, run_id, simulated_run(structs.replace(SMALL, run_id=run_id)))
        async with (
            connect(server.url_of("viewer", "VIEWER")) as viewer,
            dashboard(server_runs(viewer)) as at,
        ):
            assert (await at.json("/api/runs"))["runs"][0]["step"] == SMALL.steps
            now = await at.indexed(run_id)
            assert now["problem"] is None
            assert now["step"] == SMALL.steps
            for page in ("lanes", "overview", "versions", "figures", "dead", "timeline", "events"):
                await at.json(f"/api/runs/{run_id}/{page}")


def held_by(path):
    """The data inside of an exported page."""
    [packed] = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', path.read_text()
    )
    return json.loads(gzip.decompress(base64.b64decode(packed)))


async def test_a_run_is_exported_as_one_page_with_its_states(
    client, cli, redis_url, run_id, tmp_path
):
    plan = structs.replace(SMALL, run_id=run_id)
    entries = list(simulated_run(plan))
    await put_run(client, run_id, entries)
    path = tmp_path / "run.html"
    ended = cli("export", run_id, "--html", "--output", str(path), "--redis-url", redis_url)
    assert ended.returncode == 0, ended.stderr
    data = held_by(path)
    assert data["now"]["step"] == plan.steps
    assert data["states"][-1]["number"] == len(entries)
    for state in data["states"][:: len(data["states"]) // 5]:
        monitor = Monitor(MonitorState(run_id=run_id))
        monitor.fold(entries[: state["number"]])
        assert state["step"] == monitor.state.trainer_step
        assert state["position"] == monitor.state.position
        assert state["announced"] == monitor.state.announced


def test_a_crashed_run_is_exported_from_the_files_in_its_folder(cli, tmp_path):
    folder = tmp_path / SMALL.run_id
    folder.mkdir()
    Archive(folder, SMALL.run_id).add(Stream.EVENTS, list(simulated_run(SMALL)))
    path = tmp_path / "run.html"
    ended = cli("export", str(folder), "--html", "-o", str(path), env={"TRINITY_REDIS_URL": "x"})
    assert ended.returncode == 0, ended.stderr
    assert held_by(path)["now"]["step"] == SMALL.steps


async def test_an_exported_page_may_run_its_own_script_alone():
    with closing(RecordedSource.from_entries(SMALL.run_id, simulated_run(SMALL))) as source:
        page = await build_html(source)
    [policy] = re.findall(r'content-security-policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    # It is in a comment, which names the library of the charts.
    assert set(re.findall(r"https?://[^\s\"'`]+", page)) == {"https://github.com/leeoniya/uPlot"}


def test_two_forms_of_an_export_are_refused(cli):
    ended = cli("export", "demo-1", "--html", "--pytest")
    assert ended.returncode == 1
    assert "one file" in ended.stderr

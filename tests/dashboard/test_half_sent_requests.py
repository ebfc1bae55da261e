"""A viewer with the token gets its pages, however many requests are sent by half."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from contextlib import closing

import pytest

from tests.support.dashboards import SMALL
from tests.support.half_sent import HALF_BODY, HALF_HEAD, half_sent, wait_for_closed
from tests.support.waits import PATIENCE, child
from trinity_events.archive import Header, write_lines
from trinity_events.archive.format import bare_line
from trinity_events.dashboard.simulated_run import simulated_run
from trinity_events.http_server.connections import ConnectionLimits

pytestmark = pytest.mark.processes

TOKEN = "a-token-of-the-tests-own"
COUNT = 600
"""Half requests; of those that were held at once, 512 kept every viewer out."""


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    path = tmp_path_factory.mktemp("dashboard") / "small.jsonl"
    lines = (bare_line("events", entry) for entry in simulated_run(SMALL))
    write_lines(path, Header(run_id=SMALL.run_id), lines)
    command = [sys.executable, "-m", "trinity_events", "dashboard", str(path), "--port", "0"]
    with child([*command, "--token", TOKEN], stdout=subprocess.PIPE, text=True) as process:
        yield int(re.search(r"http://127\.0\.0\.1:(\d+)/", process.stdout.readline())[1])


def view(port, source):
    """Load the page and its data as a browser does from an address; return the statuses."""
    paths = ("/", "/app.js", "/style.css", "/api/runs", f"/api/runs/{SMALL.run_id}/now")
    statuses = []
    with closing(
        http.client.HTTPConnection("127.0.0.1", port, PATIENCE, source_address=(source, 0))
    ) as connection:
        for path in paths:
            connection.request("GET", path, headers={"authorization": f"Bearer {TOKEN}"})
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
    return statuses


@pytest.mark.parametrize(
    ("sent", "source"),
    [
        pytest.param(HALF_HEAD, "127.0.0.1", id="heads of the viewer's address"),
        pytest.param(HALF_HEAD, "127.0.0.2", id="heads of another address"),
        pytest.param(HALF_BODY, "127.0.0.1", id="bodies"),
    ],
)
def test_a_viewer_gets_its_page_while_600_requests_are_half_sent(port, sent, source):
    begun = time.monotonic()
    with half_sent(port, COUNT, sent) as peers:
        assert view(port, source) == [200] * 5
        # Not by waiting until the others have reached their deadline.
        assert time.monotonic() - begun < ConnectionLimits().head_seconds
        most_waiting = ConnectionLimits().waiting_per_address
        assert wait_for_closed(peers, COUNT - most_waiting, PATIENCE) >= COUNT - most_waiting


def test_streams_of_one_viewer_keep_no_other_out(port):
    head = f"GET /api/runs/{SMALL.run_id}/live HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"authorization: Bearer {TOKEN}\r\n\r\n"
    with half_sent(port, COUNT, head.encode()):
        assert view(port, "127.0.0.1") == [200] * 5
        assert view(port, "127.0.0.2") == [200] * 5

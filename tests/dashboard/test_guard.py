"""Only pages of the dashboard itself are answered, and nothing can be changed through it."""

from __future__ import annotations

import pytest

from tests.support.dashboards import SMALL, shared_dashboard

TOKEN = "a-token-of-the-tests-own"
NOW = f"/api/runs/{SMALL.run_id}/now"


@pytest.fixture(scope="module")
def at():
    with shared_dashboard(SMALL, hosts=["runs.example"]) as served:
        yield served


@pytest.fixture(scope="module")
def behind_token():
    with shared_dashboard(SMALL, token=TOKEN) as served:
        yield served


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/runs", "/nothing-is-here"])
async def test_every_answer_forbids_inline_scripts_frames_and_other_origins(at, path):
    headers = (await at.ask(path)).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert headers["referrer-policy"] == "no-referrer"
    assert "access-control-allow-origin" not in headers


async def test_data_is_sent_as_json(at):
    assert (await at.ask(NOW)).headers["content-type"] == "application/json"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_other_methods_than_get_are_refused(at, method):
    assert (await at.ask("/api/runs", method=method)).status == 405


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "attacker.example"}, 421),
        ({"host": "attacker.example:8760"}, 421),
        ({"host": "localhost.attacker.example"}, 421),
        ({"host": ""}, 421),
        ({"origin": "https://attacker.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
        ({"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"}, 403),
        ({"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, 403),
        ({"host": "localhost"}, 200),
        ({"host": "LocalHost:8760"}, 200),
        ({"host": "[::1]:8760"}, 200),
        ({"host": "runs.example:8760"}, 200),
        ({"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}, 200),
        ({"sec-fetch-site": "none", "sec-fetch-mode": "navigate"}, 200),
    ],
)
async def test_data_is_given_to_pages_of_this_server_alone(at, headers, status):
    assert (await at.ask(NOW, headers=headers)).status == status


async def test_a_link_of_another_site_may_open_the_page(at):
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert (await at.ask("/", headers=headers)).status == 200


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
        (f"Bearer {TOKEN}x", 401),
        (f"Bearer {TOKEN[:-1]}", 401),
        ("Bearer ", 401),
        ("", 401),
        (f"Basic {TOKEN}", 401),
        ("Bearer \xff", 401),
    ],
)
async def test_data_needs_the_token(behind_token, given, status):
    answer = await behind_token.ask(NOW, headers={"authorization": given})
    assert answer.status == status


async def test_the_page_itself_needs_no_token_and_has_no_data(behind_token):
    page = await behind_token.ask("/", headers={"authorization": ""})
    assert page.status == 200
    assert SMALL.run_id.encode() not in page.body


@pytest.mark.parametrize(
    "path", ["/../pyproject.toml", "/%2e%2e/app.py", "/static/app.py", "//etc/passwd", "/app.py"]
)
async def test_only_the_files_of_the_page_are_served(at, path):
    assert (await at.ask(path)).status == 404

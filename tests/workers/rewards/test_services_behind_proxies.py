"""Claims about reward services that are reached through a proxy, as in many companies' networks."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.support.errors import raises
from trinity_workers.rewards.errors import RewardCallFailed, RewardServiceUnusable
from trinity_workers.rewards.http_calls import HttpCalls

VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
DEAD = "http://127.0.0.1:9"
"""Proxy that nothing answers at: the discard port."""


class Server(ThreadingHTTPServer):
    """Answers any request with what it was asked for: as a proxy does, or as a service."""

    daemon_threads = True

    def __init__(self, status: int = 200) -> None:
        self.status = status
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        reply = json.dumps({"asked": self.path, "user": self.headers.get("Proxy-Authorization")})
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply.encode())

    def do_CONNECT(self) -> None:
        self.send_error(407)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def serve() -> Iterator:
    servers: list[Server] = []

    def serve(status: int = 200) -> Server:
        servers.append(Server(status))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


async def ask(url: str) -> dict:
    calls = HttpCalls("the judge", deadline=30, attempts=1, calls=1)
    try:
        return await calls.post(url, {}, json.loads)
    finally:
        await calls.aclose()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
async def test_a_judge_elsewhere_is_asked_through_the_proxy(serve, monkeypatch, name):
    monkeypatch.setenv(name, f"http://{serve().address}")
    reply = await ask("http://judge.example:8000/v1")
    assert reply == {"asked": "http://judge.example:8000/v1", "user": None}


async def test_the_proxy_gets_its_user(serve, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{serve().address}")
    assert (await ask("http://judge.example/v1"))["user"] == "Basic bWU6c2VjcmV0"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_a_judge_on_this_host_is_asked_directly(serve, monkeypatch, host):
    monkeypatch.setenv("HTTP_PROXY", DEAD)
    monkeypatch.setenv("ALL_PROXY", DEAD)
    reply = await ask(f"http://{host}:{serve().server_port}/v1")
    assert reply["asked"] == "/v1"


async def test_a_host_of_no_proxy_is_asked_directly(monkeypatch, serve):
    monkeypatch.setenv("HTTP_PROXY", f"http://{serve(status=418).address}")
    monkeypatch.setenv("NO_PROXY", ".invalid")
    reason = re.compile(r"^did not answer \((?!418)")
    with raises(RewardCallFailed, fault="attempts", reason=reason):
        await ask("http://judge.invalid/v1")


async def test_a_proxy_that_refuses_is_named_by_its_answer(serve, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", f"http://{serve().address}")
    with raises(RewardCallFailed, fault="attempts", reason=re.compile("407")):
        await ask("https://judge.example/v1")


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:1080", "ftp://127.0.0.1", "http://[::1"])
async def test_a_proxy_that_cannot_be_used_is_refused_with_the_variables(monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with raises(RewardServiceUnusable, fault="environment"):
        await ask("http://judge.example/v1")

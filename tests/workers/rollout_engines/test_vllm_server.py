"""The client of a vLLM server, on a server by hand, and its options. vLLM is not needed."""

import asyncio
import json
from contextlib import asynccontextmanager

import anyio
import pytest

pytest.importorskip("torch")

from tests.support.errors import raises
from trinity_workers.rollout_engines.base import EngineOptionsRefused
from trinity_workers.rollout_engines.vllm.reports import ServerDescription
from trinity_workers.rollout_engines.vllm.server import (
    VLLMServerMissing,
    check_server,
    wait_for_server,
)
from trinity_workers.rollout_engines.vllm.server_client import (
    ServerClient,
    VLLMServerAway,
    VLLMServerRefused,
)
from trinity_workers.rollout_engines.vllm.server_options import (
    ServerOptions,
    VLLMServerUnusable,
    get_url,
    read_server_options,
)

DESCRIPTION = ServerDescription(
    instance="a",
    context_length=64,
    max_num_seqs=8,
    world_size=1,
    data_parallel_size=1,
    dtype="float32",
    logprobs_mode="processed_logprobs",
    vocabulary_size=100,
    chunks_seeded_prefill=False,
)


class Double:
    """A server that answers each path with a status and a body, or not at all."""

    def __init__(self):
        self.answers = {}
        self.requests = []
        self.connected = anyio.Event()
        self._writers = []

    async def serve(self, reader, writer):
        self._writers.append(writer)
        self.connected.set()
        while head := await reader.readline():
            path = head.split()[1].decode()
            length = 0
            while (line := await reader.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            self.requests.append((path, json.loads(await reader.readexactly(length))))
            if (answer := self.answers.get(path.partition("?")[0])) is None:
                continue
            status, body = answer
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            head = f"HTTP/1.1 {status} -\r\ncontent-length: {len(content)}\r\n\r\n"
            writer.write(head.encode() + content)
        writer.close()

    def end(self):
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def served(timeout=30.0, api_key=None):
    """A double, and a client that is connected to it."""
    double = Double()
    server = await asyncio.start_server(double.serve, "127.0.0.1", 0)
    client = ServerClient(
        f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout, api_key
    )
    try:
        yield double, client
    finally:
        await client.close()
        double.end()
        server.close()


def answer_of(tokens, logprobs_of=None, spans=()):
    content = [{"token_id": token, "logprob": -0.5} for token in logprobs_of or tokens]
    choice = {
        "token_ids": tokens,
        "finish_reason": "length",
        "logprobs": {"content": content},
        "weight_versions": [
            {"version": each[0], "start": each[1], "end": each[2]} for each in spans
        ],
    }
    return {"choices": [choice]}


PROMPT = {"prompt_token_ids": [1, 2], "cache_salt": "0-1-a"}


async def generate(client):
    [output] = [output async for output in client.generate(PROMPT, {"max_tokens": 2}, "name")]
    return output.outputs[0]


async def test_an_answer_has_the_version_of_each_token():
    async with served() as (double, client):
        double.answers["/inference/v1/generate"] = 200, answer_of([7, 8], spans=[("0-1-a", 0, 2)])
        await client.connect()
        completion = await generate(client)
    assert completion.token_ids == [7, 8]
    assert [
        {token: each.logprob for token, each in row.items()} for row in completion.logprobs
    ] == [
        {7: -0.5},
        {8: -0.5},
    ]
    assert [(span.version, span.end) for span in completion.weight_versions] == [("0-1-a", 2)]
    assert double.requests[0][1] == {
        "token_ids": [1, 2],
        "cache_salt": "0-1-a",
        "sampling_params": {"max_tokens": 2},
        "request_id": "name",
    }


@pytest.mark.parametrize(
    "answer",
    [
        (500, {"error": "the core died"}),
        (200, b"<html>"),
        (200, {"choices": []}),
        (200, answer_of([7, 8], logprobs_of=[7, 9])),
    ],
    ids=["error", "no JSON", "no choice", "other tokens"],
)
async def test_an_answer_that_is_none_loses_the_server(answer):
    lost = []
    async with served() as (double, client):
        client.on_lost = lambda: lost.append(True)
        double.answers["/inference/v1/generate"] = answer
        await client.connect()
        with raises(VLLMServerAway, url=client.url):
            await generate(client)
        assert (lost, client.is_connected) == ([True], False)
        # Nothing reaches what may have taken its place, until it is connected again.
        with raises(VLLMServerAway, url=client.url):
            await generate(client)
        assert len(double.requests) == 1


async def test_a_request_has_a_deadline():
    """Invariant 1 of the client."""
    async with served(timeout=0.1) as (_, client):
        await client.connect()
        with raises(VLLMServerAway, url=client.url):
            await client.resume_generation()


async def test_a_refusal_names_the_path_and_loses_no_server():
    async with served(api_key="k") as (double, client):
        double.answers["/resume"] = 401, {"error": "Unauthorized"}
        await client.connect()
        with raises(VLLMServerRefused, path="/resume", status=401):
            await client.resume_generation()
        assert client.is_connected


async def test_the_end_of_its_process_loses_the_server_while_nothing_is_asked():
    """Invariant 2 of the client."""
    async with served() as (double, client):
        lost = anyio.Event()
        client.on_lost = lost.set
        await client.connect()
        with anyio.fail_after(30):
            await double.connected.wait()
            double.end()
            await lost.wait()
        with raises(VLLMServerAway, url=client.url):
            async with client.alive():
                pass


async def test_a_call_ends_with_the_server_that_it_waits_for():
    async with served() as (double, client):
        await client.connect()
        await double.connected.wait()
        with anyio.fail_after(30), raises(VLLMServerAway, url=client.url):
            async with client.alive():
                double.end()
                await anyio.sleep_forever()


async def test_a_server_that_is_away_is_waited_for_and_named():
    async with served() as (_, client):
        pass
    with raises(VLLMServerMissing, url=client.url, seconds=0.2):
        await wait_for_server(client, 0.2)


async def test_a_server_without_the_plugin_is_refused_at_once():
    async with served() as (double, client):
        error = {"message": "Call to collective_rpc method failed: no trinity_describe"}
        double.answers["/collective_rpc"] = 500, {"error": error}
        with raises(VLLMServerUnusable, fault="plugin"):
            await wait_for_server(client, 30)


@pytest.mark.parametrize(
    ("setting", "field", "value"),
    [
        ("dtype", "dtype", "bfloat16"),
        ("logprobs-mode", "logprobs_mode", "raw_logprobs"),
        ("data-parallel-size", "data_parallel_size", 2),
        ("enable-chunked-prefill", "chunks_seeded_prefill", True),
    ],
)
def test_a_server_with_other_settings_is_refused(setting, field, value):
    from msgspec import structs

    check_server("http://localhost:1", DESCRIPTION, "float32")
    other = structs.replace(DESCRIPTION, **{field: value})
    with raises(VLLMServerUnusable, fault="setting", setting=setting):
        check_server("http://localhost:1", other, "float32")


def url_of(url, **options):
    own = ServerOptions(url=url, **options)
    return get_url(own, rank=0)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("http://10.0.0.1:8000", "remote"),
        ("http://localhost.example.org:8000", "remote"),
        ("http://0.0.0.0:8000", "remote"),
        ("http://127.0.0.1@example.org/", "remote"),
        ("redis://127.0.0.1:6379", "url"),
        ("http://:80", "url"),
        ("http://127.0.0.1:x", "url"),
        ([], "rank"),
    ],
)
def test_a_url_beyond_loopback_is_refused(url, fault):
    with raises(VLLMServerUnusable, fault=fault):
        url_of(url)


def test_a_url_on_loopback_is_accepted_and_another_if_it_is_allowed():
    for url in ("http://127.0.0.1:8000", "http://localhost:8000", "http://[::1]:8000"):
        assert url_of(url + "/") == url
    assert url_of(["http://127.0.0.1:1", "http://127.0.0.1:2"]) == "http://127.0.0.1:1"
    assert url_of("http://10.0.0.1:8000", allow_remote=True) == "http://10.0.0.1:8000"


@pytest.mark.parametrize("options", [{}, {"url": "http://localhost:1", "timeout": 3}])
def test_options_that_it_lacks_are_refused(options):
    with raises(EngineOptionsRefused, engine="vllm-server"):
        read_server_options(options)


def test_a_key_that_is_not_set_is_refused(monkeypatch):
    from trinity_workers.rollout_engines.vllm.server import _get_api_key

    monkeypatch.setenv("SERVER_KEY", "k")
    own = ServerOptions(url="http://localhost:1", api_key_variable="SERVER_KEY")
    assert _get_api_key(own) == "k"
    monkeypatch.delenv("SERVER_KEY")
    with raises(VLLMServerUnusable, fault="key", setting="SERVER_KEY"):
        _get_api_key(own)

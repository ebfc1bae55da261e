"""A reader of weights waits for a chunk server that is away, as the publisher does."""

import logging

import anyio
import anyio.to_thread
import pytest
import torch

from tests.support.errors import raises
from tests.support.faulty_proxy import Proxy, command
from tests.support.pipeline import until
from tests.support.waits import PATIENCE
from tests.support.weight_versions import publish, ready
from trinity_events import Synchronizer
from trinity_events.errors import DeadlineExceeded, ServerUnreachable, VersionUnavailable
from trinity_events.server import open_client
from trinity_events.weights import model_digest
from trinity_schemas import WaitEnded, WaitStarted, manifest_key

pytestmark = pytest.mark.server

LONG = 600.0
"""Deadline that no test reaches."""


@pytest.fixture
def link(weights_url):
    with Proxy(weights_url) as between:
        yield between


@pytest.fixture
def make_reader(redis_url, run_id, link):
    """Makes readers whose chunks come by the link."""
    made = []

    def reader(deadline):
        made.append(
            Synchronizer(
                run_id,
                0,
                redis_url=redis_url,
                weights_url=link.url,
                role="explorer",
                rank=0,
                deadline=deadline,
            )
        )
        return made[-1]

    yield reader
    link.heal()
    for synchronizer in made:
        synchronizer.close()


def model(value=1.0):
    made = torch.nn.Linear(64, 8)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


@pytest.fixture
async def version(trainer, log):
    """A version of many chunks, which is ready."""
    publish(trainer, model(2.0).state_dict(), 1)
    return await ready(log, 1)


def load(reader, version):
    module = model()
    reader.load(module, version)
    return model_digest(module)


def pull(reader, version):
    with reader.pull(version) as pulled:
        module = model()
        module.load_state_dict(dict(pulled.tensors()))
    return model_digest(module)


def reads_chunk(given):
    return given[0].upper() == b"GET" and given[1].rpartition(b":")[2].isdigit()


def cut_amid(link, place):
    """Cut the link when the reader comes to a place of its work."""
    if place == "connection":
        link.refuse()
    else:
        matches, nth = {
            "lease": (command("EVALSHA", "lease"), 1),
            "manifest": (command("GET", "manifest"), 1),
            "first chunk": (reads_chunk, 1),
            "a later chunk": (reads_chunk, 9),
        }[place]
        link.at("before", matches, lambda _: link.refuse(), nth)


@pytest.mark.parametrize(
    ("place", "read"),
    [
        ("connection", pull),
        ("lease", pull),
        ("manifest", load),
        ("first chunk", pull),
        ("a later chunk", load),
    ],
)
async def test_a_reader_continues_once_the_server_is_back(
    make_reader, link, version, caplog, place, read
):
    reader = make_reader(LONG)
    cut_amid(link, place)
    digests = []

    async def read_all():
        digests.append(await anyio.to_thread.run_sync(read, reader, version))

    with anyio.fail_after(PATIENCE), caplog.at_level(logging.WARNING):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_all)
            await until(lambda: "waiting" in caplog.text)
            assert not digests
            link.heal()
    assert digests == [model_digest(model(2.0))]


async def test_the_server_is_named_after_the_deadline(make_reader, link, version):
    reader = make_reader(0.2)
    link.at("before", command("GET", "manifest"), lambda _: link.refuse())
    with anyio.fail_after(PATIENCE), raises(DeadlineExceeded, deadline=0.2) as caught:
        await anyio.to_thread.run_sync(pull, reader, version)
    assert link.url.removeprefix("redis://") in caught.value.reason
    unopened = make_reader(0.2)
    with anyio.fail_after(PATIENCE), raises(ServerUnreachable, where=link.url):
        await anyio.to_thread.run_sync(pull, unopened, version)


async def test_a_wait_ends_when_its_task_is_cancelled(make_reader, link, version, caplog):
    reader = make_reader(LONG)
    link.at("before", reads_chunk, lambda _: link.refuse())
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, pull, reader, version)
            await until(lambda: "waiting" in caplog.text)
            tasks.cancel_scope.cancel()


async def test_the_wait_for_the_server_is_reported_with_its_deadline(make_reader, link, version):
    reader, reports = make_reader(LONG), []

    class Reports:
        def publish(self, event):
            reports.append(event)

    reader.waits._threshold = 0.05
    reader.waits._publisher = Reports()
    link.at("before", reads_chunk, lambda _: link.refuse())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, pull, reader, version)
        await until(lambda: server_waits(reports))
        link.heal()
    [wait] = server_waits(reports)
    assert wait.deadline == LONG
    assert wait.what.endswith(link.url.removeprefix("redis://"))
    assert wait.wait_id in {event.wait_id for event in reports if isinstance(event, WaitEnded)}


def server_waits(reports):
    return [event for event in reports if isinstance(event, WaitStarted) and "server" in event.what]


async def test_a_version_that_went_in_the_outage_is_unavailable(
    make_reader, link, version, weights_url, run_id, caplog
):
    reader = make_reader(LONG)
    link.at("before", command("GET", "manifest"), lambda _: link.refuse())
    with anyio.fail_after(PATIENCE):
        async with anyio.create_task_group() as tasks:

            async def read():
                with raises(VersionUnavailable):
                    await anyio.to_thread.run_sync(pull, reader, version)

            tasks.start_soon(read)
            await until(lambda: "waiting" in caplog.text)
            with open_client(weights_url) as chunks:
                assert chunks.delete(manifest_key(run_id, version.epoch, 1, 0))
            link.heal()

"""A part is whole in the log and in the store, or in neither (invariants of publication.py)."""

import re

import pytest
import torch

from tests.support.errors import raises
from tests.support.pipeline import accept_reports, events_of
from tests.support.tensors import identical
from tests.support.weight_versions import ready
from trinity_events import Synchronizer
from trinity_events.errors import BufferFull, ServerUnreachable
from trinity_events.weights.errors import PartClosed
from trinity_events.weights.publishing.part_writer import UnpublishableTensor
from trinity_schemas import (
    ExplorerStatusChanged,
    SaveFailed,
    SaveStarted,
    VersionPartPublished,
    manifest_key,
)

TENSORS = [("a", torch.ones(100))]
UNPUBLISHABLE = [*TENSORS, ("b", torch.ones(1, dtype=torch.complex128))]


@pytest.fixture
def chunks(trainer, weights_client):
    """Return the function that lists what the run has on the server of the chunks."""
    return lambda: weights_client.keys(f"trinity-weights:{{{trainer.run_id}.*")


@pytest.fixture
def log_refuses(trainer, monkeypatch):
    """Return the function that lets the log refuse the events of a type from now on."""
    publish = trainer._session.events.publish

    def refuse(kind):
        def refusing(event):
            if isinstance(event, kind):
                raise BufferFull("run", "the event", "no room", backlog=1)
            publish(event)

        monkeypatch.setattr(trainer._session.events, "publish", refusing)

    return refuse


async def attempts(log):
    """Return the types of the events of each attempt at a part."""
    kinds = {}
    for envelope in await events_of(log, SaveStarted | SaveFailed | VersionPartPublished):
        event = envelope.event
        followed = isinstance(event, SaveFailed) and event.followed
        kind = "followed" if followed else type(event).__name__
        kinds.setdefault(event.save_id, []).append(kind)
    return list(kinds.values())


async def failures(log):
    return [envelope.event.message for envelope in await events_of(log, SaveFailed)]


async def test_an_attempt_begins_and_ends_in_the_log(trainer, log):
    """Invariants 1 and 6."""
    trainer.publish(TENSORS, 1)
    with raises(UnpublishableTensor, name="b", reason="its dtype is torch.complex128"):
        trainer.publish(UNPUBLISHABLE, 2)
    trainer.publication(3).begin()
    trainer.publication(4).begin()
    trainer.close()
    assert await attempts(log) == [
        ["SaveStarted", "VersionPartPublished"],
        ["SaveStarted", "SaveFailed"],
        ["SaveStarted", "followed"],
        ["SaveStarted", "followed"],
    ]


async def test_a_publication_opens_its_version_and_publishes_it_when_its_block_ends(
    trainer, explorer, log
):
    with trainer.publication(1, ranks=(0,)) as part:
        part.add("a", torch.arange(3.0))
    trainer.commit(1)
    with explorer.pull(await ready(log, 1)) as version:
        assert identical(dict(version.tensors())["a"], torch.arange(3.0))


async def test_a_part_is_published_once(trainer, log):
    """Invariant 2."""
    with trainer.publication(1) as part:
        part.add(*TENSORS[0])
        assert part.publish() == part.publish()
    trainer.flush()
    assert await attempts(log) == [["SaveStarted", "VersionPartPublished"]]


async def test_a_publication_that_fails_leaves_nothing_and_says_so(trainer, log, chunks):
    """Invariants 3 and 4."""

    def tensors():
        yield TENSORS[0]
        raise RuntimeError("gather failed")

    trainer.open_version(1)
    with pytest.raises(RuntimeError, match="gather failed"):
        trainer.publish(tensors(), 1)
    assert chunks() == []
    trainer.flush()
    assert await failures(log) == ["gather failed"]


async def test_a_publication_whose_block_raises_is_discarded_and_failed_once(trainer, log, chunks):
    """Invariants 1 and 3."""
    part = trainer.publication(1)

    def half():
        with part:
            part.add(*TENSORS[0])
            raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        half()
    part.give_up()
    with raises(PartClosed, version="weights of step 1"):
        part.add(*TENSORS[0])
    assert not part.published
    assert chunks() == []
    trainer.flush()
    assert await failures(log) == ["gather failed"]


@pytest.mark.parametrize("begins", [False, True])
async def test_a_published_part_is_taken_back_where_another_rank_has_failed(
    trainer, log, chunks, begins
):
    """Invariant 3."""
    part = trainer.publication(1)
    if begins:
        part.add(*TENSORS[0])
        part.publish()
        assert chunks()
    part.give_up()
    assert chunks() == []
    trainer.flush()
    assert await failures(log) == []


async def test_a_failure_before_the_begin_is_in_the_log(trainer, log):
    """Invariant 4."""
    trainer.publication(1).fail(RuntimeError("gather failed"))
    trainer.flush()
    assert await attempts(log) == [["SaveFailed"]]
    assert await failures(log) == ["gather failed"]


async def test_a_chunk_server_that_is_gone_is_told_to_the_log(log, redis_url, run_id):
    """Invariant 4."""
    broken = Synchronizer(run_id, 1, redis_url=redis_url, weights_url="unix:///nowhere/redis.sock")
    broken.open_version(1)
    with raises(ServerUnreachable, where=re.compile("nowhere")):
        broken.publish(TENSORS, 1)
    broken.close()
    assert await attempts(log) == [["SaveStarted", "SaveFailed"]]


async def test_a_version_that_the_log_does_not_take_is_taken_back(
    trainer, log, chunks, log_refuses
):
    """Invariants 1 and 3."""
    log_refuses(VersionPartPublished)
    with pytest.raises(BufferFull):
        trainer.publish(TENSORS, 1)
    assert chunks() == []
    trainer.flush()
    assert await attempts(log) == [["SaveStarted", "SaveFailed"]]


async def test_what_was_sent_is_taken_back_although_the_failure_cannot_be_told(
    trainer, chunks, log_refuses
):
    """Invariant 3."""
    log_refuses(SaveFailed)
    with raises(UnpublishableTensor, name="b"):
        trainer.publish(UNPUBLISHABLE, 1)
    assert chunks() == []


async def test_retired_parts_of_all_ranks_of_a_process_are_freed(trainer, log, weights_client):
    """Invariant 7."""
    for step in range(1, 6):
        trainer.open_version(step, ranks=(0, 1))
        for rank in (0, 1):
            trainer.publish([(f"rank.{rank}", torch.ones(8))], step, rank)
        trainer.commit(step)
        await ready(log, step)
    for rank in (0, 1):
        trainer.publication(6, rank).begin().discard()
        stored_steps = [
            step
            for step in range(1, 6)
            if weights_client.exists(manifest_key(trainer.run_id, 1, step, rank))
        ]
        assert stored_steps == [4, 5], rank


async def test_an_explorer_reports_its_status_under_the_old_name_too(explorer, log):
    with pytest.deprecated_call(match="is called report"):
        explorer.tell(ExplorerStatusChanged(status="running"))
    explorer.report(ExplorerStatusChanged(status="stopped"))
    explorer.flush()
    await accept_reports(log)
    statuses = [envelope.event.status for envelope in await events_of(log, ExplorerStatusChanged)]
    assert statuses == ["running", "stopped"]

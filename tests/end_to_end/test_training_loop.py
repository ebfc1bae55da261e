"""The object of a training loop: one rank alone, and how it ends. The example has several ranks."""

import os
import re
from contextlib import closing

import pytest
import torch

from tests.support.errors import raises
from tests.support.pipeline import events_of, reducer_process
from tests.support.tensors import identical
from tests.support.waits import PATIENCE
from trinity_events import Synchronizer, TrainingLoop, hold_checkpoint, wait_ready
from trinity_events.errors import DeadlineExceeded, SaveError, ServerUnreachable
from trinity_schemas import RunClosed, SaveFinished, StepCommitted


async def closed(log):
    [envelope] = await events_of(log, RunClosed)
    return envelope.event.reason, envelope.event.error


async def test_one_rank_publishes_and_saves_and_closes_its_run(log, run_id, redis_url, tmp_path):
    with TrainingLoop(run_id, tmp_path, redis_url=redis_url) as loop:
        assert (loop.epoch, loop.rank, loop.ranks) == (1, 0, 1)
        loop.publish(1, {"weight": torch.ones(2)}, {"loss": 0.5})
        path = loop.staged_folder(1) / "rank_0.pt"
        loop.saves.save_async("model", lambda: torch.save({}, path), 1, path=path)
        loop.commit_checkpoint(1)
        with raises(DeadlineExceeded, missing=re.compile("0 of 1 explorers")):
            loop.wait_served(1, explorers=1, deadline=0.2)
    assert await closed(log) == ("finished", None)
    [saved] = await events_of(log, SaveFinished)
    assert saved.event.path == os.fspath(path.relative_to(tmp_path / run_id))
    assert [entry.event.kind for entry in await events_of(log, StepCommitted)] == [
        "weights",
        "checkpoint",
    ]


@pytest.mark.heavy
@pytest.mark.processes
async def test_a_rank_saves_its_state_as_it_was_and_an_explorer_follows_what_is_published(
    log, run_id, redis_url, weights_url, tmp_path
):
    trained, served = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    urls = {"redis_url": redis_url, "weights_url": weights_url}
    explorer = Synchronizer(run_id, 0, role="explorer", **urls)
    with reducer_process(redis_url, run_id, tmp_path), closing(explorer):
        with TrainingLoop(run_id, tmp_path, **urls) as loop:
            for step in (1, 2):
                torch.nn.init.constant_(trained.weight, step)
                loop.publish(step, trained.state_dict())
                for version, _ in explorer.follow(served, deadline=PATIENCE):
                    if version.step == step:
                        break
                assert identical(served.weight, trained.weight)
            loop.save(2, {"model": trained.state_dict(), "step": 2})
            torch.nn.init.zeros_(trained.weight)
        await wait_ready(run_id, 2, "checkpoint", redis_url=redis_url, deadline=PATIENCE)
        lease = hold_checkpoint(run_id, 2, redis_url=redis_url, checkpoint_root=tmp_path)
        async with lease as folder:
            saved = torch.load(folder / "model_rank_0.pt", weights_only=True)
    assert saved["step"] == 2
    assert identical(saved["model"]["weight"], torch.full((2, 2), 2.0)), "as it was at the call"


async def test_a_failed_save_fails_the_run(log, run_id, redis_url, tmp_path):
    """Invariant 2."""

    def fails():
        raise OSError("no space left")

    loop = TrainingLoop(run_id, tmp_path, redis_url=redis_url).open()
    loop.saves.save_async("model", fails, 1)
    with raises(SaveError, __cause__=re.compile("no space left")):
        loop.close()
    loop.close()
    reason, error = await closed(log)
    assert reason == "failed"
    assert "no space left" in error


async def test_a_callback_closes_with_the_error_that_ended_training(
    log, run_id, redis_url, tmp_path
):
    """Invariant 3."""
    loop = TrainingLoop(run_id, tmp_path, redis_url=redis_url).open()
    loop.close(ValueError("no reward"))
    assert await closed(log) == ("failed", "ValueError: no reward")


def test_a_server_that_is_not_there_is_one_sentence(run_id, tmp_path):
    with pytest.raises(ServerUnreachable):
        TrainingLoop(run_id, tmp_path, redis_url="redis://127.0.0.1:1").open()

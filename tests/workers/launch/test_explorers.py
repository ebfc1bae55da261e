"""Explorers that are started by themselves: what they take from the log, and how they wait."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import anyio
import pytest

from tests.support.errors import assert_attributes, raises

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.hostile_configs import hostile_configs, with_settings
from tests.support.pipeline import reducer_task
from tests.support.trainer_side import TrainerSide
from tests.support.waits import PATIENCE, until
from trinity_events.log import AsyncPublisher, new_producer, open_run
from trinity_schemas import RunClosed, explorer_key
from trinity_workers import cli
from trinity_workers.config.errors import CommandRefused, LoggedSettingsUnreadable
from trinity_workers.config.files import read_config
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.explorer.result import ExplorationResult
from trinity_workers.launch.explore import (
    NO_WAIT,
    ExplorerOptions,
    RunFailed,
    RunWait,
    TrainerSilent,
    Unexplored,
    run_explorer,
)

pytestmark = pytest.mark.usefixtures("torch_threads")

SMALL = {
    "steps": 1,
    "rollouts.prompts_per_step": 2,
    "rollouts.samples_per_prompt": 2,
    "evaluation.sets": {},
    "sync.transport": "redis",
    "sync.timeout": PATIENCE,
}
SHORT = 0.2
"""Seconds of a wait that comes to its end."""


class Trainer:
    """Trainer of a run's epochs, as its explorers see it."""

    def __init__(self, client, log, redis_url, weights_url, root) -> None:
        self._client, self._log, self._root = client, log, root
        self._urls = {"redis_url": redis_url, "weights_url": weights_url}
        self.epoch = 0

    async def open(self, settings) -> TrainerSide:
        """Open the next epoch with settings that are laid over the small ones."""
        chosen, run_id = with_settings(SMALL | settings), self._log.run_id
        self.epoch = await open_run(self._client, run_id, config=chosen.to_text())
        config = chosen.placed(
            run_id=run_id, epoch=self.epoch, checkpoint_folder=self._root / run_id, **self._urls
        )
        return TrainerSide(self._client, self._publisher(), self._log, config)

    async def close(self, reason, error=None) -> None:
        """Close the epoch, once an explorer has joined it."""
        key = explorer_key(self._log.run_id, self.epoch, 0)
        await until(lambda: self._client.exists(key))
        await self._publisher().publish(RunClosed(reason=reason, error=error))

    def _publisher(self) -> AsyncPublisher:
        return AsyncPublisher(self._log, self.epoch, new_producer("trainer"))


@pytest.fixture
async def trainer(client, log, redis_url, weights_url, tmp_path):
    """Trainer of the run, beside a reducer, which announces its epochs."""
    async with reducer_task(redis_url, log.run_id):
        yield Trainer(client, log, redis_url, weights_url, tmp_path)


@pytest.fixture
def explore(run_id, redis_url, weights_url, tmp_path, caplog):
    """Runs an explorer beside the block; after it, its result or the error that it raised."""

    @asynccontextmanager
    async def running(**options):
        outcome = SimpleNamespace(result=None, error=None, log=caplog)

        async def run():
            chosen = ExplorerOptions(
                run_id=run_id,
                redis_url=redis_url,
                weights_redis_url=weights_url,
                checkpoint_root=tmp_path,
                **{"rank": 0, "wait": PATIENCE} | options,
            )
            try:
                outcome.result = await run_explorer(chosen)
            except Exception as error:
                outcome.error = error

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            with anyio.fail_after(PATIENCE):
                yield outcome

    return running


# --- what an explorer takes from the log ----------------------------------------------------


@contextmanager
def recorder():
    """A server of HTTP, and the requests that it got."""
    requests = []

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self):
            requests.append((self.path, self.headers.get("Authorization")))
            self.send_error(401)

        do_POST = do_GET  # noqa: N815 - the name is http.server's

        def log_message(self, *_):
            """Write nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", requests
        server.shutdown()
        thread.join()


@pytest.mark.processes
async def test_an_explorer_runs_no_code_of_the_log_and_sends_no_secret_of_its_host(
    trainer, redis_url, weights_url, run_id, policy_folder, tmp_path
):
    proof = tmp_path / "proof"
    shutil.copytree(policy_folder, tmp_path / run_id / "model")
    with recorder() as (url, requests):
        hostile = hostile_configs(proof, url)
        code, secret = hostile["task.name with options"], hostile["rewards.service"]
        side = await trainer.open(code.settings | secret.settings)
        await side.publish(0)  # an explorer of this run would have all that it needs
        command = (
            *(sys.executable, "-m", "trinity_events", "explorer", "--run", run_id),
            *("--checkpoint-root", str(tmp_path), "--redis-url", redis_url),
            *("--weights-redis-url", weights_url),
        )
        with anyio.fail_after(PATIENCE):
            ended = await anyio.run_process(
                command, env=os.environ | {"SECRET": "hunter2"}, check=False
            )
        assert not proof.exists()
        assert requests == []
    assert ended.returncode == 1
    [sentence] = ended.stderr.decode().splitlines()
    for setting in code.refused | secret.refused:
        assert setting in sentence
    assert "--config FILE" in sentence
    assert "hunter2" not in sentence


def test_settings_without_a_file_are_refused_by_the_command(run_id):
    with raises(CommandRefused, fault="file", setting="steps=3"):
        cli.explorer(run=run_id, settings=["steps=3"])


# --- how an explorer waits for the next epoch -----------------------------------------------


async def test_an_explorer_outlives_a_trainer_and_serves_the_next_epoch(
    trainer, explore, redis_url, run_id, policy_folder, tmp_path
):
    shutil.copytree(policy_folder, tmp_path / run_id / "model")
    first = await trainer.open({})
    async with explore() as outcome:
        await first.publish(0)
        await until(lambda: first.served(0))
        await trainer.close("failed", "OSError: disk full")
        await until(lambda: "for it to be opened again" in outcome.log.text)
        second = await trainer.open({})
        dispatcher = await second.dispatcher()
        await second.publish(0)
        await dispatcher.dispatch(2, second.version(0))
        groups = await dispatcher.take(2, deadline=PATIENCE)
        await dispatcher.trained(1, groups)
        await second.publish(1)
    assert outcome.error is None
    assert (outcome.result.rank, outcome.result.groups, outcome.result.applied) == (0, 2, 2)


async def test_an_explorer_of_an_interrupted_run_says_how_long_it_waited(trainer, explore):
    await trainer.open({"explorer.wait_for_run": SHORT})
    async with explore() as outcome:
        await trainer.close("interrupted")
    assert isinstance(outcome.result, Unexplored)
    assert outcome.result.reason == "interrupted"
    assert outcome.result.waited == RunWait(SHORT, "explorer.wait_for_run")
    assert "was not opened again within 0.2 s (explorer.wait_for_run)" in str(outcome.result)


async def test_an_explorer_of_a_failed_run_says_why_it_failed_and_how_long_it_waited(
    trainer, explore, run_id
):
    await trainer.open({"explorer.wait_for_run": SHORT})
    async with explore() as outcome:
        await trainer.close("failed", "OSError: disk full")
    assert isinstance(outcome.error, RunFailed)
    assert (outcome.error.run_id, outcome.error.error) == (run_id, "OSError: disk full")
    assert outcome.error.waited == RunWait(SHORT, "explorer.wait_for_run")
    assert len(str(outcome.error).splitlines()) == 1


async def test_a_wait_of_nothing_ends_an_explorer_with_its_trainer(trainer, explore):
    await trainer.open({"explorer.wait_for_run": 0})
    async with explore() as outcome:
        await trainer.close("interrupted")
    assert outcome.result.waited == NO_WAIT
    assert "within" not in str(outcome.result)


async def test_an_explorer_of_a_finished_run_waits_for_no_other(
    trainer, explore, redis_url, run_id, policy_folder, tmp_path
):
    shutil.copytree(policy_folder, tmp_path / run_id / "model")
    side = await trainer.open({"explorer.wait_for_run": 3600})
    async with explore() as outcome:
        await side.publish(0)
        await until(lambda: side.served(0))
        await trainer.close("finished")
    assert (outcome.result.reason, outcome.result.waited) == ("finished", NO_WAIT)


async def test_an_explorer_outlives_a_trainer_that_died_without_a_word(trainer, explore):
    await trainer.open({"sync.timeout": SHORT})
    async with explore() as outcome:
        await until(lambda: "starting over, for up to 300 s" in outcome.log.text)
        await trainer.open({"explorer.wait_for_run": 0})
        await trainer.close("interrupted")
    assert outcome.error is None
    assert "was opened anew: starting over" in outcome.log.text
    assert outcome.result.waited == NO_WAIT, "it is the newer epoch whose end counts"


async def test_an_explorer_serves_a_slow_trainer_that_was_silent_for_longer_than_its_timeout(
    trainer, explore, redis_url, run_id, policy_folder, tmp_path
):
    shutil.copytree(policy_folder, tmp_path / run_id / "model")
    side = await trainer.open({"sync.timeout": 1.0})
    async with explore() as outcome:
        await until(lambda: "starting over" in outcome.log.text)
        dispatcher = await side.dispatcher()
        await side.publish(0)
        await dispatcher.dispatch(2, side.version(0))
        groups = await dispatcher.take(2, deadline=PATIENCE)
        await dispatcher.trained(1, groups)
        await side.publish(1)
    assert outcome.error is None
    assert isinstance(outcome.result, ExplorationResult)


async def test_a_trainer_that_stays_silent_is_given_up_in_time(trainer, explore, run_id):
    await trainer.open({"sync.timeout": SHORT, "explorer.wait_for_run": 3 * SHORT})
    async with explore() as outcome:
        pass
    assert outcome.log.text.count("starting over") >= 2
    assert isinstance(outcome.error, TrainerSilent)
    assert outcome.error.run_id == run_id
    assert outcome.error.waited == RunWait(3 * SHORT, "explorer.wait_for_run")
    assert "weights of step 0" in str(outcome.error.silence)
    assert str(outcome.error).startswith(str(outcome.error.silence))


async def test_a_long_timeout_is_cut_short_by_the_end_of_the_wait(trainer, explore):
    await trainer.open({"sync.timeout": 1.0, "explorer.wait_for_run": SHORT})
    async with explore() as outcome:
        pass
    assert isinstance(outcome.error, TrainerSilent)
    silences = [record.args[0] for record in outcome.log.records if "starting over" in record.msg]
    # On a slow machine the wait ends before the explorer starts over at all.
    assert silences in ([], [outcome.error.silence]), "a second timeout would be another error"


def test_the_wait_is_bounded_in_a_file_and_in_the_log(tmp_path):
    week = 7 * 24 * 3600
    assert with_settings({"explorer.wait_for_run": week}).explorer.wait_for_run == week
    file = tmp_path / "run.yaml"
    for seconds in (-1, week + 1):
        with pytest.raises(LoggedSettingsUnreadable):
            with_settings({"explorer.wait_for_run": seconds})
        file.write_text(f"explorer: {{wait_for_run: {seconds}}}")
        [problem] = read_config(file).problems
        assert_attributes(problem, name="explorer.wait_for_run", value=str(seconds))
    assert TrainConfig().explorer.wait_for_run == 300

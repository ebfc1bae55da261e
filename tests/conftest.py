"""A real server for the whole session, and what tests need on it."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Set
from pathlib import Path

import msgspec
import pytest
import redis.asyncio
from hypothesis import settings

pytest.register_assert_rewrite("tests.support")

# A shell that runs the tests in the background has them ignore SIGINT, and what they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from tests.support.command_server import CommandServer  # noqa: E402
from tests.support.markers import (  # noqa: E402
    StartedProcesses,
    check_heavy_words,
    has_none_for,
    mark_by_fixtures,
)
from tests.support.pipeline import reducer_task  # noqa: E402
from tests.support.rank_processes import RankProcesses  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run  # noqa: E402
from trinity_events.server import EmbeddedServer, connect, open_client  # noqa: E402

# A bound in milliseconds of an example fails on a busy machine alone.
settings.register_profile("trinity", deadline=None)
settings.load_profile("trinity")

STARTED = StartedProcesses()


@pytest.fixture(scope="session", autouse=True)
def home():
    """A TRINITY_HOME of the session's own; its embedded servers run as long as the session."""
    with tempfile.TemporaryDirectory(prefix="trinity-test-") as folder:
        before = dict(os.environ)
        os.environ["TRINITY_HOME"] = folder
        for name in ("TRINITY_REDIS_URL", "TRINITY_WEIGHTS_REDIS_URL"):
            os.environ.pop(name, None)
        # Ray starts its workers at niceness 15: on a loaded machine they would hardly get a turn.
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name is Ray's
        yield Path(folder)
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def redis_url(home):
    with EmbeddedServer(home).attached() as url:
        yield url


@pytest.fixture(scope="session")
def weights_url(home):
    with EmbeddedServer(home, "weights", durable=False).attached() as url:
        yield url


@pytest.fixture
def run_id():
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def part(run_id):
    """What rank 0 publishes of the run's first step."""
    from trinity_events.weights import PartRef  # torch is for the tests that need it

    return PartRef(run_id, 1, 1, 0)


@pytest.fixture
async def client(redis_url):
    async with connect(redis_url) as connected:
        yield connected


@pytest.fixture
def log(client: redis.asyncio.Redis, run_id: str) -> RedisEventLog:
    return RedisEventLog(client, run_id)


@pytest.fixture
async def publisher(client, log, run_id):
    epoch = await open_run(client, run_id)
    return AsyncPublisher(log, epoch, new_producer("trainer"))


@pytest.fixture
def sync_client(redis_url):
    with open_client(redis_url) as connected:
        yield connected


@pytest.fixture(scope="session")
def cli(home):
    """Runs the real command line in a process, forked from one that has imported it."""
    server = CommandServer()

    def run(*args: str, timeout: float = PATIENCE, env: dict[str, str] | None = None):
        return server.run(*args, timeout=timeout, env=env or {})

    yield run
    server.close()


@pytest.fixture(scope="session")
def megatron_folder(tmp_path_factory):
    """Makes Hugging Face folders of tiny models, by name; each is made once."""
    from tests.support.megatron_ranks import make_folder

    made = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = make_folder(tmp_path_factory.mktemp(name), name)
        return made[name]

    return folder


@pytest.fixture
def engine_ranks(rank_group, megatron_folder):
    """Makes an engine of a tiny model on a group of ranks."""
    from tests.support.megatron_ranks import make_engine

    def make(name: str, world: int, *args, **keywords):
        ranks = rank_group(world)
        ranks(make_engine, megatron_folder(name), *args, **keywords)
        return ranks

    return make


@pytest.fixture(scope="session")
def rank_processes():
    """Processes that run functions of tests as ranks; they start when a group of them is asked."""
    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture
def torch_threads():
    """Puts torch's threads back: an explorer sets their number, for its process alone."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rank_group(rank_processes):
    """Makes a process group over Gloo of so many ranks."""
    yield rank_processes.group
    rank_processes.leave()


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory):
    """A Hugging Face folder of the demo's random policy, for reading alone."""
    from trinity_workers.learning.policy import create_policy

    folder = tmp_path_factory.mktemp("policy")
    create_policy(folder, seed=0)
    return folder


@pytest.fixture
def make_config(publisher, redis_url, weights_url, run_id, policy_folder, tmp_path):
    """Makes a configuration of the run, with these settings; weights travel by Redis."""
    from trinity_workers.config.train_config import TrainConfig

    def config(**settings):
        settings["sync"] = {"transport": "redis"} | settings.get("sync", {})
        placed = msgspec.convert(settings, TrainConfig).placed(
            run_id=run_id,
            epoch=publisher.epoch,
            redis_url=redis_url,
            weights_url=weights_url,
            checkpoint_folder=tmp_path / run_id,
        )
        return msgspec.structs.replace(placed, model_folder=policy_folder)

    return config


@pytest.fixture
async def committer(publisher, redis_url, weights_url, run_id):
    """Commits weight versions as the trainer does, with a reducer running."""
    from trinity_events.weights import Synchronizer

    made = Synchronizer(run_id, publisher.epoch, redis_url=redis_url, weights_url=weights_url)
    async with reducer_task(redis_url, run_id):
        yield made
    made.close()


@pytest.fixture
def make_synchronizer(publisher, redis_url, weights_url, run_id, where):
    """Makes ends of weight versions over the module's ``where``; trainers publish deltas."""
    from trinity_events.weights import Synchronizer

    made = []

    def synchronizer(role="trainer", rank=0):
        epoch = publisher.epoch if role == "trainer" else 0
        urls = {"redis_url": redis_url, "weights_url": weights_url}
        options = {"role": role, "rank": rank, "transport": where.name, "full_every": 4}
        made.append(Synchronizer(run_id, epoch, **urls, **options))
        return made[-1]

    yield synchronizer
    for open_synchronizer in made:
        open_synchronizer.close()


def pytest_generate_tests(metafunc):
    """Refuse a parametrize over a set: pytest-xdist's workers would order the tests differently."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        if isinstance(mark.args[1] if len(mark.args) > 1 else mark.kwargs["argvalues"], Set):
            raise pytest.UsageError(f"{metafunc.function.__name__}: sort the set of its parameters")


@pytest.fixture(scope="session", autouse=True)
def processes_watched():
    with STARTED.watching():
        yield


def pytest_runtest_setup(item):
    STARTED.begin(marker.name for marker in item.iter_markers())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    for marker, command in STARTED.unmarked.items():
        pytest.fail(f"the test started {command!r}: mark it with {marker}", pytrace=False)


def pytest_ignore_collect(collection_path, config):
    """Import no file of which no test is selected: three quarters have no heavy one."""
    if collection_path.match("test_*.py"):
        expression = config.getoption("markexpr")
        return has_none_for(expression, collection_path.read_text()) or None
    return None


def pytest_collection_modifyitems(items):
    mark_by_fixtures(items)
    check_heavy_words(items)


def pytest_collection_finish():
    """Give torch one thread in this process: more of them wait for each other on busy cores.

    Modules of users, which tests write anew, leave no bytecode.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    gc.freeze()  # what was imported stays
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)

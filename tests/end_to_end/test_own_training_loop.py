"""Loops of one's own: their runs are closed however they end, and the example does what it says."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.errors import raises
from tests.support.pipeline import events_of, reducer_process
from tests.support.redis_servers import servers
from tests.support.waits import PATIENCE, child
from trinity_events import publishing, training_run
from trinity_events.errors import InvalidRunId, RunOpenedTwice, ServerUnreachable
from trinity_events.replay import current_state
from trinity_schemas import RunClosed, RunResumed, TrainerStatusChanged

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"


async def closed(log):
    [envelope] = await events_of(log, RunClosed)
    return envelope.event.reason, envelope.event.error


async def test_a_block_that_ends_closes_the_run_as_finished(log, run_id, redis_url):
    with training_run(run_id, redis_url=redis_url) as publisher:
        assert publisher.epoch == 1
        assert (await current_state(log)).closed is None
    assert await closed(log) == ("finished", None)
    assert [entry.event.status for entry in await events_of(log, TrainerStatusChanged)] == [
        "running"
    ]


async def test_an_error_that_leaves_the_block_is_told_and_raised(log, run_id, redis_url):
    with pytest.raises(ZeroDivisionError), training_run(run_id, redis_url=redis_url):
        _ = 1 / 0
    assert await closed(log) == ("failed", "ZeroDivisionError: division by zero")


async def test_of_a_group_of_errors_the_run_tells_the_first(log, run_id, redis_url):
    group = ExceptionGroup("unhandled", [ExceptionGroup("tasks", [ValueError("no reward")])])
    with pytest.raises(ExceptionGroup), training_run(run_id, redis_url=redis_url):
        raise group
    assert await closed(log) == ("failed", "ValueError: no reward")


async def test_an_error_with_a_name_that_is_no_text_is_told_and_raised(log, run_id, redis_url):
    name = os.fsdecode(b"step-\xff")
    with pytest.raises(FileNotFoundError), training_run(run_id, redis_url=redis_url):
        raise FileNotFoundError(name)
    assert await closed(log) == ("failed", r"FileNotFoundError: step-\udcff")


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(), BaseExceptionGroup("tasks", [KeyboardInterrupt()])],
    ids=lambda error: type(error).__name__,
)
async def test_an_interrupt_is_told_as_one(log, run_id, redis_url, error):
    with pytest.raises(type(error)), training_run(run_id, redis_url=redis_url):
        raise error
    assert await closed(log) == ("interrupted", None)


async def test_each_opening_is_an_epoch_and_a_resume_says_from_where(log, run_id, redis_url):
    with training_run(run_id, redis_url=redis_url):
        pass
    with training_run(run_id, redis_url=redis_url, resume_from=20) as publisher:
        assert publisher.epoch == 2
    [resumed] = await events_of(log, RunResumed)
    assert (resumed.epoch, resumed.event.step) == (2, 20)
    assert (await current_state(log)).trainer_step == 20


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_ends_the_block_in_order_and_with_its_status(log, run_id, redis_url, number):
    code = (
        "import signal, sys, time\n"
        "from trinity_events import training_run\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may run under nohup
        "with training_run(sys.argv[1], redis_url=sys.argv[2]):\n"
        "    print('opened', flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, run_id, redis_url]
    with child(command, stdout=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline() == b"opened\n"
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
    assert await closed(log) == ("interrupted", None)


async def test_a_handler_of_the_users_own_stays(run_id, redis_url):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with training_run(run_id, redis_url=redis_url):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


async def test_what_was_said_is_in_the_log_when_the_block_is_left(log, run_id, redis_url):
    with publishing(run_id, 3, "actor", rank=2, redis_url=redis_url) as publisher:
        publisher.publish(TrainerStatusChanged(status="running", step=7))
    [envelope] = await events_of(log, TrainerStatusChanged)
    assert (envelope.epoch, envelope.producer.role, envelope.producer.rank) == (3, "actor", 2)


def test_an_id_that_cannot_be_one_is_refused_before_a_server_is_asked():
    with (
        raises(InvalidRunId, run_id="No Slug"),
        training_run("No Slug", redis_url="redis://127.0.0.1:1"),
    ):
        pass


def test_a_server_that_is_not_there_is_one_sentence(run_id):
    unreachable = raises(ServerUnreachable, way_out=re.compile("leave --redis-url"))
    with unreachable, training_run(run_id, redis_url="redis://127.0.0.1:1"):
        pass


# --- callbacks -----------------------------------------------------------------------------------

LEFT_OPEN = """
import sys, time
from trinity_events import publishing, training_run
from trinity_events.log import Publisher

Publisher.__init__.__kwdefaults__["linger"] = 0.01  # of all that the library opens
how, run, url = sys.argv[1:]
if how == "generator":
    def training():
        with training_run(run, redis_url=url) as run_:
            yield run_
    run_context = training()
    opened = next(run_context)
else:
    run_context = training_run(run, redis_url=url)
    opened = run_context.open()
others = publishing(run, opened.epoch, "actor", redis_url=url)
others.__enter__()
opened.flush(120)
time.sleep(0.1)  # longer than an idle sender stays where nothing keeps it
print("opened", flush=True)
sys.stdin.read()
raise ValueError("training broke")
"""


@pytest.fixture
def left_open(run_id):
    """Starts a process that opens the run, and ends with an error once its input is closed."""
    started = []

    def start(how, url):
        command = [sys.executable, "-c", LEFT_OPEN, how, run_id, url]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, cwd=ROOT, **pipes))
        assert started[-1].stdout.readline() == "opened\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.parametrize("how", ["callback", "generator"])
async def test_a_process_that_leaves_a_run_open_ends_and_closes_it_as_interrupted(
    log, run_id, redis_url, left_open, how
):
    _, stderr = (process := left_open(how, redis_url)).communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "ValueError: training broke" in stderr
    assert "was left open" in stderr
    assert "Exception ignored" not in stderr
    assert await closed(log) == ("interrupted", None)


@pytest.mark.heavy
@pytest.mark.processes
@pytest.mark.server
def test_a_process_that_leaves_a_run_open_ends_without_its_server_too(tmp_path, left_open):
    with servers(tmp_path, 1) as [server]:
        process = left_open("callback", server.url)
        server.kill()
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert "ValueError: training broke" in stderr


async def test_a_generator_that_is_dropped_closes_its_run_as_interrupted(log, run_id, redis_url):
    def training():
        with training_run(run_id, redis_url=redis_url) as run:
            yield run

    generator = training()
    next(generator)
    generator.close()
    assert await closed(log) == ("interrupted", None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(None, ("finished", None)), (ValueError("no reward"), ("failed", "ValueError: no reward"))],
)
async def test_callbacks_open_a_run_and_close_it_once(log, run_id, redis_url, error, reason):
    run = training_run(run_id, redis_url=redis_url)
    run.close()  # before it was opened there is nothing to close
    publisher = run.open()
    assert publisher.epoch == 1
    run.close(error)
    run.close()
    assert await closed(log) == reason
    with raises(RunOpenedTwice):
        run.open()


# --- the example ---------------------------------------------------------------------------------


def test_the_documentation_shows_the_example_as_it_is():
    assert EXAMPLE.read_text() in (ROOT / "docs" / "own-loop.md").read_text()


@pytest.mark.heavy
def test_the_example_trains_publishes_saves_and_is_followed(redis_url, tmp_path, cli):
    env = {
        **os.environ,
        "TRINITY_REDIS_URL": redis_url,
        "CHECKPOINT_ROOT": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    example, launcher = str(EXAMPLE), ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    parts = [("0",), ("1",)]
    with reducer_process(redis_url, "own-loop", tmp_path):
        explorers = [
            subprocess.Popen([sys.executable, example, *rank], env=env, stdout=subprocess.PIPE)
            for rank in parts
        ]
        try:
            trained = subprocess.run(
                [sys.executable, *launcher, example],
                env=env,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            assert trained.returncode == 0, trained.stderr
            for rank, explorer in enumerate(explorers):
                output, _ = explorer.communicate(timeout=PATIENCE)
                assert explorer.returncode == 0
                assert f"explorer {rank} serves step 30: " in output.decode().splitlines()[-1]
        finally:
            for explorer in explorers:
                explorer.kill()
                explorer.wait()
    shown = cli("status", "own-loop").stdout
    assert "trainer finished at step 30" in shown
    assert re.search(r"^weights +30 ", shown, re.MULTILINE)
    assert re.search(r"^checkpoint +30 ", shown, re.MULTILINE)
    assert len(re.findall(r"^explorer-\d +stopped +step 30 ", shown, re.MULTILINE)) == 2
    for step in (20, 30):
        ranks = sorted(
            file.name for file in (tmp_path / f"own-loop/global_step_{step}").glob("*.pt")
        )
        assert ranks == ["model_rank_0.pt", "model_rank_1.pt"]
    assert (tmp_path / "own-loop/latest_checkpointed_iteration.txt").read_text() == "30"

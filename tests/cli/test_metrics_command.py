"""``trinity-events metrics``, scraped as Prometheus does."""

import os
import resource
import signal
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.support.acl_rules import rules
from tests.support.event_histories import (
    committed,
    failed,
    finished,
    opened,
    part,
    registration,
    started,
)
from tests.support.half_sent import HALF_BODY, HALF_HEAD, half_sent
from tests.support.metrics_command import metrics_served
from tests.support.pipeline import accept_reports, publish_steps
from tests.support.redis_servers import servers
from tests.support.waits import until
from trinity_events.http_server.connections import ConnectionLimits
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.log.redis.deletion import delete_run
from trinity_events.server import connect
from trinity_schemas import (
    AppliedPhases,
    RunKeys,
    StepRef,
    StepTrained,
    SyncRequested,
    WaitStarted,
    WeightsApplied,
)

pytestmark = [pytest.mark.server, pytest.mark.processes]


@pytest.fixture
def scraped(redis_url, run_id, publisher):
    """Starts the command, and returns a function that reads a metric of the run."""
    with metrics_served(f"of run {run_id}", run_id, "--redis-url", redis_url) as (samples, _, _, _):

        def read(metric, /, **labels):
            values = samples(metric, **labels)
            assert set(values) <= {run_id}
            return list(values.values())

        yield read


async def test_metrics_follow_the_log(scraped, publisher, log, run_id):
    await until(lambda: scraped("trinity_open") == [1])
    actor = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    explorer = AsyncPublisher(log, publisher.epoch, new_producer("explorer", 0))
    await publish_steps(publisher, [1, 2, 3])
    await explorer.publish(
        WeightsApplied(
            version=StepRef(publisher.epoch, 1),
            digest="sha256:" + "0" * 64,
            bytes=80,
            verified_at=1.0,
            phases=AppliedPhases(fetch=0.25, pause=0.5),
        )
    )
    await explorer.publish(SyncRequested(oldest_version=StepRef(publisher.epoch, 4)))
    await accept_reports(log)
    await publisher.publish(opened(4, 0, 1))
    await publisher.publish(part(4))
    await publisher.publish(committed(2, "state_dict", registration(expected=3)))
    await actor.publish(started(2, "a"))
    await actor.publish(failed(2, "b", rank=1))
    await actor.publish(finished(2, "c", rank=2))
    await publisher.publish(WaitStarted(wait_id="w", what="rollouts", seconds=9.0))
    await log.append(b"\xff garbage")
    await publisher.publish(StepTrained(step=3, metrics={"loss": 0.5}))
    await until(lambda: scraped("trinity_training_metric", name="loss") == [0.5])
    assert scraped("trinity_ready_step", kind="weights") == [3]
    assert scraped("trinity_explorer_behind_steps_max") == [2]
    assert scraped("trinity_explorers", status="running") == [1]
    assert scraped("trinity_events_total", type="version-part-published") == [4]
    assert scraped("trinity_events_total", type="step-ready") == [3]
    assert scraped("trinity_published_bytes_total") == [32]
    assert scraped("trinity_applied_bytes_total") == [80]
    duration = "trinity_rl_weight_update_operation_duration_seconds"
    assert scraped(f"{duration}_sum", operation="pause") == [0.5]
    assert scraped(f"{duration}_count", operation="fetch") == [1]
    assert scraped(f"{duration}_count", operation="publish") == [4]
    assert scraped("trinity_rl_weight_update_operations_in_flight", operation="fetch") == [1]
    assert scraped("trinity_rl_weight_update_operations_in_flight", operation="publish") == [1]
    assert scraped("trinity_save_seconds_count") == [1]
    assert scraped("trinity_save_failures_total", kind="state_dict") == [1]
    assert scraped("trinity_step_failures_total", kind="state_dict") == [1]
    assert scraped("trinity_saves_under_way", stage="running") == [1]
    assert scraped("trinity_open_waits") == [1]
    assert scraped("trinity_oldest_wait_seconds")[0] > 8.9  # since it was told, and is rounded
    assert scraped("trinity_dead_letters") == [1]


async def test_all_open_runs_are_served_whatever_one_of_them_meets(tmp_path):
    users = tmp_path / "users.acl"
    users.write_text("\n".join([*rules(), "user admin on >ADMIN +@all ~*"]))
    with servers(tmp_path, 1, "--aclfile", str(users)) as [server]:
        url = server.url_of("viewer", "VIEWER")
        async with connect(server.url_of("admin", "ADMIN")) as admin:

            async def trained(run, step):
                log = RedisEventLog(admin, run)
                publisher = AsyncPublisher(log, await open_run(admin, run), new_producer("trainer"))
                await publisher.publish(StepTrained(step=step, metrics={"loss": 0.5}))
                return publisher

            await trained("first", 1)
            with metrics_served("of all open runs", "--redis-url", url) as (samples, errors, _, _):

                def steps(**expected):
                    return lambda: samples("trinity_trainer_step") == expected

                await until(steps(first=1))
                assert samples("trinity_server_up") == {None: 1}
                second = await trained("second", 2)
                await until(steps(first=1, second=2))
                await admin.set(RunKeys.of("broken").events, "no stream")
                await admin.xadd("trinity:runs", {"run": "broken"})
                await until(lambda: samples("trinity_run_readable").get("broken") == 0)
                await second.publish(StepTrained(step=3, metrics={}))
                await until(steps(first=1, second=3))
                assert samples("trinity_run_readable") == {"first": 1, "second": 1, "broken": 0}
                assert any("of run broken are of the past" in line for line in errors), errors
                await delete_run(admin, "first", await RedisEventLog(admin, "first").last_id())
                await until(steps(second=3))
                server.kill()
                await until(lambda: samples("trinity_server_up") == {None: 0})
                assert steps(second=3)()
                server.start()
                await until(lambda: samples("trinity_server_up") == {None: 1})
                await second.publish(StepTrained(step=4, metrics={}))
                await until(steps(second=4))
                assert [line for line in errors if line.startswith("the server")][-1:] == [
                    "the server answers again\n"
                ]


async def test_a_scrape_never_waits_for_a_server_that_is_stopped(tmp_path):
    with servers(tmp_path, 1) as [server]:
        async with connect(server.url) as client:
            await open_run(client, "one")
            with metrics_served("of all open runs", "--redis-url", server.url) as (
                samples,
                _,
                _,
                _,
            ):
                await until(lambda: samples("trinity_epoch") == {"one": 1})
                os.kill(server._process.pid, signal.SIGSTOP)
                try:
                    await until(lambda: samples("trinity_server_up") == {None: 0})
                    assert samples("trinity_epoch") == {"one": 1}
                finally:
                    os.kill(server._process.pid, signal.SIGCONT)
                await until(lambda: samples("trinity_server_up") == {None: 1})


@pytest.mark.parametrize("sent", [HALF_HEAD, HALF_BODY], ids=["head", "body"])
async def test_a_scrape_is_answered_while_600_requests_are_half_sent(
    redis_url, run_id, publisher, sent
):
    with metrics_served(f"of run {run_id}", run_id, "--redis-url", redis_url) as served:
        # As many connections as files that the process may open would keep all others out.
        resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (400, 400))
        begun = time.monotonic()
        with half_sent(int(urlsplit(served.url).port), 600, sent):
            assert served.samples("trinity_server_up") == {None: 1}
        assert time.monotonic() - begun < ConnectionLimits().head_seconds


def test_a_run_that_is_not_there_is_one_sentence(cli, publisher):
    shown = cli("metrics", "no-such-run", "--port", "0")
    assert shown.returncode == 1
    [line] = shown.stderr.splitlines()
    assert line.startswith("error: there is no run 'no-such-run' on this server")


def test_a_port_that_is_taken_is_one_sentence(cli, publisher, run_id):
    with socket.socket() as occupied:
        occupied.bind(("127.0.0.1", 0))
        occupied.listen()
        port = occupied.getsockname()[1]
        shown = cli("metrics", run_id, "--port", str(port))
    assert shown.returncode == 1
    [line] = shown.stderr.splitlines()
    assert line.startswith(f"error: metrics cannot listen at 127.0.0.1 port {port} (")

"""``trinity-events metrics``, scraped as Prometheus does."""

import socket
import subprocess
import sys
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.event_histories import committed, failed, finished, registration, started
from tests.support.pipeline import publish_steps
from tests.support.waits import PATIENCE, child, until
from trinity_events.log import AsyncPublisher, new_producer
from trinity_schemas import AppliedPhases, StepRef, StepTrained, WaitStarted, WeightsApplied


@pytest.fixture
def scraped(redis_url, run_id, publisher):
    """Starts the command, and returns a function that reads a metric."""
    command = [sys.executable, "-m", "trinity_events", "metrics", run_id, "--port", "0"]
    with child([*command, "--redis-url", redis_url], stdout=subprocess.PIPE, text=True) as process:
        said = process.stdout.readline()
        assert said.startswith(f"metrics of run {run_id} at http://127.0.0.1:"), said
        url = said.split()[-1]

        def read(metric, /, **labels):
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                samples = [one for family in families for one in family.samples]
            wanted = {"run": run_id} | labels
            return [one.value for one in samples if one.name == metric and one.labels == wanted]

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
    assert scraped("trinity_events_total", type="version-part-published") == [3]
    assert scraped("trinity_events_total", type="step-ready") == [3]
    assert scraped("trinity_published_bytes_total") == [24]
    assert scraped("trinity_applied_bytes_total") == [80]
    assert scraped("trinity_pause_seconds_sum") == [0.5]
    assert scraped("trinity_fetch_seconds_count") == [1]
    assert scraped("trinity_save_seconds_count") == [1]
    assert scraped("trinity_save_failures_total", kind="state_dict") == [1]
    assert scraped("trinity_step_failures_total", kind="state_dict") == [1]
    assert scraped("trinity_saves_under_way", stage="running") == [1]
    assert scraped("trinity_open_waits") == [1]
    assert scraped("trinity_oldest_wait_seconds")[0] > 8.9  # since it was told, and is rounded
    assert scraped("trinity_dead_letters") == [1]


def test_a_port_that_is_taken_is_one_sentence(cli, publisher, run_id):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        shown = cli("metrics", run_id, "--port", str(port))
    assert shown.returncode == 1
    [line] = shown.stderr.splitlines()
    assert line.startswith(f"error: port {port} of 127.0.0.1 cannot be listened at (")

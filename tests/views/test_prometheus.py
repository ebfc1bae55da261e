"""A real Prometheus with the shipped files, which scrapes the metrics of a run."""

import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from tests.support.event_histories import (
    committed,
    failed,
    finished,
    opened,
    part,
    registration,
    started,
)
from tests.support.metrics_command import metrics_served
from tests.support.pipeline import accept_reports, publish_steps
from tests.support.redis_servers import free_ports, servers
from tests.support.waits import PATIENCE, child, until
from trinity_events.log import AsyncPublisher, RedisEventLog, new_producer, open_run
from trinity_events.server import connect
from trinity_schemas import AppliedPhases, StepRef, StepTrained, WeightsApplied

pytestmark = [pytest.mark.server, pytest.mark.processes]

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
OFTEN = "200ms"


class Prometheus:
    """The server's HTTP API."""

    def __init__(self, port):
        self._url = f"http://127.0.0.1:{port}"

    def ask(self, path, **query):
        with urllib.request.urlopen(
            f"{self._url}{path}?{urllib.parse.urlencode(query)}", timeout=PATIENCE
        ) as answer:
            reply = json.loads(answer.read())
        assert reply["status"] == "success", reply
        return reply["data"]

    def is_up(self):
        try:
            targets = self.ask("/api/v1/targets")["activeTargets"]
        except OSError:
            return False
        return [target["health"] for target in targets] == ["up"]

    def query(self, expression):
        """The values of an instant vector."""
        result = self.ask("/api/v1/query", query=expression)
        assert result["resultType"] == "vector"
        return [float(sample["value"][1]) for sample in result["result"]]

    def alerts(self):
        alerts = self.ask("/api/v1/alerts")["alerts"]
        return {alert["labels"]["alertname"]: alert["state"] for alert in alerts}


@pytest.fixture
def binary():
    path = shutil.which("prometheus")
    if path is None:
        pytest.skip("prometheus is not installed (Debian's package prometheus has it)")
    return path


@contextmanager
def prometheus(binary, folder, target):
    """Start it with the shipped files, of which the target and the intervals alone are changed."""
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": OFTEN, "evaluation_interval": OFTEN}
    [scrape] = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    folder.mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(FOLDER / "alerts.yml", folder)
    [port] = free_ports(1)
    command = [
        binary,
        "--config.file=prometheus.yml",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (
        (folder / "output").open("w") as output,
        child(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT),
    ):
        yield Prometheus(port)


def panels(run):
    """Title and expression of each target of the dashboard, as Grafana asks for them."""
    shown = json.loads((FOLDER / "grafana" / "trinity-events.json").read_text())
    for panel in shown["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$run", run).replace("$__rate_interval", "1m")
            yield panel["title"], expression


def panels_without_data(at, run):
    shown = {}
    for title, expression in panels(run):
        shown.setdefault(title, []).extend(at.query(expression))
    return [title for title, has_data in shown.items() if not has_data]


async def train(log, publisher):
    """Publish what most metrics are of: an explorer is 9 steps behind, a save failed."""
    actor = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    explorer = AsyncPublisher(log, publisher.epoch, new_producer("explorer", 0))
    applied = WeightsApplied(
        version=StepRef(publisher.epoch, 1),
        digest="sha256:" + "0" * 64,
        bytes=80,
        verified_at=1.0,
        phases=AppliedPhases(fetch=0.25, pause=0.5),
    )
    await publish_steps(publisher, range(1, 11))
    await explorer.publish(applied)
    await accept_reports(log)
    await publisher.publish(opened(11, 0, 1))
    await publisher.publish(part(11))
    await publisher.publish(StepTrained(step=10, metrics={"loss": 0.5}))
    await publisher.publish(committed(2, "state_dict", registration(expected=2)))
    await actor.publish(started(2, "a"))
    await actor.publish(finished(2, "b", rank=1))
    await actor.publish(failed(2, "a"))
    await log.append(b"\xff garbage")


async def test_panels_have_data_and_alerts_fire(binary, tmp_path):
    with servers(tmp_path / "servers", 1) as [server]:
        async with connect(server.url) as client:
            publisher = AsyncPublisher(
                RedisEventLog(client, "run"),
                await open_run(client, "run"),
                new_producer("trainer"),
            )
            served = metrics_served("of all open runs", "--redis-url", server.url)
            with (
                served as (_, _, url, _),
                prometheus(
                    binary, tmp_path / "prometheus", urllib.parse.urlsplit(url).netloc
                ) as at,
            ):
                await until(at.is_up)
                await until(lambda: at.query("sum(trinity_step_failures_total)") == [0])
                assert at.alerts() == {}
                await train(publisher.log, publisher)
                await until(lambda: at.query('trinity_training_metric{name="loss"}') == [0.5])
                await until(lambda: at.query("trinity_dead_letters") == [1])
                await until(lambda: not panels_without_data(at, "run"))  # rates take two scrapes
                assert at.ask("/api/v1/label/run/values", **{"match[]": "trinity_open"}) == ["run"]
                await until(lambda: at.alerts().get("TrinityStepFailed") == "firing")
                await until(lambda: at.alerts().get("TrinitySaveFailed") == "firing")
                await until(lambda: at.alerts().get("TrinityExplorersBehind") == "pending")
                server.kill()
                await until(lambda: at.alerts().get("TrinityServerAway") == "pending")
                server.start()
                await until(lambda: "TrinityServerAway" not in at.alerts())

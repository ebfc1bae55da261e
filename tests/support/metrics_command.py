"""``trinity-events metrics`` as a process of its own, scraped as Prometheus does."""

from __future__ import annotations

import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from tests.support.waits import PATIENCE, child


class Served(NamedTuple):
    """Process of the command."""

    samples: Callable[..., dict[str | None, float]]
    """Returns the values of a metric by their run."""
    told: list[str]
    """Lines of its standard error so far."""
    url: str
    pid: int


@contextmanager
def metrics_served(of: str, *arguments: str) -> Iterator[Served]:
    """Start the command at a free port; ``of`` names the runs as its first line does."""
    command = [sys.executable, "-m", "trinity_events", "metrics", "--port", "0", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child(command, **pipes) as process:
        said = process.stdout.readline()
        assert said.startswith(f"metrics {of} at http://127.0.0.1:"), process.stderr.read()
        url = said.split()[-1]
        told: list[str] = []
        threading.Thread(target=lambda: told.extend(process.stderr), daemon=True).start()

        def samples(metric: str, /, **labels: str) -> dict[str | None, float]:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                found = [one for family in families for one in family.samples]
            return {
                one.labels.get("run"): one.value
                for one in found
                if one.name == metric and labels.items() <= one.labels.items()
            }

        yield Served(samples, told, url, process.pid)

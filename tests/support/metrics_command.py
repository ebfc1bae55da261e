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
    error_lines: list[str]
    """Lines of its standard error so far."""
    url: str
    pid: int


@contextmanager
def metrics_served(of: str, *arguments: str) -> Iterator[Served]:
    """Start the command at a free port; ``of`` names the runs as its first line does."""
    command = [sys.executable, "-m", "trinity_events", "metrics", "--port", "0", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with child(command, **pipes) as process:
        line = process.stdout.readline()
        assert line.startswith(f"metrics {of} at http://127.0.0.1:"), process.stderr.read()
        url = line.split()[-1]
        error_lines: list[str] = []
        threading.Thread(target=lambda: error_lines.extend(process.stderr), daemon=True).start()

        def samples(metric: str, /, **labels: str) -> dict[str | None, float]:
            with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
                families = text_string_to_metric_families(answer.read().decode())
                exported = [sample for family in families for sample in family.samples]
            return {
                sample.labels.get("run"): sample.value
                for sample in exported
                if sample.name == metric and labels.items() <= sample.labels.items()
            }

        yield Served(samples, error_lines, url, process.pid)

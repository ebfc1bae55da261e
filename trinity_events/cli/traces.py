"""``trinity-events traces``."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import anyio
import typer

from ..errors import PackageMissing, TrinityError
from ..views.terminal import print_out
from .options import CheckpointRoot, RedisUrl
from .sources import RunOrFile, open_states, read_timeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

ENDPOINT = "http://localhost:4318"
"""Default address of a collector: OTLP over HTTP on its own port."""
# OpenTelemetry's own variable of the address of all signals.
_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"


class CollectorRefuses(TrinityError):
    """The collector does not take the spans.

    Attributes:
        url: Its address.
        fault: ``address`` if that is none, ``spans`` if it takes no spans.
    """

    url: str
    fault: Literal["address", "spans"]
    texts: ClassVar = {
        "address": "{url!r} is no address of a collector: give http://HOST:PORT",
        "spans": "the collector at {url} takes no spans: start one that takes OTLP over HTTP, or "
        "name another with --to",
    }


def traces(
    run: RunOrFile,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help=f"Collector, by OTLP over HTTP; by default ${_VARIABLE}, else {ENDPOINT}.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds in which the collector must take a batch.", min=0.1)
    ] = 10.0,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Give a run's log to OpenTelemetry: a trace for each step, with all parts of its version.

    Ids are computed from run, epoch and step: a second call sends the same spans.

    Example: trinity-events traces demo-1 --to http://localhost:4318
    """
    url = (to or os.environ.get(_VARIABLE) or ENDPOINT).rstrip("/")
    if not url.startswith(("http://", "https://")):
        raise CollectorRefuses(url, "address")
    sent = anyio.run(_traces, run, root, redis_url, _Collector(url, timeout))
    print_out(f"{sent} spans given to {url}")


class _Collector:
    """Collector of OpenTelemetry, by OTLP over HTTP."""

    def __init__(self, url: str, timeout: float) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise PackageMissing("traces", "opentelemetry", "trinity-events[otlp]") from None
        # Its failures are this command's own sentence.
        logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
        self._url = url
        # Its path is added here: the exporter adds it to the variable's address, and takes an
        # argument as it is (its trace_exporter/__init__.py).
        self._exporter: Any = OTLPSpanExporter(endpoint=f"{url}/v1/traces", timeout=timeout)

    def send(self, spans: Sequence[ReadableSpan]) -> None:
        """Send a batch. Raises CollectorRefuses."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        if self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise CollectorRefuses(self._url, "spans")

    def close(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()


async def _traces(run: str, root: Path | None, redis_url: str | None, collector: _Collector) -> int:
    from ..views.otlp import StepTraces

    async with open_states(run, root, redis_url) as states:
        traces = StepTraces(states.source.run_id, collector.send)
        try:
            async with aclosing(read_timeline(states)) as timeline:
                async for parts in timeline:
                    traces.add_all(parts)
            traces.finish()
        finally:
            collector.close()
        return traces.spans

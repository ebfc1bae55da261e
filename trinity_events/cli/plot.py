"""``trinity-events plot``."""

from __future__ import annotations

import fnmatch
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import anyio
import typer

from trinity_schemas import ContractError, EnvelopeReader, RunResumed

from ..analysis.metrics import MetricsReader
from ..views.plot import Curves, PlotUnusable, draw
from ..views.terminal import print_out
from .options import CheckpointRoot, RedisUrl
from .sources import RunOrFile, open_states

DRAWN = (
    "rollout/reward",
    "train/loss",
    "off_policy/staleness",
    "perf/stall_seconds",
    "perf/transfer_seconds",
    "perf/pause_seconds",
)
"""Metrics that are drawn unless others are asked for, as far as the run has them.

The mean rewards of all sets of held-out questions are drawn beside them.
"""


def plot(
    run: RunOrFile,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            "-m",
            help="Metric, or group of metrics such as perf; may be given several times. By "
            "default reward, loss, staleness, times of synchronisation and mean held-out rewards.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Picture to write: svg, png or pdf. By default RUN.svg."
        ),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Draw a run's metrics over its steps, from its log alone.

    Example: trinity-events plot demo-1 --output demo-1.png
    """
    run_id, curves = anyio.run(_curves, run, root, redis_url)
    usual = (*DRAWN, *fnmatch.filter(curves.names, "eval/*/mean"))
    drawn = metrics or [name for name in usual if name in curves.names]
    if not drawn:
        raise PlotUnusable("none", run_id)
    path = output or Path(f"{run_id}.svg")
    draw(run_id, curves.matching(drawn), path)
    print_out(str(path))


async def _curves(run: str, root: Path | None, redis_url: str | None) -> tuple[str, Curves]:
    curves, reader, decode = Curves(), MetricsReader(), EnvelopeReader().decode
    async with open_states(run, root, redis_url) as states:
        async for entry in states.source.events():
            with suppress(ContractError):  # a dead letter, which the reducer has reported
                envelope = decode(entry.payload)
                if isinstance(envelope.event, RunResumed):
                    # Later steps of the earlier epoch are discarded, and trained again.
                    curves.cut_after(envelope.event.step)
                if (sample := reader.add(envelope)) is not None:
                    curves.add(sample.step, sample.values)
        return states.source.run_id, curves

"""``trinity-events track``."""

from __future__ import annotations

from contextlib import aclosing, suppress
from pathlib import Path
from typing import Annotated

import anyio
import typer

from trinity_schemas import ContractError, RunOpened, decode_envelope

from ..archive.state_at import StateSource
from ..trackers import TrackedRun, open_trackers, track_recorded, tracking_folder
from ..views.terminal import print_out
from .options import CheckpointRoot, RedisUrl
from .sources import RunOrFile, open_states


def track(
    run: RunOrFile,
    to: Annotated[
        list[str],
        typer.Option(
            "--to",
            metavar="TRACKER",
            help="jsonl, tensorboard, wandb, mlflow, an entry point or module:attribute; "
            "may be given several times.",
            show_default=False,
        ),
    ],
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder for files; by default metrics below TRINITY_HOME."),
    ] = None,
    project: Annotated[
        str, typer.Option(help="Project of Weights & Biases, experiment of MLflow.")
    ] = "trinity-events",
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Give the metrics of a run's whole log to trackers; while it trains, train does so itself.

    Example: trinity-events track demo-1 --to tensorboard --folder metrics
    """
    given = anyio.run(_track, run, to, tracking_folder(folder), project, root, redis_url)
    print_out(f"{given} measurements given to {', '.join(to)}")


async def _track(
    run: str,
    to: list[str],
    folder: Path,
    project: str,
    root: Path | None,
    redis_url: str | None,
) -> int:
    async with open_states(run, root, redis_url) as states:
        tracked = TrackedRun(
            run_id=states.source.run_id,
            folder=folder,
            project=project,
            config=await _config(states.source),
        )
        with open_trackers(to, tracked) as trackers:
            return await track_recorded(states.source.events(), trackers)


async def _config(source: StateSource) -> str | None:
    """Return the configuration that the run was opened with; None if its log tells none."""
    async with aclosing(source.events()) as entries:
        async for entry in entries:
            with suppress(ContractError):
                # A run is opened by its first event; whatever follows is not read.
                event = decode_envelope(entry.payload).event
                return event.config if isinstance(event, RunOpened) else None
    return None

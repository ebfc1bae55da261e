"""Commands of this package, found by the command line through their entry points."""

from __future__ import annotations

import importlib.util
import sys
from datetime import datetime
from typing import Annotated

import anyio
import typer

from trinity_events.cli.options import (
    CheckpointRoot,
    Json,
    RedisUrl,
    checked_run,
    checkpoint_root,
    print_json,
)
from trinity_events.errors import TrinityError
from trinity_events.reducer import writable_root


class MissingExtra(TrinityError):
    """A part of the installation that the command needs is not there."""


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 300,
    explorers: Annotated[int, typer.Option(min=1, help="Explorer processes.")] = 1,
    trainers: Annotated[int, typer.Option(min=1, help="Trainer processes (FSDP ranks).")] = 2,
    sync_interval: Annotated[
        int, typer.Option(min=1, help="Steps between two weight versions.")
    ] = 1,
    sync_offset: Annotated[
        int, typer.Option(min=0, help="Versions that explorers may be behind.")
    ] = 1,
    save_interval: Annotated[
        int, typer.Option(min=0, help="Steps between two checkpoints; 0 writes none.")
    ] = 100,
    seed: Annotated[int, typer.Option(help="Of the model and of all sampling.")] = 0,
    run: Annotated[
        str | None, typer.Option("--run", help="The run's id; made from the time when left out.")
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    weights_redis_url: Annotated[
        str | None,
        typer.Option(
            "--weights-redis-url",
            envvar="TRINITY_WEIGHTS_REDIS_URL",
            help="Server of the weight chunks; an embedded one, or else the log's, when left out.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the main job on this machine: train a small model with GRPO, every part a process.

    Example: trinity-events demo --steps 100 --explorers 2
    """
    # What can be wrong is found out before the heavy imports.
    run_id = checked_run(run or f"demo-{datetime.now():%Y%m%d-%H%M%S}")
    folder = writable_root(checkpoint_root(root))
    _require("torch", "ray", "transformers", "reasoning_gym", "xxhash")
    from .demo.launch import DemoOptions, Interrupted, run_demo
    from .demo.summary import summary_table

    options = DemoOptions(
        run_id=run_id,
        steps=steps,
        trainers=trainers,
        explorers=explorers,
        sync_interval=sync_interval,
        sync_offset=sync_offset,
        save_interval=save_interval,
        seed=seed,
        redis_url=redis_url,
        weights_redis_url=weights_redis_url,
        checkpoint_root=folder,
    )
    try:
        summary = anyio.run(run_demo, options)
    except Interrupted as error:
        print(error, file=sys.stderr)
        raise SystemExit(130) from None
    if as_json:
        print_json(summary)
    else:
        from rich.console import Console

        Console().print(summary_table(summary))


def _require(*modules: str) -> None:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(
            f"this command needs {', '.join(missing)}: pip install 'trinity-events[workers]'"
        )

"""Training again from a record: the command ``retrain``.

1. Every step is taken on the samples that it was taken on, from the initial model. With the
   settings and the order of the run it ends with the same bits, which its last checkpoint proves.
2. With other settings, another order or another bound of staleness it is a counterfactual run. It
   says so in its output, in its file and in its id, and nothing is compared.
3. No answers are generated and no version is published. The run has its own id and folder.
4. A record that lacks a step, a group or a token is refused: its result would be of other data.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import anyio
import typer
from msgspec import structs

from trinity_events.checkpoints.layout import final_name
from trinity_events.cli.options import (
    CheckpointRoot,
    RedisUrl,
    RunArgument,
    checkpoint_root,
    parse_run_id,
)
from trinity_events.errors import RunNotFound, TrinityError
from trinity_events.log import open_run
from trinity_events.log.redis.run_index import nearest_name
from trinity_events.record.reader import RolloutRecord
from trinity_events.server import connect, serving
from trinity_events.system.counts import format_count
from trinity_events.views.terminal import print_err, print_out
from trinity_schemas import Experience, StepRef, Turn

from ..config.files import COPY, read_config, typed_setting
from ..config.train_config import RunConfig, TrainConfig
from ..storage.durable_files import write_json

if TYPE_CHECKING:
    from torch import Tensor

_OWN_STATES = ("random.python", "random.numpy")
"""States that Ray seeds anew in each process, and that no step draws from."""
RESULT = "retrain.json"
"""File of the result in the run's folder."""


class StepOrder(StrEnum):
    """Orders in which recorded steps are taken."""

    recorded = "recorded"
    reversed = "reversed"
    shuffled = "shuffled"


class CannotRetrain(TrinityError):
    """A record does not have all that a run was trained on.

    Attributes:
        run_id: The run.
        fault: ``steps`` if one is missing, ``samples`` if groups of one are, ``redacted`` if tokens
            of one were left out.
        step: The step.
        recorded: Samples of the step in the record.
        needed: Samples that the step was trained on.
    """

    run_id: str
    fault: Literal["steps", "samples", "redacted"]
    step: int
    recorded: int = 0
    needed: int = 0
    texts: ClassVar = {
        "steps": "step {step} of run {run_id} is not in its record: train with record.rollouts "
        "all, and limits of the record that the run does not meet",
        "samples": "step {step} of run {run_id} has {recorded} of {needed} samples in its record: "
        "train with record.rollouts all",
        "redacted": "tokens of step {step} of run {run_id} were redacted, so that it cannot be "
        "trained on again",
    }


def require_run_folder(root: Path, run_id: str) -> None:
    """Raise RunNotFound if the root has no folder of the run, with the nearest name there."""
    if (root / run_id).is_dir():
        return
    copies = sorted(root.glob(f"*/{COPY}"), key=lambda path: path.stat().st_mtime)
    runs = [path.parent.name for path in copies]
    nearest = nearest_name(run_id, runs)
    raise RunNotFound(run_id, "no folder", nearest, tuple(runs[-5:]), root=root)


def read_groups(
    record: RolloutRecord, config: TrainConfig
) -> list[tuple[int, list[list[Experience]]]]:
    """Return the steps of a run with their groups, as they were trained on.

    Raises:
        CannotRetrain: The record lacks some of it.
    """
    record.find_step()  # the error of a run without a record
    steps = {recorded.step: recorded for recorded in record.list_steps()}
    needed = config.rollouts.prompts_per_step * config.rollouts.samples_per_prompt
    names = [name for name in record.column_names if name not in ("token_texts", "preview")]
    trained = []
    for step in range(1, max(steps) + 1):
        if step not in steps:
            raise CannotRetrain(record.run_id, "steps", step)
        rows = record.read(steps[step], names)
        if len(rows) != needed:
            raise CannotRetrain(record.run_id, "samples", step, len(rows), needed)
        if any(row["is_redacted"] for row in rows):
            raise CannotRetrain(record.run_id, "redacted", step)
        groups = [
            [to_experience(row) for row in group]
            for _, group in groupby(rows, itemgetter("ordinal"))
        ]
        trained.append((step, groups))
    return trained


def to_experience(row: dict[str, Any]) -> Experience:
    """Return the sample of a recorded row, with its tokens to the bit."""
    runs = ((StepRef(run["epoch"], run["step"]), run["tokens"]) for run in row["versions"])
    version, count = next(runs)
    turns = [Turn(role="prompt", tokens=row["prompt_ids"])]
    begin = 0
    for turn in row["turns"][1:]:
        own = slice(begin, begin + turn["tokens"])
        begin += turn["tokens"]
        if turn["role"] != "policy":
            turns.append(Turn(role="environment", tokens=row["completion_ids"][own]))
            continue
        versions: list[tuple[StepRef, int]] = []
        missing = turn["tokens"]
        # A run of one version never crosses a turn: the record has those of each turn in order.
        while missing:
            versions.append((version, count))
            missing -= count
            version, count = next(runs, (version, 0))
        turns.append(
            Turn(
                role="policy",
                tokens=row["completion_ids"][own],
                logprobs=row["logprobs"][own],
                versions=versions,
            )
        )
    names = ("run_id", "epoch", "ordinal", "attempt", "sample", "samples", "explorer")
    more = ("reward", "reward_parts", "reward_error", "question_set", "proof")
    return Experience(
        **{name: row[name] for name in (*names, *more)},
        turns=turns,
        finished=not row["is_truncated"],
    )


def arrange(
    steps: Sequence[tuple[int, list[list[Experience]]]],
    order: StepOrder,
    max_staleness: int | None,
    seed: int,
) -> list[tuple[int, list[list[Experience]]]]:
    """Return the steps in another order, without groups that are too old; none without groups."""
    if max_staleness is not None:
        steps = [
            (step, [group for group in groups if _staleness(step, group) <= max_staleness])
            for step, groups in steps
        ]
    arranged = [(step, groups) for step, groups in steps if groups]
    if order is StepOrder.reversed:
        arranged.reverse()
    elif order is StepOrder.shuffled:
        random.Random(seed).shuffle(arranged)  # noqa: S311  # an order, not a secret
    return arranged


def _staleness(step: int, group: Sequence[Experience]) -> int:
    return max(step - 1 - sample.oldest_version.step for sample in group)


def retrain(
    run: RunArgument,
    from_record: Annotated[  # said for clearness: there is no other source
        bool, typer.Option("--from-record", hidden=True)
    ] = True,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Setting to train with instead."),
    ] = None,
    order: Annotated[StepOrder, typer.Option("--order", help="Order of the steps.")] = (
        StepOrder.recorded
    ),
    max_staleness: Annotated[
        int | None,
        typer.Option("--max-staleness", min=0, help="Leave out groups that were older."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--run", help="Id of the new run; by default RUN-again.")
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
) -> None:
    """Train a run again on its recorded rollouts, from its initial model.

    Without other settings it must end with the bits of the run, and the newest checkpoint is
    compared. With others it is a counterfactual run.

    Example: trinity-events retrain demo-1 --set algorithm.loss=gspo
    """
    run_id, folders = parse_run_id(run), checkpoint_root(root)
    require_run_folder(folders, run_id)
    own = read_config(folders / run_id / COPY).checked()
    given = [typed_setting(text) for text in settings or ()]
    other = read_config(folders / run_id / COPY, given).checked()
    changed = [f"{setting.path}={setting.text}" for setting in given]
    if order is not StepOrder.recorded:
        changed.append(f"order={order.value}")
    if max_staleness is not None:
        changed.append(f"max_staleness={max_staleness}")
    recorded = read_groups(RolloutRecord(folders / run_id, run_id), own)
    steps = arrange(recorded, order, max_staleness, own.seed)
    kind = "counterfactual" if changed else "again"
    target = parse_run_id(name or f"{run_id}-{kind}")
    if changed:
        print_out(f"run {target} is counterfactual: {', '.join(changed)}")
    anyio.run(_retrain, other, run_id, target, folders, redis_url, steps, changed)


async def _retrain(
    settings: TrainConfig,
    source: str,
    target: str,
    folders: Path,
    redis_url: str | None,
    steps: Sequence[tuple[int, list[list[Experience]]]],
    changed: Sequence[str],
) -> None:
    from ..trainer.backends import get_trainer_wrapper
    from .lifecycle import closing
    from .processes import ReducerProcess, local_ray

    # It publishes no version, and records what is recorded already.
    settings = settings.replaced("sync", transport="redis", method="memory")
    settings = settings.replaced("record", rollouts="none")
    with serving(redis_url) as url:
        async with connect(url) as client:
            epoch = await open_run(client, target, config=settings.to_text())
            config = settings.placed(
                run_id=target,
                epoch=epoch,
                redis_url=url,
                weights_url=url,
                checkpoint_folder=folders / target,
            )
            if settings.model.path is None:
                config = structs.replace(config, model_folder=folders / source / "model")
            reducer = ReducerProcess(url, target, folders, keep_checkpoints=0)
            # The reducer ends last: the end of the run waits for it.
            ranks = settings.trainer.rank_count
            async with reducer.running(), closing(client, config), local_ray(ranks):
                engine = get_trainer_wrapper(config)
                await engine.prepare()
                metrics = []
                for step, groups in steps:
                    metrics.append({"step": step, **await engine.train_step(groups)})
                    shown = metrics[-1]
                    print_out(
                        f"step {step}: score {shown['score']:.3g}, loss {shown['loss']:.6g}, "
                        f"gradient norm {shown['gradient_norm']:.6g}"
                    )
                await engine.save_checkpoint(block_until_saved=True)
                await engine.shutdown()
    differing: list[str] | None = None
    last = folders / source / final_name(len(steps))
    if not changed and last.is_dir():
        differing = list(find_differences(last / "actor", config.folder_of(len(steps)) / "actor"))
    write_json(
        folders / target / RESULT,
        {
            "run_id": target,
            "source": source,
            "kind": "counterfactual" if changed else "again",
            "changed": list(changed),
            "differing": differing,
            "metrics": metrics,
        },
    )
    _print_result(source, target, len(steps), changed, differing, config)


def _print_result(
    source: str,
    target: str,
    steps: int,
    changed: Sequence[str],
    differing: Sequence[str] | None,
    config: RunConfig,
) -> None:
    place = config.checkpoint_folder / RESULT
    shown = format_count(steps, "step")
    if changed:
        print_out(f"{shown} of run {source} trained otherwise: {place}")
    elif differing is None:
        print_out(
            f"{shown} of run {source} trained again, and it has no checkpoint of its "
            f"last step to compare with: {place}"
        )
    elif differing:
        print_err(f"run {target} differs from {source} in {', '.join(differing[:8])}: {place}")
        raise typer.Exit(1)
    else:
        print_out(f"run {target} is equal to the bit to {source} at step {steps}: {place}")


def find_differences(first: Path, other: Path) -> Iterator[str]:
    """Yield the files of models and optimizers whose tensors are not equal to the bit."""
    from ..engines.state_files import read_state
    from ..learning.finite import local_tensors, nested_tensors

    names = {path.name for folder in (first, other) for path in folder.glob("*.pt")}
    for name in sorted(name for name in names if name.startswith(("model_", "optim_"))):
        if not (first / name).is_file() or not (other / name).is_file():
            yield name
            continue
        states = [dict(nested_tensors(read_state(folder / name))) for folder in (first, other)]
        if states[0].keys() != states[1].keys():
            yield name
            continue
        for place, tensor in states[0].items():
            if place.startswith(_OWN_STATES):
                continue
            pairs = zip(local_tensors(tensor), local_tensors(states[1][place]), strict=True)
            # By bytes: -0.0 equals 0.0, and NaN nothing.
            if not all(_to_bytes(own) == _to_bytes(others) for own, others in pairs):
                yield f"{name}:{place}"


def _to_bytes(tensor: Tensor) -> tuple[str, bytes]:
    import torch

    # By bytes: -0.0 equals 0.0, and NaN nothing.
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)  # (bytes,)
    return f"{tensor.dtype}{tuple(tensor.shape)}", flat.numpy().tobytes()

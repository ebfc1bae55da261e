"""Evaluation of a checkpoint without training: the command ``evaluate``.

1. It is a run of no steps, with its own id, log and folder: nothing of another run is changed.
2. A checkpoint is compared with its manifest before anything of it is read.
3. Weights travel and are proven as in training, and questions and seeds are those of the
   configuration. A deterministic engine gives the result that the training run had of them.
4. Converted weights are below the root in a locked folder, which the next evaluation removes if
   this one is killed.
5. An evaluation that failed, or that has no questions, has a sentence in the place of its metrics.
"""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import anyio
import anyio.to_thread
from msgspec import Struct, field, structs
from rich.markup import escape
from rich.table import Table

from trinity_events.checkpoints.layout import final_name
from trinity_events.errors import TrinityError
from trinity_events.system.open_folder import partial_folder
from trinity_events.views.learning import format_seconds

from ..algorithms.settings import AlgorithmConfig
from ..config.sections.checkpoints import CheckpointsConfig
from ..config.sections.notify import NotifyConfig
from ..config.sections.record import RecordConfig
from ..config.sections.tracking import TrackingConfig
from ..config.train_config import TrainConfig
from ..engines.convertible import find_source
from ..learning.lora_settings import LoraConfig
from ..storage.load_verification import verify_checkpoint

if TYPE_CHECKING:
    from .launcher import LaunchOptions
    from .summary import EvaluationResults

_STEP = re.compile(r"(?P<run>[^/]+)/(?P<step>\d{1,12})")
_ENDS = ("_low", "_high")
TEMPORARY = "evaluate"
"""Name of the folder of converted weights; that of a killed evaluation is removed by the next."""


class EvaluationRefused(TrinityError):
    """There is nothing to evaluate, or nothing to evaluate it on.

    Attributes:
        fault: ``checkpoint`` if there is no such checkpoint, ``convert`` if it cannot be converted,
            ``set`` if the configuration has no such set, ``sets`` if it has none at all.
        name: Checkpoint or set that was asked for.
        root: Folder with one checkpoint directory per run.
        sets: Sets that there are.
        reason: Error of the conversion.
    """

    fault: Literal["checkpoint", "convert", "set", "sets"]
    name: str = ""
    root: Path = Path()
    sets: tuple[str, ...] = ()
    reason: str = ""
    texts: ClassVar = {
        "checkpoint": "there is no checkpoint {name}, neither as a folder nor below {root}: give "
        "the folder of a step or of a Hugging Face model, or RUN/STEP, such as grpo-1/200",
        "convert": "the checkpoint {name} is not evaluated: {reason}",
        "set": "there is no evaluation set {name}: evaluation.sets has {_sets}",
        "sets": "evaluation.sets is empty, so that there is nothing to evaluate: name a set",
    }

    @property
    def _sets(self) -> str:
        return ", ".join(self.sets)


class SetResult(Struct, frozen=True, kw_only=True):
    """Result of one set of questions."""

    name: str
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics as the log of a run has them; none if it failed."""
    answers: int = 0
    seconds: float = 0.0
    error: str | None = None
    """Why there is no result."""


class CheckpointEvaluation(Struct, frozen=True, kw_only=True):
    """Results of a checkpoint."""

    run_id: str
    """The run of the evaluation itself."""
    checkpoint: str
    """Folder of the weights."""
    sets: list[SetResult]

    @property
    def has_failed(self) -> bool:
        """Return True if a set has no result."""
        return any(result.error is not None for result in self.sets)


def find_checkpoint(name: str, root: Path) -> Path:
    """Return the folder of a checkpoint: of a path, or of ``RUN/STEP`` below the root.

    Raises:
        EvaluationRefused: There is none.
    """
    folders = [Path(name), root / name]
    if matched := _STEP.fullmatch(name):
        folders.append(root / matched["run"] / final_name(int(matched["step"])))
    folder = next((folder for folder in folders if folder.is_dir()), None)
    if folder is None:
        raise EvaluationRefused("checkpoint", name, root)
    return folder.absolute()


def evaluation_config(config: TrainConfig, names: Sequence[str]) -> TrainConfig:
    """Return the configuration of a run that only evaluates.

    What it does not change is that of training: model, task, rewards, engines and devices.

    Args:
        config: Configuration of the training.
        names: Sets to evaluate; all without any.

    Raises:
        EvaluationRefused: There is no such set.
    """
    sets = config.evaluation.sets
    if not sets:
        raise EvaluationRefused("sets")
    for name in names:
        if name not in sets:
            raise EvaluationRefused("set", name, sets=tuple(sets))
    chosen = {
        name: structs.replace(settings, at_end=True, versions=())
        for name, settings in sets.items()
        if not names or name in names
    }
    return structs.replace(
        config.replaced("evaluation", sets=chosen),
        steps=0,
        algorithm=AlgorithmConfig(),  # without a reference, critic or teacher to load
        checkpoints=CheckpointsConfig(interval=0),
        record=RecordConfig(rollouts="none"),
        tracking=TrackingConfig(),
        notify=NotifyConfig(),
    )


def new_run_id(name: str) -> str:
    """Return the id of an evaluation's run: that of its training, and the time."""
    # A suffix: two evaluations may begin in one second.
    return f"{name}-evaluate-{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


async def evaluate_checkpoint(checkpoint: Path, options: LaunchOptions) -> CheckpointEvaluation:
    """Evaluate a checkpoint in a run of its own.

    Args:
        checkpoint: Folder of a step, or of a Hugging Face model.
        options: The run, with the settings of :func:`evaluation_config`.

    Raises:
        CheckpointDamaged: A file of it is not as it was saved.
        EvaluationRefused: It has no weights that can be converted.
        TrinityError: A part of the run failed.
    """
    from .launcher import run_job

    results: dict[str, EvaluationResults] = {}
    # Below the root, which all hosts of a run share.
    options.checkpoint_root.mkdir(parents=True, exist_ok=True)
    with partial_folder(options.checkpoint_root / TEMPORARY) as temporary:
        folder = await _to_huggingface(checkpoint, temporary / "model", options)
        settings = options.settings.replaced("model", path=str(folder), lora=LoraConfig())
        await run_job(
            structs.replace(options, settings=settings),
            lambda summary: results.update(summary.evaluations),
        )
    names = options.settings.evaluation.sets
    return CheckpointEvaluation(
        run_id=options.run_id,
        checkpoint=str(checkpoint),
        sets=[_get_result(name, results.get(name)) for name in names],
    )


def _get_result(name: str, results: EvaluationResults | None) -> SetResult:
    if results is None:
        return SetResult(name=name, error="it was not evaluated, as it has no questions")
    return SetResult(
        name=name,
        metrics=results.last,
        answers=results.answers,
        seconds=results.seconds,
        error=results.reason,
    )


async def _to_huggingface(checkpoint: Path, target: Path, options: LaunchOptions) -> Path:
    """Return a verified Hugging Face folder of a checkpoint's weights: itself, or the target."""
    folder, form = find_source(checkpoint, target)
    verify = options.settings.checkpoints.verify
    warn = form != "huggingface"  # which need not be of this project, and then has no list
    await anyio.to_thread.run_sync(lambda: verify_checkpoint(folder, verify, warn=warn))
    if form == "huggingface":
        return folder
    # A process of its own: the launcher lives as long as the run, and needs no weights.
    command = (sys.executable, "-m", "trinity_events", "convert", str(checkpoint), str(target))
    done = await anyio.run_process([*command, "--verify", "off", "--json"], check=False)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").rpartition("error: ")[2].strip()
        raise EvaluationRefused("convert", str(checkpoint), reason=reason)
    return target


def evaluation_table(evaluation: CheckpointEvaluation) -> Table:
    """Return the results for people: a row for each metric, or the reason why there is none."""
    table = Table(box=None, pad_edge=False, title_justify="left", title_style="none")
    table.title = f"{evaluation.checkpoint} (run {evaluation.run_id})"
    for name in ("set", "metric", "value", "95% interval", "answers", "time"):
        table.add_column(name, justify="left" if name in ("set", "metric") else "right")
    for result in evaluation.sets:
        time = format_seconds(result.seconds)
        if result.error is not None:
            table.add_row(result.name, f"[bold bright_red]FAILED[/]: {escape(result.error)}")
        for metric, value in result.metrics.items():
            if not metric.endswith(_ENDS):
                interval = _format_interval(result.metrics, metric)
                row = (metric, f"{value:.4g}", interval, f"{result.answers:,}", time)
                table.add_row(result.name, *row)
    return table


def _format_interval(metrics: Mapping[str, float], metric: str) -> str:
    ends = [metrics.get(f"{metric}{end}") for end in _ENDS]
    return "" if None in ends else " to ".join(f"{end:.4g}" for end in ends)

"""Commands of this package, which the command line finds through entry points."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO, TypeVar

import anyio
import typer
from msgspec import Struct, structs

from trinity_events.checkpoints.verification import CheckpointDamaged, VerifyMode, with_older
from trinity_events.cli.options import (
    CheckpointRoot,
    Json,
    RedisUrl,
    checkpoint_root,
    console,
    log_to_stderr,
    parse_run_id,
    print_json,
)
from trinity_events.errors import TrinityError
from trinity_events.reducer import writable_root
from trinity_events.server import LOG_SERVER, WEIGHTS_SERVER, connect_sync
from trinity_events.system.counts import format_count
from trinity_events.system.error_text import format_cause
from trinity_events.views.terminal import print_err, print_out

from .config.cli_options import SHIPPED_FILE, overlaid, overlay_parameters
from .config.errors import CommandRefused
from .config.files import Reading, read_config, to_yaml, typed_setting
from .config.train_config import TrainConfig
from .config.trusted_settings import OwnConfig
from .conversion.best import find_best_folder
from .engines.convertible import find_source
from .launch.results import Outcome, RunFailure, results_alone
from .launch.resume_command import resume_command

if TYPE_CHECKING:
    from .launch.launcher import LaunchOptions
    from .launch.summary import DemoSummary

T = TypeVar("T")
R = TypeVar("R")

_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_BASE_MODULES = ("torch", "ray", "transformers", "reasoning_gym", "xxhash", "yaml")
_MEGATRON, _VERL = ("megatron", "mbridge"), ("verl", "tensordict")
_MODULES = {
    "fsdp": (),
    "megatron": _MEGATRON,
    "verl": _VERL,
    "verl-megatron": (*_VERL, *_MEGATRON),
}
"""Modules that an engine of the trainer needs."""


# veRL pins versions that this project does not share, so that it comes without its dependencies
# (decision 20).
_VERL_WAYS = {
    "verl": "pip install 'trinity-events[verl]', then verl with --no-deps",
    "verl-megatron": "pip install 'trinity-events[verl]', then verl with --no-deps and "
    "Transformer Engine for the CUDA of this machine",
}


class MissingExtra(TrinityError):
    """A part of the installation that the command needs is missing.

    Attributes:
        modules: Modules that are missing.
        way_out: Command that installs them.
    """

    modules: tuple[str, ...]
    way_out: str
    text = "this command needs {_modules}: {way_out}"

    @property
    def _modules(self) -> str:
        return ", ".join(self.modules)


class WeightsRefused(TrinityError):
    """The run ended well, but its explorers refused damaged weights.

    Attributes:
        run_id: The run.
        times: Number of the refusals.
    """

    run_id: str
    times: int
    text = (
        "explorers of run {run_id} refused weights {_times}, because they were not what was "
        "published: see trinity-events status {run_id}"
    )

    @property
    def _times(self) -> str:
        return format_count(self.times, "time")


Run = Annotated[str, typer.Option("--run", help="The run's id.", show_default=False)]
AdoptFolder = Annotated[
    bool,
    typer.Option(
        "--adopt-folder",
        help="Take over the run's folder if it belongs to another log, which is lost.",
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Begin at step 1 although the run has a checkpoint to resume from, which stays.",
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over",
        help="Start the run although processes of it live on this host, which then fail.",
    ),
]
FromStep = Annotated[
    int | None,
    typer.Option(
        "--from-step",
        min=1,
        help="Resume from the checkpoint of this step; by default from the newest one.",
        show_default=False,
    ),
]
HealthFile = Annotated[
    Path | None,
    typer.Option(
        "--health-file",
        help="File that is touched every 5 seconds while the process works, for health checks.",
        show_default=False,
    ),
]
WeightsRedisUrl = Annotated[
    str | None,
    typer.Option(
        "--weights-redis-url",
        envvar="TRINITY_WEIGHTS_REDIS_URL",
        help="Server of the weight chunks; by default an embedded one beside the embedded log "
        "server, else the log's server.",
        show_default=False,
    ),
]


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """Options of a run that are no part of its configuration."""

    fresh: Fresh = False
    from_step: FromStep = None
    take_over: TakeOver = False
    root: CheckpointRoot = None
    adopt_folder: AdoptFolder = False
    redis_url: RedisUrl = None
    weights_redis_url: WeightsRedisUrl = None
    health_file: HealthFile = None
    as_json: Json = False


class _RequestedRun(Struct, kw_only=True):
    """Run that a command asks for."""

    run_id: str
    alone: bool
    """True if the command starts the reducer and the explorers too."""
    ray_address: str | None = None


def _launch(run: _RequestedRun, place: _RunOptions, read: Callable[[], TrainConfig]) -> None:
    """Run the main job to its end and print its summary, also after a failure."""
    with results_alone() as results:
        printer = _ResultPrinter(results, run.run_id, as_json=place.as_json)
        try:
            _run_job(printer, run, place, read)
        except Exception as error:
            printer.failed(error)
            raise


class _ResultPrinter:
    """Printer of a run's single result: its summary, or the reason why there is none."""

    def __init__(self, results: TextIO, run_id: str, *, as_json: bool) -> None:
        self._results = results
        self._run_id = run_id
        self._as_json = as_json
        self._has_printed = False
        self.refusals = 0
        """Number of times that explorers refused weights."""

    def summary(self, summary: DemoSummary) -> None:
        """Print the summary, as JSON or as text."""
        from .launch.summary import summary_table

        self._has_printed = True
        self.refusals = summary.log.refusals
        with suppress(OSError):  # the terminal may be gone
            if self._as_json:
                print_json(summary, self._results)
            else:
                console(self._results).print(summary_table(summary))
            self._results.flush()

    def interrupted(self, error: BaseException) -> None:
        """Print as JSON that there is no summary, unless one was printed."""
        self.failed(error, "interrupted")

    def failed(self, error: BaseException, outcome: Outcome = "failed") -> None:
        """Print as JSON why there is no summary, unless one was printed."""
        # Standard output has one document, whatever ends the run.
        if self._as_json and not self._has_printed:
            failure = RunFailure(run_id=self._run_id, outcome=outcome, error=format_cause(error))
            self._has_printed = True
            with suppress(OSError):
                print_json(failure, self._results)
                self._results.flush()


def _run_job(
    printer: _ResultPrinter, run: _RequestedRun, place: _RunOptions, read: Callable[[], TrainConfig]
) -> None:
    options = _get_launch_options(run, place, read)
    from .launch.launcher import run_job

    command = resume_command(sys.argv[1:], run.run_id)
    try:
        _interruptible(
            partial(run_job, report=printer.summary),
            structs.replace(options, resume_command=command),
            printer.interrupted,
        )
    except CheckpointDamaged as error:
        # The error of another rank than the first names no older checkpoint.
        whole = with_older(error) if error.older is None else error
        raise whole.with_command(command) from None
    if printer.refusals:
        raise WeightsRefused(run.run_id, printer.refusals)


def _get_launch_options(
    run: _RequestedRun, place: _RunOptions, read: Callable[[], TrainConfig]
) -> LaunchOptions:
    """Return the options of a job, which refuse what this machine lacks."""
    # Wrong arguments are refused before the heavy imports.
    parse_run_id(run.run_id)
    if place.fresh and place.from_step is not None:
        raise CommandRefused("start")
    chosen = read()
    folder = writable_root(_resolve_root(place.root, chosen))
    _require(*_BASE_MODULES)
    _require_for_engine(chosen, alone=run.alone)
    chosen = _with_rank_count(chosen, run.ray_address)
    _reach(place.redis_url, place.weights_redis_url)
    log_to_stderr(verbose=False)
    from .launch.launcher import LaunchOptions

    return LaunchOptions(
        run_id=run.run_id,
        alone=run.alone,
        settings=chosen,
        redis_url=place.redis_url,
        weights_redis_url=place.weights_redis_url,
        checkpoint_root=folder,
        adopt_folder=place.adopt_folder,
        fresh=place.fresh,
        from_step=place.from_step,
        take_over=place.take_over,
        health_file=place.health_file,
        ray_address=run.ray_address,
    )


def _require_for_engine(config: TrainConfig, *, alone: bool) -> None:
    modules = _MODULES[config.trainer.engine]
    if config.trainer.needs_gpus and not os.environ.get("RAY_ADDRESS"):
        # First: where there is no GPU, nothing that is installed would help.
        from .worker_group.placement import Needs, local_gpus

        _require("ray")
        explorers = config.explorers if alone else 0
        Needs.for_run(config, explorers=explorers).with_gpus([local_gpus()])
        modules += ("transformer_engine",)
    if "verl" in modules:
        _require(*modules, way=_VERL_WAYS[config.trainer.engine])
    else:
        _require(*modules)


def _reach(redis_url: str | None, weights_redis_url: str | None) -> None:
    """Raise an error for given servers that do not respond; embedded ones are started later."""
    for url, setting in ((redis_url, LOG_SERVER), (weights_redis_url, WEIGHTS_SERVER)):
        if url:
            # Before anything is loaded, which takes seconds.
            with connect_sync(url, setting=setting):
                pass


def _with_options(*, settings: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the command's ``**options`` by those of its place, and of the shipped file."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        # typer reads a command's signature; `**options` stands for fields of two types.
        own = [
            parameter
            for parameter in signature(command, eval_str=True).parameters.values()
            if parameter.kind is not Parameter.VAR_KEYWORD
        ]
        overlay = overlay_parameters() if settings else []
        place = signature(_RunOptions, eval_str=True).parameters.values()
        command.__signature__ = Signature([*own, *overlay, *place])  # type: ignore[attr-defined]
        return command

    return decorate


@_with_options(settings=False)
def train(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CONFIG]",
            help="YAML or TOML file; by default that of demo, for a run that is named by --run.",
            show_default=False,
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option("--run", help="The run's id; by default the file's name.", show_default=False),
    ] = None,
    parts: Annotated[
        Literal["all", "trainer"],
        typer.Option(
            "--parts",
            help="Parts to run: all; or the trainer, with a reducer and explorers elsewhere.",
        ),
    ] = "all",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Setting laid over the file's, such as sync.interval=2; may be given repeatedly.",
            show_default=False,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Print the effective configuration, or every mistake; start nothing."
        ),
    ] = False,
    **options: Any,
) -> None:
    """Train as a configuration file says. With RAY_ADDRESS it joins that Ray cluster.

    With --parts trainer, a reducer and explorers need this trainer's servers and, by
    --checkpoint-root, its folder.

    Example: trinity-events train grpo.yaml --set steps=100

    Example: trinity-events train grpo.yaml --parts trainer --redis-url redis://localhost:6379
    """
    # The shipped file has no name of a run.
    if file is None and run is None:
        raise CommandRefused("run")
    place = _RunOptions(**options)
    file = file or SHIPPED_FILE
    reading = read_config(file, [typed_setting(setting) for setting in settings or ()])
    name = run or reading.config.name or file.stem
    if check:
        _show(reading, name, place, alone=parts == "all")
        return
    requested_run = _RequestedRun(
        run_id=name,
        alone=parts == "all",
        ray_address=os.environ.get("RAY_ADDRESS") or None,
    )
    _launch(requested_run, place, reading.checked)


def _show(reading: Reading, name: str, place: _RunOptions, *, alone: bool) -> None:
    parse_run_id(name)
    address = os.environ.get("RAY_ADDRESS") or None
    config = reading.config
    if not _find_absent(*_BASE_MODULES):  # Ray counts the GPUs
        config = _with_rank_count(config, address)
    mistakes = [*reading.problems, *_find_mistakes(config, place, address, alone=alone)]
    for mistake in mistakes:
        print_err(f"error: {mistake}")
    if mistakes:
        raise typer.Exit(1)
    if place.as_json:
        print_json(config)
    else:
        print_out(to_yaml(config).rstrip())
    if config.model.path is not None and address is None and not _find_absent("torch"):
        from .launch.run_check import estimate_memory

        for line in estimate_memory(config):  # of this host: others' devices are not seen
            print_err(line)


def _with_rank_count(config: TrainConfig, ray_address: str | None) -> TrainConfig:
    """Return the configuration with the number of ranks, and print it where GPUs decide it."""
    if config.trainer.ranks is not None:
        return config
    from .worker_group.placement import local_gpus, with_rank_count

    gpus = local_gpus() if ray_address is None else 0
    chosen = with_rank_count(config, gpus)
    if gpus:
        has = f"this host has {format_count(gpus, 'GPU')}"
        print_err(f"trainer.ranks is {chosen.trainer.ranks}, as it is not set and {has}")
    return chosen


def _find_mistakes(
    config: TrainConfig, place: _RunOptions, ray_address: str | None, *, alone: bool
) -> list[TrinityError]:
    """Return all mistakes that a run would end with before it trains, as far as each is found."""
    mistakes: list[TrinityError] = []

    def attempt(check: Callable[..., T], *args: Any) -> T | None:
        try:
            return check(*args)
        except TrinityError as error:
            mistakes.append(error)
            return None

    root = attempt(lambda: writable_root(_resolve_root(place.root, config)))
    # One at a time, so that both are reported.
    attempt(_reach, place.redis_url, None)
    attempt(_reach, None, place.weights_redis_url)
    attempt(partial(_require_for_engine, config, alone=alone))
    attempt(_require, *_BASE_MODULES)
    if _find_absent(*_BASE_MODULES):
        return mistakes  # the other checks import them
    from .launch.run_check import find_mistakes

    check = partial(
        find_mistakes, config, root, alone=alone, ray_address=ray_address, thorough=True
    )
    # By its text: the engine's GPUs are among those that all processes are checked for.
    return list({str(mistake): mistake for mistake in mistakes + anyio.run(check)}.values())


@_with_options(settings=True)
def demo(
    run: Annotated[
        str | None, typer.Option("--run", help="The run's id; by default it is made from the time.")
    ] = None,
    **options: Any,
) -> None:
    """Run the main job on this machine: train a small model with GRPO, each role a process.

    Example: trinity-events demo --steps 100 --explorers 2
    """
    run_id = f"demo-{datetime.now():%Y%m%d-%H%M%S}" if run is None else run
    reading, place = overlaid(options)
    requested_run = _RequestedRun(run_id=run_id, alone=True)
    _launch(requested_run, _RunOptions(**place), reading.checked)


@_with_options(settings=True)
def trainer(run: Run, **options: Any) -> None:
    """Run `train --parts trainer`, whose former name this is, with the options of demo."""
    print_err("warning: trainer is now train --parts trainer, where --steps 100 is --set steps=100")
    reading, place = overlaid(options)
    _launch(_RequestedRun(run_id=run, alone=False), _RunOptions(**place), reading.checked)


# As PEP 702 marks it: the list of commands leaves it out.
trainer.__deprecated__ = "train --parts trainer"  # type: ignore[attr-defined]


def explorer(
    run: Run,
    rank: Annotated[
        int | None,
        typer.Option(min=0, help="Rank of the explorer; by default a free one."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="The configuration that the run is trained with; needed if it names code, files, "
            "URLs or environment variables.",
            show_default=False,
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Setting laid over the file's, as of train; may be given repeatedly.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device that serves the policy: cpu, cuda or cuda:N; by default that of "
            "explorer.device, else the first GPU that it sees, else the CPU.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds to wait for the run to be opened at first. After its trainer failed, "
            "was interrupted or died, explorer.wait_for_run counts.",
        ),
    ] = 300,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    weights_redis_url: WeightsRedisUrl = None,
    health_file: HealthFile = None,
    as_json: Json = False,
) -> None:
    """Explore a run that a trainer opens elsewhere, until its last weights are applied.

    It outlives its trainer: when the run failed or was interrupted, it waits for the run to be
    opened again, for the seconds of the setting explorer.wait_for_run (300).

    Example: trinity-events explorer --run grpo-1 --config grpo.yaml
    """
    run_id = parse_run_id(run)
    if device is not None and not _DEVICE.fullmatch(device):
        raise CommandRefused("device", device)
    own = _read_own_config(file, settings or ())
    _require("torch", "transformers", "reasoning_gym", "xxhash")
    _reach(redis_url, weights_redis_url)
    log_to_stderr(verbose=False)
    from .launch.explore import ExplorerOptions, Unexplored, run_explorer

    options = ExplorerOptions(
        run_id=run_id,
        rank=rank,
        redis_url=redis_url,
        weights_redis_url=weights_redis_url,
        checkpoint_root=_resolve_root(root, own.config if own else TrainConfig()),
        wait=wait,
        health_file=health_file,
        device=device,
        own=own,
    )
    result = _interruptible(run_explorer, options)
    if as_json:
        print_json(None if isinstance(result, Unexplored) else result)
    elif isinstance(result, Unexplored):
        print_out(str(result))
    else:
        print_out(
            f"explorer {result.rank} of run {run_id}: "
            f"{format_count(result.groups, 'group')} of answers, "
            f"{format_count(result.applied, 'weight version')} applied"
        )


def _read_own_config(file: Path | None, settings: Sequence[str]) -> OwnConfig | None:
    """Return the configuration of an explorer's own side, read as `train` reads it."""
    if file is None:
        if settings:
            raise CommandRefused("file", settings[0])
        return None
    config = read_config(file, [typed_setting(text) for text in settings]).checked()
    return OwnConfig(file=file, config=config)


def _resolve_root(given: Path | None, config: TrainConfig) -> Path:
    """Return the checkpoint root: the given one, else that of the configuration."""
    configured = config.checkpoints.root
    return checkpoint_root(given or (Path(configured) if configured else None))


def convert(
    source: Annotated[
        Path, typer.Argument(help="Folder to convert; with --best the run.", show_default=False)
    ],
    target: Annotated[Path, typer.Argument(help="Folder to create.", show_default=False)],
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Convert the best checkpoint of a run, by its checkpoints.keep_best."
        ),
    ] = False,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write adapters alone, as a folder that PEFT loads.")
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the adapters' base; by default the one that they were trained on.",
            show_default=False,
        ),
    ] = None,
    verify: Annotated[
        VerifyMode,
        typer.Option(
            help="Comparison of a checkpoint with its manifest before it is read: sizes and "
            "digests, sizes alone, or none."
        ),
    ] = "full",
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint to a Hugging Face folder, or such a folder to a Megatron checkpoint.

    The content of the source decides the direction: FSDP's shard files, a Megatron checkpoint, or
    the folder of a step, global_step_N. No code of a checkpoint is run: a Megatron checkpoint whose
    pickles name anything but its data is refused. Adapters (LoRA) are merged into their base.

    With --best the source is a run. Its best checkpoint has to be of the step that was evaluated.

    Example: trinity-events convert ./Qwen2-0.5B ./qwen2-megatron
    """
    if best:
        source = anyio.run(find_best_folder, redis_url, str(source), checkpoint_root(root))
    form = find_source(source, target).form  # raises before the heavy imports
    _require("torch", "transformers", "safetensors")
    if form in {"huggingface", "megatron"}:
        _require(*_MEGATRON)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a conversion only copies: it needs no GPU
    # Apex and Transformer Engine may be missing; copying does not need them.
    warnings.filterwarnings("ignore", module=r"(megatron|mbridge)\.")
    from .conversion.convert import convert as run

    done = run(source, target, adapter=adapter, base=base, verify=verify)
    if as_json:
        print_json(done)
    else:
        print_out(
            f"{done.source} converted to {done.to} in {done.target}: "
            f"{done.tensors} tensors, {done.bytes} bytes"
        )


def evaluate(
    file: Annotated[
        Path,
        typer.Argument(metavar="CONFIG", help="Configuration of the training.", show_default=False),
    ],
    checkpoint: Annotated[
        str,
        typer.Option(
            "--checkpoint",
            metavar="CHECKPOINT",
            help="RUN/STEP, such as grpo-1/200; the folder of a step or of a Hugging Face model; "
            "with --best the run.",
            show_default=False,
        ),
    ],
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Evaluate the best checkpoint of the run, by its checkpoints.keep_best."
        ),
    ] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME",
            help="Evaluation set, by default all of them; or a setting as of train, NAME=VALUE. "
            "May be given repeatedly.",
            show_default=False,
        ),
    ] = None,
    root: CheckpointRoot = None,
    redis_url: RedisUrl = None,
    weights_redis_url: WeightsRedisUrl = None,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on the evaluation sets of a configuration, without training.

    It starts engines and explorers as `train` does, in a run of its own. The exit code is 1 if an
    evaluation failed.

    Example: trinity-events evaluate grpo.yaml --checkpoint grpo-1/200 --set held-out
    """
    from .launch.evaluate import (
        evaluate_checkpoint,
        evaluation_config,
        evaluation_table,
        find_checkpoint,
        new_run_id,
    )

    # A name of a set has no equals sign (evaluation/settings.py).
    names = [text for text in sets or () if "=" not in text]
    given = [typed_setting(text) for text in sets or () if "=" in text]
    config = read_config(file, given).checked()
    folders = _resolve_root(root, config)
    requested_run = _RequestedRun(
        run_id=new_run_id(config.name or file.stem),
        alone=True,
        ray_address=os.environ.get("RAY_ADDRESS") or None,
    )
    place = _RunOptions(root=folders, redis_url=redis_url, weights_redis_url=weights_redis_url)
    options = _get_launch_options(requested_run, place, lambda: evaluation_config(config, names))
    folder = (
        anyio.run(find_best_folder, redis_url, parse_run_id(checkpoint), folders)
        if best
        else find_checkpoint(checkpoint, folders)
    )
    with results_alone() as results:
        printer = _ResultPrinter(results, options.run_id, as_json=as_json)
        try:
            evaluation = _interruptible(
                partial(evaluate_checkpoint, folder), options, printer.interrupted
            )
        except Exception as error:
            printer.failed(error)
            raise
        if as_json:
            print_json(evaluation, results)
        else:
            console(results).print(evaluation_table(evaluation))
    if evaluation.has_failed:
        raise typer.Exit(1)


def _interruptible(
    run: Callable[[T], Awaitable[R]],
    options: T,
    interrupted: Callable[[BaseException], None] = lambda _: None,
) -> R:
    from .launch.lifecycle import Interrupted

    try:
        return anyio.run(run, options)
    except Interrupted as error:
        interrupted(error)
        print_err(str(error))
        # All is closed. Ray may abort in its own teardown, and so change the exit status.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_status)


def _require(*modules: str, way: str = "pip install 'trinity-events[workers]'") -> None:
    if missing := _find_absent(*modules):
        raise MissingExtra(missing, way)


def _find_absent(*modules: str) -> tuple[str, ...]:
    return tuple(name for name in modules if importlib.util.find_spec(name) is None)

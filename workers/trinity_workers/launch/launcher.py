"""Launcher of a run: starts its parts, watches them, and ends them."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import redis.asyncio
from msgspec import Struct, structs

from trinity_events.analysis.summary import RunSummary, Summarizer
from trinity_events.archive import Archive
from trinity_events.archive.export import whole_stream
from trinity_events.archive.ownership import own_folder
from trinity_events.checkpoints.layout import final_name
from trinity_events.client.training_run import publishing
from trinity_events.core import MonitorState
from trinity_events.core.resumptions import format_changes, format_skipped
from trinity_events.diagnostics.stacks import enable_stack_dumps
from trinity_events.diagnostics.waits import WaitReporter
from trinity_events.errors import DeadlineExceeded, TrinityError
from trinity_events.live_facts import read_live_facts
from trinity_events.liveness import list_live_explorers
from trinity_events.log import RedisEventLog, Resumption, Stream, open_run
from trinity_events.replay import current_state
from trinity_events.server import (
    WEIGHTS_SERVER,
    Deadline,
    connect,
    trinity_home,
    warn_of_eviction,
)
from trinity_events.server.connect import redacted
from trinity_events.system.counts import format_count
from trinity_events.system.error_text import first_error, format_cause
from trinity_events.system.shared_memory import sweep
from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    ContractError,
    SettingChange,
    StepRef,
    decode_envelope,
)

from ..config.files import write_copy
from ..config.resumable_settings import changes_rewards
from ..config.train_config import RunConfig, TrainConfig
from ..explorer.explorer import Explorer
from ..runtime.health import beating
from ..trainer import Trainer, TrainingResult
from ..worker_group.placement import Needs, format_devices, node_gpus, with_reserved_cpus
from .actors import Actors, format_ray_error
from .alarm_messages import notifying_of_alarms
from .cluster import Notify, Placement, check_one_host, reserve_places
from .explorer_restarts import explore_to_the_end
from .failed_saves import FailedSaves
from .lifecycle import closing, interruptible
from .live_processes import LAUNCHER, refuse_live_run
from .mirror import mirrored
from .model import make_model
from .next_command import next_command
from .notice import Notice, Save
from .notifier import Message, notify
from .processes import ReducerProcess
from .progress import ProgressView
from .results import Outcome
from .resume import (
    CheckpointSource,
    EarlierRun,
    check_steps_remain,
    earlier_run,
    find_usable_checkpoint,
    held_checkpoint,
)
from .resume_command import shell_command
from .resumed_settings import check_settings
from .roots import report_other_folder
from .run_check import check_run
from .server_phases import ServerPhases
from .shared_storage import check_shared_storage
from .summary import (
    TRANSPORTS,
    DemoSummary,
    Ending,
    FailedStep,
    LoggedEvaluations,
    LoggedMetrics,
    NewestCheckpoint,
    RunFacts,
    summarize,
)
from .tracking import tracked
from .transport import NONE, Chosen, chosen_transport

logger = logging.getLogger(__name__)

EXPLORER_GONE_AFTER = 5.0
"""Seconds without a lease after which an explorer is waited for no longer, by default; twice its
renewal."""
_CATCH_UP = 5.0
"""Seconds in which the end of a run is shown that is in its log."""
SUMMARY_DEADLINE = 5.0
"""Seconds that the summary of a run may take that did not finish: what ends us kills after ten."""


class LaunchOptions(Struct, frozen=True, kw_only=True):
    """Options of the commands that start a run."""

    run_id: str
    alone: bool
    """True if every part runs here; else only the trainer does."""
    settings: TrainConfig
    redis_url: str | None
    weights_redis_url: str | None
    checkpoint_root: Path
    adopt_folder: bool = False
    """True to take over the run's folder if it belongs to another log."""
    fresh: bool = False
    """True to begin at step 1 although the run has a checkpoint to resume from."""
    from_step: int | None = None
    """Step of the checkpoint to resume from; None takes the newest one."""
    take_over: bool = False
    """True to start the run although processes of it live on this host."""
    ray_address: str | None = None
    """Ray cluster to join; None starts one on this host."""
    health_file: Path | None = None
    """Touched while the trainer answers."""
    resume_command: str | None = None
    """Command that goes on with the run."""


Report = Callable[[DemoSummary], None]
"""Receiver of the summary of a run, also of one that failed."""


class _Job(Struct, kw_only=True):
    """Data of the summary of a run."""

    options: LaunchOptions
    config: RunConfig
    began: float
    reducer: ReducerProcess | None
    begins: dict[Stream, str]
    """Last entry of each stream before the epoch was opened."""
    warm_up_steps: int = 0
    training: TrainingResult | None = None


async def run_job(options: LaunchOptions, report: Report) -> None:
    """Run the main job from beginning to end, and report its summary, also when it fails.

    There is no summary of a run that was not opened, or whose log cannot be read.

    Raises:
        Interrupted: On SIGINT or SIGTERM, after all parts ended and the log was closed.
        TrinityError: If a part fails.
    """
    notice = Notice(options.settings.checkpoints.notice)
    async with interruptible(options.run_id, notice) as end:
        await _run(options, report, notice, end)


async def _run(
    options: LaunchOptions, report: Report, notice: Notice, end: Callable[[], None]
) -> None:
    began, alone = time.monotonic(), options.alone
    settings = options.settings
    await _check(options)
    chosen = _chosen_transport(options)
    if settings.sync.method == "memory" and chosen is not NONE:
        # Chosen once and logged: an explorer on another host would choose otherwise by itself.
        settings = settings.replaced("sync", transport=chosen.name)
    if options.ray_address is not None:
        settings = with_reserved_cpus(settings)
    folder = options.checkpoint_root / options.run_id
    view = ProgressView(options.run_id, settings.steps, folder)
    async with AsyncExitStack() as exits:
        servers = ServerPhases()
        redis_url, weights_url = exits.enter_context(
            servers.serving(options.redis_url, options.weights_redis_url)
        )
        client = await exits.enter_async_context(connect(redis_url))
        await warn_of_eviction(client, redis_url)
        # A chunk server that does not answer is found out now, not at the first upload.
        async with connect(weights_url, setting=WEIGHTS_SERVER) as chunks:
            if weights_url != redis_url:
                await warn_of_eviction(chunks, weights_url, setting=WEIGHTS_SERVER)
        log = RedisEventLog(client, options.run_id)
        claim = partial(own_folder, log, folder, redacted(redis_url), adopt=options.adopt_folder)
        await claim()  # before the run is opened: it would be opened in vain
        earlier = await earlier_run(
            log, folder, settings.steps, fresh=options.fresh, from_step=options.from_step
        )
        changed = await check_settings(
            options.run_id, settings, earlier, None if earlier is None else earlier.checkpoint
        )
        reducer = None
        if alone:
            reducer = ReducerProcess(
                redis_url,
                options.run_id,
                options.checkpoint_root,
                keep_checkpoints=settings.checkpoints.keep,
                adopt_folder=options.adopt_folder,
            )
            await exits.enter_async_context(reducer.running())
        placed_options = structs.replace(options, settings=settings)
        resumption = await _find_resumption(placed_options, redis_url, earlier, changed, view)
        checkpoint = None if resumption is None else resumption.checkpoint
        begins = {stream: await log.last_id(stream) for stream in Stream}
        config = settings.placed(
            run_id=options.run_id,
            epoch=await open_run(
                client,
                options.run_id,
                resume_from=resumption,
                config=settings.to_text(),
                save_strategy=settings.checkpoints.strategy,
                transport=chosen.to_field(),
                command=options.resume_command,
                above=0 if earlier is None else earlier.reached.epoch,
                deadline=settings.sync.timeout,
            ),
            redis_url=redis_url,
            weights_url=weights_url,
            checkpoint_folder=folder,
            resumed_step=None if checkpoint is None else checkpoint.step,
            discards_answers=resumption is not None and changes_rewards(resumption.changed),
        )
        job = _Job(options=options, config=config, began=began, reducer=reducer, begins=begins)
        view.epoch = config.epoch
        if earlier is not None:
            view.print_line(earlier.notice(options.run_id, config.epoch, checkpoint))
        view.print_line(f"run {options.run_id}: {_travel(chosen)}: {chosen.reason}")
        async with (
            # Left from the last to the first: the log is closed, then trackers and mirror take
            # their last entries from it, and the summary reads it as a whole.
            _summarized(job, log, report, notice),
            mirrored(config),
            tracked(config),
            notifying_of_alarms(config),
            closing(client, config, options.resume_command, notice),
        ):
            await claim()  # a log that is new has its first entry by now
            write_copy(folder, settings)
            view.print_line(f"run {options.run_id}: {_ray(options)}, and {_first_work(config)}")
            here = config.explorers if alone else 0
            exits.callback(sweep)  # Ray may end its actors before they clear up
            async with _show_run(
                view,
                log,
                partial(report_other_folder, client, config, view.print_line),
                partial(view.show_causes, partial(read_live_facts, client, options.run_id)),
                partial(servers.report, log, config),
            ):
                with publishing(
                    options.run_id,
                    config.epoch,
                    "launcher",
                    redis_url=redis_url,
                    deadline=config.sync.timeout,
                ) as publisher:
                    with publisher.waits.waiting("its Ray cluster, with room for all processes"):
                        room = await exits.enter_async_context(
                            _room(config, here, options.ray_address, view)
                        )
                    await _work(
                        *(job, here, room, publisher.waits, view.print_line),
                        partial(notice.saving, end=end),
                    )
                if not alone:
                    await _last_weights_taken(client, config, view)


async def _check(options: LaunchOptions) -> None:
    """Raise the reasons for which the run cannot be started; nothing of it has been yet."""
    if not options.take_over:
        await refuse_live_run(options.run_id)
    enable_stack_dumps(options.run_id, LAUNCHER)
    await check_run(
        options.settings,
        options.checkpoint_root,
        alone=options.alone,
        ray_address=options.ray_address,
    )


async def _find_resumption(
    options: LaunchOptions,
    redis_url: str,
    earlier: EarlierRun | None,
    changed: tuple[SettingChange, ...],
    view: ProgressView,
) -> Resumption | None:
    """Return the checkpoint to resume from, checked before an epoch is opened; None without one.

    Args:
        options: The run.
        redis_url: Server of its log.
        earlier: Its earlier training.
        changed: Settings that differ from the epoch that wrote the newest checkpoint.
        view: Receives warnings.

    Raises:
        CannotResume: if the checkpoint is not usable, or has all steps.
        SettingsNotResumable: if an older checkpoint is taken, and its settings differ.
    """
    if earlier is None or earlier.checkpoint is None:
        return None
    run_id, saves = options.run_id, options.settings.checkpoints
    source = CheckpointSource(
        run_id=run_id,
        root=options.checkpoint_root,
        redis_url=redis_url,
        mirror=saves.mirror,
        verify=saves.verify,
        has_reducer=options.alone,
    )
    # The step that the user named is not exchanged for another one.
    on_damage = saves.on_damage if options.from_step is None else "stop"
    usable = await find_usable_checkpoint(source, earlier, on_damage=on_damage)
    check_steps_remain(run_id, usable.checkpoint.step, options.settings.steps)
    for skipped in usable.skipped:
        sentence = f"run {run_id}: {format_skipped(skipped)} (checkpoints.on_damage: previous)"
        logger.warning("%s", sentence)
        view.print_line(f"warning: {sentence}")
    if earlier.logged.missing is not None:
        view.print_line(
            f"warning: run {run_id} resumes from a checkpoint that is not compared with its log: "
            f"{earlier.logged.missing}"
        )
    if usable.checkpoint != earlier.checkpoint:
        changed = await check_settings(run_id, options.settings, earlier, usable.checkpoint)
    if changed:
        view.print_line(f"run {run_id}: {format_changes(list(changed))}")
    return Resumption(checkpoint=usable.checkpoint, changed=changed, skipped=usable.skipped)


def _travel(chosen: Chosen) -> str:
    return "no weights travel" if chosen is NONE else f"weights travel by {TRANSPORTS[chosen.name]}"


def _chosen_transport(options: LaunchOptions) -> Chosen:
    """Return the transport of the run's weights; a colocated run has none."""
    if options.settings.trainer.colocated:
        return NONE
    return chosen_transport(
        options.settings.sync,
        explorers_here=options.alone,
        one_host=options.ray_address is None,
        reads_ray=options.settings.explorers_pull,
    )


@asynccontextmanager
async def _summarized(
    job: _Job, log: RedisEventLog, report: Report, notice: Notice
) -> AsyncIterator[None]:
    """Report the summary of the run however the block ends."""
    try:
        yield
    except BaseException as error:
        interrupted = isinstance(error, anyio.get_cancelled_exc_class())
        outcome: Outcome = "interrupted" if interrupted else "failed"
        # Shielded: an interrupted run has a summary too.
        with anyio.CancelScope(shield=True), anyio.move_on_after(SUMMARY_DEADLINE):
            # What happened is worth more than that it cannot be summarised.
            try:
                summary = await _summary(job, log, outcome, None if interrupted else error)
            except Exception as unread:
                logger.warning("run %s has no summary: %s", log.run_id, unread)
            else:
                report(summary)
        with anyio.CancelScope(shield=True):
            await _notify_end(job, outcome, error, notice)
        raise
    try:
        summary = await _summary(job, log, "finished", None)
    except TrinityError as unread:  # the run has finished all the same
        logger.warning("run %s has no summary: %s", log.run_id, unread)
    else:
        report(summary)
    await _notify_end(job, "finished", None, notice)


async def _notify_end(
    job: _Job, outcome: Outcome, error: BaseException | None, notice: Notice
) -> None:
    """Send a message about the end of the run, if its configuration asks for one."""
    run_id, command = job.options.run_id, None
    if outcome == "finished":
        sentence = f"run {run_id} finished its {format_count(job.config.steps, 'step')}"
    elif outcome == "interrupted":
        reason = "" if notice.sentence is None else f": {notice.sentence}"
        sentence = f"run {run_id} was interrupted{reason}"
        command = next_command(job.options.resume_command, None)
    else:
        assert error is not None
        sentence = f"run {run_id} failed: {format_cause(error)}"
        command = next_command(job.options.resume_command, first_error(error))
    message = Message(run=run_id, event=outcome, sentence=sentence, command=command)
    await notify(job.config.notify, message)


async def _summary(
    job: _Job, log: RedisEventLog, outcome: Outcome, error: BaseException | None
) -> DemoSummary:
    """Return the summary of the run, from its parts' results and its log."""
    config, options = job.config, job.options
    summed, metrics, evaluations, failed = await _summarize_log(log, config, job.begins)
    facts = RunFacts(
        seconds=time.monotonic() - job.began,
        warm_up_steps=job.warm_up_steps,
        reducer_restarts=job.reducer.restarts if job.reducer else 0,
        transport=config.transport,
        sharded=config.publishes_shards,
        redis_url=redacted(config.redis_url),
        checkpoint_folder=str(config.checkpoint_folder),
        replay_command=_replay_command(options),
    )
    return summarize(
        facts,
        ending=Ending(
            outcome=outcome,
            error=None if error is None else format_cause(error),
            failed_steps=[
                FailedStep(step=step, kinds=sorted(kinds)) for step, kinds in failed.steps.items()
            ],
            newest_checkpoint=newest_checkpoint(await current_state(log), config),
            next_command=(
                None
                if outcome == "finished"
                else next_command(
                    options.resume_command, None if error is None else first_error(error)
                )
            ),
        ),
        metrics=job.training or metrics,
        evaluations=evaluations,
        log=summed,
    )


def newest_checkpoint(state: MonitorState, config: RunConfig) -> NewestCheckpoint | None:
    """Return the newest checkpoint that is ready, if there is one."""
    pointer = state.ready.get("checkpoint")
    if pointer is None:
        return None
    folder = (
        str(config.checkpoint_folder / final_name(pointer.at.step)) if pointer.has_folder else None
    )
    return NewestCheckpoint(step=pointer.at.step, folder=folder)


@asynccontextmanager
async def _room(
    config: RunConfig, explorers: int, address: str | None, view: ProgressView
) -> AsyncIterator[Placement]:
    """Reserve room for the run; a cluster that is joined is checked for what the run shares."""
    needs = Needs.for_run(config, explorers=explorers)
    deadline = config.sync.timeout
    async with reserve_places(needs, address, deadline=deadline, notify=view.print_line) as room:
        if room.joined:
            view.print_line(f"run {config.run_id}: {room.format_places()}")
            if config.transport in ("shm", "cuda-ipc"):
                check_one_host(room, config.transport)
            await check_shared_storage(room, config)
        for line in format_devices(room.needs, node_gpus()):
            view.print_line(f"run {config.run_id}: {line}")
        yield room


async def _work(
    job: _Job,
    explorers_here: int,
    room: Placement,
    waits: WaitReporter,
    notify: Notify,
    notice: Callable[[Save], AbstractAsyncContextManager[None]],
) -> None:
    """Make the model, train and explore; keep the results in the job."""
    config = job.config
    # Actors first: their processes start, and import torch, while the model is made.
    trainer = Trainer.get_actor(config, room.trainer)
    explorers = [_start_explorer(config, room, rank) for rank in range(explorers_here)]
    actors = Actors(
        {"trainer-0": trainer}
        | {f"explorer-{rank}": explorer for rank, explorer in enumerate(explorers)},
        waits,
    )

    async def save(seconds: float) -> str:
        sentence = str(await actors.call("trainer-0", "save_on_notice", seconds))
        notify(f"run {config.run_id} is about to end: {sentence}")
        return sentence

    async with beating(job.options.health_file):
        with waits.waiting("the built-in model to be made and warmed up"):
            job.warm_up_steps = await _make_model(config)
        # Before the processes are used: an end that is not watched is told by Ray's words alone.
        await actors.watch()
    async with beating(job.options.health_file, actors.trainer_answers):
        await _prepare(job, actors, trainer, explorers)
        async with anyio.create_task_group() as exploring:
            for rank in range(explorers_here):
                start = partial(_start_explorer, config, room, rank)
                exploring.start_soon(explore_to_the_end, actors, f"explorer-{rank}", start, notify)
            async with notice(save), actors.reporting_on_cancellation("trainer-0"):
                job.training = await actors.call("trainer-0", "train")
        await actors.call("trainer-0", "shutdown")


def _start_explorer(config: RunConfig, room: Placement, rank: int, restart: int = 0) -> Any:
    return Explorer.get_actor(config, rank, room.explorer(rank), restart=restart)


async def _prepare(job: _Job, actors: Actors, trainer: Any, explorers: Sequence[Any]) -> None:
    async with held_checkpoint(job.config, job.options.checkpoint_root):
        await actors.receive(
            "its processes to be prepared",
            [trainer.prepare.remote(), *(explorer.prepare.remote() for explorer in explorers)],
        )


def _ray(options: LaunchOptions) -> str:
    where = options.ray_address
    return "starting Ray" if where is None else f"joining the Ray cluster at {where}"


def _first_work(config: RunConfig) -> str:
    if config.resumed_step is not None:
        return "loading its checkpoint"
    return "warming the model up" if config.model.path is None else "loading the model"


async def _make_model(config: RunConfig) -> int:
    """Make the model in this process; return the steps of its warm-up.

    A model that the user gave, or that an earlier epoch made, is left as it is.
    """
    made = config.resumed_step is not None and (config.model_folder / "config.json").is_file()
    if made or config.model.path is not None:
        return 0
    make = partial(make_model, config.model_folder, config.seed, config.task.name)
    try:
        # Abandoned if the run is ended meanwhile: no process loads what it makes.
        steps, _ = await anyio.to_thread.run_sync(make, abandon_on_cancel=True)
    except OSError as error:
        raise format_ray_error(error) from None
    return steps


async def _last_weights_taken(
    client: redis.asyncio.Redis,
    config: RunConfig,
    view: ProgressView,
    *,
    gone_after: float = EXPLORER_GONE_AFTER,
) -> None:
    """Wait until every explorer serves the last version, or has stopped or died.

    The wait ends with a line after the run's ``sync.timeout``, which begins again when a server
    that was away is back. A killed explorer reports no end: its lease expires.
    """
    log = RedisEventLog(client, config.run_id)
    wait = Deadline(config.sync.timeout, "the explorers were not seen to take the last weights")
    unheld: dict[str, float] = {}
    faults = 0
    try:
        while True:
            state = await wait.retry(partial(current_state, log))
            lease_holders = await wait.retry(partial(list_live_explorers, client, state))
            if wait.faults > faults:  # explorers may have been cut off as this process was
                faults, unheld = wait.faults, {}
                wait.renew()
            now = anyio.current_time()
            late = _without_last(state, config)
            unheld = {name: unheld.get(name, now) for name in late if name not in lease_holders}
            alive = [name for name in late if now - unheld.get(name, now) < gone_after]
            if not alive:
                return
            wait.missing = f"{', '.join(alive)} did not take the last weights"
            after = {Stream.EVENTS: state.position}
            # The lapse of a lease is no entry of the log, which would end the read.
            pause = gone_after / 5 if unheld else 5
            # One entry is enough to wake up: the state is read as a whole.
            read = partial(log.read_blocking, after, seconds=min(pause, wait.left()), limit=1)
            await wait.retry(read)
    except DeadlineExceeded as error:
        view.print_line(str(error))


def _without_last(state: MonitorState, config: RunConfig) -> list[str]:
    """Return the explorers that run and do not serve the last version."""
    last = StepRef(config.epoch, config.steps)
    return [
        name
        for name in (f"explorer-{rank}" for rank in range(config.explorers))
        if (explorer := state.explorers.get(name)) is not None
        and explorer.runs
        and (explorer.version is None or explorer.version < last)
    ]


@asynccontextmanager
async def _show_run(
    view: ProgressView, log: RedisEventLog, *beside: Callable[[], Coroutine[Any, Any, None]]
) -> AsyncIterator[None]:
    """Show the run during the block, which goes on if that fails, and run tasks beside it."""

    async def follow() -> None:
        try:
            await view.follow(log)
        # Any error: what shows the run must not end it.
        except Exception as error:
            logger.warning("run %s is not shown any more: %s", log.run_id, error)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(follow)
            for task in beside:
                tasks.start_soon(task)
            yield
            tasks.cancel_scope.cancel()
    finally:
        # The cause of a failure may be in the log, and its line not printed yet.
        with anyio.CancelScope(shield=True), anyio.move_on_after(_CATCH_UP):
            try:
                await view.catch_up(log)
            except Exception as error:
                logger.warning("the end of run %s is not shown: %s", log.run_id, error)


async def _summarize_log(
    log: RedisEventLog, config: RunConfig, begins: Mapping[Stream, str]
) -> tuple[RunSummary, LoggedMetrics, LoggedEvaluations, FailedSaves]:
    """Summarize the log of the epoch; entries that were trimmed come from the archive.

    The archive of earlier epochs need not be on this host.
    """
    summarizer, metrics, failed = Summarizer(log.run_id), LoggedMetrics(), FailedSaves()
    evaluations = LoggedEvaluations()
    archive = Archive(config.checkpoint_folder, config.run_id)
    for stream in Stream:
        begun = False
        async for entry in whole_stream(log, stream, archive, begins[stream]):
            with suppress(ContractError):  # a dead letter, which the reducer has reported
                envelope = decode_envelope(entry.payload)
                # Entries of earlier epochs may lie between the position and the opening.
                begun = begun or envelope.epoch >= config.epoch
                if begun:
                    summarizer.add(envelope, len(entry.payload))
                    metrics.add(envelope)
                    evaluations.add(envelope)
                    if isinstance(envelope.event, ANNOUNCEMENT_TYPES):
                        failed.heard(envelope.event, [envelope.event])
    return summarizer.summary(), metrics, evaluations, failed


def _replay_command(options: LaunchOptions) -> str:
    """Return the command that replays the run, for any shell."""
    words = ["trinity-events", "replay", options.run_id]
    if options.redis_url:
        words += ["--redis-url", redacted(options.redis_url)]
    if options.checkpoint_root != (trinity_home() / "checkpoints").resolve():
        # Where a long run's older entries are.
        words += ["--checkpoint-root", str(options.checkpoint_root)]
    return shell_command(words)

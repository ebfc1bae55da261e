"""Training loop: asks for rollouts, trains on them, publishes weights, writes checkpoints."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from msgspec import Struct, structs

from trinity_events import publishing
from trinity_events.checkpoints.layout import TRAINER_STATE
from trinity_events.coordinator import this_process
from trinity_events.core.evaluations import evaluated_through
from trinity_events.core.ledger import Ledger
from trinity_events.core.reward_errors import REWARD_ERRORS
from trinity_events.diagnostics.phases import PhaseClock, PhaseReports
from trinity_events.diagnostics.stacks import enable_stack_dumps
from trinity_events.errors import DeadlineExceeded, PublishError
from trinity_events.log import (
    STATUS_LEASE,
    AsyncPublisher,
    RedisEventLog,
    new_producer,
    renewing_trainer_lease,
)
from trinity_events.replay import current_state
from trinity_events.rollouts import (
    AnswerGroup,
    AnswerLimits,
    DispatchSettings,
    RolloutDispatcher,
    find_answer_bytes,
)
from trinity_events.rollouts.payloads import PayloadReader, PayloadsUnusable, load_groups
from trinity_events.server import Deadline, connect
from trinity_events.subscriptions import subscribe
from trinity_events.system.error_text import ungrouped
from trinity_schemas import (
    ExperienceHeader,
    ExperienceReference,
    LedgerRestored,
    Process,
    ResendRequested,
    StepFailed,
    StepReady,
    StepRef,
    SyncRequested,
    TrainerStatusChanged,
)

from ..config.answer_limits import read_answer_limits
from ..config.sync_schedule import publishes_on_demand, requests_once_ready
from ..config.train_config import RunConfig
from ..record.discarded import DiscardedRollouts
from ..record.recorder import DROPPED_SAMPLES
from ..rollouts.held_out_sets import held_out_sets
from ..rollouts.payloads import open_payload_reader, open_payloads
from ..rollouts.user_task import task_of
from ..runtime.background_tasks import background_tasks
from ..runtime.garbage import exempt_loaded_objects
from ..storage.load_verification import verify_checkpoint
from .backend import (
    TrainEngineWrapper,
    TrainingBatch,
    WeightSyncAddress,
    group_by_prompt,
)
from .backends import get_trainer_wrapper
from .rollouts.evaluator import Evaluator
from .rollouts.explorer_requests import ExplorerRequests
from .rollouts.supply import RolloutSupply
from .run_manifest import write_run_manifest
from .sample_metrics import count_fates, summarize_samples
from .state import TrainerState, read_trainer_state
from .step_alarms import StepAlarms

if TYPE_CHECKING:
    from .rollouts.colocated import ColocatedAnswers

logger = logging.getLogger(__name__)

_LOADING_ATTEMPTS = 8
"""Attempts to load the tokens of a step, before the run fails: a medium that one of its hosts does
not reach would have prompts generated again without end."""
_STOPPED_WITHIN = 3.0
"""Seconds in which a trainer that failed publishes its end: supervisors kill after ten."""


class TrainingResult(Struct, frozen=True, kw_only=True):
    """Result of training. Lists have one entry a step."""

    steps: int
    rewards: list[float]
    scores: list[float]
    staleness: list[float]
    seconds: float
    dropped_groups: int


class Trainer:
    """Trainer of one epoch of a run.

    Args:
        config: The run.
        engine: Training engine; by default the one that the configuration names.
        lease: Seconds without a heartbeat after which the trainer is silent.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: TrainEngineWrapper | None = None,
        *,
        lease: float = STATUS_LEASE,
    ) -> None:
        self._clock = PhaseClock()
        self._phases: PhaseReports | None = None
        enable_stack_dumps(config.run_id, "trainer-0")
        self.config = config
        self.engine = engine or get_trainer_wrapper(config)
        run = config.run_id, config.redis_url
        self._resends = ExplorerRequests(*run, ResendRequested, self.sync_weight)
        self._demands = ExplorerRequests(*run, SyncRequested, self.synchronize)
        self._lease = lease
        self._has_stopped = False
        self._publishing = anyio.Lock()
        self._exits = AsyncExitStack()
        self._metrics: dict[str, float] = {}
        self._payload_reader: PayloadReader | None = None
        self._noticed = anyio.Event()
        """Set by the notice that the job is about to end."""
        self._saved_on_notice = anyio.Event()

    @classmethod
    def get_actor(cls, config: RunConfig, place: Mapping[str, Any] | None = None) -> Any:
        """Return a Ray actor of it, with the options of its place."""
        import ray

        options = {"name": f"trainer-{config.run_id}", **(place or {})}
        return ray.remote(cls).options(**options).remote(config)

    async def prepare(self) -> None:
        """Start the workers, publish the first weights, and ask for the first rollouts.

        Raises:
            CheckpointDamaged: The checkpoint that the run resumes from is not as it was saved.
            UnusableTrainerState: The checkpoint that the run resumes from lacks the ledger.
        """
        config = self.config
        client = await self._exits.enter_async_context(connect(config.redis_url))
        log = RedisEventLog(client, config.run_id)
        deadline = config.sync.timeout
        self._publisher = AsyncPublisher(
            log, config.epoch, new_producer("trainer"), deadline=deadline
        )
        wait = Deadline(deadline, f"the log of run {config.run_id} was not read")
        # Read before anything is published: requests of explorers are followed from here on.
        self._began_at = await wait.retry(log.last_id)
        ledger = await self._restored_ledger()
        with ungrouped():
            async with anyio.create_task_group() as starting:
                # The ranks import torch and load weights while this process reads the task's rows.
                starting.start_soon(self.engine.prepare)
                task = await anyio.to_thread.run_sync(task_of, config)
        if config.resumed_step is not None:
            await self.engine.load_checkpoint(config.resumed_folder, config.resumed_step)
        # In the background: a report of a wait never delays the loop that waits.
        reports = publishing(
            config.run_id,
            config.epoch,
            "trainer",
            redis_url=config.redis_url,
            deadline=deadline,
        )
        publisher = self._exits.enter_context(reports)
        self._waits, self._flush = publisher.waits, publisher.flush
        # Without cores: it waits for ranks and explorers, which compute.
        self._phases = PhaseReports(self._clock, publisher.publish, cores=0)
        self._exits.enter_context(self._phases)
        await anyio.to_thread.run_sync(write_run_manifest, config, task.fingerprint)
        compared = config.algorithm.filters
        limits = await anyio.to_thread.run_sync(
            partial(read_answer_limits, config, reward_part=compared.needed_part)
        )
        sets = await anyio.to_thread.run_sync(held_out_sets, config, task)
        self._discarded = self._exits.enter_context(
            closing(DiscardedRollouts(config, self._waits, publisher.log))
        )
        self._dispatcher = RolloutDispatcher(
            client,
            self._publisher,
            dispatch_settings(config, task.fingerprint, limits),
            ledger,
            deadline=config.sync.timeout,
            waits=self._waits,
            payloads=await self._exits.enter_async_context(open_payloads(config)),
            discarded=self._discarded,
        )
        if config.rollouts.max_prompt_tokens is not None:
            # The tokenizer takes the seconds in which transformers and torch are imported.
            from ..rollouts.prompt_filter import load_filter

            prompts = await anyio.to_thread.run_sync(
                load_filter, config, config.model_folder, task, sets
            )
            self._dispatcher.find_overlong = prompts.find_overlong_in_thread
        self._supply = RolloutSupply(config, self._dispatcher, self._waits)
        self._dropped = Counter(ledger.dropped) if ledger is not None else Counter[str]()
        """Dropped prompts by reason, until the last step."""
        self._alarms = StepAlarms(config, self._publisher.publish, self._clock)
        wait.renew()
        # A resumed run does not evaluate again what an earlier epoch has evaluated.
        state = await wait.retry(partial(current_state, log))
        through = evaluated_through(state) if sets else {}
        self._evaluator = Evaluator(
            config,
            client,
            self._publisher,
            sets,
            through,
            waits=self._waits,
            limits=structs.replace(limits, reward_part=None),
            training=self._dispatcher,
        )
        self._answers: ColocatedAnswers | None = None
        if config.trainer.colocated:
            from .rollouts.colocated import ColocatedAnswers  # as an explorer, it needs torch

            self._answers = ColocatedAnswers(config, self.engine, client, publisher, self._clock)
            await self._answers.prepare(task, sets, self._exits)
        await self._dispatcher.start()
        lease = renewing_trainer_lease(publisher, self._get_running_step, lease=self._lease)
        await anyio.to_thread.run_sync(self._exits.enter_context, lease)
        await anyio.to_thread.run_sync(publisher.flush)
        self._clock.end_start()
        await self.synchronize()
        # Last: what is loaded by now stays for the whole run.
        exempt_loaded_objects()

    async def _restored_ledger(self) -> Ledger | None:
        """Publish and return the ledger of the checkpoint that the run resumes from."""
        config = self.config
        if config.resumed_step is None:
            return None
        folder, mode = config.resumed_folder, config.checkpoints.verify
        # The ranks verify the files that they load.
        verify = partial(verify_checkpoint, folder, mode, only=[TRAINER_STATE])
        await anyio.to_thread.run_sync(verify)
        state = await anyio.to_thread.run_sync(read_trainer_state, folder, config.resumed_step)
        restored = LedgerRestored(ledger=state.ledger, digest=state.ledger.digest)
        await self._publisher.publish(restored)
        return Ledger.restored(state.ledger)

    async def report_last_phases(self) -> None:
        """Publish the seconds until now, before a signal ends the process."""
        if self._phases is not None:
            await anyio.to_thread.run_sync(self._phases.close)
            await anyio.to_thread.run_sync(self._flush)

    async def train(self) -> TrainingResult:
        """Train to the last step; publish that the trainer stopped, also after an error."""
        tasks: list[Callable[[], Any]] = [self._evaluator.run, self._dispatcher.watch_claims]
        if self.config.rollouts.keep_answers == "checkpoint":
            tasks.append(self._free_covered_answers)
        if self.config.sync.method == "checkpoint":
            tasks.append(self._raise_failed_saves)
        if self._is_fully_async:
            tasks.append(self._supply.request_when_ready)
        if self._answers is not None:
            tasks.append(self._answers.run)
        tasks.append(self._alarms.watch_pace)
        if self.config.alarms.transfer_rate is not None:
            tasks.append(self._alarms.watch_transfers)
        async with AsyncExitStack() as exits:
            if self._sends:
                await exits.enter_async_context(self._resends.listening(self._began_at))
            if self._is_explorer_driven:
                await exits.enter_async_context(self._demands.listening(self._began_at))
            await exits.enter_async_context(background_tasks(*tasks))
            return await self._train()
        # For type checkers: a context manager might suppress an error.
        raise AssertionError("unreachable")

    async def _train(self) -> TrainingResult:
        began = time.monotonic()
        step_metrics: list[dict[str, float]] = []
        try:
            while self.train_step_num < self.config.steps:
                step_result = await self._take_step()
                if step_result is None:
                    await self._save_and_wait_for_end()
                    break
                groups, self._metrics = step_result
                step_metrics.append(self._metrics)
                self._metrics |= self._count_fates(groups)
                # Before a checkpoint of this step, whose ledger has these fates.
                await self._report_trained(groups)
                await self._alarms.add_step(self.train_step_num, self._metrics)
                # The version first: with sync by files, a checkpoint of the same step rests on its
                # folder.
                if await self.need_sync():
                    await self.synchronize()
                if self.need_save():
                    as_hf = self.config.is_hf_save_step(self.train_step_num)
                    await self.save_checkpoint(save_as_hf=as_hf)
            with self._clock.phase("saving"):
                await self.engine.wait_for_save()
            with self._clock.phase("waiting-evaluation"):
                await self._evaluator.drain()
            await self._dispatcher.release()
        # A trainer that is cancelled has stopped, too.
        except BaseException:
            # The error is worth more than its report, for which a server that is away is not
            # waited for again.
            with suppress(PublishError), anyio.move_on_after(_STOPPED_WITHIN):
                await self._publish_stopped()
            raise
        await self._publish_stopped()
        return TrainingResult(
            steps=self.train_step_num,
            rewards=[metrics["reward"] for metrics in step_metrics],
            scores=[metrics["score"] for metrics in step_metrics],
            staleness=[metrics["staleness"] for metrics in step_metrics],
            seconds=time.monotonic() - began,
            dropped_groups=sum(self._dispatcher.ledger.dropped.values()),
        )

    async def _take_step(self) -> tuple[list[AnswerGroup], dict[str, float]] | None:
        """Take the next step; return its groups and metrics, or None if the job is about to end.

        A step whose ranks cannot load the tokens of their groups is not begun. Its groups are
        returned, and those without tokens are generated again.

        Raises:
            PayloadsUnusable: Tokens could not be loaded in each of several attempts.
        """
        for attempt in range(1, _LOADING_ATTEMPTS + 1):
            with self._clock.phase("waiting-rollouts"):
                groups = await self._take_unless_noticed(self.train_step_num + 1)
            if groups is None:
                return None
            try:
                with self._clock.phase("training"):
                    return groups, await self.train_step([group.experiences for group in groups])
            except PayloadsUnusable as error:
                if attempt == _LOADING_ATTEMPTS:
                    raise
                logger.warning("step %d: %s", self.train_step_num + 1, error)
                await self._dispatcher.return_groups(groups, error.faults)
        raise AssertionError("unreachable")

    async def _take_unless_noticed(self, step: int) -> list[AnswerGroup] | None:
        """Return the groups of a step; None once the job is about to end."""
        groups: list[AnswerGroup] | None = None

        async def take() -> None:
            nonlocal groups
            groups = await self._take(step)
            tasks.cancel_scope.cancel()

        if not self._noticed.is_set():
            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(take)
                    await self._noticed.wait()
                    # A call that is cut off is completed by the next one (invariant 3 of the
                    # dispatcher), which is that of a resumed epoch here.
                    tasks.cancel_scope.cancel()
        return None if self._noticed.is_set() else groups

    async def _save_and_wait_for_end(self) -> None:
        """Save a checkpoint of the last step, if it has none, and wait for the trainer's end."""
        if self.config.checkpoints.interval and not self._is_saved:
            await self.save_checkpoint(block_until_saved=True)
        await self.engine.wait_for_save()
        self._saved_on_notice.set()
        await anyio.sleep_forever()

    @property
    def _is_saved(self) -> bool:
        """True if the last step has a checkpoint already, or is that of which the run resumed."""
        step = self.train_step_num
        return self.need_save() or step == (self.config.resumed_step or 0)

    async def save_on_notice(self, seconds: float) -> str:
        """Save a checkpoint within a notice; return what was saved and what was lost, in words.

        A step that is being computed is completed first. A wait for rollouts is cut off.
        """
        before, began = self.train_step_num, time.monotonic()
        self._noticed.set()
        with anyio.move_on_after(seconds):
            await self._saved_on_notice.wait()
        passed, step = time.monotonic() - began, self.train_step_num
        if not self.config.checkpoints.interval:
            return f"checkpoints.interval is 0, so that all {step} steps are lost"
        if step == (self.config.resumed_step or 0):
            return f"no step was taken after step {step}, so that none is lost"
        if self._saved_on_notice.is_set():
            return (
                f"the checkpoint of step {step} was complete within {passed:.1f} s; no step is "
                f"lost, and a resume asks again for {self._dispatcher.open_count} open prompts"
            )
        cause = "its save was not complete" if step > before else "the step was not taken"
        return (
            f"{cause} within {seconds:g} s: the steps after the newest checkpoint are lost, and a "
            "resume trains them again"
        )

    def _get_running_step(self) -> int | None:
        """Return the number of steps taken; None once the end is published."""
        return None if self._has_stopped else self.train_step_num

    async def _publish_stopped(self) -> None:
        # First, or the next heartbeat would report a running trainer after its end.
        self._has_stopped = True
        stopped = TrainerStatusChanged(status="stopped", step=self.train_step_num)
        await self._publisher.publish(stopped)

    async def synchronize(self) -> None:
        """Ask for the rollouts that the present weights may serve, and publish these.

        Explorers then wait for weights, and not for requests. Under ``fully_async`` they wait for
        neither: the requests come once the version is ready. Ranks that answer themselves have the
        weights.
        """
        if not self._is_fully_async:
            await self._supply.request(self.train_step_num)
        if self._answers is None:
            await self.sync_weight(self._metrics or None)
        else:
            self._add_published()
            await self._evaluator.publishing(self.train_step_num)

    async def _take(self, step: int) -> list[AnswerGroup]:
        """Return the groups of a step; explorers that ask for weights get them meanwhile.

        Raises:
            DeadlineExceeded: Groups are missing, or the weights to ask for them with.
        """
        async with AsyncExitStack() as exits:
            if self._sends:
                await exits.enter_async_context(self._resends.allowed())
            if self._answers is not None:
                await self._evaluator.drain()  # the ranks have no version but this one
            if self._is_fully_async:
                await self._supply.until_ready(step)
            if self._is_explorer_driven and self._demands.published < self.train_step_num:
                if self._demands.published < self.config.version_wanted(step):
                    await self._publish_on_demand()
                else:
                    await exits.enter_async_context(self._demands.allowed())
            return await self._supply.take(step)
        raise AssertionError("unreachable")

    async def _publish_on_demand(self) -> None:
        """Publish once an explorer asks for it, as the next step can use no earlier version.

        Explorers ask soon: they have answered all that was asked of them.
        """
        run, timeout = self.config.run_id, self.config.sync.timeout
        with (
            self._waits.waiting("an explorer that asks for weights", deadline=timeout),
            anyio.move_on_after(timeout),
        ):
            await self._demands.wait()
        if not self._demands.is_open:
            raise DeadlineExceeded(
                f"no explorer of run {run} asked for weights after those of step "
                f"{self._demands.published}",
                timeout,
                f"see trinity-events status {run}",
            )
        await self.synchronize()

    async def train_step(self, exps: TrainingBatch) -> dict[str, float]:
        """Take one step on samples; return the metrics of engine and experiences.

        Samples are a flat list, or the groups of their prompts. The staleness of a sample is the
        number of steps taken, less the step of its oldest token's version.

        Raises:
            UnusableBatch: There are no samples, or there are samples next to groups.
        """
        # Read before the step is taken, which counts it up.
        step = self.train_step_num
        groups = group_by_prompt(exps)
        batch = groups if self.engine.loads_payloads else await self._load(groups)
        metrics = await self.engine.train_step(batch)
        samples = [sample for group in batch for sample in group]
        scores = [sample.reward_parts.get("score", sample.reward) for sample in samples]
        if self.config.rewards.on_error == "score":
            metrics |= {REWARD_ERRORS: float(sum(bool(sample.reward_error) for sample in samples))}
        return metrics | {
            "reward": sum(sample.reward for sample in samples) / len(samples),
            "score": sum(scores) / len(samples),
            **summarize_samples(samples),
            "staleness": sum(step - sample.oldest_version.step for sample in samples)
            / len(samples),
            "mixed_versions": sum(map(has_mixed_versions, samples)) / len(samples),
            **average_by_question_set(groups),
        }

    async def _load(
        self, groups: Sequence[Sequence[ExperienceHeader]]
    ) -> Sequence[Sequence[ExperienceHeader]]:
        """Return groups with their tokens, for an engine that loads none."""
        if not any(isinstance(group[0], ExperienceReference) for group in groups):
            return groups
        if self._payload_reader is None:
            self._payload_reader = open_payload_reader(self.config)
        load = partial(load_groups, self._payload_reader, groups, sampling=self.config.sampling)
        return await anyio.to_thread.run_sync(load)

    def _count_fates(self, groups: Sequence[AnswerGroup]) -> dict[str, float]:
        """Return the shares of the last step's prompts that taught nothing."""
        before, self._dropped = self._dropped, Counter(self._dispatcher.ledger.dropped)
        shares = count_fates([group.experiences for group in groups], self._dropped - before)
        if lost := self._discarded.dropped_samples:
            # Ranks count the samples of steps that the record lacks.
            shares[DROPPED_SAMPLES] = self._metrics.get(DROPPED_SAMPLES, 0.0) + lost
        return shares

    async def _report_trained(self, groups: Sequence[AnswerGroup]) -> None:
        """Publish the fates of the groups that the last step was taken on."""
        before = self.train_step_num - 1
        staleness = Counter(
            max(before - sample.oldest_version.step, 0)
            for group in groups
            for sample in group.experiences
        )
        await self._dispatcher.trained(
            self.train_step_num, groups, metrics=self._metrics, staleness=dict(staleness)
        )

    async def _free_covered_answers(self) -> None:
        events = subscribe(self.config.run_id, StepReady, redis_url=self.config.redis_url)
        async with events:
            async for delivered in events:
                event = delivered.event
                if event.kind == "checkpoint" and event.epoch == self.config.epoch:
                    await self._dispatcher.checkpointed(event.step)

    async def _raise_failed_saves(self) -> None:
        """Raise what failed in the save of a version, for which explorers wait in vain."""
        async with subscribe(
            self.config.run_id, StepFailed, redis_url=self.config.redis_url
        ) as events:
            async for delivered in events:
                event = delivered.event
                if event.kind == "state_dict" and event.epoch == self.config.epoch:
                    await self.engine.wait_for_save()  # one that only was slow ends well

    async def get_weight_sync_info(self) -> WeightSyncAddress | None:
        """Return address, port and tensors for the collective group; None without a group."""
        return await self.engine.get_weight_sync_info()

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, world_size: int, group_name: str, timeout: int
    ) -> None:
        """Form the collective group of trainer and explorers: see TrainEngineWrapper."""
        await self.engine.setup_weight_sync_group(
            master_address, master_port, world_size, group_name, timeout
        )

    async def teardown_weight_sync_group(self) -> None:
        """End the group; it can be set up again."""
        await self.engine.teardown_weight_sync_group()

    async def need_sync(self) -> bool:
        """Return True if the weights of the present step are to be published."""
        if self._is_explorer_driven and self.train_step_num < self.config.steps:
            return self._demands.is_open
        return self.config.is_sync_step(self.train_step_num)

    def need_save(self) -> bool:
        """Return True if a checkpoint of the present step is to be written."""
        return self.config.is_save_step(self.train_step_num)

    async def sync_weight(self, metrics: dict[str, float] | None = None) -> None:
        """Publish the present weights as a version."""
        # The loop publishes, and so do answers to explorers' requests: one version at a time.
        async with self._publishing:
            with self._clock.phase("publishing"):
                await self._send_weights(metrics)

    async def _send_weights(self, metrics: dict[str, float] | None) -> None:
        self._add_published()
        await self._evaluator.publishing(self.train_step_num)
        # Before the weights leave: a request that comes from now on may have missed them.
        for requests in (self._resends, self._demands):
            requests.publishing(self.train_step_num)
        if self._sends:
            await self.engine.sync_weight_nccl(metrics)
        elif self.config.sync.method == "checkpoint":
            await self.engine.save_state_dict(metrics)
        else:
            await self.engine.upload_state_dict(metrics)

    def _add_published(self) -> None:
        """Let answers have tokens of the present weights, which explorers are about to get."""
        self._dispatcher.add_published(StepRef(self.config.epoch, self.train_step_num))

    async def save_checkpoint(
        self, block_until_saved: bool = False, save_as_hf: bool = False
    ) -> None:
        """Write a checkpoint of the present step, in the background unless told to wait."""
        step = self.train_step_num
        state = TrainerState(
            step=step, ledger=self._dispatcher.ledger_at(step), metrics={**self._metrics}
        )
        with self._clock.phase("saving"):
            await self.engine.save_checkpoint(block_until_saved, save_as_hf, state)

    async def shutdown(self) -> None:
        """Stop the workers, and close connections."""
        await self.engine.shutdown()
        await self._exits.aclose()

    @property
    def _sends(self) -> bool:
        """True if versions are sent to a collective group, which keeps none."""
        return self.config.transport == "collective"

    @property
    def _is_explorer_driven(self) -> bool:
        return publishes_on_demand(self.config.sync)

    @property
    def _is_fully_async(self) -> bool:
        return requests_once_ready(self.config.sync)

    @property
    def train_step_num(self) -> int:
        """Number of steps taken."""
        return self.engine.train_step_num

    def process(self) -> Process:
        """Return the process that it runs in."""
        return this_process()

    async def is_alive(self) -> bool:
        """Return True, as proof that it answers."""
        return True


def average_by_question_set(groups: Sequence[Sequence[ExperienceHeader]]) -> dict[str, float]:
    """Return mean reward and number of prompts of each set, as ``rollout/SET/NAME``.

    Questions of no set are left out.
    """
    metrics: dict[str, float] = {}
    for name in sorted({group[0].question_set for group in groups} - {""}):
        of_set = [group for group in groups if group[0].question_set == name]
        rewards = [sample.reward for group in of_set for sample in group]
        metrics[f"rollout/{name}/reward"] = sum(rewards) / len(rewards)
        metrics[f"rollout/{name}/prompts"] = float(len(of_set))
    return metrics


def has_mixed_versions(sample: ExperienceHeader) -> bool:
    """Return True if several weight versions sampled it."""
    return len(sample.version_tokens) > 1


def dispatch_settings(
    config: RunConfig, fingerprint: str, limits: AnswerLimits
) -> DispatchSettings:
    """Return the settings of a run's dispatcher.

    Args:
        config: The run.
        fingerprint: Fingerprint of its task set.
        limits: Limits of its answers.
    """
    rollouts = config.rollouts
    sampled = rollouts.max_new_tokens * rollouts.max_turns
    positions = limits.max_positions or 0
    # An environment writes what the model's positions leave; a single turn has none.
    others = max(positions - sampled, 0) if rollouts.max_turns > 1 else 0
    answer_bytes = find_answer_bytes(
        rollouts.samples_per_prompt,
        sampled_tokens=sampled,
        prompt_tokens=rollouts.max_prompt_tokens or positions,
        other_tokens=others,
    )
    return DispatchSettings(
        run_id=config.run_id,
        epoch=config.epoch,
        samples=rollouts.samples_per_prompt,
        sampling=config.sampling,
        limits=limits,
        prompts_per_step=rollouts.prompts_per_step,
        fingerprint=fingerprint,
        order=rollouts.order,
        window=config.window,
        max_bytes=rollouts.max_bytes,
        answer_bytes=answer_bytes,
        claim_lease=rollouts.claim_lease,
        request_deadline=rollouts.request_deadline,
        max_attempts=rollouts.max_attempts,
        on_reward_error=config.rewards.on_error,
        max_consecutive_failures=rollouts.max_consecutive_failures,
        outage_timeout=rollouts.outage_timeout,
        when_stale=config.sync.when_stale,
        keep_answers=rollouts.keep_answers,
        discards_earlier=config.discards_answers,
    )

"""Exploration loop: claims rollout requests, answers them, and installs new weights.

1. A claim is answered, failed or given back, or it lapses, and then belongs to another explorer.
2. Claims are renewed while they wait for the engine, and until they are answered.
3. Training and evaluation take turns at the engine; neither installs in the turn of the other.
4. An explorer that is out of service claims nothing, as others can answer what it would hold.
5. It ends once the last version is installed. RunEnded, EngineEnded or a deadline end it before.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import anyio
import anyio.to_thread
import redis.asyncio

from trinity_events.coordinator import this_process
from trinity_events.diagnostics.phases import PhaseClock, PhaseReports
from trinity_events.diagnostics.stacks import enable_stack_dumps
from trinity_events.errors import (
    CorruptVersion,
    DeadlineExceeded,
    StaleEpoch,
    TrinityError,
    VersionUnavailable,
)
from trinity_events.log import STATUS_LEASE
from trinity_events.rollouts import ABORTED, Claim, RolloutClient, evaluation_keys
from trinity_events.rollouts.payloads import PayloadStore
from trinity_events.server import connect
from trinity_events.system.error_text import first_error, ungrouped
from trinity_schemas import (
    Experience,
    Process,
    RolloutRequest,
    RunKeys,
    SyncRequested,
)

from ..config.sync_schedule import publishes_on_demand
from ..config.train_config import RunConfig
from ..rollout_engines import EngineEnded, EngineOptions, NotServing, RolloutEngine, load_engine
from ..rollout_engines.base import GenerationAborted
from ..rollouts.episodes import OtherTaskSet, send_answers
from ..rollouts.held_out_sets import held_out_sets
from ..rollouts.payloads import open_payloads
from ..rollouts.run_episodes import open_episodes
from ..rollouts.user_task import task_of
from ..runtime.background_tasks import background_tasks
from ..runtime.garbage import exempt_loaded_objects
from ..worker_group.placement import threads
from .demand import VersionDemand
from .evaluation import EngineTurns, EvaluationAnswers
from .installer import VersionInstaller, VersionPrefetcher
from .result import ExplorationResult
from .run_follower import RunFollower, followed_run
from .versions import RunEnded, VersionFollower

logger = logging.getLogger(__name__)

ROLE = "explorer"
MOST_ABORTS = 3
"""Attempts of a request that a version may abort; it waits for the answer of a later one."""
_GIVE_BACK = 2.0
"""Seconds in which an explorer that ends gives its claims back; a supervisor kills after ten."""
_CLAIM_BLOCK = 1.0
"""Seconds that one claim waits for requests, after which newer weights are looked for."""


class Explorer:
    """Explorer of one run: it claims what it has room for, and holds no fixed share of a step.

    Args:
        config: The run.
        rank: Number of the explorer, which no other explorer of the run has; its name in events is
            ``explorer-RANK``.
        device: Device on which it serves the policy, such as ``cuda:1``; None takes the one of the
            settings, else the first GPU that it sees, else the CPU.
        gpus: GPUs that are reserved for it; None takes those of the settings, else one.
        lease: Seconds without a heartbeat after which the explorer is lost.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        device: str | None = None,
        gpus: float | None = None,
        *,
        lease: float = STATUS_LEASE,
    ) -> None:
        self._clock = PhaseClock()
        enable_stack_dumps(config.run_id, f"{ROLE}-{rank}")
        # Here, since it imports torch, which a launcher does not need.
        from trinity_events import Synchronizer

        self.config = config
        self.rank = rank
        self._requested_device = device or config.explorer.device
        self._lease = lease
        self._gpus = gpus or config.explorer.gpus or 1.0
        self._groups = 0
        self._is_away = False
        """True while something fails that answers depend on, so that few requests come."""
        self._turns = EngineTurns()
        self._exits = AsyncExitStack()
        self._demand: VersionDemand | None = None
        if publishes_on_demand(config.sync):
            self._demand = VersionDemand(config.sync.interval, config.rollouts.prompts_per_step)
        self._synchronizer = Synchronizer(
            config.run_id,
            0,
            redis_url=config.redis_url,
            weights_url=config.weights_url,
            role=ROLE,
            rank=rank,
            checkpoint_folder=config.checkpoint_folder,
            deadline=config.sync.timeout,
        )

    @classmethod
    def get_actor(
        cls, config: RunConfig, rank: int, place: Mapping[str, Any], *, restart: int = 0
    ) -> Any:
        """Return a Ray actor of it, with the options of its place.

        A restart has a name of its own: Ray frees the name of an actor that died some time later.
        """
        import ray

        name = f"explorer-{rank}-{config.run_id}" + (f"-{restart}" if restart else "")
        # Without GPUs of its own it may see those of others: Ray hides none from it on this host.
        gpus = place.get("num_gpus")
        device = None if gpus else "cpu"
        return ray.remote(cls).options(name=name, **place).remote(config, rank, device, gpus)

    @property
    def name(self) -> str:
        """Name of the explorer in events."""
        return f"{ROLE}-{self.rank}"

    @property
    def groups(self) -> int:
        """Return the number of groups that it has answered."""
        return self._groups

    def process(self) -> Process:
        """Return the process that it runs in."""
        return this_process()

    def join(self) -> None:
        """Join the collective group, before versions are sent to it that are not kept.

        Raises:
            DeviceMissing: if this process does not see the GPU that it is to serve on.
        """
        from .device import choose_device

        # Not where the object is made: Ray passes no error on from there.
        self._device = choose_device(self._requested_device)
        if self.config.transport == "collective":
            self._synchronizer.join_weight_sync_group()

    def leave(self) -> None:
        """Leave the group, and close connections; :meth:`explore` does so at its end."""
        self._synchronizer.close()

    async def prepare(self) -> None:
        """Load the engine, whose weights the first version replaces, and the task."""
        import torch

        config = self.config
        self.join()
        torch.set_num_threads(threads(config.explorer.cpus, config.explorer.count + 1))
        # `generate` warns of every length that it is not told; the engine tells its own.
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self._engine = self._make_engine()
        self._exits.push_async_callback(self._engine.close)
        self._task = await anyio.to_thread.run_sync(task_of, config)
        self._held_out = await anyio.to_thread.run_sync(held_out_sets, config, self._task)
        self._episodes = await open_episodes(
            config,
            self._engine,
            self._task,
            name=self.name,
            waits=self._synchronizer.waits,
            publish=self._synchronizer.report,
            exits=self._exits,
            clock=self._clock,
        )
        self._prefetcher = VersionPrefetcher(config, self._synchronizer)
        exempt_loaded_objects()

    def _make_engine(self) -> RolloutEngine:
        config = self.config
        options = EngineOptions(
            model_folder=config.model_folder,
            dtype=config.served_dtype,
            device=self._device,
            gpus=self._gpus,
            synchronizer=self._synchronizer,
            deterministic=config.explorer.deterministic,
            pause_mode=config.rollouts.pause_mode,
            proof=config.proof,
            sampling_settings=config.sampling_settings,
            lora=config.model.lora,
            seed=config.seed,
            options=config.explorer.engine_options,
        )
        return load_engine(config.explorer.engine, options)

    async def explore(self, run: RunFollower | None = None) -> ExplorationResult:
        """Answer requests until the weights of the last step are installed.

        Args:
            run: Follower of the run that this process has; None makes one for the call.

        Raises:
            RunEnded: The run was closed before that, or opened anew.
            DeadlineExceeded: The trainer neither asked nor published for ``sync.timeout``.
        """
        try:
            async with AsyncExitStack() as exits:
                if run is None:
                    run = await exits.enter_async_context(
                        followed_run(self.config.run_id, self.config.redis_url)
                    )
                result = await self._run(run)
            # The closing of the publisher is short: it follows errors too.
            await anyio.to_thread.run_sync(self._synchronizer.flush)
            return result
        except BaseExceptionGroup as errors:
            # Ray passes one error on, and no group.
            error = first_error(errors)
            raise error from error.__cause__
        finally:
            # Shielded: the judge's and the environment's processes have sessions of their own, and
            # would outlive an explorer that is cancelled here.
            with anyio.CancelScope(shield=True):
                await self._exits.aclose()
            self.leave()

    async def _run(self, run: RunFollower) -> ExplorationResult:
        config = self.config
        versions = VersionFollower(run, config.epoch, method=config.sync.method)
        installer = VersionInstaller(
            config, self._engine, self._synchronizer, versions, self._prefetcher, self._clock
        )
        async with (
            connect(config.redis_url) as client,
            open_payloads(config) as payloads,
            versions.listening(),
            # Digests of a prefetch are of use in the process that pulls.
            self._prefetcher.listening(run) if config.explorers_pull else nullcontext(),
        ):
            requests = self._create_client(client, payloads=payloads)
            evaluations = self._create_client(client, evaluation_keys(config.run_id))
            answers = EvaluationAnswers(
                self._held_out,
                self._episodes,
                evaluations,
                installer,
                self._turns,
                at_once=config.groups_per_claim,
            )
            async with self._renewing_lease():
                try:
                    return await self._explore(requests, versions, installer, answers)
                except StaleEpoch as error:
                    # One error for both ways in which a newer epoch shows: a refused write, an
                    # announcement.
                    raise RunEnded(error.run_id, error.epoch, error.newest) from None
                finally:
                    with anyio.CancelScope(shield=True):
                        # Shielded: the dispatcher removes a member that did not leave only later.
                        await requests.leave()
                        if self._held_out:
                            await evaluations.leave()
        # For mypy, which cannot know that no context manager above swallows an error.
        raise AssertionError("unreachable")

    def _create_client(
        self,
        client: redis.asyncio.Redis,
        keys: RunKeys | None = None,
        payloads: PayloadStore | None = None,
    ) -> RolloutClient:
        config = self.config
        return RolloutClient(
            client,
            config.run_id,
            config.epoch,
            self.name,
            lease=config.rollouts.claim_lease,
            deadline=config.sync.timeout,
            keys=keys,
            payloads=payloads,
        )

    @asynccontextmanager
    async def _renewing_lease(self) -> AsyncIterator[None]:
        """Report that the explorer runs, and renew its lease, for the block."""
        lease = self._synchronizer.renewing_explorer_lease(lease=self._lease)
        await anyio.to_thread.run_sync(lease.__enter__)
        self._clock.end_start()
        phases = PhaseReports(
            self._clock,
            self._synchronizer.report,
            gpus=self._gpus if self._device.startswith("cuda") else 0.0,
            cores=threads(self.config.explorer.cpus, self.config.explorer.count + 1),
        )
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                # Before the lease ends: an explorer that reports lives.
                await anyio.to_thread.run_sync(phases.close)
                await anyio.to_thread.run_sync(lease.__exit__, None, None, None)

    async def _publish(self, event: SyncRequested | None) -> None:
        if event is not None:
            await anyio.to_thread.run_sync(self._synchronizer.report, event)

    async def _explore(
        self,
        requests: RolloutClient,
        versions: VersionFollower,
        installer: VersionInstaller,
        answers: EvaluationAnswers,
    ) -> ExplorationResult:
        config = self.config
        first = await versions.wait(0, deadline=config.sync.timeout)
        await installer.refresh(first.step)
        async with background_tasks(*[answers.run] * bool(self._held_out)):
            while claims := await self._next_claims(requests, versions, installer):
                await self._check_task_set(requests, claims)
                # Renewed while the turn is waited for: an evaluation may generate for longer than a
                # lease.
                async with requests.renewing(claims) as held_claims, self._turns.training():
                    try:
                        await self._answer_with_weights(requests, held_claims, installer)
                    except anyio.get_cancelled_exc_class():
                        # A lapsed claim would count as a failed attempt, and be waited for.
                        with anyio.CancelScope(shield=True), anyio.move_on_after(_GIVE_BACK):
                            for claim in held_claims:
                                await requests.give_back(claim, ABORTED)
                        raise
                    except EngineEnded as error:
                        # Others need not wait until the claims of an explorer that ends lapse.
                        for claim in held_claims:
                            await requests.fail(claim, str(error))
                        raise
            async with self._turns.training():
                await installer.refresh(config.steps)
            if self._held_out:
                await self._evaluate_to_the_end(versions, answers)
        return ExplorationResult(
            rank=self.rank,
            applied=installer.installed,
            groups=self._groups,
            discarded=requests.discarded,
            evaluated=answers.answered,
        )

    async def _evaluate_to_the_end(
        self, versions: VersionFollower, answers: EvaluationAnswers
    ) -> None:
        """Answer evaluations until the trainer stops, or asks for none within their timeout."""
        silence, before = self.config.evaluation.timeout + self.config.sync.timeout, -1
        while answers.answered > before:
            before = answers.answered
            with anyio.move_on_after(silence):
                return await versions.until_trainer_stops()

    async def _next_claims(
        self, requests: RolloutClient, versions: VersionFollower, installer: VersionInstaller
    ) -> list[Claim]:
        """Return requests to answer; none once the last version is ready.

        Newer weights are installed while nothing is asked for.
        """
        config = self.config
        claims: list[Claim] = []

        async def claim() -> None:
            nonlocal claims
            if self._engine.serves is None:
                # Out of service, it would hold requests that other explorers can answer.
                async with self._turns.training():
                    await installer.refresh(0)
            idle_since = anyio.current_time()
            while not (claims := await self._claim(requests)):
                if not installer.is_current:
                    async with self._turns.training():
                        await installer.refresh(0)
                    idle_since = anyio.current_time()
                elif requests.is_excluded:
                    # It stays a member of the collective group, which a version needs whole.
                    idle_since = anyio.current_time()
                elif self._demand is not None and self._engine.serves is not None:
                    await self._publish(self._demand.idle(self._engine.serves))
                timeout = config.sync.timeout
                if self._is_away:  # the trainer probes it with a request now and then
                    timeout += config.rollouts.outage_timeout
                if anyio.current_time() - idle_since > timeout:
                    raise DeadlineExceeded(
                        f"{self.name}: no rollouts of run {config.run_id} were asked for",
                        timeout,
                        f"see trinity-events status {config.run_id}",
                    )
            tasks.cancel_scope.cancel()

        with ungrouped():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(claim)
                # Without a deadline: claim() gives up a trainer that asks for nothing. A claim that
                # is cut off here lapses; the trainer has taken its last step by then.
                await versions.wait(config.steps, deadline=None)
                tasks.cancel_scope.cancel()
        return claims

    async def _claim(self, requests: RolloutClient) -> list[Claim]:
        with self._clock.phase("waiting-requests"):
            return await requests.claim(self.config.groups_per_claim, seconds=_CLAIM_BLOCK)

    async def _check_task_set(self, requests: RolloutClient, claims: Sequence[Claim]) -> None:
        """Give requests of another task set back, and raise RequestRefused."""
        foreign_claim = next(
            (claim for claim in claims if claim.request.fingerprint != self._task.fingerprint), None
        )
        if foreign_claim is None:
            return
        for claim in claims:
            await requests.fail(claim, "the explorer holds another task set")
        raise OtherTaskSet(
            f"run {self.config.run_id}",
            foreign_claim.request.fingerprint,
            self._task.fingerprint,
            self.name,
        )

    async def _answer_with_weights(
        self, requests: RolloutClient, held_claims: Sequence[Claim], installer: VersionInstaller
    ) -> None:
        """Install the weights that held requests name, and answer these."""
        exact: dict[int, list[Claim]] = {}
        for claim in held_claims:
            if claim.request.exact:
                exact.setdefault(claim.request.oldest.step, []).append(claim)
        # Oldest first: install_exactly() gives requests back that are older than what is served.
        for step in sorted(exact):
            await self._answer_exactly(requests, held_claims, exact[step], installer)
        # After the exact ones: refresh() installs the newest version, which supersedes theirs.
        others = [claim for claim in held_claims if not claim.request.exact]
        if others:
            await installer.refresh(max(claim.request.oldest.step for claim in others))
            # What lapsed while weights were waited for belongs to another explorer by now.
            await self._answer(
                requests, [claim for claim in others if claim in held_claims], installer
            )

    async def _answer_exactly(
        self,
        requests: RolloutClient,
        held_claims: Sequence[Claim],
        claims: Sequence[Claim],
        installer: VersionInstaller,
    ) -> None:
        """Answer claims with the one version that they name, or give them back."""
        try:
            installed = await installer.install_exactly(claims[0].request.oldest.step)
        except (VersionUnavailable, CorruptVersion) as error:
            logger.warning("%s: %s", self.name, error)
            for claim in claims:
                await requests.fail(claim, str(error))
            return
        if installed:
            await self._answer(
                requests, [claim for claim in claims if claim in held_claims], installer
            )
            return
        for claim in claims:
            # Superseded, not failed: it says nothing about the prompt or the explorer (decision
            # 21).
            await requests.give_back(claim)

    async def _answer(
        self, requests: RolloutClient, claims: Sequence[Claim], installer: VersionInstaller
    ) -> None:
        """Answer requests; give those back that failed."""
        rollout_requests = [claim.request for claim in claims]
        goes_on = self._takes_versions_amid(rollout_requests)
        answers: Sequence[list[Experience] | TrinityError]
        try:
            # No task if no version may come: a list times False is empty.
            async with background_tasks(*[installer.install_each] * goes_on):
                answers = await self._episodes.answer_all(rollout_requests)
        except NotServing:  # a version was installed amid the answers, and is not whole
            answers = [GenerationAborted(request.ordinal) for request in rollout_requests]
        sent = await send_answers(requests, claims, answers, self._clock)
        self._groups += sent.counted
        self._is_away = sent.is_away
        if self._demand is not None and self._engine.serves is not None:
            await self._publish(self._demand.record_answers(self._engine.serves, sent.ordinals))

    def _takes_versions_amid(self, requests: Sequence[RolloutRequest]) -> bool:
        """Return True if a version may come amid the answers to requests."""
        mode = self.config.rollouts.pause_mode
        if mode == "wait" or any(request.exact for request in requests):
            return False
        # An answer that takes longer than a step would else be begun again for ever.
        return mode != "abort" or all(request.attempt <= MOST_ABORTS for request in requests)

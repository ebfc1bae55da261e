"""The bound on staleness holds at the moment of training, whatever keeps to it."""

import itertools
import random

import pytest

pytest.importorskip("torch")

from tests.support.rollout_parts import settings
from trinity_events.core.ledger import Ledger
from trinity_events.rollouts.dispatch_state import (
    AnswerGroup,
    DispatchState,
    ReissueCandidate,
    Versions,
)
from trinity_schemas import Experience, StepRef, Turn
from trinity_workers.config.sections.rollouts import RolloutsConfig
from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.config.train_config import TrainConfig

STEPS, PROMPTS = 24, 3


def answered(ordinal, version):
    turns = [
        Turn(role="prompt", tokens=[1]),
        Turn(role="policy", tokens=[7], logprobs=[-0.5], versions=[(StepRef(1, version), 1)]),
    ]
    sample = Experience(
        run_id="run",
        epoch=1,
        ordinal=ordinal,
        attempt=1,
        sample=0,
        samples=1,
        explorer="a",
        turns=turns,
        reward=0.0,
    )
    return AnswerGroup(ordinal=ordinal, attempt=1, experiences=[sample], entry_ids=[f"{ordinal}-0"])


class Simulated:
    """Trainer and explorers of one run, without I/O; explorers answer in a random order."""

    def __init__(self, config, seed):
        self.config, self.random = config, random.Random(seed)
        given = {"samples": 1, "prompts_per_step": PROMPTS, "window": config.window}
        chosen = {"order": config.rollouts.order, "when_stale": config.sync.when_stale}
        self.state = DispatchState(settings("run", 1, **given, **chosen), Ledger())
        self.staleness, self.reissued = [], 0
        self.published = self.begun = 0

    def publish(self, step):
        self.published = step
        target = self.config.prompts_open(
            begun=self.begun, version=step, oldest_named=self.state.oldest_named
        )
        self.ask(target - len(self.state.open_requests))

    def ask(self, count):
        if count > 0 and (ordinals := self.state.next_ordinals(count)):
            self.state.requests(self.state.open(ordinals, self.newest))

    @property
    def newest(self):
        return Versions(StepRef(1, self.published), exact=self.config.sync.style == "fixed")

    def answer_one(self):
        """Answer an open request with the oldest version that may serve it, or with a newer one."""
        requests = self.state.open_requests
        missing = [ordinal for ordinal in requests if ordinal not in self.state.arrived]
        if not missing:
            return False
        straggles = self.random.random() < 0.7
        ordinal = self.random.choice(missing[1:] if straggles and missing[1:] else missing)
        versions = self.state.open_requests[ordinal].versions
        newest = versions.oldest.step if versions.exact else self.published
        served = self.random.choice(range(versions.oldest.step, newest + 1))
        return self.state.arrive(answered(ordinal, served))

    def take(self, step):
        self.state.oldest = self.config.version_wanted(step)
        self.ask(self.state.lacking(PROMPTS))
        while True:
            for group in self.state.stale():
                self.state.refuse(group.ordinal)
                self.state.reissue(ReissueCandidate(group.ordinal, "stale"), self.newest)
                self.reissued += 1
            if (groups := self.state.take(PROMPTS)) is not None:
                break
            assert self.answer_one(), "the trainer waits, and there is nothing left to answer"
        self.begun = step
        for group in groups:
            self.staleness.append(step - 1 - group.oldest_step)
        self.state.train([group.ordinal for group in groups])

    def run(self):
        self.publish(0)
        for step in range(1, STEPS + 1):
            for _ in range(self.random.randrange(3 * PROMPTS)):
                self.answer_one()
            self.take(step)
            if self.config.is_sync_step(step):
                self.publish(step)
        return self


def configs(policy):
    for order, style, interval, more in itertools.product(
        ("ordinal", "arrival"), ("fixed", "trainer_driven"), (1, 2, 3), (0, 1, 3)
    ):
        bound = {"offset": more} if style == "fixed" else {"max_staleness": interval - 1 + more}
        yield TrainConfig(
            steps=STEPS,
            rollouts=RolloutsConfig(prompts_per_step=PROMPTS, order=order),
            sync=SyncConfig(style=style, interval=interval, when_stale=policy, **bound),
        )


@pytest.mark.parametrize("policy", ["pace", "wait", "drop"])
def test_no_sample_is_trained_on_beyond_the_bound_and_the_trainer_is_never_stuck(policy):
    for config, seed in itertools.product(configs(policy), range(5)):
        done = Simulated(config, seed).run()
        assert max(done.staleness) <= config.staleness_bound
        assert len(done.staleness) == STEPS * PROMPTS


@pytest.mark.parametrize("policy", ["pace", "wait"])
def test_nothing_is_generated_in_vain_where_the_trainer_waits_or_dispatch_is_paced(policy):
    for config, seed in itertools.product(configs(policy), range(5)):
        assert Simulated(config, seed).run().reissued == 0, config.sync


def test_what_is_too_old_is_issued_again_where_it_is_dropped():
    reissued = {}
    for config in configs("drop"):
        runs = [Simulated(config, seed).run() for seed in range(5)]
        reissued[config.rollouts.order, config.sync.style] = sum(run.reissued for run in runs)
    assert reissued["arrival", "trainer_driven"] > 0
    assert reissued["ordinal", "trainer_driven"] > 0, "explorers ran ahead"


def test_only_pacing_holds_dispatch_for_a_prompt_that_others_overtook():
    sync = SyncConfig(max_staleness=1)
    rollouts = RolloutsConfig(prompts_per_step=PROMPTS, order="arrival")
    config = TrainConfig(steps=STEPS, rollouts=rollouts, sync=sync)
    arguments = {"begun": 1, "version": 1, "oldest_named": 0}
    assert config.prompts_open(**arguments) == PROMPTS
    for policy, expected in (("wait", 2 * PROMPTS), ("drop", config.window)):
        assert config.replaced("sync", when_stale=policy).prompts_open(**arguments) == expected

"""Goodput of logs with known waste: sums are exact, and each waste is found within two points."""

import random
from dataclasses import dataclass, field

import pytest

from tests.support.event_histories import History
from trinity_events.analysis.goodput import Goodput, GoodputReader
from trinity_events.analysis.metrics import MetricsReader
from trinity_events.diagnostics.phases import PhaseClock
from trinity_events.views.goodput import format_headline, format_stragglers, format_waste
from trinity_schemas import (
    AppliedPhases,
    Envelope,
    LeaseExpired,
    PhasesMeasured,
    Producer,
    RunClosed,
    RunOpened,
    RunResumed,
    StepRef,
    StepTrained,
    WeightsApplied,
)

DIGEST = "sha256:" + "0" * 64
CONFIG = '{"sync": {"max_staleness": 2}}'


@dataclass
class Process:
    """Process with a phase clock on virtual time."""

    role: str
    rank: int
    epoch: int
    started: float
    wait: str
    cores: int = 1
    sequence: int = 0
    time: float = 0.0
    truth: dict[str, float] = field(default_factory=dict)
    """Seconds by phase, added up apart from the clock."""

    def __post_init__(self) -> None:
        self.time = self.started
        self.clock = PhaseClock(now=lambda: self.time)
        self.clock.end_start()
        self.producer = Producer(
            role=self.role,
            rank=self.rank,
            node=f"host-{self.rank}",
            incarnation=f"{self.role}-{self.rank}-{self.epoch}-{self.started:g}",
        )

    def work(self, *segments: tuple[str, float]) -> None:
        for phase, seconds in segments:
            with self.clock.phase(phase):
                self.time += seconds
            self.truth[phase] = self.truth.get(phase, 0.0) + seconds


class Run:
    """Log of a run whose processes do in each step what a test plants."""

    def __init__(self, explorers: int = 4, ranks: int = 2) -> None:
        self.reader = GoodputReader("planted")
        self.now = 1000.0
        self.epoch = 0
        self.step = 0
        self.sizes = explorers, ranks
        self.processes: list[Process] = []
        self.past: list[Process] = []
        self._launcher = 0
        self.open(RunOpened(config=CONFIG))

    def add(self, producer: Producer, sequence: int, event) -> None:
        envelope = Envelope(
            run_id="planted",
            epoch=self.epoch,
            producer=producer,
            sequence=sequence,
            occurred_at=self.now,
            event=event,
        )
        self.reader.add(self.now, envelope)

    def send(self, process: Process, event) -> None:
        process.sequence += 1
        self.add(process.producer, process.sequence, event)

    def open(self, event) -> None:
        self.epoch += 1
        self._launcher += 1
        launcher = Producer(role="launcher", rank=0, node="a", incarnation=f"l{self._launcher}")
        self.add(launcher, 1, event)
        explorers, ranks = self.sizes
        self.past += self.processes
        self.processes = [
            Process("trainer", 0, self.epoch, self.now, "waiting-rollouts", cores=0),
            *(Process("actor", n, self.epoch, self.now, "waiting-trainer") for n in range(ranks)),
            *(self.new_explorer(n) for n in range(explorers)),
        ]

    def new_explorer(self, rank: int) -> Process:
        return Process("explorer", rank, self.epoch, self.now, "waiting-weights")

    def of(self, role: str) -> list[Process]:
        return [process for process in self.processes if process.role == role]

    def take_step(self, plans: dict[str, list[tuple[str, float]]], tokens: dict[str, int]) -> None:
        """Let all processes work through a step, wait for its end, and report.

        A plan is of a role, or of one process.
        """
        self.step += 1
        trains = plans["trainer"]
        for explorer in self.of("explorer"):
            name = f"explorer-{explorer.rank}"
            explorer.work(*plans.get(name, plans["explorer"]))
        # The trainer waits for the slowest explorer, trains, and all begin the next step together.
        arrived = max(explorer.time for explorer in self.of("explorer"))
        [driver] = self.of("trainer")
        driver.work(("waiting-rollouts", arrived - driver.time), *trains)
        self.now = driver.time
        for rank in self.of("actor"):
            own = plans.get("actor", trains)
            rank.work(("waiting-trainer", arrived - rank.time), *own)
            rank.work(("waiting-trainer", self.now - rank.time))
        self.send(driver, StepTrained(step=self.step, tokens=tokens, staleness={0: 8}))
        for process in self.processes:
            if process.role == "explorer":
                process.work((process.wait, self.now - process.time))
            self.report(process)

    def report(self, process: Process, *, is_last: bool = False) -> None:
        event = process.clock.report(cores=process.cores, is_last=is_last)
        assert sum(event.seconds.values()) == pytest.approx(process.time - process.started)
        self.send(process, event)

    def close(self) -> Goodput:
        for process in self.processes:
            self.report(process, is_last=True)
        [driver] = self.of("trainer")
        self.send(driver, RunClosed(reason="finished"))
        return self.reader.goodput()

    @property
    def total(self) -> float:
        return sum(sum(process.truth.values()) for process in [*self.past, *self.processes])

    def planted(self, phase: str) -> float:
        everyone = [*self.past, *self.processes]
        return sum(process.truth.get(phase, 0.0) for process in everyone)


PLANS = {
    "explorer": [("installing", 0.2), ("generating", 4.0), ("judging", 0.3)],
    "trainer": [("training", 2.0), ("publishing", 0.3), ("saving", 0.2)],
}


def play(
    run: Run,
    steps: int = 20,
    tokens: dict[str, int] | None = None,
    **plans: list[tuple[str, float]],
) -> None:
    changed = PLANS | {name.replace("_", "-"): plan for name, plan in plans.items()}
    for _ in range(steps):
        for explorer in run.of("explorer"):
            explorer.clock.count_tokens("sampled", 300)
            explorer.clock.count_tokens("answered", 300)
        given = {"trained": 300 * len(run.of("explorer"))} if tokens is None else tokens
        run.take_step(changed, given)


def check_sums(goodput: Goodput, total: float | None = None) -> None:
    """Fates add up to all seconds and all tokens, of each process too."""
    seconds = sum(goodput.seconds.values())
    assert sum(share / seconds for share in goodput.seconds.values()) * 100 == pytest.approx(100)
    parts = sum(sum(worker.seconds.values()) for worker in goodput.workers)
    assert parts == pytest.approx(seconds)
    assert min(goodput.seconds.values()) >= 0 and min(goodput.tokens.values()) >= 0
    if total is not None:
        assert seconds == pytest.approx(total, rel=0.001)


def share(goodput: Goodput, fate: str) -> float:
    return goodput.seconds.get(fate, 0.0) / sum(goodput.seconds.values())


@pytest.mark.parametrize(
    ("plans", "fate"),
    [
        ({"explorer": [("generating", 4.0), ("judging", 6.0)]}, "judging"),
        ({"explorer": [("generating", 4.0), ("environment", 5.0)]}, "environment"),
        ({"trainer": [("training", 2.0), ("saving", 5.0)]}, "saving"),
        ({"explorer": [("installing", 3.0), ("generating", 4.0)]}, "installing"),
        ({"trainer": [("training", 20.0), ("publishing", 0.3)]}, "waiting-weights"),
    ],
    ids=["slow reward", "slow environment", "slow save", "slow install", "idle explorers"],
)
def test_seconds_that_are_planted_are_found(plans, fate):
    run = Run()
    play(run, **plans)
    goodput = run.close()
    check_sums(goodput, run.total)
    planted = run.planted(fate) / run.total
    assert planted > 0.1
    assert share(goodput, fate) == pytest.approx(planted, abs=0.02)
    causes = {waste.subject: waste for waste in goodput.waste}
    if fate.startswith("waiting"):
        assert causes[fate].share == pytest.approx(planted, abs=0.02)


def test_ranks_that_wait_say_for_what_the_trainer_waited():
    run = Run()
    play(run, explorer=[("generating", 12.0)])
    goodput = run.close()
    check_sums(goodput, run.total)
    waited = run.planted("waiting-trainer") + run.planted("waiting-rollouts")
    assert share(goodput, "waiting-rollouts") == pytest.approx(waited / run.total, abs=0.02)


def test_no_start_of_a_process_is_a_wait_of_another():
    run = Run(explorers=2)
    for process in run.processes:
        process.work(("starting", 50.0))
    run.now += 50.0
    play(run, explorer=[("generating", 12.0)])
    goodput = run.close()
    check_sums(goodput, run.total)
    assert goodput.seconds["starting"] == pytest.approx(50.0 * 5)
    waited = run.planted("waiting-trainer") + run.planted("waiting-rollouts")
    assert share(goodput, "waiting-rollouts") == pytest.approx(waited / run.total, abs=0.02)
    assert "waiting-tail" not in goodput.seconds


def test_a_long_tail_is_told_from_waits_for_the_trainer():
    run = Run()
    play(run, explorer_0=[("generating", 24.0)])
    goodput = run.close()
    check_sums(goodput, run.total)
    # Three explorers are done after 4.5 s, and explorer 0 after 24 s.
    planted = 3 * (24.0 - 4.5) * 20 / run.total
    assert planted > 0.2
    assert share(goodput, "waiting-tail") == pytest.approx(planted, abs=0.02)


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        ("stale", "older than the bound of staleness (sync.max_staleness 2)"),
        ("filtered", "of groups of equal rewards"),
        ("surplus", "came after another one"),
    ],
)
def test_tokens_that_are_planted_are_found_to_the_token(fate, words):
    run = Run()
    play(run, tokens={"trained": 901, fate: 299})
    goodput = run.close()
    check_sums(goodput, run.total)
    assert goodput.tokens == {"trained": 20 * 901, fate: 20 * 299}
    assert goodput.trained_tokens == pytest.approx(901 / 1200)
    assert any(words in line for line in format_waste(goodput))
    assert "75.1% of 24,000 sampled tokens were trained on" in format_headline(goodput)


def test_tokens_that_nobody_trained_are_open_at_the_end():
    run = Run()
    play(run, tokens={"trained": 1000})
    assert run.close().tokens == {"trained": 20_000, "open": 4000}


def test_a_dead_explorer_costs_its_time_and_what_it_had_under_way():
    run = Run()
    play(run, 10)
    dead = run.of("explorer")[3]
    dead.clock.count_tokens("sampled", 77)
    with dead.clock.phase("generating"):
        dead.time += 2.0
        run.now += 2.0
        run.report(dead)
    died = run.now + 3.0
    run.processes.remove(dead)
    run.past.append(dead)
    # Its heartbeat was last heard three seconds after its last report.
    run.now = died + 15.0
    [driver] = run.of("trainer")
    run.send(driver, LeaseExpired(holder=dead.producer, lease=15.0))
    play(run, 10)
    end = run.now
    goodput = run.close()
    check_sums(goodput)
    [cause] = [waste for waste in goodput.waste if waste.kind == "died"]
    assert (cause.subject, cause.detail, cause.tokens) == ("explorer-3", "host-3", 77)
    assert goodput.seconds["lost"] == pytest.approx(3.0, abs=0.01)
    assert goodput.seconds["down"] == pytest.approx(end - died, abs=0.01)
    assert goodput.tokens["lost"] == 77
    planted = (3.0 + end - died) / sum(goodput.seconds.values())
    assert planted > 0.05
    assert cause.share == pytest.approx(planted, abs=0.02)
    assert "explorer-3 on host-3 died" in "\n".join(format_waste(goodput))


def test_services_are_counted_and_what_no_report_has_is_named():
    run = Run(explorers=1, ranks=1)
    opened = run.now
    writer = Process("writer", 0, 1, opened, "waiting-samples", cores=0)
    server = Process("log-server", 0, 1, opened - 1.0, "idle", cores=0)
    # Reducers that stand by share a name, and are older than the epoch.
    ended, standing = (
        Process("standby", 0, 1, opened - age, "standing-by", cores=0) for age in (500.0, 900.0)
    )
    for _ in range(10):
        play(run, 2)
        writer.work(("writing", 1.0), ("waiting-samples", run.now - writer.time - 1.0))
        server.work(("serving", run.now - server.time))
        standing.work(("standing-by", run.now - standing.time))
        for process in (writer, server, standing):
            run.report(process)
        if run.step == 10:
            half = run.now
            ended.work(("standing-by", run.now - ended.time))
            run.report(ended)
    run.report(writer, is_last=True)
    # The others send no last report: the epoch's end is theirs.
    goodput = run.close()
    check_sums(goodput)
    seconds = goodput.seconds
    assert (seconds["writing"], seconds["waiting-samples"]) == pytest.approx(
        (10.0, run.now - opened - 10.0)
    )
    assert seconds["serving"] == pytest.approx(run.now - opened + 1.0)
    # One of them missed its reports: it is known until its last one.
    assert seconds["standing-by"] == pytest.approx(run.now - opened + half - opened)
    assert not {"lost", "down"} & seconds.keys()
    assert goodput.unmeasured == [
        *("the launcher", "the processes of Ray", "the chunk server"),
        "standby-0 on host-0 after its last report",
    ]


def test_an_explorer_that_starts_again_is_down_until_then():
    run = Run()
    play(run, 5)
    dead = run.of("explorer")[3]
    run.processes.remove(dead)
    run.past.append(dead)
    gone = run.now
    play(run, 2)
    run.processes.append(run.new_explorer(3))
    back = run.now
    play(run, 5)
    goodput = run.close()
    check_sums(goodput)
    assert goodput.seconds["down"] == pytest.approx(back - gone, abs=0.01)


def test_an_old_checkpoint_costs_the_steps_that_are_trained_again():
    run = Run()
    play(run, 16)
    # Killed after step 16, and resumed from step 8: half of the steps are trained twice.
    run.step = 8
    run.now += 60.0
    run.open(RunResumed(step=8, config=CONFIG))
    play(run, 12)
    goodput = run.close()
    check_sums(goodput, run.total)
    assert goodput.tokens == {"trained": 20 * 1200, "lost": 8 * 1200}
    assert goodput.samples == 20 * 8
    [cause] = [waste for waste in goodput.waste if waste.kind == "old-checkpoint"]
    again = [segment for plan in PLANS.values() for segment in plan]
    productive = sum(seconds for phase, seconds in again if phase in ("generating", "judging"))
    planted = 8 * (4 * productive + 3 * 2.0) / run.total
    assert planted > 0.1
    assert cause.subject == "step 8" and cause.tokens == 8 * 1200
    assert cause.share == pytest.approx(planted, abs=0.02)


def test_answers_that_a_resume_keeps_are_not_lost():
    run = Run()
    play(run, 4, tokens={"trained": 1000})
    run.step = 2
    run.open(RunResumed(step=2))
    # 800 were not trained, and 2,000 of steps 3 and 4 are discarded: 2,500 of them are kept.
    play(run, 1, tokens={"trained": 1200, "kept": 2500})
    goodput = run.close()
    assert goodput.tokens == {"trained": 2000 + 1200, "lost": 300, "open": 2500}
    assert sum(goodput.tokens.values()) == 5 * 1200


def test_a_slow_host_is_named_with_what_it_costs():
    run = Run()
    slow = [("installing", 0.2), ("generating", 12.0), ("judging", 0.3)]
    play(run, explorer_2=slow)
    for explorer in run.of("explorer"):
        for step in range(3):
            phases = AppliedPhases(fetch=4.0 if explorer.rank == 2 else 0.5, pause=0.1)
            applied = WeightsApplied(
                version=StepRef(1, step), digest=DIGEST, bytes=1, verified_at=1.0, phases=phases
            )
            run.send(explorer, applied)
    goodput = run.close()
    generating, fetching = goodput.stragglers
    assert generating.process == fetching.process == "explorer-2"
    assert generating.host == "host-2"
    assert generating.ratio == pytest.approx(3.0)
    planted = (12.0 - 4.0) * 20 / run.total
    assert generating.excess / run.total == pytest.approx(planted, abs=0.02)
    assert fetching.measure == "fetching a version" and fetching.ratio == pytest.approx(8.0)
    assert "3.0 times the others' median" in next(format_stragglers(goodput.stragglers))


def test_a_live_run_counts_up_to_now_in_the_phase_of_the_last_report():
    run = Run(explorers=1, ranks=0)
    play(run, 3)
    before = run.reader.goodput()
    after = run.reader.goodput(run.now + 10.0)
    check_sums(after)
    gained = sum(after.seconds.values()) - sum(before.seconds.values())
    assert gained == pytest.approx(20.0)
    # A run whose processes are all gone does not get older for ever.
    assert sum(run.reader.goodput(run.now + 1e6).seconds.values()) < 1000.0


@pytest.mark.parametrize("reason", ["interrupted", "failed"])
def test_no_process_has_died_that_a_signal_ended_without_a_last_report(reason):
    run = Run(explorers=1, ranks=1)
    play(run, 3)
    before = run.reader.goodput()
    run.now += 4.0
    [driver] = run.of("trainer")
    run.send(driver, RunClosed(reason=reason))
    goodput = run.reader.goodput()
    check_sums(goodput)
    gained = sum(goodput.seconds.values()) - sum(before.seconds.values())
    assert gained == pytest.approx(12.0)
    died = {waste.subject for waste in goodput.waste if waste.kind == "died"}
    # A run that failed may have failed by their death.
    assert died == ({"trainer-0", "actor-0", "explorer-0"} if reason == "failed" else set())


def test_a_repeated_entry_counts_once():
    run = Run()
    play(run, 2)
    [driver] = run.of("trainer")
    driver.sequence -= 1
    run.send(driver, StepTrained(step=2, tokens={"trained": 5000}))
    assert run.close().tokens == {"trained": 2400}


def test_a_log_without_reports_has_no_goodput():
    reader = Run(explorers=0, ranks=0).reader
    assert format_headline(reader.goodput()) == "its processes have reported no times"


@pytest.mark.parametrize("seed", range(20))
def test_sums_are_exact_after_random_kills_and_resumes(seed):
    random_ = random.Random(seed)
    run = Run(explorers=random_.randint(1, 4), ranks=random_.randint(1, 3))
    sampled = 0
    for _ in range(random_.randint(2, 5)):
        steps = random_.randint(1, 8)
        sampled += 300 * steps * run.sizes[0]
        play(run, steps, tokens={"trained": 150 * run.sizes[0], "stale": 10})
        run.now += random_.uniform(0, 100)
        run.step = random_.randint(0, run.step)
        run.open(RunResumed(step=run.step))
    play(run, 2)
    sampled += 600 * run.sizes[0]
    goodput = run.close()
    check_sums(goodput, run.total)
    assert sum(goodput.tokens.values()) == sampled


def test_the_clock_is_always_in_exactly_one_phase():
    now = 0.0
    clock = PhaseClock(now=lambda: now)
    now = 2.0
    clock.end_start()
    with clock.phase("waiting-rollouts"):
        now = 3.0
        # Activities may overlap, and end in any order: the most important one counts.
        judging, generating = clock.phase("judging"), clock.phase("generating")
        judging.__enter__()
        now = 5.0
        generating.__enter__()
        now = 9.0
        judging.__exit__(None, None, None)
        now = 10.0
        generating.__exit__(None, None, None)
        now = 12.0
        assert clock.report().phase == "waiting-rollouts"
    now = 12.5
    assert clock.report().seconds == {
        "starting": 2.0,
        "waiting-rollouts": 3.0,
        "judging": 2.0,
        "generating": 5.0,
        "idle": 0.5,
    }


def test_tokens_without_a_fate_are_settled_once():
    clock = PhaseClock()
    clock.count_tokens("sampled", 100)
    clock.count_tokens("evaluated", 40)
    clock.count_tokens("answered", 70)
    clock.settle_tokens("failed")
    clock.settle_tokens("aborted")
    assert clock.report().tokens == {
        "sampled": 100,
        "evaluated": 40,
        "answered": 70,
        "failed": 30,
        "aborted": 0,
    }


def test_trackers_get_goodput_and_rates_with_each_step():
    history, metrics = History(), MetricsReader()
    report = PhasesMeasured(seconds={"generating": 3.0, "idle": 1.0}, phase="idle", cores=1)
    history.add(StepTrained(step=1, tokens={"trained": 60, "stale": 20}, staleness={0: 4}))
    history.add(report, by="explorer")
    history.add(StepTrained(step=2, tokens={"trained": 60, "stale": 20}, staleness={0: 4}))
    first, second = [
        reading.values for _, entry in history.entries if (reading := metrics.add(entry))
    ]
    assert "perf/goodput" not in first
    assert second["perf/goodput"] == 0.75
    assert second["perf/trained_token_share"] == 0.75
    assert second["perf/tokens_per_second_per_core"] == pytest.approx(120 / 4)
    assert second["perf/samples_per_second_per_core"] == pytest.approx(8 / 4)

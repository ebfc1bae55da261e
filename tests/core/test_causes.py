"""The first cause is at the end of the chains of waits, and what cannot go on comes before it."""

from __future__ import annotations

import pytest

from tests.support.event_histories import History, lasting_cause_after_waits
from trinity_events.analysis.causes import (
    MOST_CAUSES,
    CheckpointReader,
    GroupLag,
    HostProcess,
    LiveFacts,
    find_causes,
)
from trinity_events.dashboard.state_view import build_causes
from trinity_schemas import (
    ExplorerExcluded,
    ExplorerStatusChanged,
    LeaseExpired,
    RunClosed,
    RunOpened,
    StepCommitted,
    VersionOpened,
    WaitStarted,
)


def waits(wait_id, *waits_for, what="rollouts", step=None):
    return WaitStarted(wait_id=wait_id, what=what, waits_for=waits_for, seconds=1.0, step=step)


def causes(history, **facts):
    state = history.fold()[0].state
    now = int(state.position.partition("-")[0]) + 1000
    return find_causes(state, LiveFacts(now=now, **facts))


def first(history, **facts):
    cause, *_ = causes(history, **facts)
    return cause.reason, cause.process, cause.step


def on_this_host(**conditions):
    return {
        name.replace("_", "-"): HostProcess(pid=7, condition=condition)
        for name, condition in conditions.items()
    }


def chain():
    history = History()
    history.add(waits("a", "explorer-0", "explorer-1"), by="trainer")
    history.add(waits("b", "process 9", what="the reward mine.py"), by="explorer", rank=0)
    return history


def test_the_dashboard_lists_the_first_causes():
    history = History()
    for rank in range(MOST_CAUSES + 3):
        history.add(ExplorerStatusChanged(status="running"), by="explorer", rank=rank)
    state = history.fold()[0].state
    facts = LiveFacts(now=0, processes=on_this_host(**dict.fromkeys(state.explorers, "stopped")))
    causes, listed = find_causes(state, facts), build_causes(state, facts)
    assert len(causes) == MOST_CAUSES + 3
    assert [cause["process"] for cause in listed] == [
        cause.process for cause in causes[:MOST_CAUSES]
    ]


def test_a_lasting_cause_is_listed_though_it_comes_after_many_waits_of_a_moment():
    history = lasting_cause_after_waits()
    state = history.fold()[0].state
    facts = LiveFacts(now=int(state.position.partition("-")[0]))
    passing = find_causes(state, facts)[:MOST_CAUSES]
    assert {cause.reason for cause in passing} == {"waits"}
    assert [cause["process"] for cause in build_causes(state, facts)] == ["explorer-99"]


def test_the_first_cause_is_the_end_of_the_longest_chain():
    cause, *more = causes(chain())
    assert (cause.reason, cause.process, cause.waiting) == ("waits", "process 9", "explorer-0")
    assert "the reward mine.py" in cause.sentence
    assert [link.process for link in more] == ["explorer-1"]


def test_a_process_that_cannot_go_on_comes_before_one_that_is_busy():
    processes = on_this_host(explorer_1="stopped", explorer_0="running")
    assert first(chain(), processes=processes) == ("stopped", "explorer-1", None)
    assert "kill -CONT 7" in causes(chain(), processes=processes)[0].sentence
    assert first(chain(), processes=on_this_host(explorer_1="ended"))[0] == "ended"


def test_a_run_without_a_reducer_waits_for_one_first():
    assert first(chain(), is_led=False)[0] == "no-reducer"
    assert first(chain(), unfolded_since=-9_000)[0] == "reducer-behind"
    assert first(chain(), reports_since=-9_000)[0] == "reducer-behind"


def test_a_server_that_takes_nothing_is_the_cause_of_all():
    fault = ("server-full", "its memory is full")
    assert first(chain(), is_led=False, server_fault=fault)[0] == "server-full"


def test_a_wait_for_the_weights_of_a_step_goes_on_with_the_ranks_that_it_lacks():
    history = History()
    history.add(waits("a", "trainer-0", what="the weights of step 3", step=3), by="explorer")
    history.add(VersionOpened(step=3, ranks=(0, 1), transport="memory"))
    assert first(history) == ("missing", "actor-0", 3)
    assert first(history, processes=on_this_host(actor_1="stopped")) == ("stopped", "actor-1", 3)


def test_a_step_that_lacks_its_commit_alone_waits_for_the_trainer():
    history = History()
    history.add(VersionOpened(step=3, ranks=(), transport="memory"))
    assert first(history) == ("missing", "trainer-0", 3)


def test_a_step_whose_registered_saves_are_nameless_names_no_process():
    history = History()
    history.add(StepCommitted(step=3, kind="state_dict"))
    cause = causes(history)[0]
    assert (cause.reason, cause.step) == ("missing", 3)


def test_a_trainer_that_names_no_process_waits_for_any_explorer():
    history = History()
    history.add(waits("a"), by="trainer")
    assert first(history) == ("no-explorer", "trainer-0", None)
    history.add(ExplorerStatusChanged(status="running"), by="explorer", rank=2)
    assert first(history) == ("waits", "explorer-2", None)


def test_a_wait_for_explorers_that_are_lost_names_them_and_not_their_absence():
    history = History()
    history.add(waits("a"), by="trainer")
    history.add(ExplorerStatusChanged(status="running", lease=15.0), by="explorer", rank=2)
    holder = history.fold()[0].state.explorers["explorer-2"].lease.holder
    history.add(LeaseExpired(holder=holder, lease=15.0), by="reducer")
    stopped = on_this_host(explorer_2="stopped")
    assert first(history, processes=stopped) == ("stopped", "explorer-2", None)
    sentences = [cause.sentence for cause in causes(history, processes=stopped)]
    assert not any("No explorer" in sentence for sentence in sentences)
    assert sum("is stopped" in sentence for sentence in sentences) == 1


def test_processes_that_wait_for_each_other_have_a_first_cause_too():
    history = History()
    history.add(waits("a", "explorer-0"), by="trainer")
    history.add(waits("b", "trainer-0"), by="explorer")
    assert first(history) == ("waits", "explorer-0", None)


def test_a_process_that_waits_for_its_own_save_is_the_cause():
    history = History()
    history.add(waits("a", "actor-0", what="the end of its save", step=3), by="actor")
    assert first(history) == ("waits", "actor-0", 3)


@pytest.mark.parametrize(("idle", "reasons"), [(60.0, ["unread-group"]), (0.1, [])])
def test_a_group_that_acknowledges_nothing_is_told_once_it_is_idle(idle, reasons):
    group = GroupLag(
        stream="announcements",
        name="evaluation",
        members=1,
        pending=2,
        last_delivered="2-0",
        oldest_pending="1-0",
        idle=idle,
        caught_up=False,
    )
    assert [cause.reason for cause in causes(History(), groups=(group,))] == reasons


@pytest.mark.parametrize(
    ("running", "reasons"), [((1,), ["excluded", "waits"]), ((0, 1), ["waits", "excluded"])]
)
def test_an_excluded_explorer_is_the_cause_unless_another_one_may_answer(running, reasons):
    history = History()
    for rank in running:
        history.add(ExplorerStatusChanged(status="running"), by="explorer", rank=rank)
    history.add(waits("a", "explorer-0"), by="trainer")
    history.add(ExplorerExcluded(explorer="explorer-1", malformed=3, reason="a reward is inf"))
    ordered = causes(history)
    assert [cause.reason for cause in ordered] == reasons
    [excluded] = [cause for cause in ordered if cause.reason == "excluded"]
    assert excluded.process == "explorer-1"
    assert "3 of its answers were malformed (the last one: a reward is inf)" in excluded.sentence


def test_readers_of_checkpoints_are_told_last():
    readers = (CheckpointReader(step=3, reader="a reader"),)
    assert [cause.reason for cause in causes(chain(), readers=readers)][-1] == "held-checkpoint"


def test_a_run_that_has_ended_waits_for_nothing_and_names_its_error():
    history = chain()
    history.add(RunClosed(reason="failed", error="actor-1 died"))
    [cause] = causes(history, is_led=False)
    assert (cause.reason, cause.sentence) == ("closed", "The run ended (failed): actor-1 died.")


def test_a_run_whose_launcher_has_ended_was_killed_unless_it_is_led_elsewhere():
    history = History(opened=False)
    history.add(RunOpened(command="trinity-events train a.yaml"))
    ended = on_this_host(launcher_0="ended")
    [cause] = causes(history, is_led=False, processes=ended)
    assert (cause.reason, cause.process, cause.pid) == ("ended", "launcher-0", 7)
    assert "The run was killed" in cause.sentence
    assert "trinity-events train a.yaml" in cause.sentence
    assert causes(history, is_led=True, processes=ended) == []
    running = on_this_host(launcher_0="running")
    assert [cause.reason for cause in causes(history, is_led=False, processes=running)] == [
        "no-reducer"
    ]


def test_an_outage_is_the_first_cause_and_blames_no_explorer():
    history = History()
    history.add(ExplorerStatusChanged(status="running"), by="explorer", rank=0)
    what = "http://judge, which fails for every request (refused)"
    outage = WaitStarted(wait_id="a", what=what, seconds=9.0, is_outage=True)
    history.add(outage, by="trainer")
    [cause] = causes(history)
    assert (cause.reason, cause.process) == ("waits", "trainer-0")
    assert cause.sentence.startswith(f"trainer-0 waits for {what} for ")
    assert "reports no wait" not in cause.sentence


def test_no_other_wait_of_a_trainer_hides_an_outage_or_blames_explorers_for_it():
    history = History()
    history.add(ExplorerStatusChanged(status="running"), by="explorer", rank=0)
    history.add(waits("drain", what="the evaluations on held-out questions"), by="trainer")
    history.add(waits("announcement", what="the announcement of step 1", step=1), by="trainer")
    history.add(VersionOpened(step=1, ranks=(0,), transport="memory"))
    what = "http://judge, which fails for every request (refused)"
    outage = WaitStarted(wait_id="outage", what=what, seconds=9.0, is_outage=True)
    history.add(outage, by="trainer")
    listed = causes(history)
    assert what in [cause.what for cause in listed]
    assert not any("explorer-0 reports no wait" in cause.sentence for cause in listed)

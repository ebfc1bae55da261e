"""The fold: what is ready, what failed, what was superseded, whatever the order.

The numbers are those of the invariants in `trinity_events/core/fold.py`.
"""

import io
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.support.event_histories import (
    DIGEST,
    RUN,
    History,
    committed,
    failed,
    finished,
    fold,
    opened,
    part,
    publish_weights,
    registration,
    slot,
    started,
    verified,
)
from trinity_events.analysis.explain import explain, format_profiles
from trinity_events.core import (
    Monitor,
    MonitorState,
    completeness,
    decode_state,
    encode_state,
    removable_steps,
)
from trinity_events.core.announcements import OF_AN_EPOCH, is_current, newest_subjects
from trinity_events.core.completeness import slot_key
from trinity_events.core.fold import _HANDLERS, MONITOR
from trinity_events.core.limits import (
    KEPT_ATTEMPTS,
    KEPT_DETACHED,
    KEPT_EXPLORERS,
    KEPT_PROFILES,
    KEPT_STEPS,
    KEPT_VERSIONS,
)
from trinity_events.views.status import status_panel
from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    EVENT_TYPES,
    AppliedPhases,
    ChosenTransport,
    ConsumerDetached,
    DeadlineReached,
    ExpiredAttempt,
    ExplorerStatusChanged,
    LeaseExpired,
    PartDelta,
    Producer,
    ProfileWritten,
    Registration,
    ResendRequested,
    RunClosed,
    RunOpened,
    RunResumed,
    SaveGranted,
    SaveProgressed,
    SaveRequested,
    Sender,
    StepFailed,
    StepReady,
    StepRef,
    StepSuperseded,
    SyncRequested,
    ThreadCountRegistered,
    TrainerStatusChanged,
    VersionRetired,
    WeightsApplied,
    WeightsProof,
    decode_envelope,
    encode,
)
from trinity_schemas.codec import UnknownEventType


def registered(step, **kwargs):
    return ThreadCountRegistered(step=step, registration=registration(**kwargs))


def of(events, event_type):
    return [event for event in events if isinstance(event, event_type)]


def ready(announcements):
    return [(event.kind, event.step) for event in of(announcements, StepReady)]


def test_a_step_is_ready_in_whatever_order_its_events_come():
    events = [
        registered(1, expected=2),
        started(1, "a", rank=0),
        finished(1, "a", rank=0),
        finished(1, "b", rank=1),
        committed(1, "state_dict", registration(expected=2)),
    ]
    for order in itertools.permutations(events):
        history = History()
        for number, event in enumerate(order):
            history.add(event, by=f"p{number}")
        monitor, announcements = history.fold()
        assert ready(announcements) == [("state_dict", 1)]
        assert monitor.state.ready["state_dict"].at == StepRef(1, 1)


def test_commit_waits_for_every_registered_save():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=2)))
    history.add(finished(1, rank=0))
    assert ready(history.fold()[1]) == []
    history.add(finished(1, rank=1))
    assert ready(history.fold()[1]) == [("state_dict", 1)]


def test_registrations_add_up_by_distinct_id():
    history = History()
    history.add(registered(1, name="one"))
    history.add(registered(1, name="two"))
    history.add(registered(1, name="two"))
    history.add(committed(1))
    history.add(finished(1, rank=0))
    assert ready(history.fold()[1]) == []
    history.add(finished(1, rank=1))
    assert ready(history.fold()[1]) == [("state_dict", 1)]


def test_a_step_that_is_saved_again_after_a_failure_becomes_ready():
    history = History()
    for attempt in ("first", "second"):
        history.add(registered(1))
        history.add(committed(1, "state_dict", registration()))
        history.add(failed(1, attempt) if attempt == "first" else finished(1, attempt))
    assert ready(history.fold()[1]) == [("state_dict", 1)]


def test_a_rank_that_is_named_twice_publishes_one_part():
    history = History()
    history.add(opened(1, *[0] * 1000))
    history.add(part(1))
    history.add(committed(1, "weights"))
    [announced] = of(history.fold()[1], StepReady)
    assert len(announced.parts) == 1


def test_the_commit_alone_establishes_the_registration():
    history = History()
    history.add(finished(1))
    history.add(committed(1, "state_dict", registration()))
    assert ready(history.fold()[1]) == [("state_dict", 1)]


def test_an_explicit_zero_is_ready_at_once_but_no_registration_is_not():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=0)))
    history.add(committed(2))
    assert ready(history.fold()[1]) == [("state_dict", 1)]


def test_a_finish_delivered_twice_counts_once():
    """Invariant 2."""
    history = History()
    history.add(committed(1, "state_dict", registration(expected=2)))
    history.add(finished(1, "a"), by="actor")
    history.add(finished(1, "a"), by="actor", sequence=1)  # the same event again
    history.add(finished(1, "b"), by="actor", sequence=2)  # another attempt at the same slot
    monitor, announcements = history.fold()
    assert ready(announcements) == []
    assert monitor.state.anomaly_counts == {"duplicate": 1, "late-attempt": 1}


def test_a_checkpoint_waits_for_its_state_dict_and_makes_it_ready_with_it():
    history = History()
    history.add(committed(5, "checkpoint", registration("state_dict"), registration("checkpoint")))
    history.add(finished(5, kind="state_dict"))
    assert ready(history.fold()[1]) == []
    history.add(finished(5, kind="checkpoint"))
    assert ready(history.fold()[1]) == [("state_dict", 5), ("checkpoint", 5)]


def test_a_checkpoint_may_rest_on_its_state_dict_alone():
    # As Trinity-RFT registers it: one state-dict save, committed as a checkpoint.
    history = History()
    history.add(
        committed(5, "checkpoint", registration("state_dict"), registration("checkpoint", 0))
    )
    history.add(finished(5, kind="state_dict"))
    assert ready(history.fold()[1]) == [("state_dict", 5), ("checkpoint", 5)]


def test_a_state_dict_of_its_own_does_not_wait_for_a_checkpoint():
    history = History()
    history.add(committed(5, "state_dict", registration("state_dict")))
    history.add(committed(5, "checkpoint", registration("checkpoint")))
    history.add(finished(5, kind="state_dict"))
    assert ready(history.fold()[1]) == [("state_dict", 5)]


def test_weights_are_ready_when_every_rank_has_published():
    events = [
        opened(3, 0, 1),
        part(3, rank=0),
        part(3, rank=1, digest="sha256:" + "1" * 64),
        committed(3, "weights"),
    ]
    digests = set()
    for order in itertools.permutations(events):
        history = History()
        for number, event in enumerate(order):
            history.add(event, by=f"p{number}")
        _, announcements = history.fold()
        [announced] = of(announcements, StepReady)
        assert [part.rank for part in announced.parts] == [0, 1]
        assert announced.transport == "redis"
        digests.add(announced.version_digest)
    assert len(digests) == 1


def test_a_ready_step_carries_its_proof():
    history = History()
    history.add(finished(1, "attempt", rank=2))
    cause = history.add(committed(1, "state_dict", registration()))
    [announced] = of(history.fold()[1], StepReady)
    assert announced.caused_by == cause
    assert [(save.slot.rank, save.save_id, save.bytes) for save in announced.saves] == [
        (2, "attempt", 8)
    ]


def test_a_failed_save_fails_its_step_once_and_a_retry_makes_it_ready():
    history = History()
    history.add(committed(1, "state_dict", registration()))
    history.add(failed(1, "a"))
    history.add(failed(1, "b"))
    history.add(finished(1, "c"))
    _, announcements = history.fold()
    [failure] = of(announcements, StepFailed)
    assert "model of actor-0" in failure.reason
    assert "disk full" in failure.reason
    assert ready(announcements) == [("state_dict", 1)]


def test_a_failure_after_the_finish_changes_nothing():
    history = History()
    history.add(finished(1, "a"))
    history.add(failed(1, "b"))
    history.add(committed(1, "state_dict", registration()))
    _, announcements = history.fold()
    assert of(announcements, StepFailed) == []
    assert ready(announcements) == [("state_dict", 1)]


def test_a_slow_checkpoint_is_superseded_not_an_error():
    history = History()
    history.add(committed(1, "checkpoint", registration("checkpoint")))
    history.add(committed(2, "checkpoint", registration("checkpoint")))
    history.add(finished(2, kind="checkpoint"))
    history.add(finished(1, kind="checkpoint"))
    monitor, announcements = history.fold()
    assert ready(announcements) == [("checkpoint", 2)]
    [superseded] = of(announcements, StepSuperseded)
    assert (superseded.step, superseded.by) == (1, StepRef(1, 2))
    assert monitor.state.ready["checkpoint"].at == StepRef(1, 2)
    expected = "Step 1 checkpoint is superseded: step 2 of epoch 1 is ready."
    assert explain(monitor.state, 1) == expected


def test_events_of_an_older_epoch_change_nothing():
    """Invariant 3."""
    history = History()
    history.add(RunResumed(step=0), by="second", epoch=2)
    history.add(committed(9, "state_dict", registration(expected=0)), epoch=1)
    monitor, announcements = history.fold()
    assert announcements == []
    assert monitor.state.ready == {}
    assert monitor.state.anomaly_counts == {"stale-epoch": 1}


def test_nothing_is_believed_before_an_epoch_is_opened():
    """Invariant 3."""
    for epoch in (0, 1):
        history = History(opened=False)
        history.add(committed(9, "state_dict", registration(expected=0)), epoch=epoch)
        assert history.fold()[1] == []


def test_a_resume_moves_the_pointers_back_at_once():
    history = History()
    for kind in ("state_dict", "checkpoint"):
        history.add(committed(105, kind, registration(kind, 0)))
    history.add(RunResumed(step=100), by="second", epoch=2)
    monitor, _ = history.fold()
    assert monitor.state.ready["checkpoint"].at == StepRef(2, 100)
    history.add(committed(101, "state_dict", registration(expected=0)), by="second", epoch=2)
    monitor, announcements = history.fold()
    assert ready(announcements)[-1] == ("state_dict", 101)
    assert monitor.state.ready["state_dict"].at == StepRef(2, 101)


def test_a_run_that_is_resumed_has_no_trainer_until_it_is_heard():
    history = History()
    history.add(TrainerStatusChanged(status="running", step=105))
    history.add(RunClosed(reason="interrupted"))
    history.add(RunResumed(step=100), by="second", epoch=2)
    state = history.fold()[0].state
    assert (state.closed, state.trainer, state.trainer_step) == (None, None, 100)
    history.add(TrainerStatusChanged(status="running", step=100), by="second", epoch=2)
    assert history.fold()[0].state.trainer == "running"


def test_what_an_old_epoch_left_open_is_superseded_by_the_new_one():
    history = History()
    history.add(committed(7, "state_dict", registration()))
    history.add(opened(7))
    history.add(RunOpened(), by="second", epoch=2)
    _, announcements = history.fold()
    assert {
        (event.kind, event.epoch, event.by.epoch) for event in of(announcements, StepSuperseded)
    } == {
        ("state_dict", 1, 2),
        ("weights", 1, 2),
    }
    assert [(event.epoch, event.step) for event in of(announcements, VersionRetired)] == [(1, 7)]


def test_the_state_says_how_the_present_epochs_weights_travel_and_why():
    history = History(opened=False)
    chosen = ChosenTransport(name="ray", reason="every explorer is in this Ray cluster")
    history.add(RunOpened(transport=chosen))
    assert history.fold()[0].state.transport == chosen
    other = ChosenTransport(name="redis", reason="explorers may be on any host")
    history.add(RunResumed(step=3, transport=other), epoch=2)
    assert history.fold()[0].state.transport == other
    history.add(RunOpened(), epoch=3)
    assert history.fold()[0].state.transport is None


def test_old_weight_versions_are_retired():
    history = History()
    for step in range(5):
        publish_weights(history, step)
    monitor, announcements = history.fold()
    assert [event.step for event in of(announcements, VersionRetired)] == [0, 1, 2]
    assert [ref.step for ref in monitor.state.versions] == [3, 4]
    assert len(monitor.state.versions) == KEPT_VERSIONS


def resting(step, base):
    delta = PartDelta(
        base=StepRef(1, base), whole=8, dense=0, delta=1, skip=0, changed=1, elements=9
    )
    return msgspec.structs.replace(part(step), delta=delta)


def test_what_a_live_version_rests_on_is_not_retired_before_it():
    history = History()
    for step, base in ((0, None), (1, 0), (2, 0), (3, 0), (4, None), (5, 4), (6, 4)):
        history.add(opened(step))
        history.add(part(step) if base is None else resting(step, base))
        history.add(committed(step, "weights"))
    monitor, announcements = history.fold()
    assert [event.step for event in of(announcements, VersionRetired)] == [1, 2, 0, 3]
    assert [ref.step for ref in monitor.state.versions] == [4, 5, 6]
    [ready] = [event for event in of(announcements, StepReady) if event.step == 6]
    assert ready.parts[0].base == StepRef(1, 4)
    again = decode_state(encode_state(monitor.state))
    assert again.delta_bases == monitor.state.delta_bases
    assert [delta.bases for delta in again.delta_bases] == [(StepRef(1, 4),)] * 2


def test_what_versions_rest_on_is_bounded_and_may_be_anything():
    history = History()
    for step in range(40):
        history.add(opened(step))
        history.add(resting(step, (step * 7) % 40))
        history.add(committed(step, "weights"))
    monitor, announcements = history.fold()
    assert len(monitor.state.versions) <= 4
    retired = [event.step for event in of(announcements, VersionRetired)]
    assert len(retired) == len(set(retired)) == 40 - len(monitor.state.versions)


def test_a_retried_part_replaces_the_first_until_the_version_is_ready():
    second, third = ("sha256:" + digit * 64 for digit in "23")
    history = History()
    history.add(opened(1))
    history.add(part(1))
    history.add(part(1, digest=second))
    history.add(committed(1, "weights"))
    history.add(part(1, digest=third))
    [announced] = of(history.fold()[1], StepReady)
    assert announced.parts[0].manifest_digest == second


def test_a_gap_in_a_producers_sequence_is_an_anomaly_that_names_it():
    """Invariant 2."""
    history = History()
    history.add(started(1), by="actor", rank=3)
    history.add(finished(1), by="actor", rank=3, sequence=4)
    monitor, _ = history.fold()
    assert monitor.state.anomaly_counts == {"gap": 1}
    assert "actor-3, event 2 to 3" in monitor.state.anomalies[0].detail


def test_explorers_are_not_fenced_by_epochs():
    """Invariant 3."""
    history = History()
    history.add(ExplorerStatusChanged(status="running"), by="explorer", epoch=0)
    assert history.fold()[0].state.explorers["explorer-0"].status == "running"


def test_an_explorer_that_lost_its_server_serves_no_version():
    history = History()
    url = "http://127.0.0.1:8000"
    proof = WeightsProof(status="proven", checks=("names", "served"))
    event = msgspec.structs.replace(applied(2), proof=proof)
    for status in ("running", "require_sync"):
        history.add(event, by="explorer", epoch=0)
        history.add(ExplorerStatusChanged(status=status, endpoint=url), by="explorer", epoch=0)
        explorer = history.fold()[0].state.explorers["explorer-0"]
        assert explorer.endpoint == url
        serves = status == "running"
        assert explorer.version == (StepRef(1, 2) if serves else None)
        assert explorer.proof == ("proven" if serves else None)


def test_finished_steps_are_forgotten_and_stay_settled():
    history = History()
    for step in range(1, 3 * KEPT_STEPS):
        history.add(committed(step, "state_dict", registration(expected=0)))
    history.add(committed(1, "state_dict", registration(expected=0)))
    monitor, announcements = history.fold()
    assert len(monitor.state.steps) == KEPT_STEPS
    assert ready(announcements) == [("state_dict", step) for step in range(1, 3 * KEPT_STEPS)]
    assert monitor.state.anomaly_counts == {"late": 1}


def test_a_step_that_waits_is_not_forgotten():
    history = History()
    history.add(committed(1, "checkpoint", registration("checkpoint")))
    for step in range(2, 2 * KEPT_STEPS):
        history.add(committed(step, "state_dict", registration(expected=0)))
    history.add(finished(1, kind="checkpoint"))
    assert ("checkpoint", 1) in ready(history.fold()[1])


def test_a_commit_long_after_its_saves_is_settled_once_and_harmless():
    # Settling one kind of it may be what makes the step old enough to be forgotten.
    history = History()
    history.add(finished(1, kind="state_dict"))
    history.add(finished(1, kind="checkpoint"))
    for step in range(2, KEPT_STEPS + 12):
        publish_weights(history, step)
    both = registration("state_dict"), registration("checkpoint")
    history.add(committed(1, "checkpoint", *both))
    assert ready(history.fold()[1])[-2:] == [("state_dict", 1), ("checkpoint", 1)]


def test_state_stays_small_when_every_save_fails():
    """Invariant 5."""
    history = History()
    for step in range(3 * KEPT_STEPS):
        for attempt in range(12):
            history.add(failed(step, f"attempt-{attempt}"))
    state = history.fold()[0].state
    assert len(state.steps) == KEPT_STEPS
    assert len(encode_state(state)) < 1_000_000


def test_what_is_announced_can_be_decoded_whatever_was_said():
    history = History()
    history.add(committed(1, "state_dict", registration()))
    event = msgspec.structs.replace(failed(1), message="x" * 8192, error_type="E" * 256)
    history.add(event)
    monitor, _ = fold(history.entries[:-1])
    [announcement] = monitor.apply(*history.entries[-1])
    assert decode_envelope(encode(announcement)) == announcement


def test_a_new_epoch_begins_at_its_own_step():
    history = History()
    history.add(committed(105, "state_dict", registration(expected=0)))
    history.add(RunResumed(step=100), by="second", epoch=2)
    assert history.fold()[0].state.trainer_step == 100


def test_an_event_of_a_later_contract_leaves_no_gap():
    """Invariants 2 and 4."""
    history = History()
    history.add(started(1), by="actor")
    history.add(finished(1), by="actor", sequence=3)
    monitor, _ = fold(history.entries[:-1])
    producer = history.entries[-1][1].producer
    sender = Sender(run_id="history", producer=producer, sequence=2)
    monitor.set_aside("1500-0", UnknownEventType("unknown", sender))
    monitor.apply("2000-0", history.entries[-1][1])
    assert monitor.state.anomaly_counts == {"undecodable": 1}


def test_explain_names_who_is_missing():
    history = History()
    history.add(committed(4, "state_dict", registration(expected=2)))
    history.add(started(4, "a", rank=1))
    history.add(finished(4, "b", rank=0))
    publish = History()
    publish.add(opened(4, 0, 1))
    publish.add(part(4, rank=0))
    text = explain(history.fold()[0].state, 4)
    assert text == (
        "Step 4 state_dict waits for 1 of 2 saves: model of actor-1 (started 0.0 s ago); "
        "committed 0.0 s ago."
    )
    assert "the part of rank 1" in explain(publish.fold()[0].state, 4)
    assert "Nothing is known of step 9" in explain(history.fold()[0].state, 9)


def test_of_many_that_are_missing_some_are_named_and_all_by_whoever_asks_for_them():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=2048)))
    history.add(opened(2, *range(2048)))
    for rank in range(2048):
        history.add(started(1, f"save-{rank}", rank=rank), by="actor", rank=rank)
    state = history.fold()[0].state
    for step, tells, last in (
        (1, "of actor-7 (started 2.0 s ago); and 2040 more; committed", "of actor-2047 (started"),
        (2, "the part of rank 0, 1, 2, 3, 4, 5, 6, 7, and 2040 more.", " 2046, 2047."),
    ):
        text = explain(state, step)
        assert tells in text
        assert len(text) < 500
        assert last in explain(state, step, named=None)


def test_ranks_that_name_their_own_saves_are_not_all_looked_at_when_one_finishes(monkeypatch):
    history, ranks, looked = History(), 200, []
    for rank in range(ranks):
        named = Registration(
            registration_id=f"r{rank}", kind="state_dict", expected=1, slots=(slot(1, rank=rank),)
        )
        history.add(ThreadCountRegistered(step=1, registration=named))
    history.add(committed(1, "state_dict"))
    for rank in range(ranks):
        history.add(finished(1, f"save-{rank}", rank=rank), by="actor", rank=rank)
    monkeypatch.setattr(
        completeness, "slot_key", lambda slot: looked.append(slot) or slot_key(slot)
    )
    assert [type(event) for event in history.fold()[1]] == [StepReady]
    assert len(looked) < 4 * ranks


def requested(step, save_id="a", **at):
    return SaveRequested(save_id=save_id, slot=slot(step, **at))


def progressed(step, nbytes, save_id="a", **at):
    return SaveProgressed(save_id=save_id, slot=slot(step, **at), bytes=nbytes)


def expired(step, *save_ids, **at):
    return LeaseExpired(
        holder=Producer(role="actor", rank=at.get("rank", 0), node="host-7", incarnation="x"),
        lease=30.0,
        attempts=tuple(
            ExpiredAttempt(save_id=save_id, slot=slot(step, **at)) for save_id in save_ids
        ),
    )


def deadline(step, kind="state_dict"):
    return DeadlineReached(step=step, kind=kind, seconds=60.0)


def detached(group, pending=0):
    return ConsumerDetached(
        group=group, stream="announcements", position="1001-0", pending=pending, idle=900.0
    )


def applied(step, epoch=1):
    return WeightsApplied(
        version=StepRef(epoch, step),
        digest=DIGEST,
        bytes=8,
        verified_at=1.0,
        phases=AppliedPhases(fetch=0.5, pause=0.25),
    )


def only_slot(monitor, step=1, kind="state_dict"):
    [status] = monitor.state.steps[step].kinds[kind].slots.values()
    return status


def test_the_fold_bears_every_event_and_takes_announcements_from_nobody():
    assert set(_HANDLERS) == set(EVENT_TYPES) - set(ANNOUNCEMENT_TYPES), "see _HANDLERS of fold.py"
    history = History()
    grant = SaveGranted(epoch=1, save_id="a", slot=slot(1), caused_by="1-0", lease=30.0)
    history.add(grant, by="impostor")
    monitor, announcements = history.fold()
    assert announcements == []
    assert monitor.state.anomaly_counts == {"announcement-among-events": 1}
    assert monitor.state.steps == {}


def test_a_grant_answers_one_attempt_and_is_not_what_subscribers_begin_with():
    grant = SaveGranted(epoch=1, save_id="a", slot=slot(1), caused_by="1-0", lease=30.0)
    failure = StepFailed(epoch=1, step=1, kind="weights", caused_by="1-0", reason="")
    history = History()
    for event, standing in ((grant, False), (failure, True)):
        history.add(event)
        envelope = msgspec.structs.replace(history.entries[-1][1], producer=MONITOR)
        assert is_current(envelope, history.fold()[0].state) is standing


@pytest.mark.parametrize("opening", [RunOpened(), RunResumed(step=2)])
def test_what_stands_does_not_depend_on_where_batches_end(opening):
    """Invariant 1."""
    history = History()
    for step in (1, 2, 3):  # of which the first is retired
        publish_weights(history, step)
    history.add(failed(4))
    history.add(opening, by="another", epoch=2)
    history.add(failed(5), by="another", epoch=2)
    results = [committed_in_batches(history.entries, size) for size in range(1, 15)]
    assert "version-retired/weights" in results[0] and "step-failed/state_dict" in results[0]
    assert all(result == results[0] for result in results)


def committed_in_batches(entries, size):
    """What a server has as the newest of each subject at the end."""
    monitor, current = Monitor(MonitorState(run_id=RUN)), {}
    for start in range(0, len(entries), size):
        epoch = monitor.state.epoch
        made = [
            announcement
            for entry in entries[start : start + size]
            for announcement in monitor.apply(*entry)
        ]
        for gone in OF_AN_EPOCH if monitor.state.epoch != epoch else ():
            current.pop(gone, None)
        named = zip(newest_subjects(made, monitor.state), made, strict=True)
        current.update((name, announcement) for name, announcement in named if name)
    return current


def test_a_whole_life_of_a_save_under_a_strategy_is_no_anomaly():
    history = History()
    history.add(committed(1, "state_dict", registration()))
    for event in (requested(1), started(1), progressed(1, 4), finished(1)):
        history.add(event, by="actor")
    monitor, announcements = history.fold()
    assert ready(announcements) == [("state_dict", 1)]
    assert monitor.state.anomaly_counts == {}
    status = only_slot(monitor)
    assert (status.waiting, status.running, status.progress, status.failed) == ({}, {}, {}, {})


def test_a_request_waits_in_its_slot_until_its_attempt_starts_or_ends():
    for event, waits in ((None, ["a"]), (started(1), []), (failed(1), []), (expired(1, "a"), [])):
        history = History()
        history.add(requested(1), by="actor")
        if event is not None:
            history.add(event, by="actor")
        monitor, _ = history.fold()
        assert list(only_slot(monitor).waiting) == waits


def test_a_request_of_an_attempt_that_is_further_changes_nothing():
    for earlier in (started(1), finished(1)):
        history = History()
        history.add(earlier, by="one")
        history.add(requested(1), by="two")
        assert only_slot(history.fold()[0]).waiting == {}


def test_requests_at_one_slot_are_bounded():
    history = History()
    for number in range(3 * KEPT_ATTEMPTS):
        history.add(requested(1, f"attempt-{number}"))
    waiting = list(only_slot(history.fold()[0]).waiting)
    assert waiting == [f"attempt-{2 * KEPT_ATTEMPTS + number}" for number in range(KEPT_ATTEMPTS)]


def test_attempts_at_one_slot_that_nobody_ends_are_bounded():
    """Invariant 5."""
    history = History()
    for number in range(3 * KEPT_ATTEMPTS):
        history.add(started(1, f"attempt-{number}"))  # of which no lease tells that it died
        history.add(progressed(1, 100, f"attempt-{number}"))
    status = only_slot(history.fold()[0])
    newest = [f"attempt-{2 * KEPT_ATTEMPTS + number}" for number in range(KEPT_ATTEMPTS)]
    assert (list(status.running), list(status.progress)) == (newest, newest)


def test_explain_tells_who_waits_for_its_turn_and_how_far_the_others_are():
    history = History()
    history.add(committed(4, "state_dict", registration(expected=3)))
    history.add(started(4, "a", rank=0))
    history.add(progressed(4, 1_000_000, "a", rank=0))
    history.add(requested(4, "b", rank=1))
    history.add(failed(4, "c", rank=2))
    text = explain(history.fold()[0].state, 4)
    assert (
        "a retry still needs 3 of 3 saves: model of actor-0 (started 0.0 s ago, 1,000,000 bytes"
        in text
    )
    assert "model of actor-1 (waiting for its turn for 0.0 s); model of actor-2 (failed)" in text


def test_progress_counts_only_while_its_attempt_runs_and_proves_nothing():
    history = History()
    history.add(progressed(1, 1))
    assert history.fold()[0].state.steps == {}
    history.add(committed(1, "state_dict", registration()))
    history.add(started(1))
    history.add(progressed(1, 8))
    history.add(progressed(1, 9, "another"))
    monitor, announcements = history.fold()
    assert only_slot(monitor).progress == {"a": 8}
    assert ready(announcements) == []
    history.add(failed(1))
    history.add(progressed(1, 16))
    assert only_slot(history.fold()[0]).progress == {}


def test_a_lapsed_lease_fails_its_attempts_and_their_steps_with_a_reason():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=2)))
    history.add(started(1, "a", rank=3))
    cause = history.add(expired(1, "a", rank=3), by="reducer")
    monitor, announcements = history.fold()
    [failure] = of(announcements, StepFailed)
    assert failure.caused_by == cause
    assert failure.reason == (
        "model of actor-3 for state_dict step 1 failed: "
        "nothing was heard of actor-3 on host-7 for 30 s"
    )
    status = only_slot(monitor)
    assert (status.running, list(status.failed)) == ({}, ["a"])
    assert monitor.state.anomaly_counts == {}


def test_an_attempt_that_finishes_after_its_lease_counts_if_its_slot_has_no_other():
    history = History()
    history.add(committed(1, "state_dict", registration()))
    history.add(started(1, "a"))
    history.add(expired(1, "a"))
    history.add(finished(1, "a"))
    monitor, announcements = history.fold()
    assert [type(event) for event in announcements] == [StepFailed, StepReady]
    assert only_slot(monitor).proof.save_id == "a"
    other = History()
    other.add(committed(1, "state_dict", registration()))
    other.add(expired(1, "a"))
    other.add(finished(1, "b"))
    other.add(finished(1, "a"))
    monitor, announcements = other.fold()
    assert [type(event) for event in announcements] == [StepFailed, StepReady]
    assert only_slot(monitor).proof.save_id == "b"
    assert monitor.state.anomaly_counts == {"late-attempt": 1}


def test_a_lease_that_lapses_after_the_finish_changes_nothing():
    history = History()
    history.add(finished(1, "a"))
    history.add(expired(1, "a"))
    history.add(expired(1))
    history.add(committed(1, "state_dict", registration()))
    assert [type(event) for event in history.fold()[1]] == [StepReady]


def test_a_start_that_comes_after_its_lease_lapsed_does_not_run():
    history = History()
    history.add(expired(1, "a"), by="reducer")
    history.add(started(1, "a"), by="actor")
    assert only_slot(history.fold()[0]).running == {}


def test_what_an_attempt_said_of_its_failure_outlasts_its_lease():
    history = History()
    history.add(failed(1, "a"))
    history.add(expired(1, "a"))
    assert "disk full" in only_slot(history.fold()[0]).failed["a"]


def test_two_leaders_may_say_that_a_lease_lapsed():
    history = History()
    history.add(started(1, "a"), by="actor")
    history.add(expired(1, "a"), by="reducer", rank=0)
    once, _ = history.fold()
    history.add(expired(1, "a"), by="reducer", rank=1)
    twice, announcements = history.fold()
    assert len(of(announcements, StepFailed)) == 1
    assert twice.state.steps == once.state.steps


def test_a_deadline_fails_what_is_committed_and_lists_what_is_missing():
    both = registration("state_dict"), registration("checkpoint", 2)
    history = History()
    history.add(committed(5, "checkpoint", *both))
    history.add(finished(5, "a", kind="checkpoint", rank=0))
    history.add(started(5, "b", kind="checkpoint", rank=1))
    history.add(deadline(5, "checkpoint"), by="reducer")
    monitor, announcements = history.fold()
    [failure, resting] = of(announcements, StepFailed)
    assert (failure.kind, resting.kind) == ("checkpoint", "state_dict")
    assert failure.kind == "checkpoint"
    assert failure.reason == (
        "checkpoint of step 5 was not complete 60 s after its commit: it lacks 1 of 2 saves: "
        "model of actor-1 (started 0.0 s ago), 1 of 1 saves of its state dict"
    )
    history.add(finished(5, "b", kind="checkpoint", rank=1))
    history.add(finished(5, "c", kind="state_dict"))
    assert ready(history.fold()[1]) == [("state_dict", 5), ("checkpoint", 5)]
    assert monitor.state.anomaly_counts == {}


def test_a_deadline_names_slots_that_nobody_spoke_of():
    named = Registration(
        registration_id="r", kind="state_dict", expected=2, slots=(slot(1), slot(1, rank=1))
    )
    history = History()
    history.add(finished(1, "x", rank=7))
    history.add(finished(1, "y", rank=0))
    history.add(committed(1, "state_dict", named))
    history.add(deadline(1))
    [failure] = of(history.fold()[1], StepFailed)
    assert failure.reason.endswith("lacks 1 of 3 saves: model of actor-1 (not started)")


def test_a_deadline_of_weights_names_the_ranks_without_a_part():
    history = History()
    history.add(opened(3, 0, 1, 2))
    history.add(part(3, rank=1))
    history.add(committed(3, "weights"))
    history.add(deadline(3, "weights"))
    [failure] = of(history.fold()[1], StepFailed)
    assert failure.reason.endswith("it lacks the part of rank 0, 2")


def test_a_deadline_of_what_is_ready_failed_uncommitted_or_unknown_changes_nothing():
    history = History()
    history.add(committed(1, "state_dict", registration(expected=0)))
    history.add(committed(2, "state_dict", registration()))
    history.add(failed(2))
    history.add(started(3))
    before, said_before = history.fold()
    for step in (1, 2, 3, 4):
        history.add(deadline(step), by="reducer")
    monitor, announcements = history.fold()
    assert announcements == said_before
    assert monitor.state.steps == before.state.steps
    assert monitor.state.anomaly_counts == {}


def test_a_reason_is_cut_to_what_an_announcement_may_carry():
    slots = tuple(slot(1, rank=rank) for rank in range(1000))
    named = Registration(registration_id="r", kind="state_dict", expected=1000, slots=slots)
    history = History()
    history.add(committed(1, "state_dict", named))
    history.add(deadline(1))
    monitor, _ = fold(history.entries[:-1])
    [announcement] = monitor.apply(*history.entries[-1])
    assert decode_envelope(encode(announcement)) == announcement


def test_what_explorers_ask_for_stands_until_they_have_it():
    history = History()
    history.add(SyncRequested(oldest_version=StepRef(1, 4)), by="explorer", epoch=0)
    monitor, _ = history.fold()
    explorer = monitor.state.explorers["explorer-0"]
    assert (explorer.requested_version, explorer.requested_at) == (StepRef(1, 4), 1001)
    history.add(applied(3), by="explorer", epoch=0)
    assert history.fold()[0].state.explorers["explorer-0"].requested_version == StepRef(1, 4)
    history.add(applied(5), by="explorer", epoch=0)
    served = history.fold()[0].state.explorers["explorer-0"]
    assert (served.requested_version, served.requested_at) == (None, None)
    assert history.fold()[0].state.anomaly_counts == {}


def test_a_version_that_an_explorer_missed_stands_until_it_has_it():
    history = History()
    history.add(ResendRequested(version=StepRef(1, 4)), by="explorer", epoch=0)
    assert history.fold()[0].state.explorers["explorer-0"].requested_version == StepRef(1, 4)
    history.add(applied(4), by="explorer", epoch=0)
    served = history.fold()[0].state.explorers["explorer-0"]
    assert (served.requested_version, served.requested_at) == (None, None)


def test_a_request_for_any_newer_version_is_answered_by_the_next_one():
    history = History()
    history.add(SyncRequested(), by="explorer")
    history.add(applied(1), by="explorer")
    assert history.fold()[0].state.explorers["explorer-0"].requested_at is None


def test_explorers_are_bounded_and_the_longest_silent_goes_first():
    history = History()
    history.add(SyncRequested(), by="explorer", rank=0)
    history.add(SyncRequested(), by="explorer", rank=1)
    history.add(SyncRequested(), by="explorer", rank=0)
    for rank in range(2, KEPT_EXPLORERS + 1):
        history.add(SyncRequested(), by="explorer", rank=rank)
    explorers = history.fold()[0].state.explorers
    assert len(explorers) == KEPT_EXPLORERS
    assert "explorer-0" in explorers
    assert "explorer-1" not in explorers


def test_explorers_beyond_the_limit_are_counted_and_named_by_their_ranks():
    history = History()
    for rank in range(KEPT_EXPLORERS + 4):
        history.add(SyncRequested(), by="explorer", rank=rank)
    state = history.fold()[0].state
    assert state.unlisted_explorers == [(0, 3)]
    history.add(SyncRequested(), by="explorer", rank=2)  # drops the next one
    state = history.fold()[0].state
    assert "explorer-2" in state.explorers
    assert len(state.explorers) == KEPT_EXPLORERS
    assert state.unlisted_explorers == [(0, 1), (3, 4)]
    printed = io.StringIO()
    Console(width=200, file=printed).print(status_panel(state))
    assert "4 more explorers are not listed" in printed.getvalue()
    assert "0 to 1, 3 to 4" in printed.getvalue()


def test_a_detached_consumer_is_remembered_whatever_the_epoch():
    history = History()
    history.add(detached("eval"), by="reducer", epoch=0)
    history.add(RunOpened(), by="second", epoch=2)
    last = history.add(detached("eval", pending=3), by="reducer", epoch=1)
    monitor, announcements = history.fold()
    assert announcements == []
    assert monitor.state.anomaly_counts == {}
    [(name, consumer)] = monitor.state.detached.items()
    assert name == "announcements/eval"
    assert (consumer.entry_id, consumer.pending, consumer.idle) == (last, 3, 900.0)


def test_the_last_profiles_are_kept_with_their_ranks_and_told_of_their_step():
    history = History()
    for step in range(1, KEPT_PROFILES + 3):
        for rank in (0, 1):
            path = f"profiles/{step}-actor-{rank}.json.gz"
            history.add(ProfileWritten(step=step, path=path), by="actor", rank=rank)
    state = history.fold()[0].state
    assert len(state.profiles) == KEPT_PROFILES
    last = KEPT_PROFILES + 2
    assert [(profile.step, profile.path) for profile in state.profiles[-2:]] == [
        (last, f"profiles/{last}-actor-0.json.gz"),
        (last, f"profiles/{last}-actor-1.json.gz"),
    ]
    assert format_profiles(state, 1) == []
    assert all(
        f"profiled step {last}: profiles/{last}-" in line for line in format_profiles(state, last)
    )


def test_detached_consumers_are_bounded():
    history = History()
    for number in range(3 * KEPT_DETACHED):
        history.add(detached(f"group-{number}"))
    consumers = history.fold()[0].state.detached
    assert len(consumers) == KEPT_DETACHED
    assert f"announcements/group-{3 * KEPT_DETACHED - 1}" in consumers


KINDS = ("state_dict", "checkpoint", "weights")


@st.composite
def histories(draw):
    """Some steps of some kinds, whole, broken off or failing.

    Each process's events keep their order; how the processes' events interleave is drawn.
    """
    trainer, workers = [], []
    for step in draw(st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True)):
        for kind in draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True)):
            ranks = draw(st.integers(1, 3))
            whole = draw(st.booleans())
            if kind == "weights":
                trainer += [opened(step, *range(ranks)), committed(step, kind)]
                workers += [part(step, rank=rank) for rank in range(ranks - (not whole))]
            else:
                expected = registration(kind, ranks)
                trainer.append(ThreadCountRegistered(step=step, registration=expected))
                trainer.append(committed(step, kind, expected))
                for rank in range(ranks - (not whole)):
                    if draw(st.booleans()):
                        workers.append(failed(step, f"f{rank}", kind=kind, rank=rank))
                    if draw(st.booleans()):
                        workers.append(requested(step, f"s{rank}", kind=kind, rank=rank))
                        workers.append(started(step, f"s{rank}", kind=kind, rank=rank))
                        workers.append(progressed(step, 4, f"s{rank}", kind=kind, rank=rank))
                    if draw(st.booleans()):
                        workers.append(expired(step, f"s{rank}", kind=kind, rank=rank))
                    workers.append(finished(step, f"s{rank}", kind=kind, rank=rank))
            if draw(st.booleans()):
                workers.append(deadline(step, kind))
    sent = [(event, "trainer") for event in trainer]
    for number, event in enumerate(draw(st.permutations(workers))):
        sent.insert(draw(st.integers(0, len(sent))), (event, f"worker-{number}"))
    repeats = draw(st.lists(st.integers(0, len(sent) - 1), max_size=5))
    return sent, repeats


def folded(sent, repeats=()):
    history = History()
    for event, by in sent:
        history.add(event, by=by)
    entries = list(history.entries)
    for number in repeats:
        entries.append((f"{5000 + len(entries)}-0", history.entries[number + 1][1]))
    return entries


@settings(max_examples=200, deadline=None)
@given(histories())
def test_order_decides_neither_what_is_complete_nor_where_pointers_end(drawn):
    sent, repeats = drawn
    monitor, announcements = fold(folded(sent, repeats))
    # The trainer first, then the workers: sorting is stable.
    straight, _ = fold(folded(sorted(sent, key=lambda pair: pair[1] != "trainer")))
    assert {kind: pointer.at for kind, pointer in monitor.state.ready.items()} == {
        kind: pointer.at for kind, pointer in straight.state.ready.items()
    }
    complete = {
        (e.kind, e.step) for e in announcements if isinstance(e, StepReady | StepSuperseded)
    }
    for event_type in (StepReady, StepFailed, StepSuperseded):
        named = [(event.kind, event.step) for event in of(announcements, event_type)]
        assert len(named) == len(set(named)), "announced twice"
    assert complete == {
        (kind, step)
        for step, state in straight.state.steps.items()
        for kind, kind_state in state.kinds.items()
        if kind_state.outcome is not None
    }
    for kind in KINDS:
        steps = [event.step for event in of(announcements, StepReady) if event.kind == kind]
        assert steps == sorted(steps), "a pointer went back"


@settings(max_examples=100, deadline=None)
@given(histories(), st.integers(0, 40))
def test_a_snapshot_at_any_entry_goes_on_as_the_live_fold_does(drawn, cut):
    entries = folded(*drawn)
    live, announcements = fold(entries)
    first, said_before = fold(entries[:cut])
    resumed = type(first)(decode_state(encode_state(first.state)))
    said_after = [
        announcement.event for entry in entries[cut:] for announcement in resumed.apply(*entry)
    ]
    assert said_before + said_after == announcements
    assert resumed.state == live.state


@settings(max_examples=50, deadline=None)
@given(histories())
def test_a_replay_announces_the_very_same_bytes(drawn):
    entries = folded(*drawn)

    def announce():
        monitor, _ = fold([])
        return [encode(announcement) for entry in entries for announcement in monitor.apply(*entry)]

    assert announce() == announce()


def test_state_encodes_to_json_for_programs():
    history = History()
    publish_weights(history, 1)
    msgspec.json.encode(msgspec.to_builtins(history.fold()[0].state, str_keys=True))


@pytest.mark.parametrize("events", [200, 400])
def test_state_does_not_grow_with_the_run(events):
    history = History()
    for step in range(events):
        publish_weights(history, step)
    monitor, _ = history.fold()
    assert len(encode_state(monitor.state)) < 40_000


def rests(*, fails_first):
    """A checkpoint that rests on a state dict of which one save fails, before or after it."""
    history = History()
    history.add(ThreadCountRegistered(step=1, registration=registration("state_dict", 1)))
    if fails_first:
        history.add(failed(1, "broken"), by="worker")
    history.add(committed(1, "checkpoint", registration("checkpoint", 0)))
    if not fails_first:
        history.add(failed(1, "broken"), by="worker")
    return history


@pytest.mark.parametrize("fails_first", [True, False])
def test_a_checkpoint_fails_with_the_state_dict_that_it_rests_on(fails_first):
    history = rests(fails_first=fails_first)
    failures = [
        (event.kind, event.reason) for event in history.fold()[1] if isinstance(event, StepFailed)
    ]
    assert sorted(kind for kind, _ in failures) == ["checkpoint", "state_dict"]
    assert len({reason for _, reason in failures}) == 1
    history.add(finished(1, "again"), by="worker")
    ready = [event.kind for event in history.fold()[1] if isinstance(event, StepReady)]
    assert ready == ["state_dict", "checkpoint"]


def test_a_state_dict_without_a_commit_of_its_own_shares_its_checkpoints_deadline():
    history = History()
    history.add(ThreadCountRegistered(step=1, registration=registration("state_dict", 1)))
    history.add(committed(1, "checkpoint", registration("checkpoint", 0)))
    history.add(DeadlineReached(step=1, kind="checkpoint", seconds=5.0), by="reducer")
    kinds = [event.kind for event in history.fold()[1] if isinstance(event, StepFailed)]
    assert kinds == ["checkpoint", "state_dict"]


def test_a_step_that_is_saved_again_is_ready_when_one_folder_holds_all_of_it():
    history = History()
    history.add(committed(1, "checkpoint", registration("checkpoint", 2)))
    history.add(finished(1, "a0", ".staging/a/0", kind="checkpoint", rank=0), by="w", rank=0)
    history.add(failed(1, "a1", kind="checkpoint", rank=1), by="w", rank=1)
    history.add(finished(1, "b1", ".staging/b/1", kind="checkpoint", rank=1), by="w", rank=1)
    state = history.fold()[0].state
    assert "one folder with all of its saves, not .staging/a, .staging/b" in explain(state, 1)
    history.add(finished(1, "b0", ".staging/b/0", kind="checkpoint", rank=0), by="w", rank=0)
    [ready] = [event for event in history.fold()[1] if isinstance(event, StepReady)]
    assert (ready.path, [save.save_id for save in ready.saves]) == (".staging/b", ["b0", "b1"])


def test_opening_a_run_again_makes_no_checkpoint_removable():
    history = History()
    for step in (10, 20, 30, 40):
        history.add(finished(step, f"s{step}", kind="checkpoint"), by="worker")
        history.add(committed(step, "checkpoint", registration("checkpoint", 1)))
    history.add(RunOpened(), epoch=2)
    assert removable_steps(history.fold()[0].state, verified(1, 10, 20, 30, 40), 3) == []

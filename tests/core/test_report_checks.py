"""Checks of reports: what an explorer may say, and nothing else."""

import math

import pytest
from msgspec import structs

from tests.support.errors import raises
from tests.support.event_histories import started
from tests.support.event_samples import SAMPLES
from trinity_events.core.decisions.report_checks import ReportRefused, check_report
from trinity_events.log.publishing.publisher import EnvelopeFactory
from trinity_schemas import (
    EVENT_TYPES,
    MAX_REPORT_BYTES,
    REPORT_TYPES,
    AppliedPhases,
    Envelope,
    ExplorerStatusChanged,
    ForeignEvent,
    MessageTooLarge,
    MessageUndecodable,
    PhasesMeasured,
    Producer,
    RewardErrorReported,
    StacksTaken,
    StepRef,
    WaitEnded,
    WaitStarted,
    WeightsApplied,
    encode,
    event_tag,
    reporter_incarnation,
)

RUN = "reports"
EXPLORER = Producer(
    role="explorer", rank=3, node="host", incarnation=reporter_incarnation(3, "5eed")
)


def report(event, producer=EXPLORER, **fields):
    envelope = Envelope(
        run_id=RUN, epoch=1, producer=producer, sequence=1, occurred_at=1.0, event=event
    )
    return encode(structs.replace(envelope, **fields))


def applied(fetch=0.5):
    return WeightsApplied(
        version=StepRef(1, 1),
        digest="sha256:" + "0" * 64,
        bytes=1,
        verified_at=1.0,
        phases=AppliedPhases(fetch=fetch, pause=0.1),
    )


@pytest.mark.parametrize("event_type", sorted(REPORT_TYPES, key=event_tag), ids=event_tag)
def test_an_explorer_reports_each_event_of_its_own(event_type):
    event = next(sample for sample in SAMPLES if type(sample) is event_type)
    if isinstance(event, WaitStarted | WaitEnded):
        event = structs.replace(event, wait_id=f"{EXPLORER.incarnation}-1")
    check_report(report(event), RUN)


@pytest.mark.parametrize(
    "event_type", sorted(set(EVENT_TYPES) - REPORT_TYPES, key=event_tag), ids=event_tag
)
def test_no_other_event_is_a_report(event_type):
    event = next(sample for sample in SAMPLES if type(sample) is event_type)
    with raises(ReportRefused, fault="type", tag=event_tag(event)):
        check_report(report(event), RUN)


RUNNING = ExplorerStatusChanged(status="running")
OTHER_WAIT = "0123456789abcdef-1"
REFUSED = {
    "another run": (report(RUNNING, run_id="other"), ForeignEvent, {"run_id": "other"}),
    "the trainer's role": (
        report(RUNNING, structs.replace(EXPLORER, role="trainer")),
        ReportRefused,
        {"fault": "producer"},
    ),
    "the trainer's incarnation": (
        report(RUNNING, structs.replace(EXPLORER, incarnation="0123456789abcdef")),
        ReportRefused,
        {"fault": "producer"},
    ),
    "the incarnation of another explorer": (
        report(RUNNING, structs.replace(EXPLORER, rank=30)),
        ReportRefused,
        {"fault": "producer"},
    ),
    "the start of another process's wait": (
        report(WaitStarted(wait_id=OTHER_WAIT, what="nothing")),
        ReportRefused,
        {"fault": "wait", "wait_id": OTHER_WAIT},
    ),
    "the end of another process's wait": (
        report(WaitEnded(wait_id=OTHER_WAIT, outcome="over")),
        ReportRefused,
        {"fault": "wait", "wait_id": OTHER_WAIT},
    ),
    "a time that is no number": (
        report(RUNNING, occurred_at=math.nan),
        ReportRefused,
        {"fault": "number"},
    ),
    "a sum of seconds that is infinite": (
        report(PhasesMeasured(seconds={"idle": math.inf}, phase="idle")),
        ReportRefused,
        {"fault": "number"},
    ),
    "an infinite phase": (
        report(applied(fetch=math.inf)),
        ReportRefused,
        {"fault": "number"},
    ),
    "too many bytes": (
        report(RUNNING, producer=EXPLORER) + b"\0" * MAX_REPORT_BYTES,
        MessageTooLarge,
        {"limit": MAX_REPORT_BYTES},
    ),
    "no envelope": (b"\xff", MessageUndecodable, {"expected": "an event envelope"}),
    "nothing": (b"", MessageUndecodable, {"expected": "MessagePack"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_report_is_refused_for(what):
    payload, error, attributes = REFUSED[what]
    with raises(error, **attributes):
        check_report(payload, RUN)


def test_an_explorer_is_told_before_it_sends_what_is_no_report():
    factory = EnvelopeFactory(RUN, 1, EXPLORER)
    with raises(ReportRefused, fault="publisher", tag="save-started"):
        factory.next(started(1))
    check_report(factory.next(RUNNING), RUN)


def test_the_largest_report_of_our_own_is_within_the_limit():
    stacks = StacksTaken(process="p" * 256, node="n" * 256, pid=1, stacks="\N{SNOWMAN}" * 16_384)
    assert len(report(stacks)) < MAX_REPORT_BYTES
    error = next(sample for sample in SAMPLES if isinstance(sample, RewardErrorReported))
    bounds = {"message": 8192, "traceback": 8192, "prompt": 4096, "response": 4096}
    longest = {name: "\N{SNOWMAN}" * bound for name, bound in bounds.items()}
    check_report(report(structs.replace(error, **longest)), RUN)

"""The demo's run: its phases and tokens add up, and its alarms follow from its metrics."""

from collections import defaultdict

from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.log import position
from trinity_schemas import (
    AlarmCleared,
    AlarmRaised,
    EnvelopeReader,
    MessageUndecodable,
    PhasesMeasured,
    StepTrained,
)


def test_the_seconds_of_processes_are_their_ages_and_the_tokens_those_of_the_steps():
    decode, starts, sampled, decided = EnvelopeReader().decode, defaultdict(list), {}, 0
    alarms: list[str] = []
    for entry in simulated_run(Plan()):
        try:
            envelope = decode(entry.payload)
        except MessageUndecodable:
            continue
        event, incarnation = envelope.event, envelope.producer.incarnation
        if isinstance(event, PhasesMeasured):
            at = position(entry.id)[0] / 1000
            starts[incarnation].append(at - sum(event.seconds.values()))
            if envelope.epoch == 2:
                sampled[incarnation] = event.tokens.get("sampled", 0)
        elif isinstance(event, StepTrained) and envelope.epoch == 2:
            decided += sum(event.tokens.values())
        elif isinstance(event, AlarmRaised):
            alarms.append(event.alarm)
        elif isinstance(event, AlarmCleared):
            alarms.append(f"no {event.alarm}")
    # Two epochs of 64 processes, and an actor that was killed.
    assert len(starts) == 2 * 64 + 1
    assert all(max(times) - min(times) < 0.01 for times in starts.values())
    assert sum(sampled.values()) == decided > 0
    over = ["stalled_step", "no stalled_step", "truncated_answers", "no truncated_answers"]
    assert alarms == [*over, "truncated_answers"]

"""The demo's run: its phases, tokens and samples add up; its alarms follow from its metrics."""

from collections import Counter, defaultdict

from trinity_events.core.alarms import TRUNCATED_ANSWERS
from trinity_events.dashboard.samples import read_for_file
from trinity_events.dashboard.simulated_record import SimulatedRecord
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.log import position
from trinity_schemas import (
    AlarmCleared,
    AlarmRaised,
    EnvelopeReader,
    MessageUndecodable,
    PhasesMeasured,
    RolloutsDispatched,
    StepTrained,
    WeightsApplied,
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


def test_the_samples_are_those_of_the_ledger_and_of_versions_that_their_explorers_applied():
    record, decode = SimulatedRecord(Plan()), EnvelopeReader().decode
    recorded = {(listed.epoch, listed.step): listed for listed in record.list_steps()}
    assert [step for _, step in recorded] == [*range(1, 121)]
    first_version, attempts, applied, oldest = {1: 0, 2: 80}, {}, set(), {}
    for entry in simulated_run(Plan()):
        try:
            envelope = decode(entry.payload)
        except MessageUndecodable:
            continue
        epoch, event, rank = envelope.epoch, envelope.event, envelope.producer.rank
        if isinstance(event, WeightsApplied):
            applied.add((f"explorer-{rank}", epoch, event.version.step))
        elif isinstance(event, RolloutsDispatched):
            attempts |= {again.ordinal: again.attempt for again in event.reissued}
            oldest |= {first: event.oldest.step for first, _ in event.ordinals}
        elif isinstance(event, StepTrained) and (epoch, event.step) in recorded:
            listed = recorded[epoch, event.step]
            trained = record.read(listed)
            check_rows(trained, event.trained, event.tokens["trained"])
            assert Counter(row["staleness"] for row in trained) == Counter(event.staleness)
            rewards = sum(row["reward"] for row in trained)
            assert abs(rewards - event.metrics["reward/mean"] * len(trained)) <= 0.5
            cut = sum(row["is_truncated"] for row in trained)
            assert abs(cut - event.metrics[TRUNCATED_ANSWERS] * len(trained)) <= 0.5
            discarded = record.read(listed, discarded=True)
            assert bool(listed.discarded) == bool(discarded)
            assert {row["fate"] for row in discarded} == {*event.dropped}
            for fate, ranges in event.dropped.items():
                check_rows(discarded, ranges, event.tokens[fate])
            start = oldest[min(event.trained)[0]]
            for row in (*trained, *discarded):
                assert row["attempt"] == attempts.get(row["ordinal"], 1)
                versions = row["versions"]
                assert sum(version["tokens"] for version in versions) == row["completion_tokens"]
                assert row["staleness"] == event.step - 1 - versions[0]["step"]
                for version in versions:
                    assert version["epoch"] == epoch
                    assert start <= version["step"] < event.step
                    name = (row["explorer"], epoch, version["step"])
                    assert version["step"] == first_version[epoch] or name in applied


def check_rows(rows, ranges, tokens):
    """Check that rows are all samples of these ordinals, and that they have this many tokens."""
    ordinals = [ordinal for first, last in ranges for ordinal in range(first, last + 1)]
    names = [(ordinal, sample) for ordinal in ordinals for sample in range(8)]
    assert [(row["ordinal"], row["sample"]) for row in rows] == names
    assert sum(row["completion_tokens"] for row in rows) == tokens


def test_the_texts_and_tokens_of_a_sample_agree():
    samples = read_for_file(SimulatedRecord(Plan()))["samples"].values()
    assert {sample["fate"] for sample in samples} == {"trained", "filtered"}
    for sample in samples:
        [(_, question, _), (_, answer, length)] = sample["turns"]
        assert "".join(sample["tokens"]) == answer and " days?" in question
        columns = ("tokens", "mask", "logprobs")
        assert {len(sample[name]) for name in columns} == {length} == {sample["length"]}
        assert max(sample["logprobs"]) <= 0
        is_trained = sample["fate"] == "trained"
        assert len(sample["trainer_logprobs"]) == len(sample["advantages"]) == length * is_trained
        assert sample["is_truncated"] == (length == 768) == ("so the answer" not in answer)

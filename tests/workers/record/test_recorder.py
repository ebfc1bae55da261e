"""A rank's recorder with its writer, which is a real process."""

import os
import signal
import stat
import textwrap
import time
from contextlib import ExitStack, closing
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

pytest.importorskip("pyarrow")

from tests.support.errors import raises
from tests.support.experiences import group, make_groups
from tests.support.waits import PATIENCE
from trinity_events.diagnostics.waits import NO_REPORTS
from trinity_events.log import ORIGIN, SyncEventLog
from trinity_events.record.columns import SUMMARY_COLUMNS
from trinity_events.record.files import RECORD, list_names, parse_file_name
from trinity_events.record.reader import RecordMissing, RolloutRecord
from trinity_events.server import open_client
from trinity_schemas import PhasesMeasured, StepRef, decode_envelope
from trinity_workers.algorithms.collate import collate
from trinity_workers.record.messages import StepRows, WriterSettings
from trinity_workers.record.recorder import (
    QUEUE_BYTES,
    RecordCounts,
    RecordFailed,
    RolloutRecorder,
    choose_groups,
)
from trinity_workers.record.writer import RecordWriter

pytestmark = pytest.mark.processes


@pytest.fixture
def record(make_config):
    """Return a function that opens a recorder and the reader of its files."""
    opened, exits = [], ExitStack()

    def open_one(rank=0, ranks=1, queue_bytes=QUEUE_BYTES, **settings):
        config = make_config(record=settings, trainer={"ranks": ranks}, sync={"timeout": PATIENCE})
        log = SyncEventLog(open_client(config.redis_url), config.run_id)
        exits.enter_context(closing(log))
        opened.append(RolloutRecorder(config, rank, NO_REPORTS, log=log, queue_bytes=queue_bytes))
        return opened[-1], RolloutRecord(config.checkpoint_folder, config.run_id)

    yield open_one
    for recorder in opened:
        if recorder._process.poll() is None:
            os.kill(recorder._process.pid, signal.SIGCONT)
        recorder.close()
    exits.close()


def batch_with_advantages(groups):
    batch = collate(groups, 0)
    values = torch.rand(batch.response_mask.shape)
    return replace(
        batch, advantages=values.masked_fill(~batch.response_mask, 0.0), logprobs=-values
    )


def test_every_sample_is_on_disk_to_the_bit_before_the_step_returns(record, run_id):
    """Invariant 2."""
    recorder, reader = record(rollouts="all")
    groups = make_groups(run_id, 3)
    batch = batch_with_advantages(groups)
    recorder.add(7, groups, batch)
    step = reader.find_step(7)
    rows = reader.read(step, None)
    samples = [sample for group in groups for sample in group]
    assert [(row["ordinal"], row["sample"]) for row in rows] == [
        (sample.ordinal, sample.sample) for sample in samples
    ]
    for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        prompt, answer = sample.turns
        length = len(answer.tokens)
        assert row["prompt_ids"] == [*prompt.tokens]
        assert row["completion_ids"] == [*answer.tokens]
        assert row["completion_mask"] == [True] * length
        recorded = np.array(row["logprobs"], np.float32)
        assert recorded.tobytes() == bytes(answer.logprobs.data)
        advantages = np.array(row["advantages"], np.float32)
        assert (advantages == batch.advantages[index, :length].numpy()).all()
        assert (-advantages == np.array(row["trainer_logprobs"], np.float32)).all()
        assert row["versions"] == [{"epoch": 1, "step": 0, "tokens": length}]
        assert (row["reward"], row["staleness"], row["step"]) == (sample.reward, 6, 7)
        assert row["turns"][1]["role"] == "policy" and row["completion"]
    assert recorder.counts == RecordCounts()


def test_files_are_of_the_user_alone(record, run_id):
    recorder, reader = record(rollouts="all")
    recorder.add(1, make_groups(run_id, 1), None)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in reader.folder.iterdir()}
    assert set(modes.values()) == {0o600} and len(modes) == 2
    assert stat.S_IMODE(reader.folder.stat().st_mode) == 0o700


def test_the_oldest_steps_are_removed_first_and_counted(record, run_id):
    recorder, reader = record(rollouts="all", max_steps=2)
    for step in (1, 2, 3, 4):
        recorder.add(step, make_groups(run_id, step, count=1), None)
    assert [step.step for step in reader.list_steps()] == [3, 4]
    assert recorder.counts.removed_steps == 2
    with raises(RecordMissing, fault="step", step=1, recorded=(3, 4)):
        reader.find_step(1)


def test_a_step_of_discarded_answers_in_several_files_counts_as_one(
    run_id, tmp_path, policy_folder
):
    settings = WriterSettings(
        run_id=run_id,
        epoch=1,
        resumed_step=0,
        folder=str(tmp_path),
        model_folder=str(policy_folder),
        rank=None,
        ranks=1,
        max_bytes=1 << 30,
        max_steps=2,
    )
    writer = RecordWriter(settings)
    [samples] = make_groups(run_id, 1, count=1)
    rows = [msgspec.msgpack.encode(sample) for sample in samples]
    removed = [
        writer.write(StepRows(step=step, experiences=rows)).removed
        for step in (1, 1, 2, 1, 2, 3, 3, 4)
    ]
    assert removed == [(), (), (), (), (), (1,), (), (2,)]
    files = [parse_file_name(name) for name in list_names(tmp_path)]
    assert sorted(file.step for file in files if file is not None) == [3, 3, 4]


def test_the_newest_step_stays_whatever_its_bytes_are(record, run_id):
    recorder, reader = record(rollouts="all", max_bytes=1)
    for step in (1, 2):
        recorder.add(step, make_groups(run_id, step, count=1), None)
    assert [step.step for step in reader.list_steps()] == [2]


async def test_the_seconds_of_a_writer_are_reported_to_its_end(record, run_id, log):
    began = time.monotonic()
    recorder, _ = record(rank=0, rollouts="all")
    recorder.add(1, make_groups(run_id, 1, count=1), None)
    recorder.close()
    age = time.monotonic() - began
    envelopes = [decode_envelope(entry.payload) for entry in await log.read(ORIGIN, limit=100)]
    reports = [each.event for each in envelopes if isinstance(each.event, PhasesMeasured)]
    last = reports[-1]
    assert last.is_last and last.cores == 0
    assert min(last.seconds[phase] for phase in ("starting", "writing", "waiting-samples")) > 0
    assert sum(last.seconds.values()) <= age
    # The rest of the age is the start of the process itself, and the close of its reports.
    assert {(each.producer.role, each.producer.rank) for each in envelopes[1:]} == {("writer", 0)}


def test_a_sample_never_waits_and_counts_what_it_drops(record, run_id):
    """Invariant 1."""
    recorder, reader = record(rollouts="sample", queue_bytes=1)
    os.kill(recorder._process.pid, signal.SIGSTOP)
    groups = make_groups(run_id, 1, count=2)
    recorder.add(1, groups, None)  # one step has room whatever its size
    recorder.add(2, groups, None)
    assert recorder.counts.dropped_samples == 8
    os.kill(recorder._process.pid, signal.SIGCONT)
    recorder.close()
    assert [step.step for step in reader.list_steps()] == [1]


def test_a_writer_that_is_killed_ends_all_and_is_counted_in_a_sample(record, run_id):
    """Invariant 4."""
    groups = make_groups(run_id, 1, count=2)
    recorder, _ = record(rollouts="all")
    recorder.add(1, groups, None)
    os.kill(recorder._process.pid, signal.SIGKILL)
    with raises(RecordFailed, run_id=run_id, rank=0):
        recorder.add(2, groups, None)
    recorder, _ = record(rollouts="sample")
    os.kill(recorder._process.pid, signal.SIGKILL)
    recorder.add(1, groups, None)
    recorder.close()
    assert recorder.counts.dropped_samples == 8


def test_a_redaction_leaves_neither_text_nor_tokens(record, run_id, tmp_path, policy_folder):
    file = tmp_path / "redaction.py"
    file.write_text(
        textwrap.dedent("""
        def hide(text):
            print("said on standard output")
            return "[hidden]" if "a" in text else text
        """)
    )
    letter = Tokenizer.from_file(str(policy_folder / "tokenizer.json")).token_to_id("a")
    recorder, reader = record(rollouts="all", redact=f"{file}:hide")
    [samples] = [group([10, 11], [[letter, 20], [20, 21]], [[-1.0, -2.0]] * 2, [0.5, 1.0])]
    first = msgspec.structs.replace(samples[0], judge_reply="a grade")
    recorder.add(1, [[first, *samples[1:]]], None)
    rows = reader.read(reader.find_step(1), None)
    hidden = [row for row in rows if row["is_redacted"]]
    texts = [turn["content"] for row in rows for turn in row["turns"]]
    assert len(hidden) == 1 and "[hidden]" in texts
    assert not any("a" in text for text in texts if text != "[hidden]")
    assert hidden[0]["completion_ids"] == [-1, -1]
    assert [row["judge_reply"] for row in rows] == ["[hidden]", ""]


def test_a_redaction_that_fails_is_named(record, run_id, tmp_path):
    (tmp_path / "broken.py").write_text("def hide(text):\n    return None\n")
    recorder, _ = record(rollouts="all", redact=f"{tmp_path / 'broken.py'}:hide")
    with pytest.raises(RecordFailed) as caught:
        recorder.add(1, make_groups(run_id, 1, count=1), None)
    assert "returned NoneType" in caught.value.reason


def test_ranks_record_their_own_files_of_a_step(record, run_id):
    groups = make_groups(run_id, 1)
    for rank in (0, 1):
        recorder, reader = record(rank, 2, rollouts="all")
        recorder.add(1, groups[rank::2], None)
    step = reader.find_step()
    assert len(step.files) == 2
    rows = reader.read(step, SUMMARY_COLUMNS)
    assert len({(row["ordinal"], row["sample"]) for row in rows}) == 20
    assert reader.folder.name == RECORD


def test_a_sample_has_the_best_and_the_worst_group():
    groups = [
        group([3], [[4]], [[-1.0]], [reward], ordinal=ordinal, version=StepRef(1, 0))
        for ordinal, reward in enumerate([0.5, 0.9, 0.1, 0.4, 0.6])
    ]
    assert choose_groups(groups, 3) == [0, 1, 2]
    assert choose_groups(groups, 1) == [0]
    assert choose_groups(groups, 9) == [0, 1, 2, 3, 4]

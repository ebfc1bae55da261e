"""Exports of a record, and the commands that read it."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torch")

from tests.support.errors import raises
from tests.support.experiences import make_groups
from tests.support.rollout_records import make_episode, write_record
from trinity_events.record.reader import RecordDamaged

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def root(tmp_path_factory, policy_folder):
    """Return a checkpoint root with a run whose step 2 was taken again by a second epoch."""
    root = tmp_path_factory.mktemp("root")
    groups = make_groups("r", 4, count=3)
    write_record(root / "r", policy_folder, {1: groups, 2: groups})
    write_record(root / "r", policy_folder, {2: groups}, epoch=2, resumed_step=1)
    write_record(root / "tools", policy_folder, {1: [[make_episode(policy_folder)]]})
    return root


@pytest.fixture
def export(cli, root, tmp_path):
    """Return a function that exports the run's rollouts, and the file."""

    def write(*options, run="r"):
        path = tmp_path / "out"
        done = cli(
            "export", run, "--rollouts", "--checkpoint-root", str(root), "-o", str(path), *options
        )
        assert done.returncode == 0, done.stderr
        return path

    return write


def test_rows_have_the_columns_of_trl_and_verifiers_and_their_fate(export):
    path = export()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    fates = [(row["epoch"], row["step"], row["fate"]) for row in rows]
    assert (
        fates == [(1, 1, "trained")] * 12 + [(1, 2, "superseded")] * 12 + [(2, 2, "trained")] * 12
    )
    trl = {"prompt", "completion", "prompt_ids", "completion_ids", "completion_mask", "logprobs"}
    assert trl | {"advantages", "reward", "metrics", "is_truncated"} <= rows[0].keys()
    assert len(rows[0]["completion_ids"]) == len(rows[0]["logprobs"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_parquet_has_the_same_rows(export):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(export("--format", "parquet", "--step", "2"))
    rows = table.to_pylist()
    lines = [json.loads(line) for line in export("--step", "2").read_text().splitlines()]
    assert [row["completion_ids"] for row in rows] == [line["completion_ids"] for line in lines]
    assert {row["epoch"] for row in rows} == {2}


def test_spans_have_the_episode_with_its_turns(export):
    lines = export("--format", "openinference", "--step", "1").read_text().splitlines()
    [resource] = json.loads(lines[0])["resourceSpans"]
    [scope] = resource["scopeSpans"]
    episode, turn = scope["spans"]
    kinds = [
        attribute["value"]["stringValue"]
        for span in scope["spans"]
        for attribute in span["attributes"]
        if attribute["key"] == "openinference.span.kind"
    ]
    assert kinds == ["AGENT", "LLM"]
    assert turn["parentSpanId"] == episode["spanId"] and turn["traceId"] == episode["traceId"]
    assert len(lines) == 12


def test_an_episode_with_tools_is_a_list_of_messages(export):
    [row] = [json.loads(line) for line in export(run="tools").read_text().splitlines()]
    assert row["prompt"] == [
        {"role": "system", "content": "use tools"},
        {"role": "user", "content": "what is tea"},
    ]
    call, result, answer = row["completion"]
    assert call["tool_calls"] == [
        {"type": "function", "function": {"name": "lookup", "arguments": {"word": "tea"}}}
    ]
    assert result == {"role": "tool", "content": "a drink", "name": "lookup"}
    assert answer["role"] == "assistant"
    assert row["prompt_text"] and row["completion_text"].endswith(answer["content"])
    # The rows of text alone stay text.
    assert isinstance(json.loads(export().read_text().splitlines()[0])["prompt"], str)


def test_spans_of_an_episode_with_tools_have_its_messages(export):
    line = export("--format", "openinference", run="tools").read_text()
    [scope] = json.loads(line)["resourceSpans"][0]["scopeSpans"]
    spans = [
        {item["key"]: item["value"].get("stringValue") for item in span["attributes"]}
        for span in scope["spans"]
    ]
    _episode, call, tool, answer = spans
    kinds = [span["openinference.span.kind"] for span in spans]
    assert kinds == ["AGENT", "LLM", "TOOL", "LLM"]
    assert call["llm.input_messages.0.message.role"] == "system"
    called = "llm.output_messages.0.message.tool_calls.0.tool_call.function"
    assert (call[f"{called}.name"], call[f"{called}.arguments"]) == ("lookup", '{"word": "tea"}')
    assert (tool["tool.name"], tool["input.value"]) == ("lookup", '{"word": "tea"}')
    assert answer["llm.input_messages.3.message.role"] == "tool"
    assert answer["llm.input_messages.3.message.name"] == "lookup"


def test_an_episode_with_tools_is_shown_as_a_conversation(cli, root):
    shown = cli("samples", "tools", "--ordinal", "0", "--checkpoint-root", str(root)).stdout
    roles = ("[system]", "[user]", "[assistant]", "[tool lookup]")
    places = [shown.index(role) for role in roles]
    assert places == sorted(places)
    assert 'calls lookup({"word": "tea"})' in shown


def test_samples_are_listed_and_shown_in_full(cli, root):
    options = ("--checkpoint-root", str(root))
    listed = cli("samples", "r", "--sort", "reward", "--limit", "2", *options)
    assert "step 2 (epoch 2): 12 samples of 3 questions" in listed.stdout
    assert "10 more" in listed.stdout
    shown = cli("samples", "r", "--step", "1", "--ordinal", "1", *options)
    assert shown.stdout.count("[policy]") == 4
    missing = cli("samples", "r", "--step", "9", *options)
    assert missing.returncode == 1 and "steps 1 to 2" in missing.stderr


COUNT_THREADS = """
import os, sys
from pathlib import Path
from trinity_events.record.columns import import_pyarrow
from trinity_events.record.reader import RolloutRecord

import_pyarrow("the test")
threads = [len(os.listdir("/proc/self/task"))]
record = RolloutRecord(Path(sys.argv[1]), "r")
for step in record.list_steps(superseded=True):
    assert record.read(step) and record.read(step, None, ordinal=1)
print(*threads, len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_record_is_read_by_the_calling_thread_alone(root):
    """A thread that still holds a file of Python as the interpreter exits aborts the process."""
    command = [sys.executable, "-c", COUNT_THREADS, str(root / "r")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after = done.stdout.split()
    assert before == after


def test_a_damaged_page_of_a_file_is_named_with_the_file(tmp_path, policy_folder):
    record = write_record(tmp_path / "r", policy_folder, {1: make_groups("r", 4)})
    step = record.find_step()
    path = record.folder / step.files[0].name
    contents = path.read_bytes()
    path.write_bytes(contents[:4] + bytes(2000) + contents[2004:])
    with raises(RecordDamaged, path=path):
        record.read(step, None)

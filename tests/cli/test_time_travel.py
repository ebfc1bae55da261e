"""``replay --step``, ``diff`` and ``bisect``, over a recorded log and a run on a server."""

import json
from pathlib import Path

import pytest

from tests.support.pipeline import folded, publish_steps, reducer_task
from trinity_events.analysis.expressions import Condition
from trinity_events.archive.format import read_lines
from trinity_events.core import Monitor, MonitorState
from trinity_events.views import state_as_json
from trinity_schemas import RunClosed

RECORDED = Path(__file__).parents[1] / "recorded"
LOG = str(RECORDED / "failures.jsonl")


def entries_of(path):
    return [line.entry for line in read_lines(Path(path))[1] if line.stream == "events"]


def state_after(entries):
    monitor = Monitor(MonitorState(run_id="recorded-failures"))
    monitor.fold(entries)
    return json.loads(json.dumps(state_as_json(monitor.state)))


@pytest.fixture
async def run(publisher, log, redis_url, run_id, tmp_path):
    async with reducer_task(redis_url, run_id, tmp_path):
        await publish_steps(publisher, range(1, 6))
        await publisher.publish(RunClosed(reason="finished", step=5))
        await folded(log)
    return run_id


def at(document, path):
    [value] = Condition.values(document, path)
    return value


def test_each_step_tells_what_its_event_changed(cli):
    shown = cli("replay", LOG, "--step", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    steps, entries = [json.loads(line) for line in shown.stdout.splitlines()], entries_of(LOG)
    assert [step["id"] for step in steps] == [entry.id for entry in entries]
    for number, step in enumerate(steps):
        before, after = state_after(entries[:number]), state_after(entries[: number + 1])
        for change in step["changes"]:
            assert at(before, change["path"]) == change["before"]
            assert at(after, change["path"]) == change["after"]
    changed = [change["path"] for step in steps for change in step["changes"]]
    assert any("failure" in path for path in changed)
    assert not any(path.startswith(("sequences", "position")) for path in changed)


def test_steps_can_begin_and_end_anywhere(cli):
    entries = entries_of(LOG)
    shown = cli("replay", LOG, "--step", "--from", entries[3].id, "--until", entries[5].id)
    heads = [line.split()[0] for line in shown.stdout.splitlines() if not line.startswith(" ")]
    assert sorted(set(heads)) == [entries[4].id, entries[5].id]
    assert "    + " in shown.stdout


def test_diff_tells_each_field_that_differs_between_two_entries(cli):
    entries = entries_of(LOG)
    first, other = entries[4].id, entries[-1].id
    difference = json.loads(cli("diff", LOG, first, other, "--json").stdout)
    assert (difference["from"], difference["to"]) == (first, other)
    before, after = state_after(entries[:5]), state_after(entries)
    assert difference["changes"]
    for change in difference["changes"]:
        assert at(before, change["path"]) == change["before"] != change["after"]
        assert at(after, change["path"]) == change["after"]
    shown = cli("diff", LOG, first, other).stdout
    assert shown.startswith(f"from entry {first} (5) to {other} ({len(entries)})\n")
    assert "+ dead_letters = 2" in shown
    assert "sequences" not in shown, "each event changes it"


async def test_diff_takes_steps_of_a_run(cli, run, redis_url, tmp_path):
    shown = cli("diff", run, "2", "4", "--redis-url", redis_url, "--checkpoint-root", str(tmp_path))
    assert "~ ready.weights.at.step: 2 -> 4" in shown.stdout


async def test_bisect_finds_the_first_event_after_which_a_condition_is_true(cli, run, log):
    bisection = json.loads(cli("bisect", run, "ready.weights.at.step >= 3", "--json").stdout)
    cause = bisection["found"]
    assert cause["envelope"]["event"] == {
        "type": "step-committed",
        "step": 3,
        "kind": "weights",
    }
    [ready] = [
        announcement["event"]
        for announcement in cause["announcements"]
        if announcement["event"]["step"] == 3
    ]
    assert (ready["type"], ready["caused_by"]) == ("step-ready", cause["id"])
    shown = cli("bisect", run, "closed == 'finished'", "--every").stdout
    assert "run-closed" in shown


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("ready.weights.at.step >= ", "is expected instead of 'the end'"),
        ("redy.weights", "a state has no field 'redy'"),
    ],
)
def test_a_mistake_in_a_condition_is_one_sentence(cli, expression, why):
    shown = cli("bisect", LOG, expression)
    assert shown.returncode == 1
    [line] = shown.stderr.splitlines()
    assert line.startswith("error: ") and why in line


def test_a_condition_that_never_holds_is_told(cli):
    shown = cli("bisect", LOG, "epoch > 99")
    assert (shown.returncode, shown.stderr) == (1, "")
    assert "'epoch > 99' is not true after any event" in shown.stdout


@pytest.mark.parametrize("place", ["99", "9999999999999-0", "nonsense"])
def test_a_place_that_the_log_lacks_is_one_sentence(cli, place):
    for command in (("diff", LOG, place, place), ("replay", LOG, "--step", "--from", place)):
        shown = cli(*command)
        assert shown.returncode == 1
        [line] = shown.stderr.splitlines()
        assert "was not reached" in line or "give a step, such as 40, or an entry id" in line


async def test_a_state_in_the_past_is_that_of_a_whole_replay(cli, run, log):
    middle = (await log.read())[7].id
    fast = cli("replay", run, "--until", middle, "--json").stdout
    slow = cli("replay", run, "--until", middle).stdout
    assert json.loads(fast)["position"] == middle
    assert slow.endswith(cli("replay", run, "--until", middle, "--no-timeline").stdout)

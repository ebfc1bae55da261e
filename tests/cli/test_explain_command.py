"""``trinity-events explain``, as a process."""

import json
import re

import anyio
import pytest
from msgspec import structs

from tests.support.event_histories import committed, failed, finished, registration, started
from tests.support.event_samples import SAMPLES
from tests.support.pipeline import accept_reports
from trinity_events.analysis.causes import Cause
from trinity_events.cli import explain as explain_command
from trinity_events.core import MonitorState
from trinity_events.log import AsyncPublisher, new_producer
from trinity_schemas import (
    ExplorerExcluded,
    ExplorerStatusChanged,
    ProfileWritten,
    RewardErrorReported,
    RolloutsDispatched,
    RunClosed,
    StacksTaken,
)


@pytest.fixture
async def waiting_run(publisher, log, run_id):
    """A run of which step 3 waits for one save of two."""
    actor = AsyncPublisher(log, publisher.epoch, new_producer("actor"))
    await publisher.publish(committed(3, "state_dict", registration(expected=2)))
    await actor.publish(finished(3, "a", rank=0))
    await actor.publish(started(3, "b", rank=1))
    await actor.publish(ProfileWritten(step=3, path="profiles/step_3_actor_0.json.gz", bytes=9))
    return run_id


async def test_it_says_what_a_step_waits_for_by_name_and_since_when(cli, waiting_run, redis_url):
    shown = cli("explain", waiting_run, "3", "--redis-url", redis_url)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Step 3 state_dict waits for 1 of 2 saves: model of actor-1")
    assert "s ago" in shown.stdout
    assert "actor-0 profiled step 3: profiles/step_3_actor_0.json.gz (open it" in shown.stdout


async def test_status_counts_to_now_while_a_run_is_open(cli, waiting_run, publisher):
    await anyio.sleep(1.1)
    [shown] = re.findall(r"started ([0-9.]+) s ago", cli("status", waiting_run).stdout)
    assert float(shown) >= 1.1, "nothing was said since, and that is what one wants to see"
    await publisher.publish(RunClosed(reason="interrupted"))
    shown = [cli("status", waiting_run).stdout for _ in range(2)]
    assert shown[0] == shown[1], "what has ended grows no older"


def test_causes_beyond_the_first_ones_are_counted():
    facts = explain_command._StepFacts(
        state=MonitorState(run_id="many"),
        causes=[Cause(reason="stopped", sentence="explorer-0 is stopped.")],
        more_causes=3,
        unseen="",
        now=0,
        outcomes=[],
        proof=[],
        stacks=[],
        reward_errors={},
    )
    assert explain_command._format_run(facts) == [
        "First cause: explorer-0 is stopped.",
        "3 more causes are not listed.",
    ]


async def test_what_a_terminal_cannot_show_is_written_out(cli, waiting_run, publisher):
    await publisher.publish(failed(3, "c", name="√"))
    shown = cli("replay", waiting_run, env={"PYTHONIOENCODING": "ascii"})
    assert (shown.returncode, shown.stderr) == (0, "")
    assert r"\u221a" in shown.stdout


async def test_an_excluded_explorer_is_named_in_its_status_too(cli, waiting_run, publisher):
    excluded = ExplorerExcluded(explorer="explorer-1\n", malformed=3, reason="its reward is inf")
    await publisher.publish(excluded)
    for command in ("explain", "status"):
        shown = " ".join(cli(command, waiting_run).stdout.split())
        assert r"'explorer-1\n' is excluded until the run's next epoch" in shown
        assert "(the last one: its reward is inf)" in shown


async def test_the_error_of_a_reward_is_shown_with_its_answer_also_once_the_run_has_ended(
    cli, waiting_run, publisher
):
    error = next(sample for sample in SAMPLES if isinstance(sample, RewardErrorReported))
    await publisher.publish(structs.replace(error, epoch=publisher.epoch))
    await publisher.publish(RolloutsDispatched(ordinals=((0, 3),)))
    await publisher.publish(RolloutsDispatched(dropped={"reward-failed": ((1, 2),)}))
    await publisher.publish(RunClosed(reason="failed", error="the reward of question 3 failed"))
    explained = cli("explain", waiting_run).stdout
    assert f"A reward failed: {error.explorer} could not judge answer 0" in explained
    for text in (error.message, error.traceback, error.prompt, error.response):
        assert text in explained
    assert "2 prompts were dropped, as their rewards failed." in explained
    status = " ".join(cli("status", waiting_run).stdout.split())
    assert error.message in status and f"see trinity-events explain {waiting_run}" in status


async def test_reports_that_wait_for_a_reducer_are_named(cli, waiting_run, publisher, log):
    explorer = AsyncPublisher(log, publisher.epoch, new_producer("explorer"))
    await explorer.publish(ExplorerStatusChanged(status="running"))
    shown = cli("explain", waiting_run).stdout
    assert "No reducer leads" in shown and "; reports of explorers wait for it for " in shown
    waiting = await log.oldest_waiting_report()
    status = json.loads(cli("status", waiting_run, "--json").stdout)
    assert status["reports_since"] == int(waiting.id.partition("-")[0]) / 1000
    await accept_reports(log)
    assert "reports of explorers" not in cli("explain", waiting_run).stdout


async def test_with_json_it_says_the_same_to_programs(cli, waiting_run):
    answer = json.loads(cli("explain", waiting_run, "3", "--json").stdout)
    assert answer.pop("explanation").startswith("Step 3 state_dict waits for")
    assert [cause["reason"] for cause in answer.pop("causes")] == ["no-reducer", "missing"]
    assert answer == {
        "run_id": waiting_run,
        "epoch": 1,
        "step": 3,
        "kinds": {"state_dict": "waiting"},
    }


async def test_stacks_that_were_taken_at_a_deadline_are_shown(cli, waiting_run, publisher, log):
    frames = 'Thread 0x7f (most recent call first):\n  File "mine.py", line 7 in generate'
    stacks_taken = StacksTaken(process="explorer-0", node="box", pid=7, stacks=frames)
    await publisher.publish(stacks_taken)
    entry_id = await log.last_id()
    await publisher.publish(StacksTaken(process="actor-1", node="box", pid=8))
    shown = cli("explain", waiting_run).stdout.splitlines()
    assert shown[-4:] == [
        "Stacks of explorer-0 (process 7 on box) at the deadline of a wait for it, entry "
        f"{entry_id}:",
        *(f"  {line}" for line in frames.splitlines()),
        "actor-1 (process 8 on box) wrote no stacks at the deadline of a wait for it: it is "
        "stopped.",
    ]
    assert "generate" in cli("explain", waiting_run, "3").stdout


async def test_a_run_that_failed_is_explained_with_the_way_on(cli, waiting_run, publisher):
    await publisher.publish(RunClosed(reason="failed", error="WorkerDied: actor-1 died"))
    shown = cli("explain", waiting_run).stdout.splitlines()
    assert shown[0] == "First cause: The run ended (failed): WorkerDied: actor-1 died."
    assert shown[-1].startswith("No checkpoint is ready: the run, started again under its name,")


async def test_a_step_that_is_not_known_is_one_sentence(cli, waiting_run):
    shown = cli("explain", waiting_run, "9")
    assert (shown.returncode, shown.stdout) == (1, "")
    [line] = shown.stderr.splitlines()
    assert line.startswith(f"error: nothing is known of step 9 in epoch 1 of run {waiting_run}")
    assert "its newest step is 3" in line


def test_a_run_that_is_not_known_is_one_sentence(cli):
    shown = cli("explain", "nope", "3")
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: there is no run 'nope'")
    assert len(shown.stderr.splitlines()) == 1


async def test_a_proof_names_the_entries_of_the_log(cli, waiting_run, log):
    entries = [entry.id for entry in await log.read()]
    shown = cli("explain", waiting_run, "3", "--proof").stdout.splitlines()
    assert [line.split()[0] for line in shown[-3:]] == [entries[1], entries[3], entries[2]]
    proof = json.loads(cli("explain", waiting_run, "3", "--proof", "--json").stdout)["proof"]
    assert [(entry["part"], entry["id"]) for entry in proof] == [
        ("commits", entries[1]),
        ("starts", entries[3]),
        ("finishes", entries[2]),
    ]
    refused = cli("explain", waiting_run, "--proof")
    assert refused.stderr.startswith("error: --proof names the entries of one step")

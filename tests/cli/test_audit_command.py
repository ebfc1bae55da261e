"""``trinity-events audit``, and what other commands show of rollouts and of waits."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.pipeline import accept_reports, publish_steps, reducer_task, trimming, until
from trinity_events.log import AsyncPublisher, Stream, new_producer, open_run
from trinity_events.reducer import ArchiveLimits
from trinity_schemas import (
    LedgerRestored,
    ReissuedRollout,
    RolloutsDispatched,
    RunClosed,
    StepRef,
    StepTrained,
    TrainedLedger,
    VersionOpened,
    WaitEnded,
    WaitStarted,
)

FINGERPRINT = "sha256:" + "1" * 64
AT_STEP_1 = TrainedLedger(step=1, mark=4, next=16, trained=4, fingerprint=FINGERPRINT)


async def begin(publisher):
    await publisher.publish(RolloutsDispatched(ordinals=((0, 15),), fingerprint=FINGERPRINT))
    await publisher.publish(StepTrained(step=1, trained=((0, 3),), staleness={0: 16}))
    await publisher.publish(
        RolloutsDispatched(
            ordinals=((16, 19),),
            reissued=(ReissuedRollout(ordinal=4, attempt=2, reason="deadline"),),
        )
    )
    await publisher.publish(
        StepTrained(
            step=2, trained=((4, 8),), dropped={"filtered": ((10, 11),)}, staleness={1: 16, 2: 4}
        )
    )


@pytest.fixture
async def resumed_run(client, publisher, log, run_id):
    """A run of two steps that was resumed from its first one, and trained one more."""
    await begin(publisher)
    epoch = await open_run(client, run_id, resume_from=StepRef(1, 1))
    second = AsyncPublisher(log, epoch, new_producer("trainer"))
    await second.publish(LedgerRestored(ledger=AT_STEP_1, digest=AT_STEP_1.digest))
    await second.publish(RolloutsDispatched(ordinals=((4, 17),)))
    await second.publish(StepTrained(step=2, trained=((4, 7),), staleness={0: 16}))
    return second


async def test_it_prints_the_books_of_the_lineage_that_stands(cli, resumed_run, run_id):
    shown = cli("audit", run_id)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        "lineage: epoch 1 from step 0 to 1, epoch 2 from step 1",
        "  dispatched 18 = trained 8 + dropped 0 + open 10",
        "  2 training steps, and 1 discarded",
        "  recomputed 15 (deadline 1, resumed 14)",
        "  staleness in steps, with samples: 0: 32",
        "  open: 8 to 17",
        f"the books of run {run_id} balance",
    ]


async def test_a_prompt_that_is_trained_twice_is_named_and_exits_with_1(cli, resumed_run, run_id):
    await resumed_run.publish(StepTrained(step=3, trained=((7, 8),)))
    shown = cli("audit", run_id)
    assert shown.returncode == 1
    assert (
        "trained-twice, epoch 2: ordinals 7 were trained in step 3 and had a fate already"
        in shown.stdout
    )
    assert f"the books of run {run_id} do NOT balance" in shown.stdout
    audit = cli("audit", run_id, "--json")
    assert audit.returncode == 1
    audit = json.loads(audit.stdout)
    [books] = audit["lineages"]
    assert not audit["balanced"]
    assert [
        (contradiction["name"], contradiction["ordinals"])
        for contradiction in books["contradictions"]
    ] == [("trained-twice", [[7, 7]])]


async def test_a_file_is_audited_without_a_server(cli, resumed_run, run_id, tmp_path):
    path = str(tmp_path / "run.jsonl")
    assert cli("export", run_id, "-o", path).returncode == 0
    there, here = cli("audit", run_id, "--json"), cli("audit", path, "--json")
    assert json.loads(there.stdout) == json.loads(here.stdout)
    [books] = json.loads(here.stdout)["lineages"]
    assert books["spans"] == [[1, 0, 1], [2, 1, None]]
    assert (books["dispatched"], books["trained"], books["open"]) == (18, 8, 10)
    nowhere = cli("audit", path, "--redis-url", "redis://127.0.0.1:1")
    assert nowhere.returncode == 0


async def test_a_run_without_rollouts_has_nothing_to_audit(cli, publisher, run_id):
    shown = cli("audit", run_id)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "has dispatched no rollouts" in shown.stdout


async def test_entries_that_cannot_be_decoded_are_counted(cli, resumed_run, log, run_id):
    await log.append(b"no event")
    shown = cli("audit", run_id)
    assert shown.returncode == 0
    assert "1 entries cannot be decoded" in shown.stdout


async def test_it_reads_the_archive_and_then_the_stream(
    cli, publisher, log, redis_url, run_id, tmp_path
):
    archive = ArchiveLimits(
        segment_events=40, segment_announcements=40, server_events=0, server_announcements=0
    )

    async def is_trimmed():
        return await log.first_retained_id(Stream.EVENTS)

    async with reducer_task(redis_url, run_id, tmp_path, trimming(30, archive)):
        await begin(publisher)
        await publish_steps(publisher, range(3, 120))
        await until(is_trimmed)
    await publisher.publish(StepTrained(step=120, trained=((9, 9),)))
    shown = cli("audit", run_id, "--checkpoint-root", str(tmp_path))
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "dispatched 20 = trained 10 + dropped 2 (filtered 2) + open 8\n" in shown.stdout
    elsewhere = cli("audit", run_id, "--checkpoint-root", str(tmp_path / "none"))
    assert elsewhere.returncode == 1
    assert "name that with --checkpoint-root" in elsewhere.stderr


async def test_status_and_runs_show_the_sums(cli, publisher, run_id):
    await begin(publisher)
    sums = "9 trained, 2 dropped (filtered 2), 9 open"
    assert f"prompts {sums}" in cli("status", run_id).stdout
    shown = cli("runs").stdout
    assert "PROMPTS" in shown
    [line] = [text_line for text_line in shown.splitlines() if text_line.startswith(run_id)]
    assert line.rstrip().endswith(sums)
    [row] = [run for run in json.loads(cli("runs", "--json").stdout) if run["run_id"] == run_id]
    assert row["prompts"] == {"trained": 9, "dropped": {"filtered": 2}, "open": 9}


async def test_status_and_explain_name_the_chain_of_waits(cli, publisher, log, run_id):
    producer = new_producer("explorer", 1)
    explorer_wait = f"{producer.incarnation}-1"
    explorer = AsyncPublisher(log, publisher.epoch, producer)
    await publisher.publish(VersionOpened(step=4, ranks=(0,), transport="redis"))
    await explorer.publish(
        WaitStarted(
            wait_id=explorer_wait,
            what="the weights of step 4",
            waits_for=("actor-0",),
            seconds=5.0,
        )
    )
    await publisher.publish(
        WaitStarted(
            wait_id="a", what="rollouts", waits_for=("explorer-1",), seconds=20.0, deadline=600.0
        )
    )
    await accept_reports(log)
    shown = cli("status", run_id).stdout.splitlines()
    at = next(index for index, line in enumerate(shown) if line.startswith("WAITS"))
    rows = [re.split(r"  +", line.strip()) for line in shown[at : at + 3]]
    assert rows[0] == ["WAITS", "FOR", "FROM", "SINCE", "GIVES UP"]
    assert rows[1][:3] == ["trainer-0", "rollouts", "explorer-1"]
    assert re.fullmatch(r"\d+ s ago", rows[1][3])
    assert re.fullmatch(r"in 5\d\d s", rows[1][4])
    assert rows[2][:3] == ["explorer-1", "the weights of step 4", "actor-0"]
    assert rows[2][4] == "-"
    assert shown[at + 2].startswith("  explorer-1")
    status = json.loads(cli("status", run_id, "--json").stdout)["waits"]
    assert 20 <= status["a"]["seconds"] < 600
    assert status["a"]["seconds_left"] == pytest.approx(600 - status["a"]["seconds"])
    shown_wait = status[explorer_wait]
    assert (shown_wait["by"], shown_wait["seconds_left"]) == ("explorer-1", None)
    trainer = r"trainer-0 waits for rollouts from explorer-1 for \d+\.\d s, and gives up"
    culprit = r"explorer-1 waits for the weights of step 4 from actor-0 for \d+\.\d s\."
    chain = re.compile(rf"^{trainer} in 5\d\d s\.\s*\n  {culprit}\s*$", re.MULTILINE)
    for words in ((run_id,), (run_id, "4")):
        shown = cli("explain", *words)
        assert shown.returncode == 0, shown.stderr
        assert chain.search(shown.stdout)
        assert "Step 4 weights waits for" in shown.stdout
    status = json.loads(cli("explain", run_id, "--json").stdout)
    assert status["waits"]["a"]["waits_for"] == ["explorer-1"]
    assert status["step"] is None
    await explorer.publish(WaitEnded(wait_id=explorer_wait, outcome="over"))
    await accept_reports(log)
    await publisher.publish(RunClosed(reason="finished"))
    assert "WAITS" not in cli("status", run_id).stdout


async def test_a_run_in_which_nothing_waits_is_explained_in_one_sentence(cli, publisher, run_id):
    await publisher.publish(RunClosed(reason="finished"))
    shown = cli("explain", run_id)
    assert shown.returncode == 0
    assert shown.stdout == (
        f"No process of run {run_id} has reported a wait, and no step waits for anything.\n"
    )


async def test_tail_prints_ordinals_as_ranges(cli, resumed_run, run_id):
    shown = cli("tail", run_id, "-n", "100").stdout
    for text in (
        "rollouts-dispatched     ordinals=0-15 fingerprint=sha256:111111111…",
        "rollouts-dispatched     ordinals=16-19 reissued=4#2(deadline)",
        "step-trained            step=2 trained=4-8 dropped=filtered:10-11 staleness=1:16,2:4",
        "run-resumed             step=1 checkpoint=1/1",
        "ledger-restored         ledger=step:1,mark:4,next:16",
    ):
        assert text in shown
    only = cli("tail", run_id, "--step", "1", "--json").stdout.splitlines()
    assert {json.loads(line)["event"]["type"] for line in only} == {
        *("step-trained", "run-resumed", "ledger-restored")
    }

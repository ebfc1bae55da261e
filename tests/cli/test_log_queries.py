"""``tail``, ``explain`` and ``replay`` find what they are asked for, less or more."""

import json
import re
from datetime import datetime, timedelta

import pytest

from tests.support.errors import raises
from tests.support.event_histories import History, committed, failed, opened, registration, started
from tests.support.pipeline import folded, publish_steps, reducer_task, trimming, until
from trinity_events.analysis.event_filter import find_steps
from trinity_events.analysis.explain import explain
from trinity_events.cli.times import BadTime, moment
from trinity_events.log import AsyncPublisher, Stream, new_producer, open_run, stream_order
from trinity_events.reducer import ArchiveLimits
from trinity_schemas import (
    ExplorerStatusChanged,
    RunClosed,
    TrainerStatusChanged,
    decode_envelope,
    event_tag,
)

STEPS = 12


@pytest.fixture
async def run(publisher, log, redis_url, run_id):
    """A run of weights and one failed save, which ended in its last step but one."""
    actor = AsyncPublisher(log, publisher.epoch, new_producer("actor", 1))
    explorer = AsyncPublisher(log, publisher.epoch, new_producer("explorer", 0))
    async with reducer_task(redis_url, run_id):
        await explorer.publish(ExplorerStatusChanged(status="running"))
        await publish_steps(publisher, range(STEPS))
        await publisher.publish(committed(5, "checkpoint", registration("checkpoint", 1)))
        await actor.publish(started(5, kind="checkpoint", rank=1))
        await actor.publish(failed(5, kind="checkpoint", rank=1))
        await publisher.publish(TrainerStatusChanged(status="stopped", step=STEPS - 1))
        await publisher.publish(RunClosed(reason="failed", error="WorkerDied: rank 1 died"))
        await folded(log)
    return run_id


def lines(shown) -> list[dict]:
    assert (shown.returncode, shown.stderr) == (0, "")
    return [json.loads(line) for line in shown.stdout.splitlines()]


async def every_entry(log) -> list[tuple[str, str, object]]:
    """Every entry in the order of ``tail``: id, stream, envelope."""
    entries = [(s, entry) for s in Stream for entry in await log.read(stream=s, limit=100_000)]
    return [
        (entry.id, stream.value, decode_envelope(entry.payload))
        for stream, entry in sorted(entries, key=stream_order)
    ]


async def test_the_newest_run_is_taken_where_none_is_named(cli, run, client):
    assert lines(cli("tail", "--json")) == lines(cli("tail", run, "--json"))
    assert cli("replay").stdout == cli("replay", run).stdout
    assert json.loads(cli("replay", "--json").stdout)["run_id"] == run
    assert cli("explain", "5").stdout == cli("explain", run, "5").stdout
    assert cli("explain", "5").stdout.startswith("Step 5 checkpoint FAILED: ")


async def test_tail_prints_what_it_is_asked_for_by_type_producer_and_step(cli, run, log):
    entries = await every_entry(log)
    for options, matches in (
        (("-t", "step-ready"), lambda envelope: event_tag(envelope.event) == "step-ready"),
        (
            ("--type", "step-failed", "--type", "save-failed"),
            lambda envelope: event_tag(envelope.event) in ("step-failed", "save-failed"),
        ),
        (("-p", "actor"), lambda envelope: envelope.producer.role == "actor"),
        (
            ("-p", "actor-1", "--producer", "explorer-0"),
            lambda envelope: envelope.producer.role in ("actor", "explorer"),
        ),
        (("-s", "5"), lambda envelope: 5 in find_steps(envelope.event)),
        (("--step", "2-3", "--step", "7"), lambda envelope: find_steps(envelope.event) & {2, 3, 7}),
        (
            ("-s", "5", "-t", "save-failed"),
            lambda envelope: event_tag(envelope.event) == "save-failed",
        ),
    ):
        expected = [(at, stream) for at, stream, envelope in entries if matches(envelope)]
        assert expected, options
        printed = lines(cli("tail", run, "--json", "-n", "1000", *options))
        assert [(line["id"], line["stream"]) for line in printed] == expected, options
        printed = lines(cli("tail", run, "--json", "-n", "2", *options))
        assert [(line["id"], line["stream"]) for line in printed] == expected[-2:], options


async def test_tail_prints_what_came_in_a_time(cli, run, log):
    entries = await every_entry(log)
    places = [(at, stream) for at, stream, _ in entries]
    middle, end = entries[len(entries) // 2][0], entries[-3][0]
    printed = lines(cli("tail", run, "--json", "--since", middle, "--until", end))
    order = [int(at.partition("-")[0]) for at, *_ in entries]
    assert [(line["id"], line["stream"]) for line in printed] == [
        place for place in places if _key(middle) <= _key(place[0]) <= _key(end)
    ]
    assert len(lines(cli("tail", run, "--json", "--since", "1h"))) == len(entries) > 20
    past = datetime.fromtimestamp(order[0] / 1000) - timedelta(days=1)
    assert lines(cli("tail", run, "--json", "--until", past.isoformat(sep=" "))) == []
    assert len(lines(cli("tail", run, "--json", "--since", str(past.date()), "-n", "3"))) == 3


def _key(entry_id):
    return tuple(map(int, entry_id.split("-")))


@pytest.fixture
async def archived_run(publisher, log, redis_url, run_id, tmp_path):
    """A run most of whose entries are in its archive alone, and whose steps are settled."""
    archive = ArchiveLimits(
        segment_events=40, segment_announcements=40, server_events=0, server_announcements=0
    )
    async with reducer_task(redis_url, run_id, tmp_path, trimming(30, archive)):
        await publish_steps(publisher, range(200))
        await announced_all(log, 199)
        await until(lambda: _is_trimmed(log))
    return run_id


async def announced_all(log, step):
    async def reached():
        newest = await log.read_back(stream=Stream.ANNOUNCEMENTS, limit=5)
        return any(step in find_steps(decode_envelope(entry.payload).event) for entry in newest)

    await until(reached)


async def _is_trimmed(log):
    return all([await log.first_retained_id(stream) for stream in Stream])


async def test_tail_goes_back_into_the_archive(cli, archived_run, log, tmp_path):
    root = ("--checkpoint-root", str(tmp_path))
    exported = tmp_path / "all.jsonl"
    assert cli("export", archived_run, "-o", str(exported), *root).returncode == 0
    exported_places = [json.loads(line) for line in exported.read_text().splitlines()[1:]]
    exported_places = [
        (line["id"], line["stream"]) for line in exported_places if line["stream"] != "dead"
    ]
    rank = {stream.value: number for number, stream in enumerate(Stream)}
    exported_places.sort(key=lambda place: (_key(place[0]), rank[place[1]]))
    for count in (600, 10**9):
        printed = lines(cli("tail", archived_run, "--json", "-n", str(count), *root))
        assert [(line["id"], line["stream"]) for line in printed] == exported_places[-count:]
    [ready] = lines(cli("tail", archived_run, "--json", "-t", "step-ready", "-s", "3", *root))
    assert ready["event"]["step"] == 3
    elsewhere = cli("tail", archived_run, "-s", "3", "--checkpoint-root", str(tmp_path / "none"))
    assert elsewhere.returncode == 0
    assert "name it with --checkpoint-root" in elsewhere.stderr


async def test_explain_knows_what_became_of_a_step_that_was_settled(cli, archived_run, tmp_path):
    root = ("--checkpoint-root", str(tmp_path))
    shown = cli("explain", archived_run, "3", *root)
    assert shown.returncode == 0, shown.stderr
    assert re.fullmatch(r"Step 3 weights was ready \(announcement \d+-\d+\)\.\n", shown.stdout)
    explanation = json.loads(cli("explain", archived_run, "3", "--json", *root).stdout)
    assert explanation["kinds"] == {"weights": "ready"}
    elsewhere = cli("explain", archived_run, "3", "--checkpoint-root", str(tmp_path / "none"))
    assert elsewhere.returncode == 1
    assert "name that with --checkpoint-root" in elsewhere.stderr


async def test_explain_says_so_of_the_step_in_which_a_run_failed(cli, run, publisher, log, client):
    shown = cli("explain", run, str(STEPS))
    assert shown.stdout == f"Run {run} FAILED in this step: WorkerDied: rank 1 died.\n"
    assert "FAILED in this step" not in cli("explain", run, str(STEPS - 1)).stdout
    assert cli("explain", run, str(STEPS + 1)).returncode == 1


async def test_explain_looks_up_a_step_of_an_earlier_epoch(cli, run, client):
    await open_run(client, run)
    failed_before, ready_before = cli("explain", run, "5").stdout.splitlines()
    assert failed_before.startswith("Step 5 checkpoint FAILED: model of actor-1 for checkpoint")
    assert ready_before.startswith("Step 5 weights was ready (announcement ")


def test_the_culprit_is_told_first_and_each_kind_in_a_line_of_its_own():
    history = History()
    history.add(opened(4, 0))
    history.add(committed(4, "checkpoint", registration("state_dict", 1)))
    history.add(failed(4, kind="checkpoint"), by="actor")
    first, second, third = explain(history.fold()[0].state, 4).splitlines()
    assert first.startswith("Step 4 checkpoint FAILED: model of actor-0")
    assert second.startswith("Step 4 state_dict waits for")
    assert third.startswith("Step 4 weights waits for")


NOW = int(datetime(2026, 11, 22, 18, 29, 43).timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10m", -600),
        ("90s", -90),
        ("1.5h", -5400),
        ("2d", -172_800),
        ("18:29", -43),
        ("18:29:40.5", -2.5),
        ("2026-11-22", -(18 * 3600 + 29 * 60 + 43)),
        ("2026-11-22 18:00", -(29 * 60 + 43)),
        ("2026-11-22T18:00:00", -(29 * 60 + 43)),
    ],
)
def test_moments_are_given_by_the_clock_or_by_how_long_ago_they_were(text, seconds):
    assert moment(text, NOW) == (NOW + int(seconds * 1000), 0)
    assert moment(text, NOW, end=True) == (NOW + int(seconds * 1000), 2**64 - 1)


def test_a_moment_may_be_an_entry_and_nothing_else():
    assert moment("17-3", NOW) == moment("17-3", NOW, end=True) == (17, 3)
    for text in ("", "quark", "10x", "-5s", "²", "25:00", "2026-13-01"):
        with raises(BadTime):
            moment(text, NOW)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--type", "step-redy"), "there is no event type 'step-redy': is step-ready meant?"),
        (("--step", "x"), "--step takes a step, such as 40"),
        (("--since", "quark"), "'quark' is no moment"),
        (("--follow", "--until", "1h"), "leave one of them out"),
    ],
)
async def test_what_cannot_be_asked_for_is_one_sentence(cli, publisher, options, sentence):
    shown = cli("tail", publisher.log.run_id, *options)
    assert (shown.returncode, shown.stdout) == (1, "")
    [line] = shown.stderr.splitlines()
    assert sentence in line


async def test_a_mistyped_run_is_told_with_the_nearest_name(cli, publisher, run_id):
    shown = cli("status", f"{run_id}x")
    assert f"there is no run '{run_id}x' on this server (is {run_id} meant?)" in shown.stderr

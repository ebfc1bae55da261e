"""Weights that are damaged on the way: who refused what is in the log, and shown everywhere."""

import json

import pytest
import torch

from tests.support.event_histories import History, publish_weights
from tests.support.pipeline import reports_accepted
from tests.support.weight_versions import publish, ready
from trinity_events.analysis.explain import explain
from trinity_events.analysis.summary import Summarizer
from trinity_events.core.limits import KEPT_REFUSALS
from trinity_events.core.refusals import suspects
from trinity_events.core.state import Refusal
from trinity_events.errors import CorruptVersion, NotAsPublished, ProofTooWeak
from trinity_events.log import Stream
from trinity_events.replay import current_state
from trinity_events.weights import Synchronizer
from trinity_schemas import (
    StepRef,
    VersionRefused,
    WeightsApplied,
    chunk_key,
    decode_envelope,
    manifest_key,
)

FULL = {"weight": torch.ones(4, 32), "bias": torch.ones(4)}


def refused(step=1, chunk=2, rank=0, epoch=1):
    return VersionRefused(
        version=StepRef(epoch, step), rank=rank, chunk=chunk, reason="chunk 2 is not what it was."
    )


def refusal(step, node="a", by="explorer-0", chunk=2, **others):
    where = {"version": StepRef(1, step), "rank": 0, "chunk": chunk, **others}
    return Refusal(at=1, by=by, node=node, reason="it differs", **where)


def pull(explorer, _, event):
    with explorer.pull(event):
        pass


TAKES = {"apply": Synchronizer.apply, "load": Synchronizer.load, "pull": pull}


# --- in the log -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", TAKES)
async def test_a_damaged_chunk_is_an_event_of_the_explorer(
    trainer, explorer, log, weights_client, how
):
    model = torch.nn.Linear(32, 4)
    publish(trainer, FULL, 1)
    event = await ready(log, 1)
    weights_client.setrange(chunk_key(explorer.run_id, event.epoch, 1, 0, 2), 5, b"\x55")
    with pytest.raises(CorruptVersion) as raised:
        TAKES[how](explorer, model, event)
    explorer.flush()
    await reports_accepted(log)
    [envelope] = [
        envelope
        for envelope in await read_envelopes(log)
        if isinstance(envelope.event, VersionRefused)
    ]
    assert (envelope.producer.role, envelope.producer.rank) == ("explorer", 1)
    assert envelope.producer.node
    assert envelope.event == VersionRefused(
        version=StepRef(event.epoch, 1), rank=0, chunk=2, reason=str(raised.value)
    )
    assert not any(
        isinstance(envelope.event, WeightsApplied) for envelope in await read_envelopes(log)
    )


async def test_a_manifest_that_is_another_is_refused_without_a_chunk(
    trainer, explorer, log, weights_client
):
    publish(trainer, FULL, 1)
    event = await ready(log, 1)
    weights_client.set(manifest_key(explorer.run_id, event.epoch, 1, 0), b"another")
    with pytest.raises(CorruptVersion), explorer.pull(event):
        pass
    explorer.flush()
    await reports_accepted(log)
    [refusal_event] = [
        envelope.event
        for envelope in await read_envelopes(log)
        if isinstance(envelope.event, VersionRefused)
    ]
    assert (refusal_event.version.step, refusal_event.rank, refusal_event.chunk) == (1, 0, None)
    assert "not the one that was announced" in refusal_event.reason


async def read_envelopes(log):
    return [decode_envelope(entry.payload) for entry in await log.read()]


async def test_every_view_of_the_run_tells_it(
    trainer, explorer, log, weights_client, cli, tmp_path
):
    for step in (1, 2):
        publish(trainer, FULL, step)
        event = await ready(log, step)
        weights_client.setrange(chunk_key(explorer.run_id, event.epoch, step, 0, 2), 5, b"\x55")
        with pytest.raises(CorruptVersion):
            explorer.apply(torch.nn.Linear(32, 4), event)
    explorer.flush()
    await reports_accepted(log)
    run = explorer.run_id
    who = "explorer-1 on "
    wide = {"COLUMNS": "400"}

    status = cli("status", run, env=wide).stdout
    assert f"Refused weights: 2. Last: {who}" in status
    assert "this points to failing memory" in status
    assert json.loads(cli("status", run, "--json").stdout)["refused"] == 2

    explanation = cli("explain", run, "2").stdout
    assert explanation.startswith("Step 2 weights is ready.\nexplorer-1 on ")
    assert "refused the weights of step 2: chunk 2 of the weights of step 2" in explanation
    assert "of step 1" not in explanation

    root = ("--checkpoint-root", str(tmp_path))
    checked = cli("verify", run, *root, env=wide)
    assert checked.returncode == 0, "what was derived from the log is sound"
    assert checked.stdout.count("anomaly   refused-version: ") == 3
    assert "this points to failing memory" in checked.stdout

    assert "version-refused" in cli("tail", run, "-n", "100").stdout
    replayed = cli("replay", run, "--no-timeline", *root, env=wide).stdout
    assert f"Refused weights: 2. Last: {who}" in replayed


# --- what follows from it ---------------------------------------------------------------------


def test_a_refusal_is_heard_in_every_epoch_and_the_last_few_are_kept():
    history = History()
    publish_weights(history, 1)
    for _ in range(KEPT_REFUSALS + 5):
        history.add(refused(), by="explorer", epoch=0)
    history.add(refused(7, chunk=None), by="explorer", epoch=0)
    monitor, announcements = history.fold()
    state = monitor.state
    assert state.refused == KEPT_REFUSALS + 6
    assert len(state.refusals) == KEPT_REFUSALS
    assert (state.refusals[-1].version.step, state.refusals[-1].chunk) == (7, None)
    assert state.anomaly_counts == {}
    assert [type(announcement).__name__ for announcement in announcements] == ["StepReady"], (
        "announced once, and not undone"
    )
    words = explain(state, 1)
    assert words.startswith("Step 1 weights is ready.\nexplorer-0 on ")
    assert words.endswith("more refusals came before.")


def test_explorers_of_one_host_that_refuse_several_versions_point_to_its_memory():
    assert suspects([refusal(1), refusal(1)]) == [], "it may be what was published"
    [suspicion] = suspects([refusal(1), refusal(2, by="explorer-1"), refusal(3, node="b")])
    assert suspicion.startswith(
        "explorer-0, explorer-1 on a refused 2 versions: this points to failing"
    )


@pytest.mark.parametrize(
    ("error", "check"),
    [
        (NotAsPublished(step=2, engine="vLLM", fault="probes"), "probes"),
        (NotAsPublished(step=2, engine="vLLM", fault="not served", tensors=("a",)), "served"),
        (NotAsPublished(step=2, engine="vLLM", fault="load"), "names"),
        (
            ProofTooWeak(step=2, engine="vLLM", status="partly", minimum="proven", fault="tensors"),
            "served",
        ),
    ],
)
async def test_a_check_that_an_engine_fails_points_to_no_memory(
    trainer, explorer, log, error, check
):
    for step in (1, 2):
        publish(trainer, FULL, step)
        explorer.report_refusal(await ready(log, step), error)
    explorer.flush()
    await reports_accepted(log)
    state = await current_state(log)
    assert [each.check for each in state.refusals] == [check, check]
    assert suspects(state.refusals) == []
    damaged = [refusal(step, rank=None, chunk=None) for step in (1, 2)]
    assert len(suspects(damaged)) == 1, "damaged files have no chunks"


def test_one_chunk_that_several_hosts_refuse_points_to_its_publisher():
    [suspicion] = suspects([refusal(1), refusal(1, node="b", by="explorer-1")])
    assert suspicion.startswith(
        "Chunk 2 of rank 0 of step 1 was refused on 2 hosts: this points to"
    )
    assert "where rank 0 runs" in suspicion


async def test_the_summary_counts_a_refused_version_as_such(trainer, explorer, log, weights_client):
    model = torch.nn.Linear(32, 4)
    for step in range(4):
        publish(trainer, FULL, step)
        event = await ready(log, step)
        if step in (1, 2):
            weights_client.setrange(chunk_key(explorer.run_id, event.epoch, step, 0, 2), 5, b"U")
            with pytest.raises(CorruptVersion):
                explorer.apply(model, event)
        else:
            explorer.apply(model, event)
    explorer.flush()
    await reports_accepted(log)
    summarizer = Summarizer(explorer.run_id)
    for stream in Stream:
        for entry in await log.read(stream=stream):
            summarizer.add(decode_envelope(entry.payload), len(entry.payload))
    totals = summarizer.summary()
    assert (totals.versions_published, totals.versions_applied) == (4, 2)
    assert (totals.versions_refused, totals.refusals) == (2, 2)
    assert (totals.versions_superseded_unpulled, totals.versions_unaccounted) == (0, 0)
    assert len(totals.suspects) == 1

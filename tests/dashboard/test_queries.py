"""What a dashboard answers over HTTP is what the fold says."""

from __future__ import annotations

import json
from contextlib import closing

import msgspec
import pytest
from msgspec import structs

from tests.support.dashboards import SMALL, dashboard, put_run, server_runs, shared_dashboard
from trinity_events.analysis.changes import changes
from trinity_events.analysis.proof import Proof
from trinity_events.core import MonitorState
from trinity_events.core.fold import Monitor
from trinity_events.core.fold_state import format_producer
from trinity_events.dashboard import queries, search, timeline
from trinity_events.dashboard.board import RecordedRuns
from trinity_events.dashboard.series import sample
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.dashboard.sources import RecordedSource
from trinity_events.dashboard.state_view import format_weights_proof
from trinity_events.log import position
from trinity_events.replay import fold_one
from trinity_events.views import state_as_json
from trinity_events.views.changes import format_change, is_relevant
from trinity_schemas import (
    ContractError,
    ExplorerStatusChanged,
    WeightsProof,
    decode_envelope,
    encode,
    event_tag,
)

DEMO = Plan()
ENTRIES = list(simulated_run(DEMO))
RUN = f"/api/runs/{DEMO.run_id}"


@pytest.fixture(scope="module")
def demo():
    with shared_dashboard(DEMO) as served:
        yield served


def folded(number):
    monitor = Monitor(MonitorState(run_id=DEMO.run_id))
    monitor.fold(ENTRIES[:number])
    return monitor.state


@pytest.mark.parametrize("number", [1, 2, 499, 500, 501, 4467, 8000, len(ENTRIES)])
async def test_the_state_at_an_entry_is_the_fold_of_the_log_up_to_it(demo, number):
    status = await demo.json(f"{RUN}/at", number=number, whole="")
    assert status["whole"] == json.loads(json.dumps(state_as_json(folded(number))))
    assert status["number"] == number
    assert status["position"] == ENTRIES[number - 1].id
    assert status["event"] is None or status["event"]["entry"] == ENTRIES[number - 1].id


@pytest.mark.parametrize("number", [1, 500, 4467, len(ENTRIES)])
async def test_what_an_entry_changed_is_what_replay_shows(demo, number):
    status = await demo.json(f"{RUN}/at", number=number, changed="")
    former, state = state_as_json(folded(number - 1)), state_as_json(folded(number))
    expected = [format_change(change) for change in changes(former, state) if is_relevant(change)]
    assert status["changed"] == expected[: search.FOUND]


async def test_a_state_is_found_by_entry_and_by_time(demo):
    entry = ENTRIES[4321]
    by_id = await demo.json(f"{RUN}/at", entry=entry.id)
    by_time = await demo.json(f"{RUN}/at", time=position(entry.id)[0])
    assert by_id["number"] == 4322
    assert by_time["number"] >= 4322
    assert position(by_time["position"])[0] == position(entry.id)[0]


@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ({"number": 10**9}, 404, "entries 0 to"),
        ({"entry": "1-1"}, 404, "no entry 1-1"),
        ({"entry": "nonsense"}, 404, "not an entry id"),
        ({"number": "one"}, 400, "number is a number"),
    ],
)
async def test_a_question_about_an_entry_that_is_not_there_is_answered_with_a_sentence(
    demo, query, status, word
):
    answer = await demo.ask(f"{RUN}/at", **query)
    assert answer.status == status
    assert word in answer.json["error"]


async def test_the_end_of_the_demo_shows_who_waits_for_whom(demo):
    now = await demo.json(f"{RUN}/now")
    by = {wait["by"]: wait for wait in now["waits"]}
    assert by["trainer-0"]["for"] == ["explorer-29", "explorer-41"]
    assert by["explorer-29"]["for"] == ["reward-1"]
    assert by["explorer-29"]["depth"] == by["trainer-0"]["depth"] + 1
    assert now["dead_letters"] == 1
    assert now["refused"] == 10
    assert now["suspects"]
    assert any("state_dict" in unfinished for unfinished in now["unfinished"])


def matching(types=(), producer=None, step=None):
    """Number and type of each matching event and announcement, by the fold alone, newest first."""
    monitor, matches = Monitor(MonitorState(run_id=DEMO.run_id)), []
    for number, entry in enumerate(ENTRIES, 1):
        try:
            envelope = decode_envelope(entry.payload)
        except ContractError as error:
            monitor.set_aside(entry.id, error)
            continue
        for record in (envelope, *monitor.apply(entry.id, envelope)):
            tag, event = event_tag(record.event), record.event
            of = next(
                (
                    named.step
                    for named in (
                        event,
                        getattr(event, "slot", None),
                        getattr(event, "version", None),
                    )
                    if getattr(named, "step", None) is not None
                ),
                None,
            )
            if (
                (not types or tag in types)
                and (
                    producer
                    in (
                        None,
                        format_producer(record.producer),
                        record.producer.role,
                    )
                )
                and (step is None or of == step)
            ):
                matches.append((number, tag))
    return matches[::-1]


@pytest.mark.parametrize(
    "query",
    [
        {"type": "step-failed"},
        {"type": "version-refused,lease-expired"},
        {"producer": "explorer-17", "type": "wait-started,wait-ended"},
        {"step": 40, "type": "save-finished"},
        {"producer": "reducer", "type": "step-ready"},
    ],
)
async def test_a_search_finds_what_the_whole_log_has(demo, query):
    rows, before = [], None
    for _ in range(50):
        page = await demo.json(
            f"{RUN}/events", limit=25, **query, **({} if before is None else {"before": before})
        )
        rows += [(row[0], row[4]) for row in page["found"]]
        assert len(page["found"]) <= 25
        before = page["before"]
        if before is None:
            break
    types = tuple(query["type"].split(","))
    assert rows == matching(types, query.get("producer"), query.get("step"))
    assert rows


async def test_a_search_for_an_unknown_type_is_refused(demo):
    answer = await demo.ask(f"{RUN}/events", type="step-redy")
    assert answer.status == 400
    assert "step-redy" in answer.json["error"]


async def test_a_window_shows_a_save_from_its_start_to_its_failure(demo):
    lanes = await demo.json(f"{RUN}/lanes")
    failed = next(m for m in lanes["marks"] if m[3] == "step-failed")
    window = {"from": failed[0] - 60_000, "to": failed[0] + 30_000}
    window_bars = await demo.json(f"{RUN}/timeline", rows="actor-5,reducer-0", **window)
    assert window_bars["mode"] == "spans"
    saves = [
        span for span in window_bars["spans"] if span[0] == 0 and span[4] == "saves checkpoint"
    ]
    assert [span[7] for span in saves] == ["failed", "finished"]
    assert saves[0][2] == failed[0]
    assert any(span[7] == "failed" for span in window_bars["spans"] if span[0] == 1)


async def test_a_span_that_began_before_a_window_reaches_into_it(demo):
    lanes = await demo.json(f"{RUN}/lanes")
    failed = next(m for m in lanes["marks"] if m[3] == "step-failed")
    window = {"from": failed[0] - 3000, "to": failed[0] - 1000}
    window_bars = await demo.json(f"{RUN}/timeline", rows="actor-5", **window)
    [save] = [span for span in window_bars["spans"] if span[4] == "saves checkpoint"]
    assert save[1] < window["from"]
    assert save[7] == "under way"


async def test_a_long_window_is_answered_with_counts_that_add_up(demo):
    assert len(ENTRIES) > timeline.DETAILED
    window_bars = await demo.json(f"{RUN}/timeline", rows="trainer-0,explorer:0-46,actor:0-15")
    assert window_bars["mode"] == "counts"
    of_explorers = sum(count for row, _, _, count in window_bars["cells"] if row == 1)
    expected = sum(
        1 for entry in ENTRIES if b"explorer" in entry.payload and _role(entry) == "explorer"
    )
    assert of_explorers == expected


def _role(entry):
    try:
        return decode_envelope(entry.payload).producer.role
    except ValueError:
        return None


async def test_rows_that_are_no_lanes_are_refused(demo):
    answer = await demo.ask(f"{RUN}/timeline", rows="explorer:x-y")
    assert answer.status == 400
    assert "explorer:x-y" in answer.json["error"]


async def test_versions_are_proven_by_the_announced_digest(demo):
    proofs = await demo.json(f"{RUN}/versions")
    assert len(proofs["versions"]) == 24
    verdicts = {cell[6] for cell in proofs["cells"] if proofs["versions"][cell[0]][3]}
    assert verdicts == {"proven"}
    assert {cell[7] for cell in proofs["cells"]} == {"proven by names, served"}


async def test_explorers_are_shown_with_the_proof_of_what_they_serve(demo):
    view = await demo.json(f"{RUN}/at", number=len(ENTRIES))
    serving = [row for row in view["explorers"] if row[3] is not None]
    assert serving
    assert {row[10] for row in serving} == {"proven"}


def test_a_proof_in_words_names_what_it_leaves_out():
    proof = WeightsProof(
        status="partly",
        checks=("names", "served", "probes"),
        tensors=2,
        unproven=tuple("abcdef"),
        unproven_count=9,
        difference=0.00012,
    )
    assert format_weights_proof(proof) == (
        "partly proven by names, served, probes; probes differ by 0.00012 nats; not compared: "
        "a, b, c, d and 5 more"
    )


async def test_versions_of_the_past_are_those_of_the_log_up_to_then(demo):
    newest = await demo.json(f"{RUN}/versions")
    assert await demo.json(f"{RUN}/versions", number=len(ENTRIES)) == newest
    past = await demo.json(f"{RUN}/versions", number=4467)
    state = folded(4467)
    assert [version[1] for version in past["versions"]][-2:] == [40, 41]
    assert past["explorers"] == sorted(state.explorers)
    serves = {name: explorer.version.step for name, explorer in state.explorers.items()}
    applied = {(past["versions"][cell[0]][1], cell[1]) for cell in past["cells"]}
    assert {(step, name) for name, step in serves.items()} <= applied
    assert max(cell[2] for cell in past["cells"]) <= position(ENTRIES[4466].id)[0] / 1000


async def test_learning_is_a_sample_of_the_figures_that_ends_at_the_newest_step(demo):
    figures = (await demo.json(f"{RUN}/figures"))["metrics"]
    learning = (await demo.json(f"{RUN}/learning"))["metrics"]
    names = {"reward": "reward/mean", "response length": "response_length", "KL": "kl"}
    assert learning.keys() == {*names, "entropy"}
    for label, name in names.items():
        assert len(learning[label]) <= queries._SPARKS
        assert learning[label][-1][:2] == figures[name][-1][:2]


@pytest.mark.parametrize("number", [0, 1, 159, 160, 161, 1000])
def test_a_sample_has_the_mean_of_all_points(number):
    sampled = sample([(1, step, float(step)) for step in range(number)], 160)
    assert len(sampled) <= 160
    assert [point[1] for point in sampled] == sorted({point[1] for point in sampled})
    assert not number or sampled[-1][1] == number - 1


async def test_an_open_run_with_failures_is_shown_with_its_troubles(demo):
    now = await demo.json(f"{RUN}/now")
    words = {words: number for number, words, _ in now["troubles"]}
    assert words["weights refused"] == now["refused"]
    assert now["learning"]["pace"] > 0


async def test_causes_of_the_past_are_those_that_the_log_tells(demo):
    now = await demo.json(f"{RUN}/now")
    assert now["causes"][0]["process"] == "reward-1"
    assert now["processes"] == []
    begin = await demo.json(f"{RUN}/at", number=500)
    assert begin["causes"] == []


@pytest.mark.parametrize("step", [40, 90, 120])
async def test_a_step_is_proven_by_the_entries_that_explain_names(demo, step):
    proof, monitor = Proof(step), Monitor(MonitorState(run_id=DEMO.run_id))
    results = [(entry.id, fold_one(monitor, entry)) for entry in ENTRIES]
    for entry_id, result in results:
        for announcement in result.announcements:
            proof.add_announcement(entry_id, announcement)
    for entry_id, result in results:
        if result.envelope is not None:
            proof.add(entry_id, result.envelope)
    explanation = await demo.json(f"{RUN}/explain", step=step)
    assert explanation["proof"] == json.loads(msgspec.json.encode(proof.entries))
    assert any(entry["final"] for entry in explanation["proof"])


async def test_figures_have_metrics_by_step_and_the_slowest_times_by_version(demo):
    figures = await demo.json(f"{RUN}/figures")
    steps = [step for _, step, _ in figures["metrics"]["reward/mean"]]
    assert steps == [*range(1, 101), *range(81, 121)]
    assert len(figures["times"]["stall"]) == len(figures["times"]["pause"]) == 140
    assert dict(figures["staleness"])[0] > 0


async def test_runs_of_a_server_are_listed_with_their_state(client, run_id):
    plan = Plan(run_id=run_id, ranks=2, explorers=2, steps=3, faults=False)
    await put_run(client, run_id, simulated_run(plan))
    async with dashboard(server_runs(client)) as served:
        runs = await served.json("/api/runs")
        [listed] = [run for run in runs["runs"] if run["run"] == run_id]
        assert listed["step"] == 3
        assert listed["ready"] == {"weights": 3}
        unknown = await served.ask("/api/runs/there-is-none/now")
        assert unknown.status == 404


async def test_a_router_gets_the_servers_with_the_versions_that_they_have_proven():
    plan = Plan(run_id="served", ranks=2, explorers=2, steps=3, faults=False)
    url, entries = "http://127.0.0.1:8000", []
    for entry in simulated_run(plan):
        envelope = decode_envelope(entry.payload)
        if isinstance(envelope.event, ExplorerStatusChanged) and envelope.producer.rank == 1:
            event = structs.replace(envelope.event, endpoint=url)
            payload = encode(structs.replace(envelope, event=event))
            entries.append(entry._replace(payload=payload))
        else:
            entries.append(entry)
    with closing(RecordedSource.from_entries(plan.run_id, entries)) as source:
        async with dashboard(RecordedRuns(source)) as served:
            await served.indexed(plan.run_id)
            [engine] = (await served.json(f"/api/runs/{plan.run_id}/engines"))["engines"]
            state = (await served.json(f"/api/runs/{plan.run_id}/at", whole=1))["whole"]
    assert (engine["explorer"], engine["url"]) == ("explorer-1", url)
    explorer = state["explorers"]["explorer-1"]
    for name in ("version", "digest"):
        assert engine[name] == explorer[name]


def test_the_small_plan_is_the_same_each_time():
    assert list(simulated_run(SMALL)) == list(simulated_run(SMALL))

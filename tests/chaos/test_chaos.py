"""A few cells of the chaos matrix; make chaos runs all of them."""

from collections import Counter
from functools import partial

import pytest

from tests.chaos import matrix, outcome, table
from tests.chaos.__main__ import PAGE
from tests.chaos.plan import RUN, file_of
from tests.chaos.scenarios import SCENARIOS
from trinity_schemas import RunKeys, StepReady, decode_envelope

pytestmark = pytest.mark.server

CHOSEN = [
    "worker/save-started/after",
    "trainer/step-committed/after",
    "reducer/step-ready/before",
    "reducer/step-ready/after",
    "explorer/step-ready/after",
    "group/acknowledged/before",
    "server/save-finished/after",
    "trainer/run-resumed/after",
]


@pytest.fixture(scope="module")
def undisturbed():
    return matrix.undisturbed()


@pytest.mark.processes
def test_an_undisturbed_run_keeps_every_promise(undisturbed):
    assert undisturbed.faults == []
    assert {(1, "state_dict"), (4, "checkpoint"), (4, "weights")} <= undisturbed.ready


@pytest.mark.processes
@pytest.mark.parametrize("name", CHOSEN)
def test_a_run_in_which_one_is_killed_ends_as_the_undisturbed(undisturbed, name):
    [cell] = [candidate for candidate in matrix.cells(undisturbed.counts) if str(candidate) == name]
    assert matrix.run(cell, undisturbed.ready).faults == []


@pytest.mark.processes
def test_a_leader_that_wakes_up_after_another_took_over_changes_nothing(undisturbed):
    [scenario] = [candidate for candidate in SCENARIOS if "leader" in candidate.name]
    assert matrix.run_scenario(scenario, undisturbed.ready).faults == []


@pytest.mark.processes
def test_the_matrix_has_every_event_of_the_run_and_every_victim(undisturbed):
    cells = matrix.cells(undisturbed.counts)
    met = {"run-opened", "save-requested", "save-granted", "save-failed", "step-failed"}
    met |= {"step-ready", "version-retired", "weights-applied", "lease-expired", "run-resumed"}
    assert met <= {cell.boundary for cell in cells}
    assert {cell.victim for cell in cells} == set(matrix.VICTIMS)
    assert len(set(map(str, cells))) == len(cells)


@pytest.mark.processes
def test_whoever_is_missing_is_named(undisturbed):
    def without_a_group(pipeline):
        pipeline.start(*(role for role in pipeline.roles if role != "group"))
        missing = partial(outcome.missing, pipeline)
        pipeline.until(lambda: None if "group" in (lacks := missing() or "") else lacks, 20)

    result = matrix.run_with("no group", without_a_group, undisturbed.ready, {}, deadline=1.0)
    assert [fault.partition(":")[0] for fault in result.faults] == ["stuck"]
    assert "group has not heard of" in result.faults[0]


@pytest.mark.processes
def test_a_run_that_breaks_its_promises_is_found_out(undisturbed):
    def sabotage(pipeline):
        pipeline.start()
        pipeline.until(lambda: outcome.missing(pipeline), 20)
        keys = RunKeys.of(RUN)
        for _, fields in pipeline.client.xrange(keys.announcements):
            if isinstance(decode_envelope(fields[b"e"]).event, StepReady):
                pipeline.client.xadd(keys.announcements, fields)
                break
        saved = pipeline.place.run_folder / "global_step_4" / file_of("checkpoint", 0)
        saved.write_bytes(b"something else")

    expected = undisturbed.ready | {(9, "weights")}
    problems = "; ".join(matrix.run_with("sabotage", sabotage, expected, {}).faults)
    assert "weights of step 9 was never ready" in problems
    assert "announced 2 times" in problems
    assert "a replay does not announce what the reducer announced" in problems
    assert "global_step_4/checkpoint_rank_0.bin is not what was saved" in problems


def test_the_matrix_is_kept_where_it_was():
    cell = matrix.Cell("worker", "save-started", "after")
    results = {
        str(cell): matrix.Result(str(cell), [], 1.0, frozenset(), Counter()),
        SCENARIOS[0].name: matrix.Result(SCENARIOS[0].name, ["stuck"], 1.0, frozenset(), Counter()),
    }
    text = table.table([cell], SCENARIOS[:1], results)
    assert "| `save-started` | - ok | - - |" in text
    assert f"| {SCENARIOS[0].name} | **fails** |" in text
    page = f"before\n{table.BEGIN}\nold\n{table.END}\nafter"
    replaced = table.with_matrix(page, text)
    assert replaced == f"before\n{table.BEGIN}\n{text}{table.END}\nafter"
    assert table.with_matrix(replaced, text) == replaced


def test_the_page_has_room_for_the_matrix():
    page = PAGE.read_text()
    assert page.count(table.BEGIN) == page.count(table.END) == 1
    assert "a new matrix" in table.with_matrix(page, "a new matrix\n")

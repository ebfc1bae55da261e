"""Page of recorded samples: its queries, on a record that a writer wrote."""

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torch")

import anyio.to_thread
import msgspec

from tests.support.browser import browser
from tests.support.errors import raises
from tests.support.experiences import make_groups
from tests.support.rollout_records import make_episode, write_record
from trinity_events.dashboard import samples as dashboard_samples
from trinity_events.dashboard.html_export import build_html
from trinity_events.dashboard.samples import FILE_GROUPS, read_for_file, read_sample, read_step
from trinity_events.dashboard.simulated_run import Plan, simulated_run
from trinity_events.dashboard.sources import RecordedSource
from trinity_events.record.reader import RecordMissing, RolloutRecord

GROUPS = 5
sample_of = msgspec.structs.replace


@pytest.fixture(scope="module")
def groups():
    return make_groups("r", 4, count=GROUPS)


@pytest.fixture(scope="module")
def record(tmp_path_factory, policy_folder, groups):
    """Return a record in which step 1 discarded a first attempt, and step 3 is being filled."""
    folder = tmp_path_factory.mktemp("runs") / "r"
    # The stale one was asked for again, and its second attempt was trained on.
    stale, filtered = groups[0], [sample_of(sample, ordinal=90) for sample in groups[1]]
    trained = [[sample_of(sample, attempt=2) for sample in stale], *groups[1:]]
    discarded = {1: [("stale", stale), ("filtered", filtered)], 3: [("filtered", filtered)]}
    return write_record(folder, policy_folder, {1: trained, 2: groups}, discarded=discarded)


def test_a_step_has_its_groups_with_the_best_and_the_worst_answer(record, groups):
    step_page = read_step(record)
    assert (step_page["step"], step_page["steps"], step_page["explorers"]) == (
        2,
        [1, 2, 3],
        ["explorer-0"],
    )
    assert [group["ordinal"] for group in step_page["groups"]] == [*range(GROUPS)]
    for shown, group in zip(step_page["groups"], groups, strict=True):
        rewards = [sample.reward for sample in group]
        assert [row[1] for row in shown["samples"]] == rewards
        assert rewards[shown["best"]] == 1.0 and rewards[shown["worst"]] == 0.0
        lengths = [len(sample.turns[1].tokens) for sample in group]
        assert [row[2] for row in shown["samples"]] == lengths
        assert len(shown["previews"]) == 3


def test_each_group_has_the_end_of_its_question_on_one_line(record):
    first = read_step(record)["groups"][0]
    prompt = read_sample(record, 2, first["ordinal"], 0)["turns"][0][1]
    assert first["question"] == " ".join(prompt.split())
    long = dashboard_samples._format_question("system\n" * 100 + "what is 2 + 2?")
    assert long.startswith("…") and long.endswith("system what is 2 + 2?")
    assert len(long) == dashboard_samples._QUESTION + 1


def test_a_sample_has_a_text_for_each_token_that_make_up_its_turns(record, groups):
    sample = read_sample(record, 1, 3, 2)
    answer = groups[3][2].turns[1]
    assert len(sample["tokens"]) == len(answer.tokens) == sample["length"]
    [prompt, turn] = sample["turns"]
    assert (prompt[0], turn[0]) == ("prompt", "policy")
    assert "".join(sample["tokens"]) == turn[1]
    assert sample["versions"] == [[1, 0, len(answer.tokens)]]
    assert sample["logprobs"] == pytest.approx([*answer.logprobs], abs=1e-4)
    assert sample["trainer_logprobs"] == []


def test_discarded_answers_are_groups_of_the_step_that_was_being_filled(record, groups):
    step_page = read_step(record, 1)
    size = len(groups[0])
    assert step_page["fates"] == {"trained": GROUPS * size, "stale": size, "filtered": size}
    names = [(group["fate"], group["ordinal"], group["attempt"]) for group in step_page["groups"]]
    assert names[0] == ("trained", 0, 2)
    assert names[GROUPS:] == [("stale", 0, 1), ("filtered", 90, 1)]
    assert step_page["groups"][-1]["question"]
    trained = read_sample(record, 1, 0, 1)
    stale = read_sample(record, 1, 0, 1, "stale", 1)
    assert (trained["fate"], trained["attempt"]) == ("trained", 2)
    assert (stale["fate"], stale["attempt"], stale["tokens"]) == ("stale", 1, trained["tokens"])
    with raises(RecordMissing, fault="ordinal", ordinal=0):
        read_sample(record, 1, 0, 1, "stale", 2)
    # No step trained on samples of the third step so far.
    assert read_step(record, 3)["fates"] == {"filtered": size}


def test_an_episode_with_a_tool_has_its_messages_by_turn(tmp_path, policy_folder):
    episode = make_episode(policy_folder)
    sample = read_sample(write_record(tmp_path / "r", policy_folder, {1: [[episode]]}), 1, 0, 0)
    assert [(turn, role, name) for turn, role, name, *_ in sample["messages"]] == [
        (0, "system", ""),
        (0, "user", ""),
        (1, "assistant", ""),
        (2, "tool", "lookup"),
        (3, "assistant", ""),
    ]
    assert sample["messages"][2][4] == [["lookup", '{"word": "tea"}']]


def test_a_step_that_is_not_recorded_is_named(record):
    with raises(RecordMissing, fault="step", step=7, recorded=(1, 3)):
        read_step(record, 7)
    with raises(RecordMissing, fault="ordinal", ordinal=99):
        read_sample(record, 1, 99, 0)


def test_a_run_without_a_record_has_no_step(tmp_path):
    assert read_step(RolloutRecord(tmp_path, "r")) == {"steps": [], "step": None}


def test_a_file_has_the_groups_of_all_steps_and_the_tokens_of_some(record):
    data = read_for_file(record)
    assert [*data["steps"]] == ["1", "2", "3"]
    names = [name.split("/")[:4] for name in data["samples"]]
    trained = {ordinal for _, fate, ordinal, _ in names if fate == "trained"}
    assert len(trained) == min(GROUPS, FILE_GROUPS)
    assert names.count(["1", "trained", "0", "2"]) == names.count(["1", "stale", "0", "1"]) == 4
    assert len(names) == (2 * len(trained) + 3) * 4


async def write_page(record, folder):
    """Write the HTML file of a run with a record; return the address of the run in it."""
    plan = Plan(explorers=2, steps=4)
    source = RecordedSource.from_entries(plan.run_id, simulated_run(plan))
    source.record = record
    path = folder / "run.html"
    path.write_text(await build_html(source))
    source.close()
    return f"{path.as_uri()}#/{plan.run_id}"


@pytest.mark.processes
async def test_the_page_filters_groups_and_shades_the_tokens_of_a_sample(record, tmp_path):
    address = await write_page(record, tmp_path)
    await anyio.to_thread.run_sync(look_at_samples, tmp_path, address)


@pytest.mark.processes
async def test_the_page_shows_an_episode_with_a_tool_as_a_conversation(tmp_path, policy_folder):
    record = write_record(tmp_path / "r", policy_folder, {1: [[make_episode(policy_folder)]]})
    address = await write_page(record, tmp_path)

    def look() -> None:
        with browser(tmp_path / "profile") as page:
            page.open(f"{address}/samples")
            page.wait_for("document.querySelector('.group summary')")
            page.evaluate("document.querySelector('.group summary').click()")
            page.wait_for("document.querySelector('.tool-call')")
            assert page.text(".tool-call") == 'calls lookup({"word": "tea"})'
            roles = "[...document.querySelectorAll('.turn-role')].map((role) => role.innerText)"
            assert page.evaluate(f"{roles}.join()") == "system,user,policy,tool lookup,policy"
            assert page.problems == []

    await anyio.to_thread.run_sync(look)


def look_at_samples(folder, address):
    """Open the page in a browser, and use it."""
    groups = "document.querySelectorAll('.group').length"
    with browser(folder / "profile") as page:
        page.open(f"{address}/samples")
        page.wait_for(f"{groups} === {GROUPS}")
        page.evaluate("document.querySelector('.group summary').click()")
        page.wait_for("document.querySelector('.token')")
        assert "step 0" in page.text(".version-mark")
        shade = "getComputedStyle(document.querySelector('.token')).backgroundColor"
        assert page.evaluate(shade) != "rgba(0, 0, 0, 0)"
        # Questions with odd numbers have answers of four tokens at most.
        field = (
            "[...document.querySelectorAll('.sample-tools label')].find((label) => label.innerText"
        )
        typed = f"(() => {{ const box = {field}.startsWith('Tokens')).querySelector('input');"
        page.evaluate(f"{typed} box.value = '5'; box.dispatchEvent(new Event('input')) }})()")
        page.wait_for(f"{groups} === 3")
        page.evaluate(f"{typed} box.value = ''; box.dispatchEvent(new Event('input')) }})()")
        page.evaluate("document.querySelector('[aria-label=\"The step before\"]').click()")
        page.wait_for("document.querySelector('.panel h2').innerText.includes('step 1')")
        fate = f"const fate = {field}.startsWith('Fate')).querySelector('select');"
        change = "fate.value = 'discarded'; fate.dispatchEvent(new Event('change'))"
        page.evaluate(f"(() => {{ {fate} {change} }})()")
        page.wait_for(f"{groups} === 2")
        assert page.text(".group .fate") in ("stale", "filtered")
        page.evaluate("document.querySelector('.group summary').click()")
        page.wait_for("document.querySelector('.token')")
        assert page.problems == []

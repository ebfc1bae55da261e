"""Page of recorded samples: its queries, on a record that a writer wrote."""

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torch")

import anyio.to_thread

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


@pytest.fixture(scope="module")
def groups():
    return make_groups("r", 4, count=GROUPS)


@pytest.fixture(scope="module")
def record(tmp_path_factory, policy_folder, groups):
    folder = tmp_path_factory.mktemp("runs") / "r"
    return write_record(folder, policy_folder, {1: groups, 2: groups})


def test_a_step_has_its_groups_with_the_best_and_the_worst_answer(record, groups):
    step_page = read_step(record)
    assert (step_page["step"], step_page["steps"], step_page["explorers"]) == (
        2,
        [1, 2],
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
    with raises(RecordMissing, fault="step", step=7, recorded=(1, 2)):
        read_step(record, 7)
    with raises(RecordMissing, fault="ordinal", ordinal=99):
        read_sample(record, 1, 99, 0)


def test_a_run_without_a_record_has_no_step(tmp_path):
    assert read_step(RolloutRecord(tmp_path, "r")) == {"steps": [], "step": None}


def test_a_file_has_the_groups_of_all_steps_and_the_tokens_of_some(record):
    data = read_for_file(record)
    assert [*data["steps"]] == ["1", "2"]
    ordinals = {name.split("/")[1] for name in data["samples"]}
    assert len(ordinals) == min(GROUPS, FILE_GROUPS)
    assert len(data["samples"]) == 2 * len(ordinals) * 4


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
            roles = "[...document.querySelectorAll('.turn-role')].map((one) => one.innerText)"
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
        field = "[...document.querySelectorAll('.sample-tools label')].find((one) => one.innerText"
        typed = f"(() => {{ const box = {field}.startsWith('Tokens')).querySelector('input');"
        page.evaluate(f"{typed} box.value = '5'; box.dispatchEvent(new Event('input')) }})()")
        page.wait_for(f"{groups} === 3")
        assert page.problems == []

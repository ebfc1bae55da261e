"""Claims about sets of questions that are mixed by weights (the invariants of mixed_questions)."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.errors import assert_attributes, raises
from trinity_workers.rollouts.held_out_sets import HeldOutSet
from trinity_workers.tasks import (
    Answer,
    MixedQuestions,
    Question,
    QuestionSet,
    TrainingSet,
    WeightedMix,
    load_reward,
    load_task,
)
from trinity_workers.tasks.errors import MixRefused, NoQuestions, NoReward, SetsUnusable

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.floats(min_value=1e-6, max_value=1e6) | st.sampled_from([1.0, 2.0, 0.1, 1 / 3]),
    min_size=1,
)
SEEDS = st.none() | st.integers(0, 2**32 - 1)
SIZES = {"small": 7, "large": 60}


def make_questions(name: str, count: int, **fields) -> list[Question]:
    data = {"level": 1} | fields
    return [Question(prompt=f"{name} {n}", answer=str(n), data=data) for n in range(count)]


def make_task(weights=None, *, seed=0, sizes=None, evaluation=(), **settings) -> MixedQuestions:
    sets = {name: make_questions(name, size) for name, size in (sizes or SIZES).items()}
    weights = weights or {"small": 1.0, "large": 2.0}
    return MixedQuestions(sets, weights, seed=seed, evaluation=evaluation, **settings)


@given(WEIGHTS, SEEDS, st.integers(0, 2**53), st.integers(1, 300))
def test_each_set_has_its_share_of_any_consecutive_ordinals(weights, seed, first, count):
    mix = WeightedMix(weights, seed)
    drawn = Counter(mix.draw(ordinal)[0] for ordinal in range(first, first + count))
    for name, weight in weights.items():
        expected = count * weight / sum(weights.values())
        assert abs(drawn[name] - expected) < 2 * len(weights)  # invariant 2


@given(WEIGHTS, SEEDS, st.integers(0, 2**53))
def test_the_draws_of_a_set_are_consecutive_from_any_ordinal_on(weights, seed, first):
    mix = WeightedMix(weights, seed)
    for start in (0, first):
        following = dict.fromkeys(weights, 0) if start == 0 else {}
        for ordinal in range(start, start + 100):
            name, draw = mix.draw(ordinal)
            assert draw == following.get(name, draw)  # invariant 3
            following[name] = draw + 1


@given(WEIGHTS, SEEDS, st.sampled_from([0.5, 2.0, 1024.0]), st.randoms())
def test_order_of_the_names_and_a_common_factor_change_nothing(weights, seed, factor, random):
    items = [(name, weight * factor) for name, weight in weights.items()]
    random.shuffle(items)
    mix, other = WeightedMix(weights, seed), WeightedMix(dict(items), seed)
    assert [mix.draw(n) for n in range(50)] == [other.draw(n) for n in range(50)]  # invariant 4


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_question_of_a_set_is_asked_once_in_each_of_its_passes(shuffle):
    task = make_task(shuffle=shuffle)
    questions = [task.question(ordinal) for ordinal in range(3000)]
    for name, size in SIZES.items():
        of_set = [question.prompt for question in questions if question.set == name]
        passes = [of_set[at : at + size] for at in range(0, len(of_set) - size, size)]
        assert len(passes) > 10
        assert all(len(set(passed)) == size for passed in passes)
        assert (len({tuple(passed) for passed in passes}) == 1) != shuffle
    # The small set is exhausted many times before the large one, and its share stays.
    counts = Counter(question.set for question in questions)
    assert abs(counts["small"] - 1000) < 4


def test_the_seed_decides_mix_and_orders_and_sets_of_one_size_have_different_orders():
    def ask(seed: int, **settings) -> list[str]:
        task = make_task(seed=seed, sizes={"small": 20, "large": 20}, **settings)
        return [str(task.question(ordinal).prompt) for ordinal in range(60)]

    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert ask(1, shuffle=False) == ask(2, shuffle=False)
    numbers = {
        name: [prompt.split()[1] for prompt in ask(1) if prompt.startswith(name)][:20]
        for name in SIZES
    }
    assert numbers["small"] != numbers["large"]


@pytest.mark.processes
def test_another_process_and_a_resume_find_the_same_questions_from_any_ordinal(tmp_path):
    sets = write_sets(tmp_path)
    task = load_task(sets=sets, seed=3, folder=tmp_path)
    program = (
        "import sys, json, msgspec; from pathlib import Path\n"
        "from trinity_workers.tasks import load_task, TrainingSet\n"
        "sets = msgspec.json.decode(sys.argv[2], type=dict[str, TrainingSet])\n"
        "t = load_task(sets=sets, folder=Path(sys.argv[1]), seed=3)\n"
        "asked = [t.question(n) for n in range(500, 520)]\n"
        "print(json.dumps([t.fingerprint, [[q.set, q.prompt] for q in asked]]))"
    )
    named = json.dumps({name: {"questions": of.questions} for name, of in sets.items()})
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), named],
        check=True,
        capture_output=True,
        text=True,
    )
    expected = [[q.set, q.prompt] for q in map(task.question, range(500, 520))]
    assert json.loads(done.stdout) == [task.fingerprint, expected]


def write_sets(folder: Path, **fields: object) -> dict[str, TrainingSet]:
    for name, size in SIZES.items():
        records = [
            {"prompt": f"{name} {n}", "answer": str(n), **(fields if name == "small" else {})}
            for n in range(size)
        ]
        lines = "\n".join(map(json.dumps, records))
        (folder / f"{name}.jsonl").write_text(lines)
    return {name: TrainingSet(questions=f"{name}.jsonl") for name in SIZES}


def test_the_fingerprint_covers_questions_names_weights_and_seed_and_not_their_order():
    fingerprint = make_task().fingerprint
    assert make_task({"large": 4.0, "small": 2.0}).fingerprint == fingerprint
    sizes = dict(reversed(SIZES.items()))
    assert make_task(sizes=sizes).fingerprint == fingerprint
    others = [
        make_task({"small": 1.0, "large": 2.5}),
        make_task(seed=1),
        make_task(shuffle=False),
        make_task(sizes={"small": 7, "large": 61}),
        make_task({"tiny": 1.0, "large": 2.0}, sizes={"tiny": 7, "large": 60}),
        make_task(evaluation=make_questions("held", 3)),
        make_task(evaluation=None),
    ]
    assert len({fingerprint, *(task.fingerprint for task in others)}) == 1 + len(others)


def test_the_name_of_a_set_is_no_part_of_a_fingerprint_that_was_logged_before_there_were_sets():
    questions = make_questions("a", 3)
    assert QuestionSet("q", questions, seed=5).fingerprint == (
        "sha256:682f28de5085e135e42e2b04b4c6d7e37298d83ebd18a6d6ff86049c66452224"
    )
    named = [Question(prompt=q.prompt, answer=q.answer, data=q.data, set="a") for q in questions]
    fingerprints = {HeldOutSet("h", None, of, None).fingerprint for of in (questions, named)}
    assert fingerprints == {
        "sha256:f7665d5fee6543b6522886c6b427142c0c1d6814ea7cf6c2e269215a9c91891b"
    }


def test_held_out_questions_have_the_shares_of_the_sets_and_are_never_trained_on():
    task = make_task(sizes={"small": 400, "large": 400}, evaluation=None)
    held_out = task.held_out(30)
    counts = Counter(question.set for question in held_out)
    assert abs(counts["small"] - 10) <= 1 and abs(counts["large"] - 20) <= 1
    everything = task.held_out(1000)
    assert everything[:30] == held_out, "the first ones are the same"
    trained = {task.question(ordinal).prompt for ordinal in range(4000)}
    assert len(trained) + len(everything) == 800
    assert not trained & {question.prompt for question in everything}


def test_a_source_of_evaluation_leaves_all_questions_to_training(tmp_path):
    sets = write_sets(tmp_path)
    (tmp_path / "held.jsonl").write_text('{"prompt": "held", "answer": "1"}\n')
    task = load_task(sets=sets, options={"evaluation": "held.jsonl"}, folder=tmp_path)
    assert [question.prompt for question in task.held_out(5)] == ["held"]
    trained = {task.question(ordinal).prompt for ordinal in range(400)}
    assert len(trained) == sum(SIZES.values())


def test_a_set_may_have_fields_and_options_of_its_own(tmp_path):
    sets = {"plain": write_sets(tmp_path)["large"]}
    (tmp_path / "own.jsonl").write_text('{"question": "q", "solution": "4"}\n' * 4)
    sets["own"] = TrainingSet(questions="own.jsonl", prompt="question", answer="solution")
    options = {"evaluation": "large.jsonl"}
    task = load_task(sets=sets, options=options, folder=tmp_path)
    own = next(q for q in map(task.question, range(9)) if q.set == "own")
    assert (own.prompt, own.answer, own.data) == ("q", "4", {})
    sized = {
        name: TrainingSet(questions="reasoning-gym:spell_backward", source=source)
        for name, source in (("a", {"size": 7}), ("b", {}))
    }
    pytest.importorskip("reasoning_gym")
    options = {"evaluation": "large.jsonl", "source": {"size": 5}}
    task = load_task(sets=sized, options=options, folder=tmp_path)
    assert isinstance(task, MixedQuestions)
    assert {name: len(of_set) for name, of_set in task.sets.items()} == {"a": 7, "b": 5}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_not_positive_and_finite_is_refused_by_its_set(weight):
    with raises(MixRefused, fault="weight", name="small"):
        make_task({"small": weight, "large": 1.0})


def test_every_set_that_cannot_be_read_is_named_with_a_package_that_is_missing(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    sets = {name: TrainingSet(questions=name) for name in ("a.parquet", "absent.jsonl")}
    with raises(SetsUnusable) as refused:
        load_task(sets=sets, folder=tmp_path)
    missing, absent = refused.value.errors
    assert_attributes(missing, package="pyarrow")
    assert_attributes(absent, fault="absent")


def test_a_set_without_questions_is_refused_by_its_name(tmp_path):
    sets = write_sets(tmp_path)
    (tmp_path / "small.jsonl").write_text("\n")
    with raises(NoQuestions, fault="set", setting="task.sets.small", source="small.jsonl"):
        load_task(sets=sets, folder=tmp_path)
    with raises(MixRefused, fault="source", name="none"):
        load_task(sets={"none": TrainingSet()}, folder=tmp_path)


@pytest.mark.parametrize(
    ("small", "missing"),
    [
        (make_questions("small", 9, topic="x"), "the field 'topic'"),
        ([Question(prompt="1 + 1 ="), Question(prompt="2 =", data={"level": 2})], "right answers"),
        (
            [
                Question(prompt=question.messages(), answer=question.answer, data=question.data)
                for question in make_questions("small", 9)
            ],
            "prompts of text",
        ),
    ],
)
def test_sets_whose_questions_have_other_fields_are_refused_by_field_and_set(small, missing):
    sets = {"small": small, "large": make_questions("large", 9)}
    with raises(MixRefused, fault="fields") as refused:
        MixedQuestions(sets, dict.fromkeys(sets, 1.0))
    assert {refused.value.name, refused.value.other} == {"small", "large"}
    assert missing in refused.value.missing
    assert "\n" not in str(refused.value)


def test_families_judge_the_answers_to_their_own_questions():
    pytest.importorskip("reasoning_gym")
    families = {"sums": "basic_arithmetic", "letters": "spell_backward"}
    sets = {
        name: TrainingSet(questions=f"reasoning-gym:{family}", source={"size": 30})
        for name, family in families.items()
    }
    task = load_task(sets=sets)
    reward = load_reward(None, task="spell-backward", sets=sets)
    questions = [task.question(ordinal) for ordinal in range(20)]
    assert {question.set for question in questions} == set(families)
    for question, other in pairwise(questions):
        for text, earned in ((question.answer, 1.0), (f"not {other.answer} 77", 0.0)):
            answer = Answer(text=text, finished=True, messages=[], tokens=1)
            assert (reward(question, answer) == 1.0) == (earned == 1.0)


def test_sets_without_a_reward_of_their_own_need_a_function(tmp_path):
    with raises(NoReward, source="task.sets.small"):
        load_reward(None, task="spell-backward", sets=write_sets(tmp_path))

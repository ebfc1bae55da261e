"""Claims about tasks by name: built-in ones, entry points and a user's objects."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from tests.support.errors import raises
from trinity_workers.tasks import (
    Answer,
    ComplexSums,
    Question,
    SortDigits,
    SpellBackward,
    Task,
    built_in_task,
    load_task,
    split_of,
)
from trinity_workers.tasks.errors import ObjectUnusable, TaskUnusable, TooFewQuestions
from trinity_workers.tasks.loading import TASKS

MINE = """
from trinity_workers.tasks import Question, TaskError

class Sums:
    fingerprint = "sha256:0"

    def __init__(self, seed, top=10):
        if top < 1:
            raise ValueError("top must be positive")
        self.name, self.seed, self.top = f"sums-to-{top}", seed, top

    def question(self, ordinal):
        return Question(prompt=f"{ordinal % self.top} + {self.seed} =")

    def held_out(self, count):
        return []

class Half:
    name = "half"

    def question(self, ordinal):
        return None

ready = Sums(seed=5)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def test_a_class_is_called_with_the_seed_and_the_options(folder):
    task = load_task("./mine.py:Sums", seed=2, options={"top": 3}, folder=folder)
    assert isinstance(task, Task)
    assert (task.name, task.question(4).prompt) == ("sums-to-3", "1 + 2 =")


def test_an_object_is_a_task_as_it_is(folder):
    assert load_task("./mine.py:ready", folder=folder).question(1).prompt == "1 + 5 ="


def test_a_module_beside_the_configuration_is_found(folder, monkeypatch):
    (folder / "my_own_tasks_module.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert load_task("my_own_tasks_module:ready", folder=folder).name == "sums-to-10"


def test_an_installed_package_offers_a_task_as_an_entry_point(folder, monkeypatch):
    (folder / "offering_module.py").write_text(MINE)
    metadata = folder / "offering-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[trinity_events.tasks]\nsums = offering_module:Sums\nlost = offering_module:Lost\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    assert load_task("sums", seed=1, folder=folder).question(0).prompt == "0 + 1 ="
    for name, attributes in (("lost", {"fault": "load"}), ("sum", {"nearest": "sums"})):
        with raises(ObjectUnusable, name=name, **attributes):
            load_task(name, folder=folder)


@pytest.mark.parametrize(
    ("name", "options", "error", "attributes"),
    [
        (
            "chess",
            {},
            ObjectUnusable,
            {"fault": "unknown", "choices": ("complex-sums", "sort-digits", "spell-backward")},
        ),
        (
            "spell-backwards",
            {},
            ObjectUnusable,
            {"fault": "unknown", "nearest": "spell-backward"},
        ),
        ("./mine.py:", {}, ObjectUnusable, {"fault": "form"}),
        ("./mine.py:Sum", {}, ObjectUnusable, {"fault": "attribute", "nearest": "Sums"}),
        (
            "./mine.py:Half",
            {},
            TaskUnusable,
            {"fault": "attributes", "missing": ("fingerprint", "held_out")},
        ),
        ("./mine.py:Sums", {"tops": 1}, TaskUnusable, {"fault": "signature"}),
        (
            "./mine.py:Sums",
            {"top": 0},
            TaskUnusable,
            {"fault": "make", "reason": "ValueError: top must be positive"},
        ),
        ("./mine.py:ready", {"top": 1}, TaskUnusable, {"fault": "options"}),
        ("./absent.py:Sums", {}, ObjectUnusable, {"fault": "file", "kind": "task"}),
    ],
)
def test_a_mistake_is_told_in_one_sentence(folder, name, options, error, attributes):
    with raises(error, **attributes) as caught:
        load_task(name, folder=folder, options=options)
    assert "\n" not in str(caught.value)


# --- the built-in task ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spelling() -> SpellBackward:
    pytest.importorskip("reasoning_gym")
    return SpellBackward()


def test_any_ordinal_of_the_built_in_task_is_found_without_those_before_it(spelling):
    far = [spelling.question(ordinal) for ordinal in (10**12, 3, 10**12)]
    assert far[0] == far[2] != far[1]
    assert SpellBackward().question(3) == far[1]
    assert SpellBackward(seed=1).question(3) != far[1]


def test_neighbouring_ordinals_and_seeds_ask_different_words(spelling):
    words = [spelling.question(ordinal).prompt for ordinal in range(200)]
    assert len(set(words)) > 180
    # reasoning-gym's own seeds 0 and 1 give one sequence shifted by one.
    other = [SpellBackward(seed=1).question(ordinal).prompt for ordinal in range(200)]
    assert len(set(words) & set(other)) < 30


def test_the_built_in_task_trains_on_nothing_held_out(spelling):
    training = {spelling.question(ordinal).prompt.casefold() for ordinal in range(2_000)}
    training |= {q.prompt.casefold() for q in islice(spelling.training_questions(0), 5_000)}
    held_out = {question.prompt.casefold() for question in spelling.held_out(256)}
    validation = {question.prompt.casefold() for question in spelling.validation(256)}
    assert len(held_out) > 240
    assert not held_out & training
    assert not validation & training
    assert not held_out & validation
    assert spelling.held_out(256) == SpellBackward(seed=9).held_out(256)


def test_more_held_out_questions_than_there_are_words_are_refused(spelling):
    with raises(TooFewQuestions, split="held-out", requested=1000):
        spelling.held_out(1_000)


def test_a_right_answer_earns_one_and_a_near_one_a_score(spelling):
    def reward(text: str, *, finished: bool = True) -> dict[str, float]:
        answer = Answer(text=text, finished=finished, messages=[], tokens=len(text))
        return spelling.reward(question, answer)

    question = next(
        question
        for question in map(spelling.question, range(1_000))
        if len(str(question.answer)) == 3
    )
    right = str(question.answer)
    assert reward(right) == {"reward": 1.0, "score": 1.0}
    assert reward(right, finished=False) == {"reward": 0.0, "score": 0.0}
    near = reward(right[:2] + "#")
    assert near["reward"] == 0.0 < near["score"] < 1.0


def test_digits_are_sorted_both_ways_and_judged_by_their_text():
    pytest.importorskip("reasoning_gym")
    task = SortDigits()
    orders = set()
    for question in map(task.question, range(100)):
        digits, order = str(question.prompt)[:-1].split(), str(question.prompt)[-1]
        assert question.answer == " ".join(sorted(digits, reverse=order == ">"))
        assert len(str(question.answer)) + 2 <= task.answer_tokens
        orders.add(order)
    assert orders == {"<", ">"}
    sorting = Question(prompt="7 0 5 3<", answer="0 3 5 7")
    # The family's verifier would take each of these for right.
    assert [judged(task, sorting, text) for text in ("0 3 5 7", "0 3 5 8", "0 3 5 7 ")] == [1, 0, 0]
    assert judged(task, sorting, "0 3 5 7", finished=False) == 0


def test_complex_numbers_are_added_and_subtracted():
    pytest.importorskip("reasoning_gym")
    task = ComplexSums()
    operations = set()
    for question in map(task.question, range(100)):
        first, second = question.data["operands"]
        operation = question.data["operation"]
        assert question.prompt == f"{first}{operation}({second})="
        values = [complex(number.replace("i", "j")) for number in (first, second)]
        right = values[0] + values[1] if operation == "+" else values[0] - values[1]
        assert complex(str(question.answer).replace("i", "j")) == right
        assert len(str(question.answer)) + 3 <= task.answer_tokens
        operations.add(operation)
    assert operations == {"+", "-"}


ONE_FAMILY = """
import json, sys
from trinity_workers.tasks.loading import TASKS, built_in_task

def draw():
    return [built_in_task(name, 3).question(ordinal).prompt for name in TASKS for ordinal in (0, 9)]

alone = draw()
imported = {"reasoning_gym", "sympy", "matplotlib"} & sys.modules.keys()
import reasoning_gym
reasoning_gym.create_dataset("basic_arithmetic")
print(json.dumps([alone == draw(), sorted(imported)]))
"""


@pytest.mark.processes
def test_a_built_in_task_imports_its_family_alone_and_leaves_the_others_to_a_later_import():
    pytest.importorskip("reasoning_gym")
    command = [sys.executable, "-c", ONE_FAMILY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, []]


def judged(task, question: Question, text: str, *, finished: bool = True) -> float:
    answer = Answer(text=text, finished=finished, messages=[], tokens=len(text))
    return task.reward(question, answer)["reward"]


@pytest.mark.parametrize("name", TASKS)
def test_no_built_in_task_trains_on_a_question_equivalent_to_a_held_out_one(name):
    pytest.importorskip("reasoning_gym")
    task = built_in_task(name, 3)
    trained = {content(task.question(ordinal)) for ordinal in range(1_000)}
    trained |= {content(question) for question in islice(task.training_questions(0), 1_000)}
    held_out, validation = task.held_out(200), task.validation(200)
    assert not trained & {content(question) for question in [*held_out, *validation]}
    assert not {content(question) for question in held_out} & {
        content(question) for question in validation
    }
    assert held_out == built_in_task(name, 0).held_out(200)


def content(question: Question) -> tuple[str, ...]:
    """What a question is about, whatever its order, direction or case."""
    if (operands := question.data.get("operands")) is not None:
        operation = question.data["operation"]
        return (operation, *(sorted(operands) if operation == "+" else operands))
    return tuple(sorted(str(question.prompt).casefold().rstrip("<>").split()))


def test_the_split_of_a_question_is_stable_across_releases():
    # Recorded values: changing them would train later runs on what earlier runs held out.
    recorded = {
        "hulu>": "held-out",
        "chip>": "held-out",
        "veta>": "validation",
        "lead>": "validation",
        "Lead>": "validation",
        "sun>": "training",
        "moon>": "training",
    }
    assert {prompt: split_of(prompt) for prompt in recorded} == recorded


def test_a_tenth_is_held_out_whatever_the_case_of_the_letters():
    prompts = [f"question {number}>" for number in range(20_000)]
    share = sum(split_of(prompt) == "held-out" for prompt in prompts) / len(prompts)
    assert share == pytest.approx(0.1, abs=0.01)
    assert all(split_of(prompt) == split_of(prompt.upper()) for prompt in prompts[:100])

"""Claims about questions from files, data sets, reasoning-gym and Python objects."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.support.errors import raises
from trinity_workers.tasks import QuestionSet, load_task
from trinity_workers.tasks.errors import (
    AnswersMissing,
    NoQuestions,
    ObjectUnusable,
    RecordRefused,
    SourceUnreadable,
    TaskOptionsRefused,
)

RECORDS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n), "level": n % 3} for n in range(200)]


@pytest.fixture
def write(tmp_path: Path):
    """Writes a file into the folder of the task."""

    def write(name: str, content: str) -> Path:
        path = tmp_path / name
        path.write_text(content)
        return path

    return write


@pytest.fixture
def jsonl(write) -> Path:
    return write("questions.jsonl", "\n".join(json.dumps(record) for record in RECORDS) + "\n\n")


def refused(folder: Path, source: str, error: type[Exception], attributes, **settings) -> None:
    with raises(error, **attributes) as caught:
        load_task(questions=source, folder=folder, **settings)
    assert "\n" not in str(caught.value)


def prompts(task, first: int, count: int) -> list[str]:
    return [task.question(ordinal).prompt for ordinal in range(first, first + count)]


def test_every_training_question_is_asked_once_in_each_pass(jsonl):
    task = load_task(questions="questions.jsonl", folder=jsonl.parent)
    assert isinstance(task, QuestionSet)
    size = len(task)
    passes = [prompts(task, number * size, size) for number in range(3)]
    assert Counter(passes[0]) == Counter(passes[1]) == Counter(passes[2])
    assert len(set(passes[0])) == size
    assert passes[0] != passes[1] != passes[2]


def test_fields_besides_prompt_and_answer_come_as_data(jsonl):
    task = load_task(questions="questions.jsonl", folder=jsonl.parent)
    question = task.question(0)
    number = int(question.prompt.split()[0])
    assert (question.answer, question.data) == (str(2 * number), {"level": number % 3})


def test_other_fields_may_hold_prompt_and_answer(write):
    write("q.jsonl", json.dumps({"question": "2 + 2 =", "solution": [4]}))
    task = load_task(
        questions="q.jsonl",
        prompt="question",
        answer="solution",
        folder=Path(write("x", "")).parent,
    )
    assert (task.question(7).prompt, task.question(7).answer) == ("2 + 2 =", [4])


VERL = {
    "prompt": [{"role": "user", "content": "1 + 1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"question": "1 + 1?", "index": 0},
}


def test_a_field_may_be_a_path_to_one_within_others(write):
    path = write("q.jsonl", json.dumps(VERL | {"a.b": "dots"}))
    cases = [
        ("prompt", "reward_model.ground_truth", VERL["prompt"], "2"),
        ("extra_info.question", "extra_info.index", "1 + 1?", 0),
        ("prompt", "a.b", VERL["prompt"], "dots"),
    ]
    for prompt, answer, text, right in cases:
        task = load_task(questions="q.jsonl", prompt=prompt, answer=answer, folder=path.parent)
        question = task.question(0)
        assert (question.prompt, question.answer) == (text, right)
        assert question.data["reward_model"] == VERL["reward_model"]


@pytest.mark.parametrize(
    ("record", "answer", "reason"),
    [
        ({"answer": "2"}, "anwser", "did you mean 'answer'?"),
        ({"reward_model": {"ground_truth": "2"}}, "ground_truth", "'reward_model.ground_truth'?"),
        ({"reward_model": {"ground_truth": "2"}}, "reward_model.truth", "model.ground_truth'?"),
        ({"solution": "2"}, "answer", "it has prompt, solution"),
        ({"answer": None}, "answer", "it is null in each"),
    ],
)
def test_an_answer_that_no_record_has_is_refused_with_the_nearest_field(
    write, record, answer, reason
):
    path = write("q.jsonl", (json.dumps({"prompt": "a"} | record) + "\n") * 2)
    attributes = {"source": "q.jsonl", "field": answer, "reason": re.compile(reason)}
    refused(path.parent, "q.jsonl", AnswersMissing, attributes, answer=answer)
    task = load_task(questions="q.jsonl", answer=None, folder=path.parent)
    assert task.question(0).answer is None
    write("q.jsonl", path.read_text() + json.dumps({"prompt": "b", answer: "3"}))
    task = load_task(questions="q.jsonl", answer=answer, folder=path.parent)
    assert {task.question(number).answer for number in range(len(task))} <= {None, "3"}


def test_questions_of_python_may_have_no_answer(write):
    path = write(
        "mine.py",
        "from trinity_workers.tasks import Question\nlisted = [Question(prompt='b')] * 2\n",
    )
    assert load_task(questions="./mine.py:listed", folder=path.parent).question(0).answer is None


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_may_begin_with_a_byte_order_mark(tmp_path, encoding):
    text = json.dumps({"prompt": "Gr\u00f6\u00dfe", "answer": "\u6570"}, ensure_ascii=False)
    (tmp_path / "q.jsonl").write_bytes(text.encode(encoding))
    question = load_task(questions="q.jsonl", folder=tmp_path).question(0)
    assert (question.prompt, question.answer) == ("Gr\u00f6\u00dfe", "\u6570")


@pytest.mark.parametrize(
    ("encoding", "attributes"),
    [
        ("latin-1", {"fault": "encoding", "line": 1, "reason": "0xf6"}),
        ("utf-16", {"fault": "UTF-16"}),
    ],
)
def test_a_file_of_another_encoding_is_refused_with_the_way_to_convert_it(
    tmp_path, encoding, attributes
):
    text = json.dumps({"prompt": "Gr\u00f6\u00dfe", "answer": "1"}, ensure_ascii=False)
    (tmp_path / "q.jsonl").write_bytes(text.encode(encoding))
    refused(tmp_path, "q.jsonl", SourceUnreadable, attributes)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ([{"type": "image_url", "image_url": {"url": "x.png"}}], "image_url"),
        ([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "audio"}], "audio and image"),
        (["a"], "str"),
    ],
)
def test_a_message_with_other_parts_than_text_is_refused_with_their_types(write, parts, named):
    record = {"prompt": [{"role": "user", "content": parts}], "answer": "1"}
    path = write("q.jsonl", json.dumps(record))
    refused(path.parent, "q.jsonl", RecordRefused, {"fault": "parts", "reason": named})


def test_a_message_may_be_of_parts_of_text(write):
    content = [{"type": "text", "text": "1 + 1?"}]
    record = {"prompt": [{"role": "user", "content": content}], "answer": "2"}
    path = write("q.jsonl", json.dumps(record))
    options = {"evaluation": "q.jsonl"}
    task = load_task(questions="q.jsonl", folder=path.parent, options=options)
    assert task.question(0).prompt == [{"role": "user", "content": content}]


@pytest.mark.parametrize("answer", ["nan", "inf", "[1.0, nan]", "{'low': -inf}"])
def test_an_answer_that_is_no_number_of_json_is_refused(write, answer):
    path = write(
        "mine.py", f"from math import inf, nan\nlisted = [{{'prompt': 'a', 'answer': {answer}}}]\n"
    )
    refused(path.parent, "./mine.py:listed", RecordRefused, {"fault": "number", "reason": answer})


def test_answers_may_be_arrays_and_numbers_of_any_size(write):
    pytest.importorskip("numpy")
    text = (
        "import numpy\nfrom decimal import Decimal\nanswers = [10**400, numpy.ones((2, 2)), "
        "numpy.float32(0.5), Decimal('1.10'), {'a': (1, None)}, True]\n"
        "listed = [{'prompt': str(number), 'answer': one} for number, one in enumerate(answers)]\n"
    )
    write("mine.py", text)
    options = {"shuffle": False, "evaluation": "./mine.py:listed"}
    folder = write("x", "").parent
    task = load_task(questions="./mine.py:listed", folder=folder, options=options)
    assert [task.question(number).answer for number in range(len(task))] == [
        *(10**400, [[1.0, 1.0]] * 2, 0.5, "1.10", {"a": [1, None]}, True)
    ]


def test_held_out_questions_are_a_tenth_and_never_trained_on(jsonl):
    tasks = [
        load_task(questions="questions.jsonl", folder=jsonl.parent, seed=seed) for seed in (0, 1)
    ]
    held_out = [question.prompt for question in tasks[0].held_out(10_000)]
    assert 8 <= len(held_out) <= 36
    assert held_out == [question.prompt for question in tasks[1].held_out(10_000)]
    assert held_out[:3] == [question.prompt for question in tasks[0].held_out(3)]
    for task in tasks:
        assert not set(held_out) & set(prompts(task, 0, len(task)))
    assert len(held_out) + len(tasks[0]) == len(RECORDS)


def test_a_source_of_evaluation_leaves_all_questions_for_training(jsonl, write):
    write("eval.jsonl", json.dumps({"prompt": "1 + 2 =", "answer": "3"}))
    task = load_task(
        questions="questions.jsonl", folder=jsonl.parent, options={"evaluation": "eval.jsonl"}
    )
    assert len(task) == len(RECORDS)
    assert [question.prompt for question in task.held_out(5)] == ["1 + 2 ="]


@pytest.mark.processes
def test_the_order_follows_from_the_seed_in_every_process(jsonl):
    task = load_task(questions="questions.jsonl", folder=jsonl.parent, seed=3)
    other = load_task(questions="questions.jsonl", folder=jsonl.parent, seed=4)
    assert prompts(task, 0, 20) != prompts(other, 0, 20)
    code = (
        "import sys, json; from pathlib import Path; from trinity_workers.tasks import load_task\n"
        "t = load_task(questions='questions.jsonl', folder=Path(sys.argv[1]), seed=3)\n"
        "print(json.dumps([t.fingerprint, [t.question(n).prompt for n in range(500, 520)]]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(jsonl.parent)],
        env=os.environ | {"PYTHONHASHSEED": "7"},
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert json.loads(result.stdout) == [task.fingerprint, prompts(task, 500, 20)]


def test_without_shuffling_every_pass_has_the_order_of_the_source(jsonl):
    task = load_task(questions="questions.jsonl", folder=jsonl.parent, options={"shuffle": False})
    held_out = {question.prompt for question in task.held_out(1_000)}
    expected = [record["prompt"] for record in RECORDS if record["prompt"] not in held_out]
    assert prompts(task, 0, len(task)) == prompts(task, len(task), len(task)) == expected


def test_the_fingerprint_tells_questions_answers_and_orders_apart(jsonl, write):
    def fingerprint(**settings) -> str:
        return load_task(questions="questions.jsonl", folder=jsonl.parent, **settings).fingerprint

    first = fingerprint()
    assert first.startswith("sha256:")
    assert fingerprint() == first
    assert fingerprint(seed=1) != first
    assert fingerprint(options={"shuffle": False}) != first
    assert fingerprint(options={"system": "Be brief."}) != first
    jsonl.write_text(jsonl.read_text().replace('"answer": "8"', '"answer": "9"'))
    assert fingerprint() != first


def test_prompts_become_chat_messages_on_demand(write):
    path = write(
        "q.jsonl",
        json.dumps({"prompt": "hi"})
        + "\n"
        + json.dumps({"prompt": [{"role": "user", "content": "ho"}]}),
    )
    options = {"system": "Be brief.", "shuffle": False, "evaluation": "q.jsonl"}
    task = load_task(questions="q.jsonl", answer=None, folder=path.parent, options=options)
    assert [task.question(ordinal).prompt for ordinal in (0, 1)] == [
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
        for text in ("hi", "ho")
    ]


def test_questions_come_from_a_python_object(write):
    path = write(
        "mine.py",
        "from trinity_workers.tasks import Question\n"
        "from beside import more\n"
        "listed = [{'prompt': 'a', 'answer': 1}, Question(prompt='b', answer=2)]\n"
        "def made():\n    yield from listed\n    yield from more\n",
    )
    write("beside.py", "more = [{'prompt': 'c'}]\n")
    options = {"evaluation": "./mine.py:listed"}
    task = load_task(questions="./mine.py:made", folder=path.parent, options=options)
    assert sorted(prompts(task, 0, 3)) == ["a", "b", "c"]


def test_questions_come_from_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    options = {"source": {"size": 30, "seed": 5}}
    task = load_task(questions="reasoning-gym:basic_arithmetic", options=options)
    question = task.question(0)
    assert isinstance(question.prompt, str)
    assert question.answer
    again = load_task(questions="reasoning-gym:basic_arithmetic", options=options)
    assert again.fingerprint == task.fingerprint


def test_questions_come_from_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "q.parquet")
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(record) for record in RECORDS))
    parts = [load_task(questions=name, folder=tmp_path) for name in ("q.parquet", "q.jsonl")]
    assert parts[0].fingerprint == parts[1].fingerprint
    (tmp_path / "bad.parquet").write_text("no")
    refused(tmp_path, "bad.parquet", SourceUnreadable, {"fault": "Parquet"})


def test_questions_come_from_a_data_set(jsonl, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(jsonl.parent / "cache"))
    options = {
        "source": {"data_files": str(jsonl), "cache_dir": str(jsonl.parent / "cache")},
        "shuffle": False,
    }
    task = load_task(questions="datasets:json", options=options)
    files = load_task(questions="questions.jsonl", folder=jsonl.parent, options={"shuffle": False})
    assert task.fingerprint == files.fingerprint
    missing = "datasets:no_such/data_set_here"
    refused(jsonl.parent, missing, SourceUnreadable, {"fault": "load", "source": missing})


@pytest.mark.parametrize(
    ("content", "error", "attributes"),
    [
        ("{", SourceUnreadable, {"fault": "JSON", "line": 1}),
        ("[" * 100_000, SourceUnreadable, {"fault": "JSON", "line": 1}),
        ("[1]", RecordRefused, {"fault": "kind", "record": 1, "reason": "list"}),
        (
            '{"promt": "a"}',
            RecordRefused,
            {"fault": "field", "field": "prompt", "reason": "did you mean 'promt'?"},
        ),
        (
            '{"a": 1, "b": 2}',
            RecordRefused,
            {"fault": "field", "field": "prompt", "reason": "it has a, b"},
        ),
        ('{"prompt": "a"}\n{"prompt": 3}', RecordRefused, {"fault": "prompt", "record": 2}),
        ('{"prompt": ""}', RecordRefused, {"fault": "empty", "record": 1}),
        ('{"prompt": [{"content": "a"}]}', RecordRefused, {"fault": "empty", "record": 1}),
        ("", NoQuestions, {"fault": "training", "source": "q.jsonl"}),
    ],
)
def test_a_mistake_in_a_file_is_told_in_one_sentence(write, content, error, attributes):
    path = write("q.jsonl", content)
    refused(path.parent, "q.jsonl", error, attributes)


@pytest.mark.parametrize(
    ("source", "error", "attributes"),
    [
        ("missing.jsonl", SourceUnreadable, {"fault": "absent"}),
        ("questions.csv", SourceUnreadable, {"fault": "form", "source": "questions.csv"}),
        ("./missing.py:questions", ObjectUnusable, {"fault": "file"}),
        ("./mine.py:question", ObjectUnusable, {"fault": "attribute", "nearest": "questions"}),
        ("./mine.py:number", SourceUnreadable, {"fault": "object"}),
        (
            "./mine.py:broken",
            SourceUnreadable,
            {"fault": "object", "reason": "RuntimeError: no questions today"},
        ),
        (
            "./mine.py:later",
            SourceUnreadable,
            {"fault": "object", "reason": "ValueError: not this one"},
        ),
        (
            "./fails.py:x",
            ObjectUnusable,
            {"fault": "import", "reason": re.compile("^ZeroDivisionError")},
        ),
        (
            "no_such_module_here:x",
            ObjectUnusable,
            {"fault": "module", "place": "no_such_module_here"},
        ),
        ("reasoning-gym:no_such_family", SourceUnreadable, {"fault": "family"}),
        ("./mine.py:sets", RecordRefused, {"fault": "JSON", "record": 1}),
    ],
)
def test_a_mistake_in_a_source_is_told_in_one_sentence(write, source, error, attributes):
    if source.startswith("reasoning-gym"):
        pytest.importorskip("reasoning_gym")
    folder = write(
        "mine.py",
        "questions = []\nnumber = 3\nsets = [{'prompt': 'a', 'answer': object()}]\n"
        "def broken():\n    raise RuntimeError('no questions\\ntoday')\n"
        "def later():\n    yield {'prompt': 'a'}\n    raise ValueError('not this one')\n",
    ).parent
    write("fails.py", "1 / 0\n")
    refused(folder, source, error, attributes)


def test_an_unknown_option_of_a_source_is_refused_with_the_known_ones(jsonl):
    attributes = {
        "reason": re.compile("shufle"),
        "allowed": ("chat", "system", "shuffle", "evaluation", "source"),
    }
    options = {"shufle": True}
    refused(jsonl.parent, "questions.jsonl", TaskOptionsRefused, attributes, options=options)

"""Claims about the code of an answer, as Markdown has it."""

from __future__ import annotations

import time

import pytest

from trinity_workers.rewards.code_blocks import find_code
from trinity_workers.rewards.code_runner import choose_blocks


@pytest.mark.parametrize(
    "info",
    ["python", "py", "Python", "python3", "PY3", "python3.11", "{.python}", "python title=x"],
)
def test_a_block_of_python_is_known_by_each_of_its_names(info):
    assert find_code(f"```{info}\na\n```\n```\nb\n```\n```bash\nc\n```") == ["a\n"]


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("no block", ["no block"]),
        ("```python\na\n```\n```py\nb\n```\n", ["a\n", "b\n"]),
        ("```bash\nc\n```\n```\na\n```", ["a\n"]),
        ("```text\na\n```", ["a\n"]),
        ("```pycon\n>>> a\n```\n```python\n>>> a\n```\n```python\na\n```", ["a\n"]),
        ("```python\r\na\r\nb\r\n```", ["a\nb\n"]),
        ("- x\n\n  ~~~python\n  a\n    b\n  ~~~", ["a\n  b\n"]),
        ("> ```python\n> a\n> ```", ["a\n"]),
        ("    ```python\n    a\n    ```", ["a\n"]),
        ("````python\na = '''\n```\n'''\n````", ["a = '''\n```\n'''\n"]),
        ("````md\n# x\n```python\na\n```\n````", ["a\n"]),
        ("1. ```python\n   a\n   ```", ["a\n"]),
        ("Code: ```python\na```", ["a\n"]),
        ("```python\na", ["a"]),
        ("<details>\n```python\na\n```\n</details>", ["a\n"]),
        ("<think>\n```python\nb\n```\n</think>\n```python\na\n```", ["a\n"]),
    ],
)
def test_blocks_are_those_of_markdown(text, blocks):
    assert find_code(text) == blocks


@pytest.mark.parametrize("piece", ["> ", "- a\n", "```\n", "    ```\n", "[a]: b\n", "```md\n"])
def test_a_hostile_answer_is_parsed_in_linear_time(piece):
    began = time.monotonic()
    find_code(piece * 10_000)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("blocks", "tests", "chosen"),
    [
        (["a = 1", "b = 2"], "assert b", ["b = 2"]),
        (["a = 1", "b = 2"], "assert a", ["a = 1", "b = 2"]),
        (["a = 1", "b = a", "print(b)"], "", ["a = 1", "b = a", "print(b)"]),
        (
            ["def f():\n  return g()", "g = 1", "h = 1", "f()"],
            "",
            ["def f():\n  return g()", "g = 1", "f()"],
        ),
        (["a = 1", "a = 2", "print(a)"], "", ["a = 2", "print(a)"]),
        (
            ["import os", "def f():\n  return os.sep"],
            "f()",
            ["import os", "def f():\n  return os.sep"],
        ),
        (["a = 1", "if a:\nreturn", "print(a)"], "", ["a = 1", "print(a)"]),
        (["a = 1", "print(a"], "", ["print(a"]),
        (["len = 1", "print(len)"], "", ["print(len)"]),
    ],
)
def test_earlier_blocks_are_run_if_they_define_what_the_program_lacks(blocks, tests, chosen):
    assert choose_blocks(blocks, tests) == chosen

"""The lint of prose: each rule refuses what breaks it, and plain text passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from . import prose

PATH = Path("module.py")


def in_code(source: str) -> list[str]:
    return [f"{finding.line}: {finding.text}" for finding in prose.in_code(PATH, source)]


@pytest.mark.parametrize("word", prose.OPENERS)
def test_a_docstring_that_opens_with_a_question_word_is_refused(word: str) -> None:
    assert in_code(f'''"""{word} a module has."""''')[0] == f"1: a docstring opens with {word!r}"
    assert in_code(f'''class A:\n    """{word} it is."""''')
    assert in_code(f'''def f():\n    """{word} it does."""''')
    assert in_code(f'''async def f():\n    """{word} it does."""''')


def test_the_docstring_of_a_constant_is_checked_too() -> None:
    findings = in_code('LIMIT = 3\n"""What comes at most."""')
    assert findings == ["2: a docstring opens with 'What'"]
    assert in_code('class A:\n    limit: int\n    """Whether it is one."""')


@pytest.mark.parametrize(
    "text",
    [
        "Return True if the rank is alone.",
        "Whatever the client guesses is refused.",
        "Offset of the chunk.",
        "Sockets of the server.",
        "Thaw the model.",
    ],
)
def test_a_docstring_of_plain_words_passes(text: str) -> None:
    assert in_code(f'"""{text}"""') == []


@pytest.mark.parametrize(
    "text",
    [
        "Stops for whoever asks.",
        "Nobody reads it.",
        "It is told to somebody.",
        "Everybody hears it.",
        "Does anybody wait?",
        "It is kept for those who wait.",
        "Who reads it is told.",
        "It ends. Who reads it is told.",
    ],
)
def test_a_subject_that_is_no_role_is_refused_wherever_it_is_written(text: str) -> None:
    assert in_code(f"LINE = {text!r}")
    assert in_code(f"def f(n):\n    raise ValueError(f'{{n}}: {text}')")
    assert in_code(f"x = 1  # {text}")
    assert list(prose.in_page(Path("page.md"), text))
    assert list(prose.in_script(Path("script.lua"), f"return 1 -- {text}"))


def test_a_word_that_only_contains_one_of_the_list_passes() -> None:
    assert in_code('LINE = "The reader who asks is told, and the step Whole."') == []


def test_a_finding_names_the_line_within_a_long_string() -> None:
    [finding] = in_code('"""One.\n\nTwo, which nobody reads.\n"""')
    assert finding.startswith("3: 'nobody'")


def test_code_in_a_page_is_not_prose() -> None:
    page = "The name `nobody` passes.\n```\nnobody\n```\nNobody reads it.\n"
    assert [finding.line for finding in prose.in_page(Path("page.md"), page)] == [5]


def test_only_comments_of_a_script_are_checked() -> None:
    assert not list(prose.in_script(Path("script.lua"), "local nobody = 1"))


@pytest.mark.processes
def test_the_command_prints_each_finding_and_fails(tmp_path: Path) -> None:
    wrong, right = tmp_path / "wrong.py", tmp_path / "right.py"
    wrong.write_text('"""What it is."""\n')
    right.write_text('"""Cursor of a consumer group."""\n')
    command = [sys.executable, "-m", "tests.lint.prose"]
    options = {"cwd": prose.ROOT, "capture_output": True, "text": True}
    failed = subprocess.run([*command, str(wrong), str(right)], check=False, **options)
    assert failed.returncode == 1
    assert failed.stdout == f"{wrong}:1: a docstring opens with 'What'\n"
    assert subprocess.run([*command, str(right)], check=False, **options).returncode == 0


def test_the_scripts_modules_and_pages_are_among_the_files() -> None:
    names = {str(path.relative_to(prose.ROOT)) for path in prose.files()}
    assert {
        "trinity_events/log/redis/commit.lua",
        "trinity_events/errors.py",
        "workers/trinity_workers/cli.py",
        "docs/concepts.md",
        "README.md",
    } <= names

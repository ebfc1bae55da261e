"""The public interface is the one that is kept: a change of it is seen where it is reviewed."""

from pathlib import Path

import pytest

from tests.support.signatures import FOLDER, format_modules, format_object, read_page

NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.fixture(scope="module")
def texts():
    return format_modules()


def test_every_module_of_the_api_page_is_kept(texts):
    assert sorted(texts) == NAMES


@pytest.mark.parametrize("module", NAMES)
def test_names_parameters_types_and_defaults_are_those_that_are_kept(texts, module):
    kept_text = (FOLDER / f"{module}.txt").read_text()
    assert texts[module] == kept_text, (
        "the interface changed: docs/releases.md says what a version may change; then run "
        "python -m tests.support.signatures"
    )


class Example:
    limit: "int" = 4

    def __init__(self, path: Path, *, strict: bool = False) -> None: ...

    def read(self, start: int, /, *names: str, **options: float) -> "list[str]": ...

    @property
    def size(self) -> int:
        return 0


def test_every_part_of_a_signature_is_in_its_line():
    assert list(format_object("Example", Example, ["limit", "read", "size"])) == [
        "class Example(object): Example(path: pathlib.Path, *, strict: bool = False)",
        "    limit: int",
        "    read(self, start: int, /, *names: str, **options: float) -> list[str]",
        "    size: property(self) -> int",
    ]


def test_the_page_names_objects_and_their_members():
    text = "::: a.b\n    options:\n      members: [x, y]\n\n::: a.c\n"
    assert list(read_page(text)) == [("a.b", ["x", "y"]), ("a.c", None)]

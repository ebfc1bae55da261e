"""The documentation says what the code does: helps, links and snippets."""

import ast
import importlib
import importlib.util
import re
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import get_args

import pytest

from benchmarks import pages
from tests.support.errors import raises
from trinity_schemas import Event

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PACKAGES = ("schemas", "trinity_events", "workers")
READMES = sorted(page for package in PACKAGES for page in (ROOT / package).rglob("README.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *READMES,
    *sorted(DOCS.rglob("*.md")),
]
WITH_SNIPPETS = [page for page in PAGES if "```python" in page.read_text()]

_CODE = re.compile(r"^(```+).*?^\1\s*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(\s*<?([^)\s>]+)")
_PYTHON = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def anchors(page: Path) -> set[str]:
    """What the page's headings can be linked to by."""
    text = re.sub(r"^(```+).*?^\1\s*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_the_changelog_stays_short():
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    assert len(lines) <= 60, "join entries, or leave the details to the pages that they name"


def test_every_command_has_a_page_and_no_other_has():
    pages = {page.stem for page in (DOCS / "commands").glob("*.md")}
    assert pages == {*generator.commands(), "index"}


@pytest.mark.parametrize("command", generator.commands())
def test_the_help_on_a_page_is_what_the_command_prints(command):
    page = DOCS / "commands" / f"{command}.md"
    assert page.read_text() == generator.expected(command), "it lags behind: run make docs"


def test_the_page_of_the_configuration_is_made_from_its_types():
    page = (DOCS / "configuration.md").read_text()
    assert page == generator.configuration(), "it lags behind: run make docs"


def test_the_page_of_the_documents_has_every_field_that_a_command_prints():
    page = (DOCS / "json.md").read_text()
    assert page == generator.documents_page(), "it lags behind: run make docs"


def test_the_matrix_of_methods_and_styles_is_what_train_refuses():
    page = (DOCS / "sync.md").read_text()
    assert page == generator.sync_page(), "it lags behind: run make docs"


@pytest.mark.parametrize("command", generator.commands())
def test_a_command_is_in_the_navigation_and_in_both_tables(command):
    assert f"commands/{command}.md" in (ROOT / "mkdocs.yml").read_text()
    assert f"]({command}.md)" in (DOCS / "commands" / "index.md").read_text()
    assert f"`{command}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_points_to_something(page):
    for link in _LINK.findall(_CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} points to nothing"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link} points to no heading"


@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_snippet_compiles_and_imports_what_is_there(page):
    snippets = _PYTHON.findall(page.read_text())
    assert snippets
    for snippet in snippets:
        compile(snippet, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


@pytest.mark.parametrize("drawing", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_every_drawing_is_well_formed(drawing):
    assert ET.parse(drawing).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("drawing", sorted(DOCS.rglob("*.svg")), ids=lambda path: path.name)
def test_a_drawing_loads_nothing_from_elsewhere(drawing):
    assert "url(http" not in drawing.read_text()


# --- first impressions ---------------------------------------------------------------------------

_FIGURE = r"\d[\d,.]* (?:ms|MiB)"


def test_what_pages_begin_with_is_written_from_the_figures_that_were_kept():
    for path, text in pages.written(pages.Figures()).items():
        assert path.read_text() == text, f"{path.name} lags behind: python -m benchmarks --pages"


def test_a_figure_that_was_not_kept_is_not_quoted():
    quote = pages.Quote("latency", "a row that is not there")
    with raises(pages.PageBroken, fault="figure", quote=quote):
        pages.Figures()[quote]


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", DOCS / "index.md"], ids=lambda page: page.name
)
def test_a_first_page_says_within_a_screen_what_is_replaced_and_why(page):
    screen = "\n".join(page.read_text().splitlines()[:40])
    rows = [line for line in screen.splitlines() if line.startswith("| ") and "](" in line]
    assert len(rows) == 3
    assert all(re.search(rf"\[(?:{_FIGURE}|\d+ of \d+ runs)\]\(", row) for row in rows)
    assert "Trinity-RFT" in screen and "veRL" in screen
    assert "demo.svg)" in screen
    assert "pip install" in screen


@pytest.mark.parametrize("name", ["speed", "performance"])
def test_a_page_of_figures_begins_with_a_chart_and_one_table(name):
    lines = (DOCS / f"{name}.md").read_text().splitlines()
    begin, end = lines.index(pages.BEGIN), lines.index(pages.END)
    assert begin < 6
    assert f"]({name}.svg)" in "\n".join(lines[begin:end])
    assert sum(line.startswith("| ---") for line in lines[begin:end]) == 1


@pytest.mark.processes
def test_the_first_make_says_what_it_installs_and_how_much_before_it_does(tmp_path):
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'none'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    announced = done[: done.index("pip install")]
    assert "torch" in announced and re.search(r"\d GB", announced)


def test_every_name_on_the_page_of_the_api_is_there():
    names = re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
    for name in names:
        home, _, last = name.rpartition(".")
        if not _is_module(name):
            assert hasattr(importlib.import_module(home), last), name
    public = set(importlib.import_module("trinity_events").__all__)
    events = {event_type.__name__ for event_type in _event_types()}
    assert public - events <= {name.rpartition(".")[2] for name in names}


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _event_types() -> tuple[type, ...]:
    return get_args(Event)


PROMISE = re.compile(r"^\| (\d+) \| (.+) \|$", re.MULTILINE)


def test_promises_are_numbered_in_order_and_name_tests_that_exist():
    page = (ROOT / "docs/reliability.md").read_text()
    section = page.partition("## The promises\n")[2].partition("\n## ")[0]
    promises = PROMISE.findall(section)
    numbers = [int(number) for number, _ in promises]
    assert numbers == sorted(set(numbers))
    for number, row in promises:
        names = re.findall(r"`([^`]+)`", row.rpartition(" | ")[2])
        assert names, number
        for name in names:
            assert (ROOT / "tests" / name).exists(), (number, name)


@pytest.mark.parametrize("page", READMES, ids=lambda page: str(page.parent.relative_to(ROOT)))
def test_files_that_the_readme_of_a_package_names_exist(page):
    text = re.sub(r"\{([\w,]+)\}", lambda match: match[1].partition(",")[0], page.read_text())
    for name in re.findall(r"[\w/.]+\.(?:py|lua)\b", text):
        folders = (page.parent, page.parent.parent, ROOT, ROOT / "tests")
        assert any((folder / name).exists() for folder in folders), name

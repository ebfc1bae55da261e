"""Writes pages from code: commands' helps and documents, configuration, and matrix of syncs.

Usage: python docs/generate.py
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import msgspec
from typer import Context
from typer.main import get_group
from typer.testing import CliRunner

from trinity_events.cli.app import build
from trinity_events.views.documents import document_schema
from trinity_schemas.schemas import components
from trinity_workers.config.fields import Field, fields, sections
from trinity_workers.config.other_names import FORMER_NAMES, OTHER_NAMES
from trinity_workers.config.rules.table import find_contradictions
from trinity_workers.config.schema import format_meaning
from trinity_workers.config.sections.model import ModelConfig
from trinity_workers.config.sections.sync import (
    SyncConfig,
    SyncMethod,
    SyncStyle,
)
from trinity_workers.config.sections.trainer import (
    EngineName,
    TrainerConfig,
)
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.documents import DOCUMENTS

PAGES = Path(__file__).parent / "commands"
BEGIN = "<!-- help: written by docs/generate.py from the command's --help -->"
END = "<!-- end of help -->"
_HELP = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)


def commands() -> list[str]:
    """The commands that are installed, in the order of the command line's own help."""
    group = get_group(build())
    return group.list_commands(Context(group))


def help_of(command: str) -> str:
    """Return the output of ``trinity-events COMMAND --help`` in a terminal of 80 columns."""
    # The caller's terminal and servers must not show in the output.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")
    }
    with mock.patch.dict(os.environ, {**environment, "COLUMNS": "80"}, clear=True):
        result = CliRunner().invoke(build(), [command, "--help"], prog_name="trinity-events")
    if result.exit_code != 0:
        raise RuntimeError(f"the help of {command} cannot be had: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.strip().splitlines())


def expected(command: str) -> str:
    """The page as it should be: as it is, with the help of today."""
    section = f"{BEGIN}\n\n```text\n{help_of(command)}\n```\n\n{END}"
    page = PAGES / f"{command}.md"
    text = page.read_text() if page.exists() else f"# {command}\n\n{BEGIN}{END}\n"
    if not _HELP.search(text):
        raise RuntimeError(f"{page} lacks the markers between which the help is written")
    return _HELP.sub(lambda _: section, text)


CONFIGURATION = Path(__file__).parent / "configuration.md"
_INTRODUCTION = """\
# Configuration

<!-- written by docs/generate.py from the types of the configuration -->

`trinity-events train CONFIG` runs what one YAML or TOML file says. Every field has a default,
so an empty file is a whole configuration. Examples are in the repository's folder
`examples/train`.

```bash
trinity-events train run.yaml --check                     # print the effective configuration
trinity-events train run.yaml --set sync.interval=2       # lay a setting over the file's
```

A file may be laid over another one, which it names first, relative to itself. Sections are laid
over each other field by field; `evaluation.sets` and `task.sets` are each taken as a whole.

```yaml
base: common.yaml
trainer:
  learning_rate: 2.0e-6
```

An editor with a YAML language server, such as VS Code with the extension YAML, completes names,
checks values and shows meanings, if the file's first line names the schema. The schema is in a
wheel, and on this site under *JSON Schemas*:

```yaml
# yaml-language-server: $schema=./train-check.json
```

```bash
python -c "from importlib.resources import files; \\
print((files('trinity_schemas') / 'json/commands/train-check.json').read_text())" > train-check.json
```

A sweep is a loop of the shell, with a run of its own for each value:

```bash
for rate in 1e-6 2e-6 5e-6; do
  trinity-events train run.yaml --run "rate-$rate" --set trainer.learning_rate=$rate
done
```

A name that does not exist and a value that is not allowed are refused: each mistake is one
sentence that names the file and the field. So is a setting where nothing reads it, such as
`rewards.best_grade` without a judge: its sentence says why, and what to do.
Relative paths are relative to the file; those of `--set`, to the current folder. The effective
configuration is in the event that opens the run, and in `config.yaml` in the run's folder. `demo`
lays its options over a file that the package has. If `RAY_ADDRESS` is set, `train`
joins that [Ray cluster](cluster.md).

An explorer that is started by itself takes numbers and choices from that event. Code, paths,
URLs and environment variables it takes from its own copy of the file:
`trinity-events explorer --config CONFIG` ([explorer](commands/explorer.md#its-configuration)).
"""

_FORMER_NAMES = """\
## Names of other projects

A name that a setting is known by elsewhere may be written in its place, by its whole path, and is
reported with the name here. A name with a remark has another unit, other values or another effect:
it is refused with the setting that comes nearest. So is a setting that has no equivalent, such as
`num_train_epochs`, with what to do instead.

```yaml
learning_rate: 1.0e-6                        # TRL
data: {train_batch_size: 64}                 # veRL
actor_rollout_ref: {rollout: {n: 8}}
synchronizer: {sync_method: memory}          # Trinity-RFT
```

## Former names

Files and `--set` may still have these names, and log a warning with the new one. A configuration
with both names of a setting is refused. Runs that logged former names are resumed as they are.

| Former name | Name |
|---|---|
"""


def configuration() -> str:
    """Return the page of the configuration's fields."""
    parts = [_INTRODUCTION]
    for name in ("", *sections()):
        own = [field for field in fields().values() if field.path.rpartition(".")[0] == name]
        about = (sections()[name].__doc__ or "") if name else "Fields of the run as a whole."
        head = "| Field | Value | Default | Meaning | Known elsewhere as |\n|---|---|---|---|---|"
        rows = "\n".join(_row(field) for field in own)
        parts.append(f"## {f'`{name}`' if name else 'The run'}\n\n{about}\n\n{head}\n{rows}\n")
    rows = "\n".join(f"| `{former}` | `{path}` |" for former, path in FORMER_NAMES.items())
    parts.append(f"{_FORMER_NAMES}{rows}\n")
    return "\n".join(parts)


def _row(field: Field) -> str:
    default = "null" if field.default is None else f"`{json.dumps(field.default)}`"
    elsewhere = ", ".join(
        f"{name.project} `{name.name}`" + (f" ({name.note})" if name.note else "")
        for name in OTHER_NAMES.get(field.path, ())
        if name.project
    )
    return (
        f"| `{field.path}` | {field.allowed} | {default} | {format_meaning(field)} | {elsewhere} |"
    )


SYNC = Path(__file__).parent / "sync.md"
MATRIX_BEGIN = "<!-- matrix: written by docs/generate.py from what train refuses -->"
MATRIX_END = "<!-- end of matrix -->"
_MATRIX = re.compile(f"{re.escape(MATRIX_BEGIN)}.*?{re.escape(MATRIX_END)}", re.DOTALL)


def sync_page() -> str:
    """Return the page of synchronisation as it should be: as it is, with the matrix of today."""
    text = SYNC.read_text()
    if not _MATRIX.search(text):
        raise RuntimeError(f"{SYNC} lacks the markers between which the matrix is written")
    return _MATRIX.sub(lambda _: f"{MATRIX_BEGIN}\n\n{matrix()}\n\n{MATRIX_END}", text)


def matrix() -> str:
    """Return the table of the methods and styles that go together, and why others do not."""
    methods, styles, engines = (
        get_args(type_of) for type_of in (SyncMethod, SyncStyle, EngineName)
    )
    reasons: list[str] = []
    rows = [
        f"| | {' | '.join(f'`{method}`' for method in methods)} |",
        f"|{'---|' * (len(methods) + 1)}",
    ]
    for style in styles:
        cells = []
        for method in methods:
            refusals = [
                why for engine in engines if (why := _refused(engine, method, style)) is not None
            ]
            # One sentence for all engines, or none: a table for each would have to be made else.
            assert not refusals or (len(refusals) == len(engines) and len(set(refusals)) == 1)
            if refusals and refusals[0] not in reasons:
                reasons.append(refusals[0])
            cells.append(f"refused ({reasons.index(refusals[0]) + 1})" if refusals else "yes")
        rows.append(f"| `{style}` | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}." for number, reason in enumerate(reasons, 1)]
    return "\n".join([*rows, "", *notes])


def _refused(engine: str, method: str, style: str) -> str | None:
    """Return why `train` refuses a method with a style; None if it takes them."""
    sync = msgspec.convert({"method": method, "style": style}, SyncConfig)
    trainer = msgspec.convert({"engine": engine}, TrainerConfig)
    model = ModelConfig(dtype="bfloat16")  # which all engines compute in
    config = TrainConfig(model=model, sync=sync, trainer=trainer)
    conflicts = find_contradictions(config, lambda path: f"`{path}`")
    sentences = [conflict.sentence for conflict in conflicts]
    return "; ".join(sentences) or None


DOCUMENTS_PAGE = Path(__file__).parent / "json.md"
_DOCUMENTS = """\
# JSON of the commands

<!-- written by docs/generate.py from the types of the documents -->

Documents that commands print with `--json`, and the fields of each. Fields that are not always
there are optional. JSON Schemas are on this site, under *JSON Schemas*, and in a wheel, in
`trinity_schemas/json/commands`. Events and their structs are those of the
[contract](contract.md); `train-check` has the fields of the [configuration](configuration.md).

| command | document |
|---|---|
"""


def documents_page() -> str:
    """Return the page of the documents, on which every change of a field is one line."""
    structs: dict[str, dict[str, Any]] = {}
    rows = []
    for name, document in DOCUMENTS.items():
        schema = document_schema(document)
        rows.append(f"| `{name}` | {_format_schema(schema)} |")
        if document is not TrainConfig:
            structs |= schema["$defs"]
    fields = [
        f"| `{name.lstrip('_')}.{field}` | {_format_schema(inner)}"
        f"{'' if field in struct['required'] else '; optional'} |"
        for name, struct in sorted(structs.items())
        if name not in components("")
        for field, inner in struct.get("properties", {}).items()
    ]
    head = ["", "## Fields", "", "| field | value |", "|---|---|"]
    return _DOCUMENTS + "\n".join([*rows, *head, *fields, ""])


def _format_schema(schema: dict[str, Any]) -> str:  # noqa: PLR0911
    match schema:
        case {"discriminator": _}:
            return "event"
        case {"$ref": str(ref)}:
            return f"`{ref.rpartition('/')[2].lstrip('_')}`"
        case {"anyOf": list(options)}:
            return " or ".join(_format_schema(option) for option in options)
        case {"enum": list(values)}:
            return ", ".join(f"`{value}`" for value in values)
        case {"type": "array", "prefixItems": list(items)}:
            return f"list: {', '.join(_format_schema(item) for item in items)}"
        case {"type": "array", "items": dict(items)}:
            return f"list of {_format_schema(items)}"
        case {"type": "object", "additionalProperties": dict(values)}:
            return f"map to {_format_schema(values)}"
        case {"type": str(plain)}:
            return plain
    return "anything"


def main() -> None:
    """Write what lags behind; exits 1 when there is a page of no command."""
    names = commands()
    for command in names:
        page, text = PAGES / f"{command}.md", expected(command)
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            sys.stdout.write(f"docs/commands/{page.name} written\n")
    if not CONFIGURATION.exists() or CONFIGURATION.read_text() != configuration():
        CONFIGURATION.write_text(configuration())
        sys.stdout.write("docs/configuration.md written\n")
    if SYNC.read_text() != (page_of_sync := sync_page()):
        SYNC.write_text(page_of_sync)
        sys.stdout.write("docs/sync.md written\n")
    page_of_documents = documents_page()
    if not DOCUMENTS_PAGE.exists() or DOCUMENTS_PAGE.read_text() != page_of_documents:
        DOCUMENTS_PAGE.write_text(page_of_documents)
        sys.stdout.write("docs/json.md written\n")
    strays = {page.name for page in PAGES.glob("*.md")} - {
        f"{name}.md" for name in (*names, "index")
    }
    if strays:
        sys.exit(f"of no command that is installed: docs/commands/{', '.join(sorted(strays))}")


if __name__ == "__main__":
    main()

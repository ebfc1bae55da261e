"""What is generated from the contract: JSON Schema, AsyncAPI, tables. All in step with it."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from jsonschema import Draft202012Validator

import trinity_schemas
from tests.support.errors import raises
from tests.support.event_histories import (
    DIGEST,
    History,
)
from tests.support.event_samples import SAMPLES
from tests.support.rollout_messages import REQUEST, experience
from tests.support.waits import PATIENCE
from trinity_schemas import (
    ANNOUNCEMENT_TYPES,
    EVENT_TYPES,
    SENT_BY,
    Chunk,
    DeadlineReached,
    RunKeys,
    TensorEntry,
    VersionRetired,
    WeightManifest,
    decode_envelope,
    encode,
    event_tag,
    to_json,
)
from trinity_schemas.asyncapi import asyncapi
from trinity_schemas.documents import (
    FOLDER,
    PAGE,
    TRACKED,
    MarkersLost,
    lagging,
    main,
    message_documents,
    write,
)
from trinity_schemas.schemas import json_schemas

ROOT = Path(__file__).parents[2]
MANIFEST = WeightManifest(
    run_id="r",
    epoch=1,
    step=2,
    rank=0,
    tensors=(TensorEntry(name="a", dtype="float32", shape=(2,), offset=0),),
    chunks=(Chunk(nbytes=8, digest=DIGEST),),
)


def in_envelope(event):
    history = History()
    history.add(event)
    return history.entries[-1][1]


def valid(schema, message):
    return Draft202012Validator(schema).is_valid(message)


def plain(message):
    return json.loads(msgspec.json.encode(to_json(message)))


def checkout(tmp_path):
    """A copy of what the generator reads and writes."""
    (tmp_path / PAGE).parent.mkdir(parents=True)
    shutil.copy(ROOT / PAGE, tmp_path / PAGE)
    write(tmp_path)
    return tmp_path


def test_what_is_generated_is_in_step_with_the_contract():
    assert lagging(ROOT) == [], "they lag behind: run make schemas"


def test_there_is_a_sample_and_a_sender_of_every_event():
    assert [type(sample) for sample in SAMPLES] == list(EVENT_TYPES), (
        "enter it in tests/support/event_samples.py, at its place in the union Event"
    )
    assert set(SENT_BY) == set(EVENT_TYPES), "enter it in SENT_BY of trinity_schemas/events.py"
    assert {SENT_BY[kind] for kind in ANNOUNCEMENT_TYPES} == {"reducer"}


@pytest.mark.parametrize("event", SAMPLES, ids=event_tag)
def test_a_sample_of_every_event_validates_and_survives_the_wire(event):
    schemas, envelope = json_schemas(), in_envelope(event)
    assert decode_envelope(encode(envelope)) == envelope
    raw = plain(envelope)
    assert valid(schemas["envelope"], raw)
    assert valid(schemas[event_tag(event)], raw["event"])
    assert not valid(schemas[event_tag(event)], {**raw["event"], "type": "another"})
    for name, schema in schemas.items():
        if name not in (event_tag(event), "envelope"):
            assert not valid(schema, raw["event"]), f"taken for {name}"


def test_what_travels_beside_events_validates_too():
    schemas = json_schemas()
    assert valid(schemas["weight-manifest"], plain(MANIFEST))
    assert valid(schemas["rollout-request"], plain(REQUEST))
    assert valid(schemas["experience"], plain(experience()))
    assert not valid(schemas["rollout-request"], plain(experience()))
    assert not valid(schemas["experience"], {**plain(experience()), "ordinal": -1})


@pytest.mark.parametrize("step", [-1, 2**60, 1.5, "7", None])
def test_a_schema_refuses_what_the_decoder_refuses(step):
    schema = json_schemas()["deadline-reached"]
    raw = plain(DeadlineReached(step=1, kind="weights", seconds=1.0))
    assert valid(schema, raw)
    assert not valid(schema, {**raw, "step": step})


def test_a_schema_takes_fields_of_a_later_version():
    raw = {**plain(VersionRetired(epoch=1, step=1)), "later": True}
    assert valid(json_schemas()["version-retired"], raw)


def test_every_schema_is_valid_json_schema():
    for schema in json_schemas().values():
        Draft202012Validator.check_schema(schema)
    for schema in asyncapi()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def references(node):
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for value in node.values():
            yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_every_reference_resolves_in_its_own_document():
    for document in (asyncapi(), *json_schemas().values()):
        links = set(references(document))
        assert links
        for reference in links:
            node = document
            root, *path = reference.split("/")
            assert root == "#"
            for key in path:
                node = node[key]


def test_every_message_of_asyncapi_is_in_one_channel_and_its_operations_know_only_those():
    document = asyncapi()
    channels = document["channels"]
    # What explorers report is copied to the events.
    own = [channel for name, channel in channels.items() if name != "reports"]
    of_channels = [name for channel in own for name in channel["messages"]]
    assert set(channels["reports"]["messages"]) <= set(channels["events"]["messages"])
    assert sorted(of_channels) == sorted(document["components"]["messages"])
    for operation in document["operations"].values():
        messages = channels[operation["channel"]["$ref"].rpartition("/")[2]]["messages"]
        assert operation["messages"]
        for message in operation["messages"]:
            assert message["$ref"].startswith(operation["channel"]["$ref"])
            assert message["$ref"].rpartition("/")[2] in messages


def test_a_channels_address_is_the_key_once_its_parameter_has_the_literal_braces():
    channels, keys = asyncapi()["channels"], RunKeys.of("grpo-7b")
    addresses = {
        name: channel["address"].replace("{run}", channel["parameters"]["run"]["examples"][0])
        for name, channel in channels.items()
    }
    assert addresses == {
        "events": keys.events,
        "announcements": keys.announcements,
        "reports": keys.reports,
        "experiences": keys.experiences,
        "rollouts": keys.rollouts,
        "deadLetters": keys.dead,
    }


def test_the_payload_of_an_asyncapi_message_takes_its_own_event_alone():
    document = asyncapi()
    ready, started = in_envelope(SAMPLES[14]), in_envelope(SAMPLES[6])
    payload = document["components"]["messages"]["StepReady"]["payload"]
    schema = {**payload, "components": document["components"]}
    assert valid(schema, plain(ready))
    assert not valid(schema, plain(started))


def test_generating_twice_gives_the_same_bytes(tmp_path):
    root = checkout(tmp_path)
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert {path.name for path in before} == {*message_documents(), PAGE.name}
    write(root)
    assert {path: path.read_bytes() for path in before} == before
    assert all(text.endswith(b"\n") for text in before.values())


def check(root, package):
    """The command, over a package that lies in a folder of its own."""
    return subprocess.run(
        [sys.executable, "-m", "trinity_schemas.documents", "--check", str(root)],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


@pytest.mark.processes
def test_the_check_fails_with_one_sentence_when_an_event_changes(tmp_path):
    root = checkout(tmp_path)
    package = root / "changed" / "trinity_schemas"
    shutil.copytree(ROOT / "schemas/trinity_schemas", package)
    assert check(root, package).returncode == 0
    events = (package / "events.py").read_text()
    field_line = "    oldest_version: Annotated["
    changed = events.replace(field_line, "    patience: int = 0\n" + field_line)
    assert changed != events
    (package / "events.py").write_text(changed)
    result = check(root, package)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "run make schemas" in result.stderr
    for path in ("schemas/json/asyncapi.json", "schemas/json/envelope.json", "docs/contract.md"):
        assert path in result.stderr
    assert "sync-requested.json" not in result.stderr


@pytest.mark.parametrize("path", [FOLDER / "asyncapi.json", FOLDER / "envelope.json", PAGE])
def test_a_file_that_was_edited_lags_and_is_written_anew(tmp_path, path):
    root = checkout(tmp_path)
    before = (root / path).read_text()
    (root / path).write_text(before.replace("type", "sort"))
    assert main([str(root), "--check"]) == 1
    assert main([str(root)]) == 0
    assert main([str(root), "--check"]) == 0


def test_a_schema_of_no_event_is_removed(tmp_path):
    root = checkout(tmp_path)
    stray = root / FOLDER / "no-such-event.json"
    stray.write_text("{}")
    write(root)
    assert not stray.exists()


def test_a_file_that_is_not_tracked_is_not_missed_and_is_written_again(tmp_path):
    root = checkout(tmp_path)
    schema = root / FOLDER / "run-opened.json"
    before = schema.read_text()
    schema.unlink()
    assert lagging(root) == []
    write(root)
    assert schema.read_text() == before


def test_the_tracked_document_has_every_schema_of_a_message():
    tracked = asyncapi()["components"]["schemas"]
    structs = {name for schema in json_schemas().values() for name in schema["$defs"]}
    assert structs <= tracked.keys()


@pytest.mark.processes
def test_git_tracks_the_documents_that_the_check_compares():
    files = subprocess.run(
        ["git", "ls-files", FOLDER], cwd=ROOT, capture_output=True, text=True, check=True
    )
    if files.stdout:  # else the tests are not those of a clone
        assert {Path(line).name for line in files.stdout.splitlines()} == set(TRACKED)


def test_a_page_without_its_markers_is_refused(tmp_path):
    root = checkout(tmp_path)
    (root / PAGE).write_text("# The contract\n")
    with raises(MarkersLost, page=root / PAGE):
        write(root)


def test_every_field_on_the_page_has_a_meaning():
    page = (ROOT / PAGE).read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert [row for row in rows if re.search(r"\|\s*\|", row)] == []


def test_every_key_of_a_run_is_on_the_page():
    page = (ROOT / PAGE).read_text()
    assert [key for key in RunKeys.of("grpo-7b") if f"`{key}`" not in page] == []


def test_the_contract_imports_msgspec_alone():
    folder = Path(trinity_schemas.__file__).parent
    imported = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    assert imported - sys.stdlib_module_names == {"msgspec"}

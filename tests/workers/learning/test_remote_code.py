"""A Hugging Face folder may name Python code of its own: none of it is ever run."""

from __future__ import annotations

import ast
import json
import re
import shutil
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.errors import raises
from trinity_workers.learning.pretrained import PolicyUnreadable

pytest.importorskip("torch")
pytest.importorskip("transformers")

from trinity_workers.learning.policy import BadPolicy, context_length, load_policy, load_tokenizer
from trinity_workers.learning.reward_model import load_reward_model

ROOT = Path(__file__).parents[3]
LOADERS = {"from_pretrained", "from_config"}


def loads(tree: ast.AST):
    """Yield the calls that load a model, a configuration or a tokenizer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in LOADERS:
            yield node


def test_every_place_that_loads_from_a_folder_refuses_its_code():
    places = 0
    for package in ("trinity_events", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            for call in loads(ast.parse(path.read_text())):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
                places += 1
    assert places > 8
    for path in (ROOT / "workers").rglob("*.py"):
        assert "trust_remote_code=True" not in path.read_text(), path


@pytest.fixture
def folder(own_model_folder, tmp_path):
    """A policy's folder that names code for everything; the code leaves a file."""
    folder = shutil.copytree(own_model_folder(), tmp_path / "model")
    (folder / "theirs.py").write_text(
        f"import pathlib\npathlib.Path({str(tmp_path / 'proof')!r}).write_text('ran')\n"
        "class Theirs: pass\n"
    )
    code = "theirs.Theirs"
    kinds = ("Config", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    names = {f"Auto{kind if kind == 'Config' else f'Model{kind}'}": code for kind in kinds}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": names}))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"auto_map": {"AutoTokenizer": [code, code]}, "tokenizer_class": "Theirs"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_code_of_a_known_architecture_is_left_alone(folder, tmp_path):
    model, _ = load_policy(folder)
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert context_length(folder) == 256
    assert not (tmp_path / "proof").exists()


def test_an_architecture_of_its_own_code_is_refused(folder, tmp_path, monkeypatch):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "theirs"}))
    # Without the argument, transformers asks on the terminal: "Do you wish to run the custom code?"
    monkeypatch.setattr("builtins.input", lambda _: "y")
    for load in (load_tokenizer, load_policy, context_length, load_reward_model):
        with raises(PolicyUnreadable, reason=re.compile("custom code")):
            load(folder)
    assert not (tmp_path / "proof").exists()


def test_a_tokenizer_of_its_own_code_is_not_run(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "y")
    (folder / "tokenizer.json").unlink()
    with suppress(BadPolicy):  # it may be loaded by the class of its architecture
        load_tokenizer(folder)
    assert not (tmp_path / "proof").exists()

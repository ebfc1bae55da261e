"""The built-in task's policy: its tokenizer and its weights."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import pytest

from tests.support.errors import raises
from trinity_workers.learning.pretrained import FilesUnreadable, NoChatTemplate, NoModel

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("reasoning_gym")

from tests.support.tensors import identical  # noqa: E402
from trinity_workers.learning import policy  # noqa: E402
from trinity_workers.tasks import SpellBackward  # noqa: E402


@pytest.fixture(scope="module")
def task() -> SpellBackward:
    return SpellBackward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    policy.create_policy(folder, seed=0)
    return folder


def test_the_tokenizer_survives_its_folder_with_one_token_a_character(folder: Path) -> None:
    _, tokenizer = policy.load_policy(folder)
    text = 'Zebra 09>"<q'
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text)
    assert tokenizer.unk_token_id not in tokens
    assert tokenizer.decode(tokens) == text
    assert tokenizer.padding_side == "left"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_every_question_and_answer_is_made_of_known_characters(
    folder: Path, task: SpellBackward
) -> None:
    _, tokenizer = policy.load_policy(folder)
    for question in islice(task.training_questions(0), 2_000):
        assert tokenizer.unk_token_id not in tokenizer.encode(question.prompt + question.answer)


def test_a_policy_is_determined_by_its_seed(tmp_path: Path, folder: Path) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    policy.create_policy(tmp_path / "same", seed=0)
    policy.create_policy(tmp_path / "other", seed=1)
    assert identical(torch.get_rng_state(), before)
    weights, same, other = (
        policy.load_policy(path)[0].state_dict()
        for path in (folder, tmp_path / "same", tmp_path / "other")
    )
    assert all(identical(weights[name], same[name]) for name in weights)
    assert not identical(weights["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_folder_without_a_policy_is_refused_without_asking_the_hub(tmp_path: Path) -> None:
    with raises(NoModel, model="policy", folder=tmp_path / "missing", setting="model.path"):
        policy.load_policy(tmp_path / "missing")


@contextmanager
def not_as_root() -> Iterator[None]:
    """Take the place of a user whom files of mode 0600 refuse."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that each user reaches; pytest's are the user's own."""
    made = Path(tempfile.mkdtemp())
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


def test_weights_that_their_owner_alone_may_read_are_named_with_what_allows_it(
    folder: Path, open_to_all: Path
) -> None:
    model = Path(shutil.copytree(folder, open_to_all / "model"))
    model.chmod(0o755)
    for file in model.iterdir():
        file.chmod(0o644)
    with not_as_root():
        policy.load_tokenizer(model)
    weights = model / "model.safetensors"
    weights.chmod(0)
    with not_as_root(), raises(FilesUnreadable, path=weights, folder=model):
        policy.load_policy(model)


def test_chat_messages_need_a_chat_template(folder: Path) -> None:
    _, tokenizer = policy.load_policy(folder)
    with pytest.raises(NoChatTemplate):
        policy.encode_prompt(tokenizer, [{"role": "user", "content": "hi"}])


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(params=["<unk> $A", "$A <eos>", "<unk> $A <eos>", "$A"])
def adding(request, folder: Path, tmp_path: Path):
    """Return a tokenizer that adds tokens to a text; <unk> is its beginning of sequence."""
    processors = pytest.importorskip("tokenizers.processors")
    tokenizer = policy.load_tokenizer(folder)
    names = [policy.UNKNOWN, policy.END]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=request.param,
        special_tokens=[(name, tokenizer.convert_tokens_to_ids(name)) for name in names],
    )
    tokenizer.bos_token = policy.UNKNOWN
    tokenizer.chat_template = TEMPLATE
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    tokenizer.save_pretrained(tmp_path)
    return policy.load_tokenizer(tmp_path), request.param


def test_a_prompt_has_one_beginning_of_sequence_and_no_end(adding) -> None:
    tokenizer, adds = adding
    begin = [policy.UNKNOWN] if adds.startswith(policy.UNKNOWN) else []
    end = [policy.END] if adds.endswith(policy.END) else []

    def encoded(prompt, **options):
        tokens = policy.encode_prompt(tokenizer, prompt, **options)
        return tokenizer.convert_ids_to_tokens(tokens)

    assert encoded("2+2=") == [*begin, *"2+2="]
    assert encoded(f"{policy.UNKNOWN}2+2=") == [policy.UNKNOWN, *"2+2="]
    assert encoded(f"2{policy.END}") == [*begin, "2", policy.END], "a text may have its own"
    assert encoded("2+2=4", answered=True) == [*begin, *"2+2=4", *end]
    assert encoded(f"4{policy.END}", answered=True) == [*begin, "4", policy.END]
    question = [{"role": "user", "content": "2"}]
    assert encoded(question) == [policy.UNKNOWN, *"user:2"]
    answered = [*question, {"role": "assistant", "content": "4"}]
    assert encoded(answered, answered=True) == [policy.UNKNOWN, *"user:2assistant:4", policy.END]

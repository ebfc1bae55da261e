"""A teacher judges the policy's own tokens, so it must know the same ones."""

import pytest

from tests.support.errors import raises
from trinity_workers.learning.pretrained import NoModel, TokenizerRefused

pytest.importorskip("transformers")

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from trinity_workers.learning.teacher import checked_teacher


def test_a_teacher_with_the_policys_tokens_is_taken(policy_folder):
    assert checked_teacher(policy_folder, policy_folder) == policy_folder


def test_one_that_is_not_there_or_has_other_tokens_is_refused(policy_folder, tmp_path):
    with raises(NoModel, model="teacher", folder=tmp_path, setting="algorithm.teacher.path"):
        checked_teacher(tmp_path, policy_folder)
    (tmp_path / "config.json").write_bytes((policy_folder / "config.json").read_bytes())
    other = Tokenizer(models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=other, eos_token="<eos>").save_pretrained(tmp_path)
    with raises(TokenizerRefused, folder=tmp_path, fault="teacher"):
        checked_teacher(tmp_path, policy_folder)

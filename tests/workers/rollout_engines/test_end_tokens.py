"""Tokens that end an answer: engines with the model and without it have the same."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from trinity_workers.learning.policy import create_policy, end_tokens, load_policy
from trinity_workers.rollout_engines.vllm.options import read_end_tokens


@pytest.mark.parametrize("defaults", [None, {"eos_token_id": [5, 6]}, {"eos_token_id": 7}, {}])
@pytest.mark.parametrize("configured", [1, 8, [8, 9]])
def test_end_tokens_are_those_of_the_loaded_model(tmp_path, defaults, configured):
    create_policy(tmp_path, seed=0)
    config = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": configured}))
    generation = tmp_path / "generation_config.json"
    if defaults is None:
        generation.unlink(missing_ok=True)
    else:
        generation.write_text(json.dumps(defaults))
    model, tokenizer = load_policy(tmp_path)
    ends = end_tokens(model.generation_config, tokenizer)
    assert set(read_end_tokens(tmp_path, tokenizer)) == ends
    assert tokenizer.eos_token_id in ends

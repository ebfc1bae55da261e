"""Folders that are written: the user's own files, and a configuration for any transformers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from tests.support.own_models import own_model  # noqa: E402
from tests.support.rank_processes import Rank  # noqa: E402
from trinity_workers.conversion.convert import convert  # noqa: E402
from trinity_workers.engines.fsdp import FSDPEngine  # noqa: E402
from trinity_workers.engines.model_folder import write_model_folder  # noqa: E402
from trinity_workers.learning.adapters import policy_loader  # noqa: E402
from trinity_workers.learning.lora_settings import LoraConfig  # noqa: E402
from trinity_workers.storage.huggingface_files import read_user_files, set_dtype, write_config  # noqa: E402

THETA = 1_000_000.0
FILES = {
    "generation_config.json": b'{"temperature":   0.6, "eos_token_id": [1, 2]}',
    "special_tokens_map.json": b'{"eos_token": "<|end|>"}',
    "additional_chat_templates/tools.jinja": b"{{ messages }}",
    "vocab.json": b"{}",
}


@pytest.fixture(scope="module")
def released_folder(tmp_path_factory) -> Path:
    """A folder as transformers 4 wrote it: bfloat16, ``rope_theta``, and no padding token."""
    folder = own_model(tmp_path_factory.mktemp("released"), "llama")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for name in ("rope_parameters", "rope_scaling", "dtype"):
        config.pop(name, None)
    more = {"rope_theta": THETA, "torch_dtype": "bfloat16", "transformers_version": "4.51.0"}
    file.write_text(json.dumps(config | more, indent=2))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, data in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def save(rank: Rank, source: Path, folder: Path, dtype: str, lora: int) -> None:
    load = policy_loader(LoraConfig(rank=lora), seed=0) if lora else None
    engine = FSDPEngine(
        source, device=torch.device("cpu"), learning_rate=1e-3, dtype=dtype, load=load
    )
    engine.save_checkpoint(str(folder / "actor"))
    if not lora:
        described = folder / "published"
        write_model_folder(described, engine.write_description, engine.get_per_tensor_param())


def check_folder(folder: Path, source: Path) -> dict[str, Any]:
    """Check the user's files, and return the configuration; its dtype is that of the weights."""
    assert read_user_files(folder) == read_user_files(source)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    dtypes = {str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()}
    assert dtypes == {f"torch.{config['torch_dtype']}"}
    return config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoints_and_exports_have_the_users_files_and_both_spellings(
    rank_group, released_folder, tmp_path, dtype
):
    rank_group(1)(save, released_folder, tmp_path / "step", dtype, 0)
    convert(tmp_path / "step", tmp_path / "exported")
    described = tmp_path / "step" / "actor" / "huggingface"
    assert read_user_files(described) == read_user_files(released_folder)
    for folder in (tmp_path / "exported", tmp_path / "step" / "published"):
        config = check_folder(folder, released_folder)
        assert (config["rope_theta"], config["rope_scaling"]) == (THETA, None)
        assert config["rope_parameters"]["rope_theta"] == THETA
        assert config["dtype"] == config["torch_dtype"]
        check_by_transformers_4(folder, config["torch_dtype"])


def test_adapters_alone_and_merged_have_the_users_files(rank_group, released_folder, tmp_path):
    pytest.importorskip("peft")
    rank_group(1)(save, released_folder, tmp_path / "step", "bfloat16", 2)
    convert(tmp_path / "step", tmp_path / "adapter", adapter=True)
    convert(tmp_path / "step", tmp_path / "merged")
    assert read_user_files(tmp_path / "adapter") == read_user_files(released_folder)
    check_folder(tmp_path / "merged", released_folder)


def check_by_transformers_4(folder: Path, dtype: str) -> None:
    """Load the folder with transformers 4, if TRANSFORMERS4 names a Python that has it."""
    python = os.environ.get("TRANSFORMERS4")
    if python is None:  # what is written was checked without it
        return
    code = (
        "import sys; from transformers import AutoConfig, AutoTokenizer, __version__\n"
        "assert __version__.startswith('4.')\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\n"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])\n"
        "print(config.rope_theta, config.torch_dtype, tokenizer.pad_token, tokenizer.encode('1'))"
    )
    shown = subprocess.run(
        [python, "-c", code, str(folder)], capture_output=True, text=True, check=True, timeout=60
    )
    theta, shown_dtype, pad, _ = shown.stdout.split(maxsplit=3)
    assert (float(theta), shown_dtype.removeprefix("torch."), pad) == (THETA, dtype, "None")


def qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(rope_parameters={"rope_type": "default", "rope_theta": THETA})


def llama_3() -> Any:
    from transformers import LlamaConfig

    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    places = {"original_max_position_embeddings": 64}
    return LlamaConfig(
        rope_parameters={"rope_type": "llama3", "rope_theta": THETA, **scaling, **places}
    )


def gemma_3() -> Any:
    from transformers import Gemma3TextConfig

    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": THETA}
    sliding = {"rope_type": "default", "rope_theta": 10_000.0}
    return Gemma3TextConfig(rope_parameters={"full_attention": full, "sliding_attention": sliding})


def partly_rotated() -> Any:
    from transformers import GlmConfig

    rope = {"rope_type": "default", "rope_theta": THETA, "partial_rotary_factor": 0.25}
    return GlmConfig(rope_parameters=rope)


def nested() -> Any:
    from transformers import Gemma3Config

    return Gemma3Config(text_config=gemma_3())


@pytest.mark.parametrize("make", [qwen3, llama_3, gemma_3, partly_rotated, nested])
def test_a_configuration_says_the_same_in_both_spellings(tmp_path, make):
    config = make()
    write_config(tmp_path, config)
    again = AutoConfig.from_pretrained(tmp_path).get_text_config()
    expected = config.get_text_config()
    assert again.rope_parameters == expected.rope_parameters
    written = json.loads((tmp_path / "config.json").read_text())
    written = written.get("text_config", written)
    rope = expected.rope_parameters
    full = rope.get("full_attention", rope)
    assert written["rope_theta"] == full["rope_theta"] == THETA
    scaling = written["rope_scaling"] or {"rope_type": "default"}
    assert scaling == {name: full[name] for name in full if name in scaling}
    assert scaling["rope_type"] == full["rope_type"]
    if make is partly_rotated:
        assert written["partial_rotary_factor"] == 0.25


def test_a_configuration_that_names_the_dtype_of_its_weights_keeps_its_bytes(tmp_path):
    data = b'{"torch_dtype":   "bfloat16", "text_config": {"model_type": "a", "dtype": "float16"}}'
    (tmp_path / "config.json").write_bytes(data.replace(b'float16"}', b'bfloat16"}'))
    before = (tmp_path / "config.json").read_bytes()
    set_dtype(tmp_path, "bfloat16")
    assert (tmp_path / "config.json").read_bytes() == before
    (tmp_path / "config.json").write_bytes(data)
    set_dtype(tmp_path, "float32")
    values = json.loads((tmp_path / "config.json").read_text())
    assert values == {
        "torch_dtype": "float32",
        "text_config": {"model_type": "a", "dtype": "float32"},
    }

"""Converting between Hugging Face folders and Megatron checkpoints."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, Qwen3Config  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.errors import raises  # noqa: E402
from tests.support.rank_processes import RankProcesses  # noqa: E402
from tests.support.waits import child  # noqa: E402
from trinity_events.errors import TrinityError  # noqa: E402
from trinity_events.weights.errors import AbsentTensor  # noqa: E402
from trinity_workers.engines.convertible import SourceRefused  # noqa: E402
from trinity_workers.engines.megatron import ParallelLayout  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.megatron, pytest.mark.heavy]


@pytest.mark.parametrize(
    "name",
    [
        *("qwen2", "qwen2-untied", "qwen3", "llama", "llama-one-group"),
        *("qwen3-moe", "qwen2-moe", "deepseek", "moonlight"),
    ],
)
def test_a_model_comes_back_bit_for_bit(converting, megatron_folder, tmp_path, name):
    there = converting(megatron_folder(name), tmp_path / "megatron")
    back = converting(tmp_path / "megatron", tmp_path / "back", shard_bytes=20_000)
    assert (there.to, back.to) == ("megatron", "huggingface")
    assert there.bytes == back.bytes
    at.assert_same(at.in_folder(tmp_path / "back"), at.in_folder(megatron_folder(name)))
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 1
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


@pytest.mark.parametrize(
    "dtype_of",
    [
        lambda name: torch.bfloat16,
        lambda name: torch.float32 if "norm" in name else torch.bfloat16,
    ],
    ids=["bfloat16", "float32 norms"],
)
def test_every_tensor_keeps_its_dtype(converting, megatron_folder, tmp_path, dtype_of):
    weights = {
        name: value.to(dtype_of(name))
        for name, value in at.in_folder(megatron_folder("qwen3")).items()
    }
    source = folder_with(weights, megatron_folder("qwen3"), tmp_path / "source")
    converting(source, tmp_path / "megatron")
    converting(tmp_path / "megatron", tmp_path / "back")
    at.assert_same(at.in_folder(tmp_path / "back"), weights)


@pytest.mark.parametrize(
    "name", ["model.layers.1.self_attn.k_proj.weight", "model.layers.1.input_layernorm.weight"]
)
def test_tensors_that_a_checkpoint_stores_in_one_dtype_have_one(
    converting, megatron_folder, tmp_path, name
):
    weights = at.in_folder(megatron_folder("qwen3"))
    weights[name] = weights[name].half()
    source = folder_with(weights, megatron_folder("qwen3"), tmp_path / "source")
    with raises(SourceRefused, fault="dtypes", dtypes="float32, float16"):
        converting(source, tmp_path / "megatron")


def folder_with(weights, like, folder):
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((like / "config.json").read_bytes())
    return folder


def test_generation_defaults_come_back_byte_for_byte(converting, megatron_folder, tmp_path):
    source = folder_with(
        at.in_folder(megatron_folder("qwen3")), megatron_folder("qwen3"), tmp_path / "source"
    )
    defaults = b'{"do_sample": true, "temperature": 0.6, "eos_token_id": [1, 2], "of_ours": 7}\n'
    (source / "generation_config.json").write_bytes(defaults)
    converting(source, tmp_path / "megatron")
    converting(tmp_path / "megatron", tmp_path / "back")
    assert (tmp_path / "back" / "generation_config.json").read_bytes() == defaults


def load(rank, folder):
    rank.objects.engine.load_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama", ParallelLayout(tensor=2)),
        ("deepseek", ParallelLayout(tensor=2, sequence_parallel=True)),
    ],
)
def test_what_was_converted_loads_at_any_layout(
    converting, engine_ranks, megatron_folder, tmp_path, name, layout
):
    converting(megatron_folder(name), tmp_path / "megatron")
    ranks = engine_ranks(name, 2, layout, load_weights=False)
    ranks(load, tmp_path / "megatron")
    at.assert_same(ranks(at.full_weights)[1], at.in_folder(megatron_folder(name)))


def measure_peaks(rank, folders):
    """Return by how many bytes each conversion raised this process's resident memory at most."""
    import ctypes
    import gc

    from trinity_workers.conversion.convert import convert

    def read_resident(field):
        [line] = [
            line
            for line in Path("/proc/self/status").read_text().splitlines()
            if line.startswith(field)
        ]
        return int(line.split()[1]) * 1024

    peaks = []
    for source, target in folders:
        # Memory that an earlier conversion freed would serve this one, and so hide what it takes.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = read_resident("VmRSS")
        convert(source, target)
        peaks.append(read_resident("VmHWM") - before)
    return peaks


HIDDEN, INTERMEDIATE = 512, 1024
LARGEST_PARAMETER = 2 * INTERMEDIATE * HIDDEN * 4
"""Bytes of a layer's gate and up projections, which Megatron stores as one."""


def deep_folder(folder, layers):
    """Save a model of so many layers of 7.5 MiB; return what its weights take."""
    sizes = at.SIZES | {
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
    }
    config = Qwen3Config(**sizes, head_dim=64, tie_word_embeddings=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # what the memory had before may not be finite
    model.save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


@pytest.fixture
def fresh_process():
    """Process whose memory no other conversion has used."""
    processes = RankProcesses()
    processes.start(1)
    yield processes
    processes.close()


@pytest.mark.parametrize("way", ["there", "back"])
def test_memory_does_not_grow_with_the_layers(converting, fresh_process, tmp_path, way):
    layer = (deep_folder(tmp_path / "16", 16) - deep_folder(tmp_path / "4", 4)) / 12
    folders = [(tmp_path / layers, tmp_path / f"megatron-{layers}") for layers in ("4", "16")]
    if way == "back":
        for source, target in folders:
            converting(source, target)
        folders = [(target, tmp_path / f"back-{target.name}") for _, target in folders]
    warm = (folders[0][0], tmp_path / "warm")  # imports, which take more than a conversion does
    _, shallow, deep = fresh_process.ask(0, measure_peaks, [warm, *folders])()
    # Twelve layers more add their entries in the checkpoint's index, and none of their values.
    assert deep - shallow < layer / 2
    # Source, converted and written values of the largest parameter, and pages mapped around them.
    assert deep < 5 * LARGEST_PARAMETER


def test_what_cannot_be_converted_leaves_nothing(converting, megatron_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with raises(SourceRefused, fault="form"):
        converting(tmp_path / "empty", tmp_path / "target")
    with raises(SourceRefused, fault="target"):
        converting(megatron_folder("qwen2"), megatron_folder("qwen3"))
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_bytes((megatron_folder("qwen2") / "config.json").read_bytes())
    save_file({"model.norm.weight": torch.ones(32)}, broken / "model.safetensors")
    with raises(AbsentTensor, fault="folder", folder=broken):
        converting(broken, tmp_path / "target")
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "broken"}


CONVERTING = (
    "import sys; from pathlib import Path\n"
    "from trinity_events.system.open_folder import partial_folder\n"
    "with partial_folder(Path(sys.argv[1])) as made:\n"
    "    (made / 'result').mkdir()\n"
    "    print(made.name, flush=True); sys.stdin.read()\n"
)


def test_what_a_killed_conversion_has_left_is_removed_by_the_next_and_no_other(
    converting, megatron_folder, tmp_path
):
    target, other = tmp_path / "target", tmp_path / "other"
    partial_names = []
    with ExitStack() as exits:
        for destination in (target, other, other):
            command = [sys.executable, "-c", CONVERTING, str(destination)]
            writer = exits.enter_context(child(command, stdin=PIPE, stdout=PIPE, text=True))
            partial_names.append(writer.stdout.readline().strip())
            if destination == target:
                writer.kill()
                writer.wait()
        assert partial_names[0].startswith(".target.")
        assert partial_names[0].endswith(".part")
        converting(megatron_folder("qwen2"), target)
        assert {path.name for path in tmp_path.iterdir()} == {"target", *partial_names[1:]}


# --- the command ------------------------------------------------------------------------------


def test_the_command_converts_there_and_back(cli, megatron_folder, tmp_path):
    source, there, back = megatron_folder("qwen3"), tmp_path / "megatron", tmp_path / "back"
    shown = cli("convert", str(source), str(there))
    assert (shown.returncode, shown.stderr) == (0, "")
    weights = at.in_folder(source)
    size = sum(tensor.nbytes for tensor in weights.values())
    assert shown.stdout == (
        f"{source} converted to megatron in {there}: {len(weights)} tensors, {size} bytes\n"
    )
    done = json.loads(cli("convert", str(there), str(back), "--json").stdout)
    assert done == {
        "source": str(there),
        "target": str(back),
        "to": "huggingface",
        "tensors": len(weights),
        "bytes": size,
    }
    at.assert_same(at.in_folder(back), weights)


def no_folder(folder):
    return "is no folder: give the folder of the model"


def no_checkpoint(folder):
    folder.mkdir()
    return "is neither a Hugging Face folder (config.json) nor a Megatron checkpoint"


def unfinished(folder):
    (folder / "huggingface").mkdir(parents=True)
    (folder / "huggingface" / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "model").mkdir()
    return "is neither a Hugging Face folder (config.json) nor a Megatron checkpoint"


def unknown_architecture(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "thinker9"}')
    return "config.json describes no model that can be converted"


def architecture_without_mapping(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"wte.weight": torch.ones(2)}, folder / "model.safetensors")
    return "a Megatron model cannot be made of 'gpt2': choose deepseek_v3, llama"


def no_weights(folder):
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return "has no *.safetensors files to load weights from"


@pytest.mark.parametrize(
    "make",
    [
        no_folder,
        no_checkpoint,
        unfinished,
        unknown_architecture,
        architecture_without_mapping,
        no_weights,
    ],
)
def test_what_cannot_be_converted_is_an_error_that_says_why(converting, tmp_path, make):
    expected = make(tmp_path / "source")
    with pytest.raises(TrinityError) as caught:
        converting(tmp_path / "source", tmp_path / "target")
    assert expected in str(caught.value)
    assert not (tmp_path / "target").exists()


def test_what_the_command_cannot_convert_is_one_sentence(cli, tmp_path):
    expected = no_weights(tmp_path / "source")
    shown = cli("convert", str(tmp_path / "source"), str(tmp_path / "target"))
    assert (shown.returncode, shown.stdout) == (1, "")
    [line] = shown.stderr.splitlines()
    assert line.startswith("error: ")
    assert expected in line
    assert not (tmp_path / "target").exists()

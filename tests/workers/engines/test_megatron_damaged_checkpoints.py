"""Each damage to each file of a Megatron checkpoint is one sentence, before it is unpickled."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.damage import (  # noqa: E402
    check_all,
    damage_all,
    flipped_conversion,
    load,
    save,
)
from trinity_workers.engines.megatron import OptimizerOptions, ParallelLayout  # noqa: E402

pytestmark = pytest.mark.megatron


def test_each_damage_to_each_file_of_megatron_is_raised_on_all_ranks(
    engine_ranks, tmp_path, megatron_folder
):
    trained = OptimizerOptions(learning_rate=1e-3)
    ranks = engine_ranks("qwen3", 2, ParallelLayout(tensor=2), trained)
    ranks(at.train, [at.padded_batch(0, rows=8)])
    folder = tmp_path / "global_step_5" / "actor"
    ranks(save, folder)
    names = check_all(ranks(damage_all, folder), folder)
    assert {".metadata", "common.pt", "metadata.json", "rank_0.pt", "__0_0.distcp"} <= names
    assert ranks(load, folder) == [None, None]
    error = flipped_conversion(folder, "model/.metadata", tmp_path / "converted")
    assert error.path == folder / "model" / ".metadata"

"""Arguments of veRL's engines that others do not have are refused, and nothing is deleted."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from trinity_workers.engines.base import ArgumentRefused
from trinity_workers.engines.fsdp import FSDPEngine
from trinity_workers.engines.megatron import MegatronEngine
from trinity_workers.engines.verl.fsdp import VerlEngine


@pytest.fixture(params=[FSDPEngine, MegatronEngine, VerlEngine])
def engine(request):
    """Engine without a model: arguments are refused before anything is read or written."""
    engine = object.__new__(request.param)
    engine._memory = SimpleNamespace(resident=lambda *parts: nullcontext())
    return engine


@pytest.mark.parametrize(
    ("method", "argument", "value"),
    [
        ("save_checkpoint", "hdfs_path", "hdfs://somewhere"),
        ("save_checkpoint", "max_ckpt_to_keep", 2),
        ("load_checkpoint", "hdfs_path", "hdfs://somewhere"),
        ("load_checkpoint", "del_local_after_load", True),
    ],
)
def test_an_argument_without_an_effect_is_refused(engine, tmp_path, method, argument, value):
    (tmp_path / "checkpoint").mkdir()
    with pytest.raises(ArgumentRefused) as refused:
        getattr(engine, method)(str(tmp_path / "checkpoint"), **{argument: value})
    error = refused.value
    assert (error.engine, error.method) == (type(engine).__name__, method)
    assert (error.argument, error.value) == (argument, value)
    assert error.alternative
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]

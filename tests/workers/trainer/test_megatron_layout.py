"""The layout on Megatron is the one that the configuration names."""

import pytest

from tests.support.errors import raises

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from trinity_workers.config.sections.trainer import TrainerConfig  # noqa: E402
from trinity_workers.engines.megatron import LayoutRefused, ParallelLayout  # noqa: E402
from trinity_workers.trainer.models.megatron import (  # noqa: E402
    load_models,
    parallel_layout,
)

pytestmark = [pytest.mark.megatron, pytest.mark.heavy]


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        ({"ranks": 1}, {}),
        ({"ranks": 4}, {"tensor": 4}),
        ({"ranks": 4, "pipeline_parallel": 2}, {"tensor": 2, "pipeline": 2}),
        (
            {"ranks": 4, "tensor_parallel": 1, "pipeline_parallel": 2, "virtual_pipeline": 2},
            {"pipeline": 2, "virtual": 2},
        ),
        ({"ranks": 4, "expert_parallel": 2}, {"expert": 2}),
        (
            {"ranks": 4, "context_parallel": 2, "sequence_parallel": True},
            {"tensor": 2, "context": 2, "sequence_parallel": True},
        ),
    ],
)
def test_sizes_of_the_configuration_are_those_of_the_layout(settings, layout):
    parallel = parallel_layout(TrainerConfig(engine="megatron", **settings))
    assert parallel == ParallelLayout(**layout)
    parallel.check(settings["ranks"])


def test_experts_that_the_policy_does_not_have_are_not_spread(make_config):
    config = make_config(trainer={"engine": "megatron", "expert_parallel": 2})
    with raises(LayoutRefused, fault="no experts", expert=2, folder=config.model_folder):
        load_models(config, torch.device("cpu"))

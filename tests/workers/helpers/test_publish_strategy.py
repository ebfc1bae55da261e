"""The strategy that a run's settings choose."""

import pytest

pytest.importorskip("ray")

from trinity_workers.config.sections.sync import SyncConfig
from trinity_workers.config.sections.trainer import TrainerConfig
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.helpers import (
    PublishFull,
    PublishShards,
    PublishSnapshot,
    strategy_for,
)


@pytest.mark.parametrize(
    ("ranks", "sync", "kind"),
    [
        (1, {}, PublishFull),
        (2, {}, PublishShards),
        (1, {"publish": "shards"}, PublishShards),
        (1, {"publish": "snapshot"}, PublishSnapshot),
        (2, {"publish": "full"}, PublishFull),
        (2, {"method": "nccl"}, PublishFull),
        (2, {"method": "checkpoint", "publish": "snapshot"}, PublishFull),
    ],
)
def test_the_settings_choose_one_strategy(ranks, sync, kind):
    settings = TrainConfig(trainer=TrainerConfig(ranks=ranks), sync=SyncConfig(**sync))
    strategy = strategy_for(settings.published_form, 20)
    strategy.close()
    assert type(strategy) is kind
    assert settings.publishes_shards == (kind is not PublishFull)

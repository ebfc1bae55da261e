"""The strategy that a run's settings choose."""

import pytest

pytest.importorskip("ray")

from trinity_workers.config import RunSettings
from trinity_workers.helpers import (
    PublishFull,
    PublishShards,
    PublishSnapshot,
    strategy_for,
)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"trainers": 1}, PublishFull),
        ({"trainers": 2}, PublishShards),
        ({"trainers": 1, "publish": "shards"}, PublishShards),
        ({"trainers": 1, "publish": "snapshot"}, PublishSnapshot),
        ({"trainers": 2, "publish": "full"}, PublishFull),
        ({"trainers": 2, "transport": "collective"}, PublishFull),
        ({"trainers": 2, "transport": "collective", "publish": "snapshot"}, PublishFull),
    ],
)
def test_the_settings_choose_one_strategy(options, kind):
    settings = RunSettings(**options)
    strategy = strategy_for(settings.published_form, 20)
    strategy.close()
    assert type(strategy) is kind
    assert settings.publishes_shards == (kind is not PublishFull)

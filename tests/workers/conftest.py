"""Folders of tiny models, each made once a session, and the run that ranks of FSDP publish to."""

import pytest


@pytest.fixture(scope="session")
def own_model_folder(tmp_path_factory):
    from tests.support.own_models import own_model

    made = {}

    def folder(name="qwen2"):
        if name not in made:
            made[name] = own_model(tmp_path_factory.mktemp(name), name)
        return made[name]

    return folder


@pytest.fixture
def where(publisher, redis_url, weights_url, run_id, policy_folder, tmp_path):
    from tests.support.fsdp_runs import Where

    return Where(
        run_id=run_id,
        epoch=publisher.epoch,
        redis_url=redis_url,
        weights_url=weights_url,
        model_folder=policy_folder,
        run_folder=tmp_path / run_id,
    )

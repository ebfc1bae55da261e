"""Folders of tiny models, each made once a session."""

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

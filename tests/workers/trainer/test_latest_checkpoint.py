"""The newest folder that other programs load is one with weights, of a step that is ready."""

import pytest

pytest.importorskip("torch")

from trinity_events.checkpoint_layout import ITERATION_FILES, MODEL_FOLDER
from trinity_workers.engines.model_folder import write_model_folder
from trinity_workers.trainer import get_latest_hf_checkpoint_path


def describe(folder):
    (folder / "config.json").write_text("{}")


def test_folders_without_weights_and_steps_that_are_not_ready_are_passed_over(make_config):
    config = make_config()
    assert get_latest_hf_checkpoint_path(config) is None

    def saved(step, *, weights):
        folder = config.folder_of(step).joinpath(*MODEL_FOLDER)
        folder.mkdir(parents=True)
        describe(folder)
        if weights:
            write_model_folder(folder, describe, iter(()))
        return str(folder)

    expected = saved(4, weights=True)
    saved(2, weights=True)
    saved(6, weights=False)
    saved(9, weights=True)
    assert get_latest_hf_checkpoint_path(config) is None, "no step is ready"
    (config.checkpoint_folder / ITERATION_FILES["checkpoint"]).write_text("6")
    assert get_latest_hf_checkpoint_path(config) == expected
    (config.checkpoint_folder / ITERATION_FILES["state_dict"]).write_text("9")
    assert get_latest_hf_checkpoint_path(config) == saved_path(config, 9)


def saved_path(config, step):
    return str(config.folder_of(step).joinpath(*MODEL_FOLDER))


@pytest.mark.parametrize(
    ("which", "steps"), [("never", set()), ("last", {9}), ("always", set(range(1, 10)))]
)
def test_the_configuration_says_which_checkpoints_have_one(make_config, which, steps):
    config = make_config(steps=9, checkpoints={"save_hf_checkpoint": which})
    assert {step for step in range(1, 10) if config.is_hf_save_step(step)} == steps

"""veRL's roles in a run: they generate, train, publish and save, and an explorer follows.

python roles.py           trains
python roles.py follow    follows its versions, as explorer 0
"""

import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import msgspec
import ray

from trinity_events import CheckpointCoordinator, Synchronizer, subscribe, training_run
from trinity_events.coordinator import staged_path
from trinity_schemas import ExplorerStatusChanged, WeightsApplied
from trinity_workers.algorithms.collate import collate
from trinity_workers.algorithms.prepare import prepare
from trinity_workers.algorithms.presets import preset_values
from trinity_workers.config.train_config import TrainConfig
from trinity_workers.learning.policy import create_policy, load_policy, load_tokenizer
from trinity_workers.roles import ActorRolloutRefWorker, create_experiences, start_role
from trinity_workers.rollout_engines.base import GenerationRequest

RUN, STEPS, SAVE_EVERY, RANKS, SAMPLES = "roles", 6, 3, 2, 8
ROOT = Path(os.environ["CHECKPOINT_ROOT"])
MODEL = ROOT / "model"
SETTINGS = {
    "model": {"path": str(MODEL)},
    "algorithm": preset_values("grpo"),
    "rollouts": {"max_new_tokens": 8},
    "trainer": {"ranks": RANKS, "learning_rate": 3e-3, "warmup_steps": 0},
    "sync": {"transport": "shm"},
}


async def train() -> None:
    """Train for digits: the reward is their share of the answer."""
    tokenizer = load_tokenizer(MODEL)
    folder, url = ROOT / RUN, os.environ["TRINITY_REDIS_URL"]
    with training_run(RUN) as run:
        config = msgspec.convert(SETTINGS, TrainConfig).placed(
            run_id=RUN, epoch=run.epoch, redis_url=url, weights_url=url, checkpoint_folder=folder
        )
        actor = await start_role(ActorRolloutRefWorker, config, role="actor_rollout")
        await actor.call("init_model")
        saves = CheckpointCoordinator(run, folder)
        with closing(Synchronizer(RUN, run.epoch, transport="shm")) as weights:
            for step in range(1, STEPS + 1):
                prompts = [tokenizer.encode(f"{number}:") for number in range(4)]
                requests = [
                    GenerationRequest(
                        tokens=tokens,
                        sampling=config.sampling,
                        ordinal=step * len(prompts) + place,
                        sample=sample,
                    )
                    for place, tokens in enumerate(prompts)
                    for sample in range(SAMPLES)
                ]
                turns = await actor.call("generate_sequences", requests)
                samples = create_experiences(config, requests, turns)
                for place, turn in enumerate(turns):
                    answer = tokenizer.decode(turn.tokens)
                    digits = sum(map(str.isdigit, answer)) / max(len(answer), 1)
                    samples[place] = msgspec.structs.replace(samples[place], reward=digits)
                groups = [samples[at : at + SAMPLES] for at in range(0, len(samples), SAMPLES)]
                batch = collate(groups, tokenizer.pad_token_id)
                old = await actor.call("compute_log_prob", batch)
                prepared, _ = prepare(replace(batch, **old), config.algorithm_of_step)
                metrics = await actor.call("update_actor", prepared)
                metrics["reward"] = float(batch.rewards.mean())

                await actor.call("upload_state_dict", step)
                weights.commit(step, metrics)
                if step % SAVE_EVERY == 0:
                    path = staged_path(folder, run.epoch, step) / "actor"
                    await actor.call("save_checkpoint", str(path), step)
                    await saves.register_and_monitor(
                        step, state_dict_thread_count=RANKS, checkpoint_thread_count=RANKS
                    )
                print(f"step {step}: reward {metrics['reward']:.2f}", flush=True)
            # The weights go with their publisher: wait until the explorer serves the last ones.
            served = subscribe(RUN, WeightsApplied, start="beginning", deadline=120)
            async with served:
                async for delivered in served:
                    if delivered.event.version.step == STEPS:
                        break
            await actor.call("leave")


def follow() -> None:
    """Serve every version that can be had, until that of the last step."""
    with TemporaryDirectory() as folder:  # its weights are those of the versions
        create_policy(Path(folder), seed=0)
        model, _ = load_policy(Path(folder))
    with closing(Synchronizer(RUN, 0, role="explorer")) as synchronizer:
        for version, took in synchronizer.follow(model, deadline=120):
            print(f"explorer serves step {version.step}: {took}", flush=True)
            if version.step == STEPS:
                break
        synchronizer.report(ExplorerStatusChanged(status="stopped"))


if __name__ == "__main__":
    if sys.argv[1:] == ["follow"]:
        follow()
    else:
        if not MODEL.exists():
            create_policy(MODEL, seed=0)
        ray.init("local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False)
        anyio.run(train)

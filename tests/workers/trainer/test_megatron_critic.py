"""A critic on Megatron: its numbers are those of plain torch at every layout."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from transformers import AutoModelForTokenClassification  # noqa: E402

from tests.support import megatron_ranks as at  # noqa: E402
from tests.support.experiences import make_groups  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_events.coordinator import staged_path  # noqa: E402
from trinity_schemas import SaveFinished, decode_envelope  # noqa: E402
from trinity_workers.algorithms.presets import preset_values  # noqa: E402
from trinity_workers.algorithms.rules import read_settings  # noqa: E402
from trinity_workers.conversion.convert import convert  # noqa: E402
from trinity_workers.engines.adamw import AdamWOptions  # noqa: E402
from trinity_workers.engines.megatron import (  # noqa: E402
    MegatronCritic,
    MegatronEngine,
    OptimizerOptions,
    ParallelLayout,
)
from trinity_workers.learning.policy import isolated_rng  # noqa: E402
from trinity_workers.trainer.step.base import Models  # noqa: E402
from trinity_workers.trainer.step.division import MicroBatchLimit  # noqa: E402
from trinity_workers.trainer.step.megatron import MegatronTrainingStep  # noqa: E402
from trinity_workers.trainer.workers.megatron import MegatronTrainWorker  # noqa: E402

pytestmark = pytest.mark.megatron

CPU = torch.device("cpu")
RATE, CLIP, LAMBDA, NORM = 3e-3, 0.02, 0.9, 1.0
LAYOUTS = {
    "one rank": (1, ParallelLayout()),
    "TP 2": (2, ParallelLayout(tensor=2)),
    "PP 2": (2, ParallelLayout(pipeline=2)),
    "TP 2 x PP 2": (4, ParallelLayout(tensor=2, pipeline=2)),
    "CP 2": (2, ParallelLayout(context=2)),
    "TP 2 SP": (2, ParallelLayout(tensor=2, sequence_parallel=True)),
    "TP 2 SP x CP 2": (4, ParallelLayout(tensor=2, context=2, sequence_parallel=True)),
    "PP 2 x CP 2": (4, ParallelLayout(pipeline=2, context=2)),
}
SHORT = {"TP 2", "PP 2", "TP 2 SP x CP 2"}
"""Layouts of ``make test``; one of each kind."""
MODEL = "qwen2"
STEPS = 2


def settings():
    return read_settings(
        {
            "advantage": "gae",
            "gae_lambda": LAMBDA,
            "scale": "none",
            "mini_batches": 2,
            "critic": {"use": True, "clip": CLIP},
        }
    )


def batch_of(step: int):
    return at.padded_batch(step, rows=8)


@pytest.fixture(scope="module")
def critic_folder(megatron_folder, tmp_path_factory):
    """A critic with the layers of the policy and a head that is not 0."""
    folder = tmp_path_factory.mktemp("critic")
    policy = megatron_folder(MODEL)
    with isolated_rng(3):
        model, loading_info = AutoModelForTokenClassification.from_pretrained(
            policy, num_labels=1, output_loading_info=True
        )
        torch.nn.init.normal_(model.score.weight, std=0.3)
        torch.nn.init.normal_(model.score.bias, std=0.3)
    assert set(loading_info["missing_keys"]) == {"score.weight", "score.bias"}
    model.save_pretrained(folder)
    return folder


def make(rank, policy, critic, layout, **options):
    """Make the rank's policy and critic, in one layout and one process."""
    rank.exits.callback(at.drop_engine, rank)
    common = {"device": CPU, "layout": layout, **options}
    trained = OptimizerOptions(learning_rate=RATE, adamw=AdamWOptions(max_grad_norm=NORM))
    rank.objects.models = Models(
        MegatronEngine(policy, optimizer=trained, **common),
        MegatronCritic(critic, optimizer=trained, **common),
    )


def forget(rank):
    rank.objects.models = None
    at.drop_engine(rank)


def first_values(rank, batch):
    return rank.objects.models.critic.response_values(batch)


def learn(rank):
    step = MegatronTrainingStep(rank.objects.models, settings(), limit=MicroBatchLimit(rows=3))
    return [step.learn(batch_of(number)) for number in range(STEPS)]


def weights(rank):
    return {
        name: tensor.clone() for name, tensor in rank.objects.models.critic.get_per_tensor_param()
    }


def slices(rank):
    return [(shard.name, shard.global_shape) for shard in rank.objects.models.critic.local_shards()]


def save(rank, folder):
    rank.objects.models.critic.save_checkpoint(str(folder))


def load(rank, folder):
    rank.objects.models.critic.load_checkpoint(str(folder))
    return rank.objects.models.critic.steps


class Plain:
    """The same critic in one process, by formulas written out: no code of the trainer's."""

    def __init__(self, folder) -> None:
        self.model = AutoModelForTokenClassification.from_pretrained(folder).eval()
        # Biases and norms decay too: megatron-core gives them a factor of 0, which only its own
        # scheduler reads (megatron/core/optimizer_param_scheduler.py).
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01
        )

    def values(self, batch, rows=None):
        """The values before each response token of each row, which is computed by itself."""
        predictions = []
        for row in range(len(batch)) if rows is None else rows:
            real = batch.attention_mask[row].bool()
            count = int(batch.response_mask[row].sum())
            predictions.append(
                self.model(batch.input_ids[row][real][None]).logits[0, -count - 1 : -1, 0]
            )
        return predictions

    def step(self, batch) -> dict[str, float]:
        with torch.no_grad():
            old = self.values(batch)
        targets = [self.targets(*pair) for pair in zip(old, batch.rewards.tolist(), strict=True)]
        losses, clipped, predicted, norms = [], [], [], []
        half = len(batch) // 2
        for rows in (range(half), range(half, 2 * half)):
            of_rows = []
            for row, values in zip(rows, self.values(batch, rows), strict=True):
                plain = (values - targets[row]) ** 2
                near = old[row] + (values - old[row]).clamp(-CLIP, CLIP)
                bounded = (near - targets[row]) ** 2
                of_rows.append(torch.maximum(plain, bounded) / 2)
                clipped.append((bounded > plain).float())
                predicted.append(values.detach())
            loss = torch.cat(of_rows)
            losses.append(loss.detach())
            self.optimizer.zero_grad()
            loss.mean().backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), NORM)))
            self.optimizer.step()
        values, returns = torch.cat(old), torch.cat(targets)
        unexplained = (returns - values).var(unbiased=False) / returns.var(unbiased=False)
        return {
            "critic/vf_loss": float(torch.cat(losses).mean()),
            "critic/vf_clipfrac": float(torch.cat(clipped).mean()),
            "critic/vpred_mean": float(torch.cat(predicted).mean()),
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/vf_explained_var": 1.0 - float(unexplained),
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/lr": RATE,
        }

    @staticmethod
    def targets(values, reward):
        """Return A_t + V_t, with the reward at the last token and no discount."""
        advantage, following, returns = 0.0, 0.0, []
        for place in range(len(values) - 1, -1, -1):
            last = place == len(values) - 1
            error = reward * last + following - float(values[place])
            advantage = error + LAMBDA * advantage
            following = float(values[place])
            returns.append(advantage + following)
        return torch.tensor(returns[::-1])


@pytest.fixture(scope="module")
def plain(critic_folder):
    """First values, metrics and weights of the plain critic."""
    torch.set_num_threads(1)
    model = Plain(critic_folder)
    with torch.no_grad():
        values = model.values(batch_of(0))
    metrics = [model.step(batch_of(step)) for step in range(STEPS)]
    return (
        values,
        metrics,
        {name: parameter.detach() for name, parameter in model.model.named_parameters()},
    )


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.nightly) for name in LAYOUTS],
)
def test_values_losses_norms_and_weights_are_those_of_plain_torch(
    rank_group, megatron_folder, critic_folder, plain, name
):
    world, layout = LAYOUTS[name]
    values, metrics, trained = plain
    assert 0.0 < metrics[0]["critic/vf_clipfrac"] < 1.0
    ranks = rank_group(world)
    ranks(make, megatron_folder(MODEL), critic_folder, layout)
    batch = batch_of(0)
    outputs = [output for output in ranks(first_values, batch) if output is not None]
    assert len(outputs) == world // layout.pipeline, "the last stage has them"
    for tensor in outputs:
        torch.testing.assert_close(
            tensor[batch.response_mask], torch.cat(values), atol=1e-5, rtol=0
        )
        assert not tensor[~batch.response_mask].any()
    for rank_metrics in ranks(learn):
        for mine, expected in zip(rank_metrics, metrics, strict=True):
            assert {key: mine[key] for key in expected} == pytest.approx(
                expected, abs=5e-4, rel=2e-3
            )
            assert {"pg_loss", "gradient_norm", "learning_rate"} <= mine.keys()
    for own in ranks(weights):
        assert sorted(own) == sorted(trained)
        for key, tensor in own.items():
            torch.testing.assert_close(tensor, trained[key], atol=3e-4, rtol=0)
    heads = [dict(rank_slices).get("score.weight") for rank_slices in ranks(slices)]
    assert heads.count((1, 32)) == world // layout.pipeline, "each of the last stage has all of it"


def test_a_critic_goes_on_at_another_layout_and_is_converted_there_and_back(
    rank_group, rank_processes, megatron_folder, critic_folder, tmp_path
):
    ranks = rank_group(2)
    ranks(make, megatron_folder(MODEL), critic_folder, LAYOUTS["TP 2"][1])
    ranks(learn)
    ranks(save, tmp_path / "saved")
    expected = ranks(weights)[0]
    ranks(forget)
    other = LAYOUTS["PP 2"][1]
    ranks(make, megatron_folder(MODEL), megatron_folder(MODEL), other)
    assert set(ranks(first_zero)) <= {None, True}, "the head of a policy's critic begins at 0"
    assert ranks(load, tmp_path / "saved") == [2 * STEPS] * 2
    for rank_weights in ranks(weights):
        at.assert_same(rank_weights, expected)
    rank_processes.leave()

    back, again = tmp_path / "back", tmp_path / "again"
    for source, target in ((tmp_path / "saved", back), (back, again)):
        rank_processes.call_alone(partial(converted, source), target)
    at.assert_same(at.in_folder(back), expected)
    _, loading_info = AutoModelForTokenClassification.from_pretrained(
        back, output_loading_info=True
    )
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]


def first_zero(rank):
    values = rank.objects.models.critic.response_values(batch_of(0))
    return None if values is None else not values.any()


def converted(source, rank, target):
    return convert(source, target)


PPO = {
    "algorithm": {
        **preset_values("ppo"),
        **{"epochs": 2, "mini_batches": 2},
        "critic": {"use": True, "learning_rate": 3e-3, "critic_warmup_steps": 1},
    },
    "trainer": {"engine": "megatron", "ranks": 2, "warmup_steps": 2, "micro_batch_rows": 4},
    "sync": {"timeout": PATIENCE},
    "steps": 3,
}


def begin(rank, config):
    rank.objects.worker = MegatronTrainWorker(config, rank.number)
    return rank.objects.worker.address() if rank.number == 0 else None


def take_part(rank, place, seeds, loads, saves):
    """Train on these groups, after loading and before saving a checkpoint, if asked to."""
    worker = rank.objects.worker
    worker.setup(*place)
    try:
        if loads is not None:
            worker.load_checkpoint(str(loads / "actor"))
        metrics = [worker.train_step(make_groups("r", seed)) for seed in seeds]
        if saves is not None:
            worker.save_checkpoint(str(saves / "actor"), len(seeds))
            worker.wait_on_save_thread()
        return metrics
    finally:
        worker.shutdown()


async def test_a_run_of_ppo_on_megatron_goes_on_from_its_checkpoint(
    rank_processes, make_config, log
):
    rank_processes.leave()
    config = make_config(**PPO)
    folder = staged_path(config.checkpoint_folder, config.epoch, 2)

    def run(seeds, *, loads=None, saves=None):
        rank_processes.start(2)
        place, _ = rank_processes.call(range(2), begin, config)
        answers = rank_processes.call(range(2), take_part, place, seeds, loads, saves)
        assert answers[0] == answers[1], "every rank tells the metrics of all"
        return answers[0]

    whole = run((1, 2, 3))
    assert "loss" not in whole[0], "the critic is trained alone first"
    for metrics, expected in zip(run((1, 2), saves=folder), whole, strict=False):
        assert metrics == pytest.approx(expected, abs=1e-6)
    entries = await log.read(limit=1000)
    events = [decode_envelope(entry.payload).event for entry in entries]
    names = sorted(event.slot.name for event in events if isinstance(event, SaveFinished))
    assert names == ["critic", "critic_training_state", "model_state_dict", "training_state"]
    [last] = run((3,), loads=folder)
    assert last == pytest.approx(whole[2], abs=1e-6)

"""Roles on Megatron answer what they answer on FSDP, through the dispatch of their group."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from tests.support.experiences import make_groups  # noqa: E402
from tests.support.waits import PATIENCE  # noqa: E402
from trinity_workers.algorithms.collate import collate  # noqa: E402
from trinity_workers.algorithms.settings import preset_values  # noqa: E402
from trinity_workers.roles import ActorRolloutRefWorker, CriticWorker, RoleRefused  # noqa: E402
from trinity_workers.worker_group.dispatch import deal  # noqa: E402
from trinity_workers.worker_group.registered import registered_methods  # noqa: E402

KINDS = {"actor": ActorRolloutRefWorker, "critic": CriticWorker}


def make_roles(rank, config):
    rank.held.roles = {name: kind(config, rank.number) for name, kind in KINDS.items()}
    return rank.held.roles["actor"].address() if rank.number == 0 else None


def begin(rank, host, port):
    rank.held.roles["actor"].join(host, port)
    for role in rank.held.roles.values():
        role.init_model()
    return rank.held.roles["actor"].rank_info()


def call(rank, role, method, args):
    return getattr(rank.held.roles[role], method)(*args)


def end(rank):
    rank.held.roles["actor"].leave()


class Roles:
    """Roles of so many ranks, called as by a group."""

    def __init__(self, processes, config):
        self._processes, ranks = processes, range(config.trainer.ranks)
        processes.start(len(ranks))
        place, *_ = [processes.ask(rank, make_roles, config)() for rank in ranks]
        self._table = self._answers([(begin, *place)] * len(ranks))

    def call(self, role, method, *args):
        mode = registered_methods(KINDS[role])[method].dispatch_mode
        dealt = deal(mode, self._table, args)
        given = [(call, role, method, dealt.arguments[share]) for share in dealt.ranks]
        return dealt.collected(self._answers(given))

    def end(self):
        self._answers([(end,)] * len(self._table))

    def _answers(self, calls):
        asked = [self._processes.ask(rank, *one) for rank, one in enumerate(calls)]
        answers = [one() for one in asked]
        for one in answers:
            if isinstance(one, Exception):
                raise one
        return answers


@pytest.fixture
def told(rank_processes, make_config):
    rank_processes.leave()

    def run(batch, **trainer):
        config = make_config(
            algorithm={
                **preset_values("ppo"),
                "critic": {"use": True},
                "kl": {"coefficient": 0.1, "where": "reward", "estimator": "k1"},
                "importance_sampling": {"ratio_to": "proximal"},
            },
            trainer={"ramp_steps": 0} | trainer,
            sync={"timeout": PATIENCE},
        )
        roles = Roles(rank_processes, config)
        try:
            before = roles.call("actor", "compute_log_prob", batch)
            fields = before | roles.call("actor", "compute_ref_log_prob", batch)
            fields |= roles.call("critic", "compute_values", batch)
            metrics = roles.call("critic", "update_critic", batch)
            metrics |= roles.call("actor", "update_actor", replace(batch, **before))
            fields["after"] = roles.call("actor", "compute_log_prob", batch)["proximal_logprobs"]
            if trainer.get("engine") == "megatron":
                with pytest.raises(RoleRefused, match="does not generate yet"):
                    roles.call("actor", "generate_sequences", [1, 2])
            return fields, metrics
        finally:
            roles.end()

    return run


def test_roles_answer_on_a_pipeline_and_on_replicas_what_they_answer_on_fsdp(told):
    batch = collate(make_groups("roles", 1), 0)
    lot = torch.Generator().manual_seed(0)
    noise = torch.randn(batch.response_mask.shape, generator=lot) * batch.response_mask
    batch = replace(batch, advantages=noise, returns=noise + 1.0, values=noise * 0.0)
    expected, expected_metrics = told(batch, ranks=1)
    pipeline = {"ranks": 2, "engine": "megatron", "pipeline_parallel": 2}
    for trainer in (pipeline, {"ranks": 2}):
        fields, metrics = told(batch, **trainer)
        assert fields.keys() == expected.keys()
        for name, value in fields.items():
            torch.testing.assert_close(value, expected[name], atol=1e-4, rtol=1e-4)
        assert metrics.keys() == expected_metrics.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(expected_metrics[name], abs=1e-3, rel=1e-3), name

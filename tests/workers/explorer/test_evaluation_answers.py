"""Claims of evaluations are answered by the player of their own set."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.support.waits import PATIENCE
from trinity_schemas import StepRef
from trinity_workers.explorer import evaluation
from trinity_workers.explorer.evaluation import EngineTurns, EvaluationAnswers


class Requests:
    """Stream of evaluations with one batch of claims, whose answers are collected."""

    def __init__(self, claims):
        self._claims = claims
        self.asked_again = anyio.Event()

    async def claim(self, count, *, seconds):
        claims, self._claims = self._claims, []
        if not claims:
            self.asked_again.set()
            await anyio.sleep_forever()
        return claims

    @asynccontextmanager
    async def renewing(self, claims):
        yield claims


async def test_a_batch_may_have_claims_of_several_sets(monkeypatch):
    played, sent = [], {}

    def create_player(episodes, held_out):
        async def play_all(requests):
            played.append((held_out.fingerprint, [request.ordinal for request in requests]))

            async def judged():
                return [f"{held_out.fingerprint}-{request.ordinal}" for request in requests]

            return SimpleNamespace(judged=judged)

        return SimpleNamespace(play_all=play_all)

    async def send(requests, claims, answers):
        sent.update(zip((claim.request.ordinal for claim in claims), answers, strict=True))

    async def install(version):
        return version

    monkeypatch.setattr(evaluation, "create_held_out_episodes", create_player)
    monkeypatch.setattr(evaluation, "send_answers", send)
    claims = [
        SimpleNamespace(
            request=SimpleNamespace(ordinal=ordinal, oldest=StepRef(1, step), fingerprint=of_set)
        )
        for ordinal, (step, of_set) in enumerate([(2, "a"), (1, "b"), (2, "b"), (2, "a")])
    ]
    requests = Requests(claims)
    answers = EvaluationAnswers(
        [SimpleNamespace(fingerprint=name) for name in "ab"],
        None,
        requests,
        SimpleNamespace(announcement=install, install_again=install),
        EngineTurns(),
        at_once=4,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(answers.run)
        with anyio.fail_after(PATIENCE):
            await requests.asked_again.wait()
        tasks.cancel_scope.cancel()
    assert sent == {0: "a-0", 1: "b-1", 2: "b-2", 3: "a-3"}
    assert played == [("b", [1]), ("a", [0, 3]), ("b", [2])]
    assert answers.answered == 4

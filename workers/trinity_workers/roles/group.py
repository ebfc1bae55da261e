"""Worker group of a role, which takes and returns veRL's `DataProto` as well as batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import structs

from trinity_schemas import Experience, Turn

from ..algorithms.collate import collate
from ..algorithms.verl_data import (
    from_data_proto,
    read_prompts,
    result_to_data_proto,
    to_data_proto,
)
from ..config.train_config import RunConfig
from ..learning.policy import load_tokenizer
from ..rollout_engines.base import Generation, GenerationRequest
from ..worker_group.group import WorkerGroup
from ..worker_group.value_kinds import is_data_proto

# Methods whose rows need a `uid`: in a pass, each row may be a group by itself.
_UPDATES = frozenset({"update_actor", "update_critic"})
_UNKNOWN_YET = ("token_level_scores",)
"""Fields of a whole batch that generated rows have not: they are not judged yet."""


class RoleGroup(WorkerGroup):
    """Workers of a role.

    A `DataProto` becomes a batch before its rows are dealt out: the rows that fill up a share then
    count in no update, while veRL repeats rows and trains on them again. The result is a
    `DataProto` with veRL's names; metrics of an update are in its `meta_info["metrics"]`.

    Args:
        config: The run, whose sampling `generate_sequences` takes.
        args: Arguments of a :class:`WorkerGroup`, as are ``options``.
    """

    def __init__(self, *args: Any, config: RunConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._config = config
        self._generated_rows = 0

    def _translate(
        self, method: str, args: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], Callable[[Any], Any]]:
        # Own callers pass batches, which need no translation.
        if len(args) != 1 or not is_data_proto(args[0]):
            return super()._translate(method, args)
        if method == "generate_sequences":
            requests = self._create_requests(args[0])
            return (requests,), lambda turns: self._join_turns(args[0], requests, turns)
        batch = from_data_proto(args[0], needs_groups=method in _UPDATES)
        return (batch,), lambda result: result_to_data_proto(result, batch)

    def _create_requests(self, data: Any) -> list[GenerationRequest]:
        """Return a request for each row.

        Rows are numbered over the group's life, so that a prompt that comes again is sampled with
        other random numbers. `do_sample: False` takes the most likely tokens, as in veRL.
        """
        first, self._generated_rows = self._generated_rows, self._generated_rows + len(data)
        sampling = self._config.sampling
        if not data.meta_info.get("do_sample", True):
            sampling = structs.replace(sampling, temperature=0.0)
        return [
            GenerationRequest(tokens=tokens, sampling=sampling, ordinal=first + row, sample=0)
            for row, tokens in enumerate(read_prompts(data))
        ]

    def _join_turns(
        self, data: Any, requests: Sequence[GenerationRequest], turns: Sequence[Generation]
    ) -> Any:
        """Return prompts and responses as veRL's rollouts do, with `uid` and others of the rows."""
        groups = [[sample] for sample in create_experiences(self._config, requests, turns)]
        padding = load_tokenizer(self._config.model_folder).pad_token_id
        made = to_data_proto(collate(groups, padding))
        # collate() fills it with the rewards of the samples, which are 0 here.
        made.pop(batch_keys=list(_UNKNOWN_YET))
        # veRL's `uid` and its other columns belong to the prompts, and stay with their rows.
        made.non_tensor_batch = {**data.non_tensor_batch}
        made.meta_info = {**data.meta_info}
        return made


def create_experiences(
    config: RunConfig, requests: Sequence[GenerationRequest], turns: Sequence[Generation]
) -> list[Experience]:
    """Return the samples of requests and their turns, in order, with the reward 0."""
    samples = Counter(request.ordinal for request in requests)
    return [
        Experience(
            run_id=config.run_id,
            epoch=config.epoch,
            ordinal=request.ordinal,
            attempt=1,
            sample=request.sample,
            samples=samples[request.ordinal],
            explorer="rollout",
            turns=[
                Turn(role="prompt", tokens=request.tokens),
                Turn(
                    role="policy",
                    tokens=turn.tokens,
                    logprobs=turn.logprobs,
                    versions=turn.versions,
                ),
            ],
            reward=0.0,
            finished=turn.finished,
        )
        for request, turn in zip(requests, turns, strict=True)
    ]

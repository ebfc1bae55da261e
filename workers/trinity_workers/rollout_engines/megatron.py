"""Rollout engine of a hybrid engine: generates on megatron-core, in the trainer's processes.

Keys and values are in megatron-core's static inference context. The loop around it is this
project's: megatron-core's own engines time every token with CUDA events, so they run on no CPU, and
they draw from a generator's state, where a token here follows from its request alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby, islice
from typing import Any

import anyio.to_thread
import msgspec
import torch

from trinity_events.weights.tensors import Digesting, as_bytes, dtype_name
from trinity_schemas import StepReady, StepRef

from ..engines.megatron import HybridEngine
from .base import Generation, GenerationRequest, InstallRefused, NotServing
from .gate import Gate
from .replicas import Replica, generate_shared
from .turns import OpenTurn, StopFinder, make_sampler


class MegatronRolloutEngine:
    """Engine that serves the weights of the trainer in its own processes.

    All ranks make the same calls. Each brings requests of its own, and gets their answers: ranks
    that bring equal requests, as those of one training replica do, get equal answers.

    Args:
        hybrid: The model in its rollout layout.
        deterministic: Generate each ordinal by itself.
        max_batch: Maximum number of turns that a replica generates at a time.
    """

    def __init__(
        self, hybrid: HybridEngine, *, deterministic: bool = False, max_batch: int = 256
    ) -> None:
        self.serves: StepRef | None = None
        self.deterministic = deterministic
        self._hybrid = hybrid
        self._max_batch = max_batch
        self._gate = Gate()
        self._generating = threading.Lock()

    @property
    def context_length(self) -> int | None:
        """Maximum number of tokens of an episode, as the model's configuration says."""
        length: int | None = getattr(self._hybrid.engine.config, "max_position_embeddings", None)
        return length

    @contextmanager
    def serving(self, version: StepRef) -> Iterator[None]:
        """Serve the training weights of now as a version, for the block. Collective.

        Raises as :meth:`~trinity_workers.engines.megatron.HybridEngine.resharded`.
        """
        with self._hybrid.resharded():
            self.serves = version
            try:
                yield
            finally:
                with self._generating:
                    self.serves = None

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate in a worker thread; else as :meth:`generate_here`."""
        return await anyio.to_thread.run_sync(self.generate_here, requests)

    def generate_here(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Generate one turn for each request, in order. Collective.

        The replicas of the rollout layout share the requests of all ranks.

        Raises:
            NotServing: outside of a block of :meth:`serving`.
            RolloutEngineError: on all ranks, if a request of one leaves no room for a token.
            PeerFailed: on the ranks that did not fail themselves.
            CollectiveBroken: if a rank died or was too slow.
        """
        hybrid = self._hybrid
        replica = Replica(
            hybrid.group, hybrid.replica, hybrid.replicas, is_first=hybrid.is_first_of_replica
        )

        def generate(turns: Sequence[OpenTurn]) -> list[Generation]:
            with self._generating, self._gate.moving():
                self._generate(turns)
            return [turn.generation() for turn in turns]

        return generate_shared(
            requests, replica, self.context_length, generate, by_prompt=self.deterministic
        )

    async def pause(self, lease: float) -> None:
        """Stand still between tokens for at most `lease` seconds; so do the replica's ranks."""
        await anyio.to_thread.run_sync(self._gate.pause, lease)

    async def resume(self) -> None:
        """Go on generating."""
        self._gate.resume()

    async def release(self) -> None:
        """Return None: there are weights in a block of :meth:`serving` alone."""
        return

    async def install(self, ready: StepReady) -> None:
        """Refuse: raises RolloutEngineError."""
        raise InstallRefused(ready.step, "ranks")

    async def prove(self) -> str:
        """Return a digest of the full tensors that it serves, by Hugging Face name. Collective."""
        return await anyio.to_thread.run_sync(self._prove)

    async def close(self) -> None:
        """Do nothing: the engine is in the trainer's processes."""

    def _prove(self) -> str:
        with self._generating, self._gate.hold():
            self._version()
            digests = {}
            for name, tensor in self._hybrid.full_tensors():
                tensor_digest = Digesting()
                # With dtype and shape: the same bytes may be another tensor.
                tensor_digest.update(f"{dtype_name(tensor.dtype)}:{tuple(tensor.shape)}:".encode())
                tensor_digest.update(as_bytes(tensor))
                digests[name] = tensor_digest.digest()
        whole = Digesting()
        # Sorted: the digest does not depend on the order in which a layout gathers.
        whole.update(msgspec.json.encode(sorted(digests.items())))
        return whole.digest()

    # --- one replica -----------------------------------------------------------------------

    def _generate(self, turns: Sequence[OpenTurn]) -> None:
        """Generate turns in batches of prompts of one length: without padding, without a mask."""

        def batch(turn: OpenTurn) -> tuple[int, ...]:
            request = turn.request
            own = (request.ordinal, request.turn) if self.deterministic else ()
            return (len(request.tokens), *own)

        for _, alike in groupby(sorted(turns, key=batch), key=batch):
            while members := list(islice(alike, self._max_batch)):
                self._generate_batch(members)

    def _generate_batch(self, turns: Sequence[OpenTurn]) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        version = self._version()
        device = self._hybrid.engine.device
        end_tokens = self._hybrid.engine.end_tokens
        # (turns, prompt tokens), and (turns, 1) from the second token on: the context has the
        # others' keys and values.
        tokens = torch.tensor([turn.request.tokens for turn in turns], device=device)
        limits = torch.tensor([turn.limit for turn in turns], device=device)
        longest = max(turn.limit for turn in turns)
        ends = torch.tensor(
            sorted(self._hybrid.engine.end_tokens), dtype=torch.int64, device=device
        )
        sampler = make_sampler(turns, device)
        stops = StopFinder(self._hybrid.engine.tokenizer, turns)
        context: Any = StaticInferenceContext(len(turns), tokens.shape[1] + longest)
        # (turns,), as the limits and each token's choice.
        is_over = torch.zeros(len(turns), dtype=torch.bool, device=device)
        chosen, logprobs = [], []
        for place in range(longest):
            if not self.deterministic:
                self._gate.stop_over()
            next_tokens, of_next = sampler.choose(self._hybrid.logits(tokens, context), place)
            chosen.append(next_tokens)
            logprobs.append(of_next)
            is_over |= torch.isin(next_tokens, ends) | (limits <= place + 1)
            if stops.is_needed:
                is_over |= torch.tensor(stops.add(next_tokens.tolist()), device=device)
            if bool(is_over.all()):
                break
            tokens = next_tokens[:, None]
        # (turns, new tokens)
        rows = torch.stack(chosen, dim=1).tolist()
        of_rows = torch.stack(logprobs, dim=1).tolist()
        for turn, row, of_row, stopped in zip(turns, rows, of_rows, stops.ends, strict=True):
            turn.extend(row, of_row, [version] * len(row), end_tokens, stopped)

    def _version(self) -> StepRef:
        if self.serves is None:
            raise NotServing("generate in a block of serving()")
        return self.serves

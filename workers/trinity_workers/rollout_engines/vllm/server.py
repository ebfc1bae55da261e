"""Rollout engine of a vLLM server: `vllm serve` with the plugin, which an explorer drives by HTTP.

The workers of the server pull, load and prove versions as those of the engine `vllm`, whose
invariants hold. In addition:

1. The label of a version names the connection that installed it. A server that started again, or
   that another explorer changed, answers with another label: such tokens raise VLLMServerAway.
2. A server that is lost serves nothing until its newest connection has installed a version whole.
3. Between a connection and the first verdict, and from a bad verdict on, generation is paused for
   all clients of the server. Probes need its scheduler: while they are computed, other clients are
   answered by a version that has passed the checks before them alone.
4. A server has one explorer at a time, as far as they are on its host.
"""

from __future__ import annotations

import logging
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import anyio
import anyio.to_thread
import msgspec

from trinity_events.diagnostics.waits import NO_REPORTS
from trinity_events.log.retry import backoff_delays
from trinity_schemas import ExplorerStatus, ExplorerStatusChanged, Sampling, StepReady, StepRef

from ...learning.policy import load_tokenizer
from ..base import EngineEnded, EngineOptions
from ..loading import reads_options, samples_with, updates_amid_turns
from .engine import EngineLimits, VLLMEngine
from .options import PROBE_ARGUMENTS, VLLMUnusable, get_sampling_arguments, read_end_tokens
from .reports import FetchOutcome, ServerDescription
from .server_client import ServerClient, VLLMServerAway
from .server_options import ServerOptions, VLLMServerUnusable, get_url, read_server_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ATTEMPTS = 3
"""Connections that one installation begins: a server that each one ends is of no use."""
_NO_METHOD = "Call to collective_rpc method failed"
"""Begin of vLLM's error for a method that its workers do not have, or that raises in one."""
_LONGEST_PAUSE = 2.0
"""Maximum seconds between two attempts to reach a server."""


class VLLMServerMissing(EngineEnded):
    """A vLLM server was away for too long, or is lost again and again.

    Attributes:
        url: URL of the server.
        fault: ``late`` if it did not come back, ``lost`` if it was lost in each installation.
        seconds: Seconds for which it was waited for.
        reason: Error of the last attempt.
    """

    engine: str = "vLLM"
    process: str = "server"
    url: str = ""
    fault: Literal["late", "lost"] = "late"
    seconds: float = 0.0
    reason: str = ""
    texts: ClassVar = {
        "late": "the vLLM server at {url} did not come back within {seconds:g} s ({reason}): start "
        "it, or raise explorer.engine_options.startup_timeout",
        "lost": "the vLLM server at {url} is lost whenever a version is installed ({reason}): see "
        "its own log",
    }


class VLLMServerEngine(VLLMEngine):
    """Engine in a vLLM server, which this explorer drives."""

    def __init__(
        self,
        client: ServerClient,
        options: EngineOptions,
        own: ServerOptions,
        tokenizer: PreTrainedTokenizerBase,
        limits: EngineLimits,
    ) -> None:
        end_tokens = read_end_tokens(options.model_folder, tokenizer)
        super().__init__(client, options, tokenizer, end_tokens, limits, core=client)
        client.on_lost = self._lose
        self._client = client
        self._own = own
        self._dtype = options.dtype
        self._session = ""
        """Name of the connection, which labels have; empty before the first one."""
        self._reaches = False
        """True if the server's workers reach the socket of this process."""

    @classmethod
    @samples_with("top_k", "top_p", "min_p", "repetition_penalty")
    @updates_amid_turns("keep", "retract")
    @reads_options(read_server_options)
    def open(cls, options: EngineOptions) -> VLLMServerEngine:
        """Return an engine of a server, once that answers.

        Raises:
            RolloutEngineError: for options that it does not have, and a server that does not fit.
        """
        own = read_server_options(options.options)
        if options.deterministic:
            raise VLLMUnusable("deterministic")
        rank = 0 if options.synchronizer is None else options.synchronizer.settings.rank
        url, api_key = get_url(own, rank), _get_api_key(own)
        waits = NO_REPORTS if options.synchronizer is None else options.synchronizer.waits
        waiting = waits.waiting(f"the vLLM server at {url}", deadline=own.startup_timeout)
        # In a thread: an event loop that runs cannot be waited for, and clients belong to theirs.
        with waiting, ThreadPoolExecutor(1) as thread:
            description = thread.submit(anyio.run, _find_server, url, own, api_key).result()
        check_server(url, description, options.dtype)
        limits = EngineLimits(
            description.context_length,
            description.max_num_seqs,
            description.world_size,
            description.vocabulary_size,
        )
        client = ServerClient(url, own.request_timeout, api_key)
        return cls(client, options, own, load_tokenizer(options.model_folder), limits)

    async def close(self) -> None:
        """Leave the server, which goes on serving its version."""
        if self._lease is not None and self._client.is_connected:
            await self.resume()
        await self._client.close()
        self._outcomes.close()
        self._folder.cleanup()

    def _lose(self) -> None:
        self.serves = None
        self._prepared = False

    def _sampling_params(self, sampling: Sampling, limit: int, seed: int) -> Any:
        return get_sampling_arguments(sampling, limit, seed, self._end_tokens)

    def _probe_params(self) -> Any:
        return PROBE_ARGUMENTS

    def _label(self, version: StepRef) -> str:
        # It is a cache salt too, in which the server takes no slash.
        return f"{version.epoch}-{version.step}-{self._session}"

    def _version_of_label(self, label: str) -> StepRef:
        match label.split("-"):
            case [epoch, step, session] if session == self._session:
                return StepRef(int(epoch), int(step))
        raise self._client.lose(
            f"its weights have the label {label}, which is not of this connection"
        )

    async def install(self, ready: StepReady) -> None:
        """Serve a weight version, once the server is there; see :class:`~..base.RolloutEngine`.

        Raises:
            NotAsPublished: The server does not compute with it as it was published.
            VLLMServerMissing: The server was away for too long, or is lost each time.
            VLLMServerUnusable: It was started with other settings, or another explorer drives it.
        """
        reason = ""
        for _ in range(_ATTEMPTS):
            try:
                await self._reach()
                await super().install(ready)
            except VLLMServerAway as error:
                reason = error.reason
            if self._client.is_connected:
                return await self._report("running")
            self.serves = None
        raise VLLMServerMissing(url=self._client.url, fault="lost", reason=reason)

    async def _reach(self) -> None:
        """Connect to the server, unless it is connected, and put it out of service."""
        client = self._client
        if client.is_connected:
            return
        if self._session:
            logger.warning("the vLLM server at %s was lost, and is waited for", client.url)
            await self._report("require_sync")
        assert self._synchronizer is not None
        with self._synchronizer.waits.waiting(
            f"the vLLM server at {client.url}", deadline=self._own.startup_timeout
        ):
            description = await wait_for_server(
                client, self._own.startup_timeout, str(self._outcomes_path)
            )
        check_server(client.url, description, self._dtype)
        if description.context_length != self._limits.context_length:
            raise VLLMServerUnusable(
                client.url,
                "setting",
                "max-model-len",
                str(description.context_length),
                str(self._limits.context_length),
            )
        if description.driver not in {None, str(self._outcomes_path)}:
            raise VLLMServerUnusable(client.url, "driven")
        self._reaches = description.reaches
        self._session = secrets.token_hex(4)
        await self._give_up_turns()

    async def _report(self, status: ExplorerStatus) -> None:
        assert self._synchronizer is not None
        event = ExplorerStatusChanged(status=status, endpoint=self._client.url)
        await anyio.to_thread.run_sync(self._synchronizer.report, event)

    async def _receive_outcomes(self, version: StepRef) -> list[FetchOutcome]:
        try:
            with anyio.fail_after(self._own.request_timeout):
                if self._reaches:
                    return await super()._receive_outcomes(version)
                # A worker on another host does not reach the socket. It waits, and generates not.
                outcomes = await self._client.collective_rpc("trinity_fetched")
                return [msgspec.json.decode(outcome, type=FetchOutcome) for outcome in outcomes]
        except TimeoutError:
            raise self._client.lose(f"step {version.step} was not fetched in time") from None

    async def _give_up_turns(self) -> None:
        """End the update and every turn, and generate nothing for other clients either."""
        if self._client.is_connected:
            await self._client.collective_rpc("trinity_abandon")
            await self._client.pause_generation(mode="abort", clear_cache=True)


def _get_api_key(own: ServerOptions) -> str | None:
    if own.api_key_variable is None:
        return None
    key = os.environ.get(own.api_key_variable)
    if not key:
        raise VLLMServerUnusable("", "key", own.api_key_variable)
    return key


async def _find_server(url: str, own: ServerOptions, api_key: str | None) -> ServerDescription:
    client = ServerClient(url, own.request_timeout, api_key)
    try:
        return await wait_for_server(client, own.startup_timeout)
    finally:
        await client.close()


async def wait_for_server(
    client: ServerClient, timeout: float, outcomes: str = ""
) -> ServerDescription:
    """Connect to a server, once it answers, and return its description.

    Args:
        client: Client of the server.
        timeout: Seconds for which it is waited for.
        outcomes: Socket of the explorer.

    Raises:
        VLLMServerMissing: It did not answer in time.
        VLLMServerUnusable: Its workers do not have the plugin.
    """
    reason = ""
    pauses = backoff_delays(_LONGEST_PAUSE)
    with anyio.move_on_after(timeout):
        while True:
            try:
                await client.connect()
                results = await client.collective_rpc("trinity_describe", (outcomes,))
                return msgspec.json.decode(results[0], type=ServerDescription)
            except VLLMServerAway as error:
                reason = error.reason
                if _NO_METHOD in reason:
                    raise VLLMServerUnusable(client.url, "plugin", value=reason) from None
            await anyio.sleep(next(pauses))
    raise VLLMServerMissing(url=client.url, fault="late", seconds=timeout, reason=reason)


def check_server(url: str, description: ServerDescription, dtype: str) -> None:
    """Raise VLLMServerUnusable if a server was started with settings that do not fit the run."""
    settings = (
        ("dtype", description.dtype, dtype),
        # Losses divide by the probabilities of the distribution that a token was sampled from.
        ("logprobs-mode", description.logprobs_mode, "processed_logprobs"),
        # Its engines would count their workers alike, and each labels its own weights.
        ("data-parallel-size", str(description.data_parallel_size), "1"),
        ("enable-chunked-prefill", str(description.chunks_seeded_prefill).lower(), "false"),
    )
    for setting, value, needed in settings:
        if value != needed:
            raise VLLMServerUnusable(url, "setting", setting, value, needed)

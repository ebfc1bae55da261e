"""Episodes: the turns of policy and environment that answer one rollout request.

Tokens of earlier turns are never encoded again: encoding the text of sampled tokens may give
others, which the policy did not sample. For a turn of the environment only the text between two
turns of the policy is encoded. The chat template renders the conversation with a mark in place of
the policy's last turn; what follows the mark are the end of that turn, the environment's messages,
and the beginning of the next turn. That text follows a special token, so no merge crosses its edge.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio
from msgspec.structs import replace

from trinity_events.diagnostics.phases import PhaseClock
from trinity_events.errors import TrinityError
from trinity_events.rollouts import ABORTED, Claim, RolloutClient
from trinity_events.rollouts.dispatch_state import count_sampled
from trinity_events.system.error_text import first_error
from trinity_schemas import (
    ChatMessage,
    Experience,
    ProofStatus,
    RewardErrorReported,
    RolloutRequest,
    StepRef,
    Turn,
)
from trinity_schemas.rollouts import LONGEST_REWARD_ERROR

from ..learning.policy import encode_prompt
from ..learning.pretrained import ReplyRefused
from ..rewards import Rewarded, RewardFailed, RewardFault, Rewards
from ..rewards.error_reports import AnswersNotJudged, make_report
from ..rewards.settings import OnRewardError
from ..rewards.values import NO_REWARD
from ..rollout_engines.base import (
    Generation,
    GenerationAborted,
    GenerationRequest,
    TurnGenerator,
)
from ..rollout_engines.proof import find_weakest
from ..sandbox.environments import EnvironmentFailed
from ..tasks.base import Answer, Message, Question, Task
from .chat_messages import convert_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_MARK = "TRINITYxPOLICYxTURN"
"""Text in place of the policy's turn, which a template neither changes nor contains."""


class RequestRefused(TrinityError):
    """A rollout request asks for what the explorer does not have."""


class OtherTaskSet(RequestRefused):
    """A request asks for a question of another task set.

    Attributes:
        subject: The run, or the ordinal.
        requested: Fingerprint of the task set that is asked for.
        explorer: Name of the explorer.
        own: Fingerprint of its task set.
    """

    subject: str
    requested: str
    own: str
    explorer: str = "this explorer"
    text = (
        "{subject} asks for a task set with the fingerprint {requested}, and {explorer} holds "
        "{own}: give trainer and explorers the same questions"
    )


class PromptTooLong(RequestRefused):
    """A prompt is longer than the model, or a setting, has room for.

    Attributes:
        ordinal: Ordinal of the question.
        tokens: Tokens of the prompt.
        room: Tokens that it may have.
        setting: Setting that limits it; None for the model.
    """

    ordinal: int
    tokens: int
    room: int
    setting: str | None = None
    text = "the prompt of ordinal {ordinal} has {tokens} tokens, and {_limit}"

    @property
    def _limit(self) -> str:
        if self.setting is None:
            return f"the model has room for {self.room}: leave the question out, or shorten it"
        return f"{self.setting} is {self.room}: leave the question out, or allow more tokens"


class OtherVersion(RequestRefused):
    """A request asks for another weight version than the engine serves.

    Attributes:
        ordinal: Ordinal of the question.
        oldest: Oldest version that it may be answered with.
        exact: True if it may be answered with this version alone.
        served: Version of the engine.
    """

    ordinal: int
    oldest: StepRef
    exact: bool
    served: StepRef
    text = (
        "ordinal {ordinal} needs the version of {_oldest}, and the engine served that of "
        "{_served}: install it before answering"
    )

    @property
    def _oldest(self) -> str:
        return _format_version(self.oldest) + ("" if self.exact else " or a later one")

    @property
    def _served(self) -> str:
        return _format_version(self.served)


class Replier(Protocol):
    """Environment of episodes, such as a pool of processes with a user's tools."""

    async def reply(self, question: Question, messages: Sequence[Message]) -> list[Message] | None:
        """Return the messages after the policy's last turn; None ends the episode."""
        ...


@dataclass(slots=True)
class _Episode:
    """One sample of a request while it is played."""

    place: int
    request: RolloutRequest
    sample: int
    question: Question
    messages: list[Message]
    turns: list[Turn]
    finished: bool = True
    over: bool = False
    text: str = ""
    proofs: list[ProofStatus] = field(default_factory=list)
    """Status of each turn of the policy."""

    @property
    def tokens(self) -> list[int]:
        """All tokens so far."""
        return [token for turn in self.turns for token in turn.tokens]

    @property
    def policy_turns(self) -> int:
        """Number of the policy's turns so far."""
        return sum(turn.role == "policy" for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class Episodes:
    """Answers rollout requests: plays their episodes, and has them judged.

    Args:
        engine: Engine that generates the policy's turns.
        tokenizer: The policy's tokenizer.
        task: The task, whose questions the requests name by their ordinals.
        judge: Judge of the answers.
        explorer: Name of the explorer.
        environment: Other side of the episodes; without one, an episode has one turn.
        max_turns: Maximum number of the policy's turns in an episode.
        max_prompt_tokens: Maximum number of tokens of a prompt; None has no limit but the model's.
        template_kwargs: Further arguments of the chat template.
        include_stop: Keep a stop string in the text that rewards and environments read.
        needed_part: Part of the reward that the trainer reads, if it reads one.
        on_error: Effect of a reward that failed. With ``score`` its sample gets a score in its
            place; else the whole request fails, and the trainer applies its policy.
        error_score: Score of samples whose reward failed.
        held_out: True for episodes of held-out questions.
        report: Reports the error of a reward to the log; by default none is reported.
        clock: Clock of the process, which counts the sampled tokens too.
        keeps_messages: Send the chat messages of prompts and environments, for the record.
    """

    engine: TurnGenerator
    tokenizer: PreTrainedTokenizerBase
    task: Task
    judge: Rewards
    explorer: str
    environment: Replier | None = None
    max_turns: int = 1
    max_prompt_tokens: int | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    include_stop: bool = False
    needed_part: str | None = None
    on_error: OnRewardError = "fail"
    error_score: float = 0.0
    held_out: bool = False
    report: Callable[[RewardErrorReported], Awaitable[None]] | None = None
    clock: PhaseClock = field(default_factory=PhaseClock)
    keeps_messages: bool = False

    def _phase(self, name: str) -> AbstractContextManager[None]:
        """Return the phase of an activity; held-out questions have one for all activities."""
        return self.clock.phase("evaluating" if self.held_out else name)

    async def answer(self, request: RolloutRequest) -> list[Experience]:
        """Return the experiences of one request; see :meth:`answer_all`. Raises what failed."""
        (answered,) = await self.answer_all([request])
        if isinstance(answered, TrinityError):
            raise answered
        return answered

    async def answer_all(
        self, requests: Sequence[RolloutRequest]
    ) -> list[list[Experience] | TrinityError]:
        """Return the experiences of each request, one a sample, or the error that it failed with.

        The turns of all episodes are generated together. An environment or reward that fails
        spoils its own request alone; an engine that fails raises.
        """
        played = await self.play_all(requests)
        return await played.judged()

    async def play_all(self, requests: Sequence[RolloutRequest]) -> Played:
        """Play the episodes of requests; the engine has nothing more to do for them then."""
        failed: dict[int, TrinityError] = {}
        groups: list[list[_Episode]] = []
        for place, request in enumerate(requests):
            try:
                groups.append(self._begin(place, request))
            except TrinityError as error:
                failed[place] = error
                groups.append([])
        while alive := [episode for group in groups for episode in group if not episode.over]:
            await self._policy_turns(alive, failed)
            # Environments of all requests side by side: the engine waits for the slowest.
            with self._phase("environment"):
                async with anyio.create_task_group() as tasks:
                    for place, group in enumerate(groups):
                        if place not in failed:
                            tasks.start_soon(self._environment_turns, place, group, failed)
            for place in failed:
                groups[place] = []
        return Played(self, groups, failed)

    def _begin(self, place: int, request: RolloutRequest) -> list[_Episode]:
        if request.fingerprint != self.task.fingerprint:
            raise OtherTaskSet(
                f"ordinal {request.ordinal}", request.fingerprint, self.task.fingerprint
            )
        question = self.task.question(request.ordinal)
        tokens = encode_prompt(
            self.tokenizer, question.prompt, template_kwargs=self.template_kwargs
        )
        if self.max_prompt_tokens is not None and len(tokens) > self.max_prompt_tokens:
            raise PromptTooLong(
                request.ordinal, len(tokens), self.max_prompt_tokens, "rollouts.max_prompt_tokens"
            )
        room = self.engine.context_length
        # Equal is too long: one token of the answer has to fit as well.
        if room is not None and len(tokens) >= room:
            raise PromptTooLong(request.ordinal, len(tokens), room)
        # A prompt of text has no messages: its tokens are all that there is of it.
        is_text = isinstance(question.prompt, str)
        messages = [] if is_text else self._convert(question.messages())
        prompt = Turn(role="prompt", tokens=tokens, messages=messages)
        return [
            # A list of messages for each sample, to which its own turns are added.
            _Episode(place, request, sample, question, question.messages(), [prompt])
            for sample in range(request.samples)
        ]

    async def _policy_turns(
        self, episodes: Sequence[_Episode], failed: dict[int, TrinityError]
    ) -> None:
        with self._phase("generating"):
            generated = await self.engine.generate(
                [
                    GenerationRequest(
                        tokens=episode.tokens,
                        sampling=episode.request.sampling,
                        ordinal=episode.request.ordinal,
                        sample=episode.sample,
                        # Part of the key of the random numbers: each turn draws others.
                        turn=episode.policy_turns,
                    )
                    for episode in episodes
                ]
            )
        self.clock.count_tokens(
            "evaluated" if self.held_out else "sampled",
            sum(len(generation.tokens) for generation in generated),
        )
        for episode, generation in zip(episodes, generated, strict=True):
            try:
                self._add_policy_turn(episode, generation)
            except (RequestRefused, GenerationAborted) as error:
                failed[episode.place] = error

    def _add_policy_turn(self, episode: _Episode, generation: Generation) -> None:
        if generation.aborted:
            raise GenerationAborted(episode.request.ordinal)
        _check_versions(episode.request, [version for version, _ in generation.versions])
        episode.turns.append(
            Turn(
                role="policy",
                tokens=generation.tokens,
                logprobs=generation.logprobs,
                versions=generation.versions,
            )
        )
        episode.proofs.append(generation.proof)
        episode.text = self._get_text(generation)
        episode.messages.append({"role": "assistant", "content": episode.text})
        episode.finished = generation.finished
        episode.over = (
            # A turn that was cut off has no end for a reply to follow.
            not generation.finished
            or self.environment is None
            or episode.policy_turns >= self.max_turns
        )

    def _get_text(self, generation: Generation) -> str:
        """Return the text of a turn, up to its end of sequence or its stop string."""
        ended = generation.finished and generation.stop is None
        # The end of sequence is no text of the answer; a token that completes a stop string is.
        tokens = generation.tokens[:-1] if ended else generation.tokens
        # Special tokens are kept: a padding token that was really sampled must spoil the answer,
        # not vanish from it.
        text = str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        if generation.stop is None:
            return text
        # The last token may have text after the string that it completes.
        before, stop, _ = text.partition(generation.stop)
        return before + stop if self.include_stop else before

    async def _environment_turns(
        self, place: int, group: Sequence[_Episode], failed: dict[int, TrinityError]
    ) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                for episode in group:
                    if not episode.over:
                        tasks.start_soon(self._environment_turn, episode)
        # Collected for this request alone: an error that left here would cancel the others.
        except* TrinityError as errors:
            error = first_error(errors)
            assert isinstance(error, TrinityError)
            failed[place] = error

    async def _environment_turn(self, episode: _Episode) -> None:
        assert self.environment is not None
        replies = await self.environment.reply(episode.question, episode.messages)
        if replies is None:
            episode.over = True
            return
        tokens = self._between(episode, replies)
        room = self.engine.context_length
        # Without room for the reply and one token more, the episode is one that was cut off.
        if room is not None and len(episode.tokens) + len(tokens) >= room:
            episode.over, episode.finished = True, False
            return
        episode.messages += replies
        turn = Turn(role="environment", tokens=tokens, messages=self._convert(replies))
        episode.turns.append(turn)

    def _convert(self, messages: Sequence[Message]) -> list[ChatMessage]:
        return convert_messages(messages) if self.keeps_messages else []

    def _between(self, episode: _Episode, replies: Sequence[Message]) -> list[int]:
        """Return the tokens between the policy's last turn and its next one."""
        # A prompt of text has no chat template: replies follow the answer as they are.
        if isinstance(episode.question.prompt, str):
            text = "".join(str(reply["content"]) for reply in replies)
        else:
            last = episode.turns[-1].tokens[-1]
            text = continuation(
                self.tokenizer, episode.messages, replies, last, self.template_kwargs
            )
        # Without special tokens: the conversation has begun, and the template writes its own.
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    async def judge_group(
        self,
        place: int,
        group: Sequence[_Episode],
        answers: list[list[Experience]],
        failed: dict[int, TrinityError],
    ) -> None:
        """Have the episodes of one request judged, and add its answer or the error."""
        if not group:
            return
        judged_answers = [
            Answer(
                text=episode.text,
                finished=episode.finished,
                messages=episode.messages,
                tokens=sum(len(turn.tokens) for turn in episode.turns if turn.role == "policy"),
            )
            for episode in group
        ]
        try:
            rewarded, faults = await self._judge(group[0].question, judged_answers)
        except TrinityError as error:
            failed[place] = error
            return
        if faults:
            reports = self._make_reports(group, judged_answers, faults)
            away = next((fault.dependency for fault in faults.values() if fault.dependency), None)
            if away is not None and not group[0].request.last_attempt:
                # Not in the log as an error of the reward: other requests tell if it is one.
                failed[place] = AnswersNotJudged(reports[0], dependency=away)
                return
            if self.report is not None:
                for report in reports:
                    await self.report(report)
            if self.on_error != "score":
                failed[place] = AnswersNotJudged(reports[0])
                return
        answers[place] = [
            self._experience(episode, rewarded[index])
            if index in rewarded
            else self._make_scored(episode, faults[index])
            for index, episode in enumerate(group)
        ]

    async def _judge(
        self, question: Question, answers: Sequence[Answer]
    ) -> tuple[dict[int, Rewarded], dict[int, RewardFault]]:
        """Return the rewards of answers by index, and the errors of those without a reward."""
        try:
            rewarded = dict(enumerate(await self.judge.judge(question, answers)))
            faults: dict[int, RewardFault] = {}
        except RewardFailed as error:
            rewarded, indices = dict(error.rewarded), range(len(answers))
            faults = {at: error.get_fault(at) for at in indices if at not in rewarded}
        for index, reward in list(rewarded.items()):
            if self.needed_part is not None and self.needed_part not in reward.parts:
                # The trainer would refuse the answer.
                del rewarded[index]
                names = ", ".join(reward.parts) or "none"
                sentence = (
                    f"filters.part is {self.needed_part!r}, and the reward has no such part: its "
                    f"parts are {names}"
                )
                faults[index] = RewardFault(sentence=sentence, error_type=NO_REWARD)
        return rewarded, faults

    def _make_reports(
        self,
        group: Sequence[_Episode],
        answers: Sequence[Answer],
        faults: Mapping[int, RewardFault],
    ) -> list[RewardErrorReported]:
        """Return the reports of the errors of a request."""
        return [
            make_report(
                group[index].request,
                group[index].sample,
                group[index].question,
                answers[index],
                faults[index],
                explorer=self.explorer,
                held_out=self.held_out,
            )
            for index in sorted(faults)
        ]

    def _make_scored(self, episode: _Episode, fault: RewardFault) -> Experience:
        """Return a sample with the score that is configured for errors, marked as such."""
        score = self.error_score
        parts = {} if self.needed_part is None else {self.needed_part: score}
        sample = self._experience(episode, Rewarded(reward=score, parts=parts))
        # The contract refuses a longer one, and an empty one would mark no error.
        sentence = fault.sentence[:LONGEST_REWARD_ERROR] or fault.error_type
        return replace(sample, reward_error=sentence)

    def _experience(self, episode: _Episode, rewarded: Rewarded) -> Experience:
        request = episode.request
        return Experience(
            run_id=request.run_id,
            epoch=request.epoch,
            ordinal=request.ordinal,
            attempt=request.attempt,
            sample=episode.sample,
            samples=request.samples,
            explorer=self.explorer,
            turns=episode.turns,
            reward=rewarded.reward,
            reward_parts=rewarded.parts,
            judge_reply=rewarded.judge_reply,
            finished=episode.finished,
            question_set=episode.question.set,
            # An episode is as proven as its least proven turn (decision 49).
            proof=find_weakest(episode.proofs),
        )


class Played(NamedTuple):
    """Episodes that were played to their end, or the errors of their requests."""

    episodes: Episodes
    groups: list[list[_Episode]]
    failed: dict[int, TrinityError]

    async def judged(self) -> list[list[Experience] | TrinityError]:
        """Return the experiences of each request, or the error that it failed with."""
        answers: list[list[Experience]] = [[] for _ in self.groups]
        with self.episodes._phase("judging"):
            async with anyio.create_task_group() as tasks:
                for place, group in enumerate(self.groups):
                    tasks.start_soon(self.episodes.judge_group, place, group, answers, self.failed)
        if not self.episodes.held_out:
            self.episodes.clock.count_judged(sum(map(len, answers)))
        return [self.failed.get(place, answer) for place, answer in enumerate(answers)]


def continuation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    replies: Sequence[Message],
    last_token: int,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Return the text between the policy's last turn and its next one, by the chat template.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages so far; the last one is the policy's.
        replies: Messages of the environment.
        last_token: Last token that the policy sampled; it is not repeated.
        template_kwargs: Further arguments of the chat template.

    Raises:
        BadPolicy: if the template refuses the messages.
    """
    marked = [*messages[:-1], {**messages[-1], "content": _MARK}, *replies]
    template: Any = tokenizer.apply_chat_template
    try:
        rendered = str(
            template(marked, add_generation_prompt=True, tokenize=False, **(template_kwargs or {}))
        )
    # Templates are code of the model's author, and raise whatever they like.
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ReplyRefused(replies[-1]["role"], reason) from None
    _, mark, after = rendered.rpartition(_MARK)
    if not mark:
        raise ReplyRefused()
    # The policy itself sampled the end of its turn.
    return after.removeprefix(str(tokenizer.decode([last_token], skip_special_tokens=False)))


def _check_versions(request: RolloutRequest, versions: Sequence[StepRef]) -> None:
    """Refuse versions that may not serve a request."""
    if request.exact:
        wrong = [version for version in versions if version != request.oldest]
    else:
        wrong = [version for version in versions if version < request.oldest]
    if wrong:
        raise OtherVersion(request.ordinal, request.oldest, request.exact, wrong[0])


def _format_version(version: StepRef) -> str:
    return f"epoch {version.epoch}, step {version.step}"


class Sent(NamedTuple):
    """Answers that were sent."""

    counted: int
    """Answers that were not discarded."""
    ordinals: list[int]
    is_away: bool = False
    """True if something failed that answers depend on."""


async def send_answers(
    requests: RolloutClient,
    claims: Sequence[Claim],
    answers: Sequence[list[Experience] | TrinityError],
    clock: PhaseClock | None = None,
) -> Sent:
    """Send the answers of claims, and give those back that failed.

    Args:
        requests: Client of the stream that they are of.
        claims: The claims.
        answers: Experiences of each, or the error that it failed with.
        clock: Clock that counts what becomes of their tokens; None for those of evaluations.

    Raises:
        StaleEpoch: The run has a newer epoch.
    """
    outgoing: list[tuple[Claim, list[Experience]]] = []
    is_away = False
    for claim, answer in zip(claims, answers, strict=True):
        if isinstance(answer, GenerationAborted):
            logger.info("%s: %s", requests.name, answer)
            # No failed attempt: a version came in between (decision 21).
            await requests.give_back(claim, ABORTED)
        elif isinstance(answer, TrinityError):
            logger.warning("%s: ordinal %d: %s", requests.name, claim.request.ordinal, answer)
            report = answer.report if isinstance(answer, AnswersNotJudged) else None
            dependency = None
            if isinstance(answer, (AnswersNotJudged, EnvironmentFailed)):
                # The last attempt is a failure of the request, whatever it failed for.
                dependency = None if claim.request.last_attempt else answer.dependency
                is_away |= answer.dependency is not None
            await requests.fail(claim, str(answer), report, dependency=dependency)
        else:
            outgoing.append((claim, answer))
    counted = await requests.answer_all(outgoing)
    if clock is not None:
        for (_, experiences), is_first in zip(outgoing, counted, strict=True):
            tokens = sum(map(count_sampled, experiences))
            clock.count_tokens("answered" if is_first else "surplus", tokens)
        aborted = any(isinstance(answer, GenerationAborted) for answer in answers)
        clock.settle_tokens("aborted" if aborted else "failed")
    return Sent(sum(counted), [claim.request.ordinal for claim, _ in outgoing], is_away)

"""Errors of rewards: answers that cannot be judged, and judges that cannot work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Literal, TypeAlias

from msgspec.structs import replace

from trinity_events.errors import TrinityError
from trinity_schemas import FailedDependency

from .values import Rewarded, RewardFault

ProcessFault: TypeAlias = Literal["late", "loading", "ended", "unasked", "undecodable"]


class RewardFailed(TrinityError):
    """Answers cannot be judged; each subclass is one kind of judge or cause.

    Attributes:
        faults: Errors of single answers, by index.
        rewarded: Rewards of the answers that could be judged, by index.
    """

    faults: Mapping[int, RewardFault] = field(kw_only=True, default_factory=dict)
    rewarded: Mapping[int, Rewarded] = field(kw_only=True, default_factory=dict)

    @property
    def shared_fault(self) -> RewardFault:
        """Error of all answers that have no reward and no error of their own."""
        return RewardFault(sentence=str(self), error_type=type(self).__name__)

    def get_fault(self, index: int) -> RewardFault:
        """Return the error of an answer without a reward: its own, or that of all answers."""
        # A process that ended has one error for all that it had not judged (decision 38).
        return self.faults.get(index, self.shared_fault)


class AnswersFailed(RewardFailed):
    """Single answers could not be judged, for the reasons in ``faults``; the text is the first."""

    text = "{_first}"

    @property
    def _first(self) -> str:
        # By the lowest index: errors come in the order in which answers were judged.
        return self.faults[min(self.faults)].sentence


class RewardFunctionFailed(RewardFailed):
    """A reward function cannot be loaded.

    Attributes:
        function: Name of the function, or of the questions that need one.
        loading: Error of loading it.
    """

    function: str
    loading: RewardFault
    text = "{loading.sentence}"

    @property
    def shared_fault(self) -> RewardFault:
        """Error of loading it, which all answers have."""
        return self.loading


class RewardProcessFailed(RewardFailed):
    """The process of a reward function does not answer as it should.

    Attributes:
        function: Name of the function.
        fault: ``late`` if the function did not return within its deadline, ``loading`` if it was
            not loaded within one, ``ended`` if the process did, ``unasked`` for an answer that was
            not asked for, ``undecodable`` for bytes that are no answer.
        seconds: The deadline.
        detail: Place at which it was late, or the way in which the process ended.
    """

    function: str
    fault: ProcessFault
    seconds: float = 0.0
    detail: str = ""
    texts: ClassVar = {
        "late": "the reward {function} did not return within {seconds:g} s{detail}",
        "loading": "the reward {function} did not load within {seconds:g} s{detail}",
        "ended": "the reward {function} ended its process ({detail})",
        "unasked": "the reward {function} gave an answer that was not asked for",
        "undecodable": "the reward {function} sent what is no answer",
    }
    _types: ClassVar = {"late": "TimeoutError", "loading": "TimeoutError", "ended": "ProcessEnded"}

    @property
    def shared_fault(self) -> RewardFault:
        """Error of all answers without a verdict, by the type that a function would raise."""
        error_type = self._types.get(self.fault, "UnexpectedReply")
        return RewardFault(sentence=str(self), error_type=error_type)


class RewardServiceUnusable(RewardFailed):
    """A service cannot be asked at all; a setting or the environment is wrong.

    Attributes:
        service: Name of the service, with its URL.
        fault: ``token`` if its variable is not set, ``environment`` for proxies or certificates
            that cannot be used, ``absent`` if nothing answers, ``refused`` for a missing token.
        setting: Setting that names the service, or the variable of the token.
        reason: Error of the client.
        status: Status code of a refusal.
    """

    service: str
    fault: Literal["token", "environment", "absent", "refused"]
    setting: str = ""
    reason: str = ""
    status: int = 0
    texts: ClassVar = {
        "token": "{service} needs a token, and the environment variable {setting} is not set: set "
        "it for the explorers, or leave out rewards.token_variable",
        "environment": "{service} cannot be asked with the proxies or certificates of the "
        "environment ({reason}): correct HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, SSL_CERT_FILE and "
        "SSL_CERT_DIR, or list its host in NO_PROXY",
        "absent": "{service} does not answer ({reason}): start it, or name another in {setting}",
        "refused": "{service} refuses the explorers ({status}): name the environment variable "
        "with its token in rewards.token_variable",
    }


class RewardCallFailed(RewardFailed):
    """A call of a service failed for good.

    Attributes:
        service: Name of the service, with its URL.
        fault: ``question`` if no JSON can be made of it, ``late`` after the deadline, ``attempts``
            after all of them, ``large`` for a reply above the limit, ``status`` for a refusal.
        reason: Error of the client, end of the sentence about the last attempt, or the reply.
        seconds: The deadline.
        attempts: Number of attempts.
        status: Status code of a refusal.
        limit: Maximum bytes of a reply.
        dependency: The service, if it failed rather than refused this question.
    """

    service: str
    fault: Literal["question", "late", "attempts", "large", "status"]
    reason: str = ""
    seconds: float = 0.0
    attempts: int = 1
    status: int = 0
    limit: int = 0
    dependency: FailedDependency | None = None
    texts: ClassVar = {
        "question": "{service} cannot be sent this question: {reason}",
        "late": "{service} did not answer within {seconds:g} s{_before}",
        "attempts": "{service} {reason}{_tried}",
        "large": "{service} sent more than {limit} bytes, which are not read",
        "status": "{service} answered {status}{reason}",
    }

    @property
    def _before(self) -> str:
        return f"; before that it {self.reason}" if self.reason else ""

    @property
    def _tried(self) -> str:
        return f", {self.attempts} times" if self.attempts > 1 else ""

    @property
    def shared_fault(self) -> RewardFault:
        """Error of all answers of the call, with the service if that failed."""
        return replace(super().shared_fault, dependency=self.dependency)


class RewardReplyRefused(RewardFailed):
    """The reply of a reward service is not what was asked for.

    Attributes:
        service: Name of the service, with its URL.
        fault: ``JSON`` if it is none, ``list`` without a list of rewards, ``count`` for another
            number of them than answers.
        value: The reply, or the error of its decoder.
        rewards: Number of rewards.
        answers: Number of answers.
    """

    service: str
    fault: Literal["JSON", "list", "count"]
    value: str = ""
    rewards: int = 0
    answers: int = 0
    texts: ClassVar = {
        "JSON": "{service} sent what is no JSON: {value}",
        "list": "{service} sent {value}, and its reply is an object with a list of rewards",
        "count": "{service} sent {rewards} rewards for {answers} answers",
    }


class PromptNotReadable(RewardFailed):
    """A judge cannot read a message of the prompt.

    Attributes:
        fault: ``role`` if it has none, ``content`` if it is no text, ``calls`` if no JSON can be
            made of its tool calls.
        role: Role of the message.
        value: The message, or the reason why it cannot be read.
    """

    fault: Literal["role", "content", "calls"]
    role: str = ""
    value: str = ""
    texts: ClassVar = {
        "role": "a message of the prompt has no role: {value}",
        "content": "the judge reads text, and a message of {role} {value}: give the question to a "
        "reward function or a reward service",
        "calls": "the tool calls of a message of {role} are no JSON: {value}",
    }


class CodeNotRunnable(RewardFailed):
    """The code of answers cannot be run, or has no tests.

    Attributes:
        fault: ``limits`` if a program of one line does not run within them, ``tests`` without any,
            ``start`` if no process for code can be started.
        reason: Error of its start.
        field: Field of the question that ``rewards.code_tests`` names.
        proposal: Clause about the fields that there are.
    """

    fault: Literal["limits", "tests", "start"]
    field: str = ""
    proposal: str = ""
    reason: str = ""
    texts: ClassVar = {
        "start": "the sandbox for the code of answers does not start: {reason}",
        "limits": "a program of one line does not run within the limits of an answer's code: raise "
        "rewards.code_memory_mb or rewards.deadline",
        "tests": "a question has no text in its field {field!r}, which rewards.code_tests names: "
        "{proposal}",
    }

    @property
    def shared_fault(self) -> RewardFault:
        """Error of all answers, with the sandbox if that failed."""
        dependency = None
        if self.fault == "start":
            dependency = FailedDependency("the sandbox for the code of answers", unreachable=True)
        return replace(super().shared_fault, dependency=dependency)

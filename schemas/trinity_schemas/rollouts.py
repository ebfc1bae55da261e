"""Rollout requests and experiences, which travel beside the log on streams of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from .arrays import FloatArray, TokenArray
from .errors import ExperienceContradiction, LedgerContradiction, RangesOverlap
from .identity import Digest, Epoch, Name, RunId, Seconds, Slug, Step, StepRef
from .proof import ProofStatus

TokenId = Annotated[int, Meta(ge=0, le=2**31)]
Ordinal = Annotated[
    int,
    Meta(
        ge=0,
        le=2**53,
        description="Place of a prompt in the task set's order, counted on through its passes.",
    ),
]
OrdinalRange = Annotated[
    tuple[Ordinal, Ordinal], Meta(description="First and last of consecutive ordinals.")
]
OrdinalRanges = Annotated[
    tuple[OrdinalRange, ...],
    Meta(max_length=65_536, description="Ordinals, as ascending ranges without overlap."),
]
DropReason = Annotated[
    Slug, Meta(description="Final reason, such as filtered, attempts or task-set.")
]
LOOP_TAIL = 64
"""Last tokens of an answer in which a loop is looked for; shorter answers have no time for one."""
_LOOP_RUNS = 16
"""Longest loop, in distinct runs of four tokens: a short sentence and its variations."""
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
"""Largest finite float32, in which trainers compute; a larger float64 becomes infinite in it."""
MAX_REWARD = 1e16
"""Largest reward. Advantages add up squares of rewards: those of 2**20 such samples, which is the
largest group of the contract, are still finite in float32."""
REWARD_RANGE = f"finite, from {-MAX_REWARD:g} to {MAX_REWARD:g}"
"""Range of rewards in words."""
MAX_REWARD_PARTS = 256
"""Maximum named parts of a reward; a reward function has some dozens at most."""
LONGEST_REWARD_ERROR = 500
"""Maximum characters of a sentence about a reward's error: every sample that failed repeats it."""
LONGEST_JUDGE_REPLY = 2_000
"""Maximum characters of a judge's reply: it travels in the stream, with every sample."""
LONGEST_MESSAGES = 2**18
"""Maximum characters of the chat messages of a turn, of which explorers cut the contents."""
QUESTION_SET = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,126})?$"
"""Pattern of a set's name, which is part of the names of metrics."""
MAX_EXCLUDED_NAMES = 64
"""Maximum explorers that a request names as excluded: every request repeats them."""
PayloadTransport = Literal["redis", "shm"]
Attempts = Annotated[int, Meta(ge=1, le=2**31, description="Number of the attempt, from 1.")]
Samples = Annotated[int, Meta(ge=1, le=2**20, description="Samples of a group.")]


def check_ranges(ranges: Sequence[tuple[int, int]]) -> None:
    """Raise :class:`RangesOverlap` unless ranges of ordinals ascend and do not overlap."""
    # Not -1: the range of an empty ledger is (-1, -1), which must pass.
    before = -2
    for first, last in ranges:
        # Ranges that touch pass: a ledger of another writer need not have merged them.
        if not before < first <= last:
            raise RangesOverlap(first, last, before)
        before = last


class Sampling(Struct, frozen=True, kw_only=True):
    """Settings with which a rollout engine samples tokens."""

    max_new_tokens: Annotated[int, Meta(ge=1, le=2**31, description="Tokens of one turn at most.")]
    temperature: Annotated[float, Meta(ge=0, description="Temperature; 0 is greedy.")] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1, description="Nucleus; 1 samples the policy.")] = 1.0
    top_k: Annotated[int, Meta(ge=0, description="Most likely tokens; 0 samples the policy.")] = 0
    min_p: Annotated[
        float,
        Meta(ge=0, le=1, description="Least share of the likeliest token's probability; 0 is off."),
    ] = 0.0
    repetition_penalty: Annotated[
        float, Meta(gt=0, description="Penalty of tokens that occurred; 1 samples the policy.")
    ] = 1.0
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...],
        Meta(max_length=64, description="Strings after the first of which a turn ends."),
    ] = ()
    seed: Annotated[int, Meta(ge=0, le=2**62, description="The run's seed.")] = 0


class FailedDependency(Struct, frozen=True):
    """Something that an answer depends on and that failed, such as a reward service."""

    name: str
    """Name in words, with its URL if it has one."""
    unreachable: bool = False
    """True if nothing answered, which cannot be the fault of the prompt."""


class RolloutRequest(Struct, frozen=True, kw_only=True):
    """Request of the trainer for one group: all samples of one prompt.

    (epoch, ordinal, attempt) identifies it. The prompt is not part of it: trainer and explorers
    hold the same task set, and ``fingerprint`` proves it.
    """

    run_id: RunId
    epoch: Epoch
    ordinal: Ordinal
    attempt: Attempts
    samples: Samples
    sampling: Sampling
    oldest: Annotated[StepRef, Meta(description="Oldest weight version that may serve it.")]
    exact: Annotated[
        bool, Meta(description="True if no other version than `oldest` may serve it.")
    ] = False
    fingerprint: Annotated[Digest, Meta(description="Fingerprint of the task set.")]
    deadline: Annotated[
        Seconds, Meta(description="Seconds after which the request is issued again.")
    ]
    excluded: Annotated[
        tuple[Name, ...],
        Meta(
            max_length=MAX_EXCLUDED_NAMES,
            description="Explorers whose answers are not taken, the last ones excluded.",
        ),
    ] = ()
    payloads: Annotated[
        PayloadTransport | None,
        Meta(
            description="Medium on which the tokens of the answer may lie; null if its samples are "
            "to have them, as the trainer reads no payloads."
        ),
    ] = None
    last_attempt: Annotated[
        bool,
        Meta(
            description="True if a failure of what the answer depends on, such as a reward "
            "service, is to count as a failure of this request."
        ),
    ] = False


# One object for every turn without any: prompts and tool results have none.
_NO_LOGPROBS = FloatArray.pack([])


class ChatMessage(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Chat message as it was before the chat template: what a record of rollouts shows."""

    role: Annotated[
        str, Meta(max_length=64, description="Its writer, such as system, user or tool.")
    ]
    content: Annotated[
        str, Meta(max_length=LONGEST_MESSAGES, description="Its text; of parts, those of text.")
    ] = ""
    name: Annotated[str, Meta(max_length=256, description="Name of the tool that wrote it.")] = ""
    tool_call_id: Annotated[
        str, Meta(max_length=256, description="Id of the call that it is the result of.")
    ] = ""
    arguments: Annotated[
        str,
        Meta(
            max_length=LONGEST_MESSAGES,
            description="Arguments of that call, if the environment reports them.",
        ),
    ] = ""
    tool_calls: Annotated[
        str,
        Meta(
            max_length=LONGEST_MESSAGES,
            description="Calls of tools by an assistant's message of the prompt, as JSON.",
        ),
    ] = ""


class Turn(Struct, frozen=True, kw_only=True):
    """Part of an episode: consecutive tokens that one side wrote.

    Tokens and log-probabilities may be given, and received, as lists: each becomes an array.
    """

    role: Annotated[
        Literal["prompt", "policy", "environment"],
        Meta(description="Writer of the tokens; only those of the policy are trained on."),
    ]
    tokens: Annotated[
        TokenArray | list[TokenId],
        Meta(description="Token ids, without padding: an array, or a list from older explorers."),
    ]
    logprobs: Annotated[
        FloatArray | list[float],
        Meta(
            description="Natural log-probability of each token that the policy sampled: an array, "
            "or a list from older explorers."
        ),
    ] = _NO_LOGPROBS
    versions: Annotated[
        list[tuple[StepRef, int]],
        Meta(description="Weight versions that sampled the tokens, each with its number of tokens"),
    ] = []
    messages: Annotated[
        list[ChatMessage],
        Meta(
            max_length=4096,
            description="Chat messages that the tokens of a prompt, or of an environment, encode; "
            "empty for text, and for the policy's turns.",
        ),
    ] = []

    def __post_init__(self) -> None:
        # Lists are the form of recorded logs, and of explorers of their own.
        if not isinstance(self.tokens, TokenArray):
            force_setattr(self, "tokens", TokenArray.pack(self.tokens))
        if not isinstance(self.logprobs, FloatArray):
            force_setattr(self, "logprobs", FloatArray.pack(self.logprobs))

    @property
    def token_view(self) -> memoryview:
        """Token ids as a buffer for ``numpy.asarray``, without a copy."""
        assert isinstance(self.tokens, TokenArray)
        return self.tokens.view

    @property
    def logprob_view(self) -> memoryview:
        """Log-probabilities in float32 as a buffer for ``numpy.asarray``, without a copy."""
        assert isinstance(self.logprobs, FloatArray)
        return self.logprobs.view


NO_PROMPT = Turn(role="prompt", tokens=[])
"""Prompt of a sample that shares that of the first sample of its answer."""


class ExperienceHeader(Struct, frozen=True, kw_only=True):
    """One sample of a group without its tokens: its request, its reward, and what it is of."""

    run_id: RunId
    epoch: Epoch
    ordinal: Ordinal
    attempt: Attempts
    sample: Annotated[int, Meta(ge=0, description="Index of the sample in its group.")]
    samples: Samples
    explorer: Annotated[Name, Meta(description="Name of the explorer that made it.")]
    reward: Annotated[float, Meta(description="Reward to learn from.")]
    reward_parts: Annotated[
        dict[str, float], Meta(description="Named parts of the reward, and scores to show.")
    ] = {}
    finished: Annotated[
        bool, Meta(description="False if the last turn met its limit of tokens.")
    ] = True
    reward_error: Annotated[
        str,
        Meta(
            max_length=LONGEST_REWARD_ERROR,
            description="Sentence about the error of the reward function, if `reward` is the score "
            "that is configured for errors; else empty.",
        ),
    ] = ""
    judge_reply: Annotated[
        str,
        Meta(
            max_length=LONGEST_JUDGE_REPLY,
            description="Reply of the model that judged it, without the middle of a long one; "
            "empty if none did.",
        ),
    ] = ""
    question_set: Annotated[
        str,
        Meta(
            pattern=QUESTION_SET,
            description="Name of the set that the question is of, where a task mixes several; else "
            "empty.",
        ),
    ] = ""
    proof: Annotated[
        ProofStatus | None,
        Meta(
            description="Weakest status of the versions that sampled it, as the explorer proved "
            "them before it served them; null if the explorer did not say."
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.sample >= self.samples:
            raise ExperienceContradiction("sample", self.sample, self.samples)

    @property
    def token_count(self) -> int:
        """Number of tokens of the prompt and all turns."""
        raise NotImplementedError

    @property
    def version_tokens(self) -> dict[StepRef, int]:
        """Number of sampled tokens of each weight version, from the oldest version on."""
        raise NotImplementedError

    @property
    def oldest_version(self) -> StepRef:
        """Return the oldest weight version that sampled one of its tokens."""
        return min(self.version_tokens)


class Experience(ExperienceHeader, frozen=True, kw_only=True):
    """One sample of a group: an episode, its reward, and the version of each sampled token.

    An episode begins with a turn of the prompt, and has at least one turn of the policy. Turns of
    the environment (results of tools) have no log-probabilities.
    """

    turns: Annotated[list[Turn], Meta(min_length=2, description="Turns of the episode, in order.")]
    shares_prompt: Annotated[
        bool,
        Meta(
            description="True if the turn of the prompt is that of sample 0 of the same answer, "
            "and is empty here."
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        prompt = self.turns[0]
        has_prompt = len(prompt.tokens) > 0
        # A sample has its prompt, or shares it: neither both nor none.
        if prompt.role != "prompt" or has_prompt is self.shares_prompt:
            raise ExperienceContradiction("prompt", self.sample, self.samples)
        if self.shares_prompt and self.sample == 0:
            raise ExperienceContradiction("prompt", self.sample, self.samples)
        if not any(turn.role == "policy" for turn in self.turns):
            raise ExperienceContradiction("policy", self.sample, self.samples)
        for turn in self.turns:
            # Loss and staleness need them for each trained token, and for no other one.
            turn_tokens = len(turn.tokens) if turn.role == "policy" else 0
            if len(turn.logprobs) != turn_tokens:
                raise ExperienceContradiction("logprobs", self.sample, self.samples)
            if sum(count for _, count in turn.versions) != turn_tokens:
                raise ExperienceContradiction("versions", self.sample, self.samples)

    def with_prompt_of(self, first: Experience) -> Experience:
        """Return the sample with the prompt of the first one, if it shares that."""
        if not self.shares_prompt:
            return self
        return replace(self, turns=[first.turns[0], *self.turns[1:]], shares_prompt=False)

    @property
    def token_count(self) -> int:
        """Number of tokens of the prompt and all turns."""
        return sum(len(turn.tokens) for turn in self.turns)

    @property
    def version_tokens(self) -> dict[StepRef, int]:
        """Number of sampled tokens of each weight version, from the oldest version on."""
        counts: dict[StepRef, int] = {}
        for turn in self.turns:
            for version, count in turn.versions:
                counts[version] = counts.get(version, 0) + count
        return dict(sorted(counts.items()))

    @property
    def ends_in_loop(self) -> bool:
        """Return True if the last tokens of its last turn repeat few runs of four tokens."""
        last = next(turn for turn in reversed(self.turns) if turn.role == "policy")
        tail = last.tokens[-LOOP_TAIL:]
        # Each token but the last three begins a run: so many different ones are as many runs.
        if len(tail) < LOOP_TAIL or len(set(tail[:-3])) > _LOOP_RUNS:
            return False
        runs = set(zip(tail, tail[1:], tail[2:], tail[3:], strict=False))
        return len(runs) <= _LOOP_RUNS


class PayloadAddress(Struct, frozen=True, kw_only=True):
    """Place of the tokens of an answer: those of all its samples, which are one payload."""

    transport: Annotated[
        PayloadTransport,
        Meta(description="Medium: the server of the weights, or shared memory of the host."),
    ]
    name: Annotated[
        str,
        Meta(pattern="^[0-9a-f]{32}$", description="Random name, which is unique in the run."),
    ]
    size: Annotated[int, Meta(ge=1, le=2**29, description="Number of its bytes.")]
    digest: Annotated[Digest, Meta(description="Digest of its bytes.")]


class ExperienceReference(ExperienceHeader, frozen=True, kw_only=True):
    """One sample of a group whose tokens lie elsewhere: all that is needed to dispatch it.

    The lengths and versions are those of its payload, so that staleness and balance need none.
    """

    payload: Annotated[PayloadAddress, Meta(description="Place of the turns of its group.")]
    tokens: Annotated[int, Meta(ge=2, le=2**31, description="Tokens of the prompt and all turns.")]
    versions: Annotated[
        list[tuple[StepRef, Annotated[int, Meta(ge=1, le=2**31)]]],
        Meta(
            min_length=1,
            max_length=1024,
            description="Weight versions that sampled its tokens, from the oldest on, each with "
            "its number of tokens.",
        ),
    ]
    ends_in_loop: Annotated[
        bool | None,
        Meta(
            description="True if the last 64 tokens of its last turn have at most 16 different "
            "runs of four; null if the explorer did not say."
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        sampled = sum(count for _, count in self.versions)
        are_ordered = all(older < newer for (older, _), (newer, _) in pairwise(self.versions))
        # A prompt has at least one token, which no version sampled.
        if sampled >= self.tokens or not are_ordered:
            raise ExperienceContradiction("versions", self.sample, self.samples)

    @property
    def token_count(self) -> int:
        """Number of tokens of the prompt and all turns."""
        return self.tokens

    @property
    def version_tokens(self) -> dict[StepRef, int]:
        """Number of sampled tokens of each weight version, from the oldest version on."""
        return dict(self.versions)

    @property
    def oldest_version(self) -> StepRef:
        """Return the oldest weight version that sampled one of its tokens."""
        return self.versions[0][0]

    def with_turns(self, turns: list[Turn]) -> Experience:
        """Return the sample with its turns.

        Raises:
            ExperienceContradiction: The turns are no episode, or have other tokens or versions than
                the reference.
        """
        experience = Experience(
            **{name: getattr(self, name) for name in ExperienceHeader.__struct_fields__},
            turns=turns,
        )
        lengths = experience.token_count, [*experience.version_tokens.items()]
        if lengths != (self.tokens, self.versions):
            raise ExperienceContradiction("reference", self.sample, self.samples)
        return experience


def refer(group: Sequence[Experience], payload: PayloadAddress) -> list[ExperienceReference]:
    """Return references to samples whose turns are in a payload."""
    return [
        ExperienceReference(
            **{name: getattr(sample, name) for name in ExperienceHeader.__struct_fields__},
            payload=payload,
            tokens=sample.token_count,
            versions=[*sample.version_tokens.items()],
            ends_in_loop=sample.ends_in_loop,
        )
        for sample in group
    ]


def share_prompts(group: Sequence[Experience]) -> list[Experience]:
    """Return samples that have their prompt once, if the first of them has it.

    :meth:`Experience.with_prompt_of` the first one is the way back.
    """
    first = group[0]
    # Readers find the prompt at sample 0 of the answer, which this list may lack.
    if first.sample != 0 or first.shares_prompt:
        return [*group]
    prompt = first.turns[0]
    return [
        replace(sample, turns=[NO_PROMPT, *sample.turns[1:]], shares_prompt=True)
        if sample.sample and (sample.turns[0] is prompt or sample.turns[0] == prompt)
        else sample
        for sample in group
    ]


class TrainedLedger(Struct, frozen=True, kw_only=True):
    """Fates of ordinals in a lineage, as a checkpoint holds them at its step.

    Every ordinal below ``mark`` has a fate. From ``mark`` on, those in ``settled`` have one. The
    next ordinal to dispatch is ``next``.
    """

    step: Step
    mark: Ordinal
    next: Ordinal
    settled: OrdinalRanges = ()
    trained: Annotated[int, Meta(ge=0, description="Ordinals that were trained.")] = 0
    dropped: Annotated[
        dict[DropReason, Annotated[int, Meta(ge=0)]],
        Meta(max_length=128, description="Ordinals that were dropped, by reason."),
    ] = {}
    fingerprint: Annotated[Digest, Meta(description="Fingerprint of the task set.")]

    def __post_init__(self) -> None:
        # All below the mark is one range with a fate, so that later ones must lie above it.
        check_ranges(((-1, self.mark - 1), *self.settled))
        # The mark would be higher: a ledger has one encoding, and so one digest.
        if self.settled and self.settled[0][0] == self.mark:
            raise LedgerContradiction("mark", self.mark)
        if max(self.mark - 1, self.settled[-1][1] if self.settled else -1) >= self.next:
            raise LedgerContradiction("next", self.next)

    @property
    def digest(self) -> str:
        """Return the digest of the encoded ledger."""
        # In an order of its own: reasons are counted in the order in which they came up.
        encoded = msgspec.msgpack.encode(self, order="deterministic")
        return f"sha256:{hashlib.sha256(encoded).hexdigest()}"

"""Experiences as an explorer may send them, on which no trainer may train, by kind of fault."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec

from trinity_events.rollouts import AnswerLimits
from trinity_schemas import Experience
from trinity_schemas.arrays import FloatArray, TokenArray

from .rollout_messages import as_lists

STEP_0 = {"epoch": 1, "step": 0}
LIMITS = AnswerLimits(
    vocabulary_size=98, max_positions=128, max_turns=2, question_sets=frozenset(("", "a"))
)
"""Limits of the built-in policy."""

Plain = dict[str, Any]
Change = Callable[[Plain], object]
"""Changes an experience as plain data, which no contract has checked."""


def _set(**values: Any) -> Change:
    return lambda plain: plain.update(values)


def _parts(**parts: float) -> Change:
    return _set(reward_parts=parts)


def _turn(place: int, **values: Any) -> Change:
    return lambda plain: plain["turns"][place].update(values)


def _policy(count: int, token: int = 7, **values: Any) -> Change:
    def change(plain: Plain) -> None:
        turn = plain["turns"][1]
        versions = [(turn["versions"][0][0], count)]
        turn |= {"tokens": [token] * count, "logprobs": [-0.5] * count, "versions": versions}
        turn |= values

    return change


def _logprobs(*values: float) -> Change:
    return _policy(len(values), logprobs=list(values))


def _versions(*versions: tuple[int, int, int]) -> Change:
    count = sum(tokens for _, _, tokens in versions)
    named = [({"epoch": epoch, "step": step}, tokens) for epoch, step, tokens in versions]
    return _policy(count, versions=named)


def _array(name: str, values: TokenArray | FloatArray, **damage: Any) -> Change:
    plain = {"dtype": values.dtype, "length": len(values), "data": values.data, **damage}
    return _policy(len(values), **{name: plain})


_TOKENS, _LOGPROBS = TokenArray.pack([7, 7]), FloatArray.pack([-0.5, math.nan])


def _add_turns(plain: Plain) -> None:
    plain["turns"] += [{"role": "environment", "tokens": [1]}, plain["turns"][1]] * 2


FAULTS: dict[str, tuple[str, Change]] = {
    "nan logprob": ("logprobs", _logprobs(math.nan, math.nan, math.nan)),
    "one nan logprob": ("logprobs", _logprobs(-1.0, math.nan, -0.5)),
    "+inf logprob": ("logprobs", _logprobs(math.inf)),
    "-inf logprob": ("logprobs", _logprobs(-math.inf)),
    "inf and -inf logprobs": ("logprobs", _logprobs(math.inf, -math.inf)),
    "logprob 1e30": ("logprobs", _logprobs(1e30)),
    "logprob -1e30": ("logprobs", _logprobs(-1e30)),
    "positive logprob": ("logprobs", _logprobs(0.05)),
    "token out of the vocabulary": ("tokens", _policy(1, token=98)),
    "prompt token out of the vocabulary": ("tokens", _turn(0, tokens=[10**6])),
    "token 2^40": ("unreadable", _policy(1, token=2**40)),
    "negative token": ("unreadable", _policy(1, token=-5)),
    "negative token in an array": ("tokens", _array("tokens", TokenArray.pack([7, -5]))),
    "token of an array out of the vocabulary": ("tokens", _array("tokens", TokenArray.pack([98]))),
    "nan in an array": ("logprobs", _array("logprobs", _LOGPROBS)),
    "array longer than its bytes": ("unreadable", _array("tokens", _TOKENS, length=3)),
    "array with half a value": ("unreadable", _array("tokens", _TOKENS, data=b"abc")),
    "array of a negative length": ("unreadable", _array("tokens", _TOKENS, length=-1)),
    "array of an unknown type": ("unreadable", _array("tokens", _TOKENS, dtype="float64")),
    "array of 2^60 values": ("unreadable", _array("tokens", _TOKENS, length=2**60)),
    "prompt of no token": ("unreadable", _turn(0, tokens=[])),
    "shared prompt of sample 0": ("unreadable", _set(shares_prompt=True, sample=0)),
    "inf reward": ("reward", _set(reward=math.inf)),
    "nan reward": ("reward", _set(reward=math.nan)),
    "reward 1e38": ("reward", _set(reward=1e38)),
    "reward 1e300": ("reward", _set(reward=1e300)),
    "reward -1e300": ("reward", _set(reward=-1e300)),
    "nan reward part": ("reward-parts", _parts(score=math.nan)),
    "reward part 1e300": ("reward-parts", _parts(score=1e300)),
    "many reward parts": ("reward-parts", _parts(**{f"part {at}": 0.0 for at in range(257)})),
    "long name of a reward part": ("reward-parts", _parts(**{"x" * 300: 0.0})),
    "empty policy turn": ("length", _turn(1, tokens=[], logprobs=[], versions=[])),
    "answer of 5,000 tokens": ("length", _policy(5000)),
    "prompt of 5,000 tokens": ("length", _turn(0, tokens=[5] * 5000)),
    "three turns": ("length", _add_turns),
    "negative count of a version": ("versions", _versions((1, 0, -1), (1, 0, 2))),
    "version of a prompt": ("versions", _turn(0, versions=[(STEP_0, 1), (STEP_0, -1)])),
    "version of no token": (
        "versions",
        lambda plain: plain["turns"].append(
            {"role": "policy", "tokens": [], "versions": [(STEP_0, 0)]}
        ),
    ),
    "version of an epoch to come": ("versions", _versions((9, 0, 1))),
    "fewer logprobs than tokens": ("unreadable", _policy(2, logprobs=[-0.5])),
    "fewer versions than tokens": (
        "unreadable",
        _policy(2, versions=[(STEP_0, 1)]),
    ),
    "no turn of the policy": ("unreadable", lambda plain: plain["turns"].pop()),
    "unknown role": ("unreadable", _turn(1, role="system")),
    "sample beyond its group": ("unreadable", _set(sample=2)),
    "set of questions with a name of no metric": ("unreadable", _set(question_set="a/b")),
    "unknown set of questions": ("request", _set(question_set="b")),
    "another number of samples": ("request", _set(samples=3)),
    "attempt that was not made": ("request", _set(attempt=8)),
}
"""Fault that is found, and the change that makes a sound experience malformed, by kind.

The first two dozen are the kinds of one batch with a bad answer that were seen to end a trainer, to
give it weights that are not finite, or to be trained on.
"""


def malformed(kind: str, experience: Experience) -> bytes:
    """Return the payload of an experience that was made malformed."""
    plain = as_lists(experience)
    FAULTS[kind][1](plain)
    return msgspec.msgpack.encode(plain)

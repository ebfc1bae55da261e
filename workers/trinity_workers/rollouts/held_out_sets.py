"""Sets of held-out questions, as a run's configuration names them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence

from trinity_schemas import Sampling

from ..config.train_config import TrainConfig
from ..evaluation.settings import EvaluationSet
from ..tasks import Question, Task
from ..tasks.errors import NoQuestions
from ..tasks.question_set import encode_content
from ..tasks.sources import QuestionOptions, read_questions

logger = logging.getLogger(__name__)


class HeldOutSet:
    """Questions of a set in the place of a task: their order is that of the list.

    Args:
        name: Name of the set.
        settings: Its settings.
        questions: Its questions.
        sampling: Settings of sampling, with a seed that is not that of training.
    """

    def __init__(
        self, name: str, settings: EvaluationSet, questions: Sequence[Question], sampling: Sampling
    ) -> None:
        self.name = name
        self.settings = settings
        self.questions = questions
        self.sampling = sampling
        # Of the content alone, not of the name: trainer and explorers compare what is asked.
        self.fingerprint = f"sha256:{hashlib.sha256(encode_content(questions)).hexdigest()}"

    def question(self, ordinal: int) -> Question:
        """Return one of the questions."""
        return self.questions[ordinal]

    def held_out(self, count: int) -> list[Question]:
        """Return the first of the questions."""
        return list(self.questions[:count])


def held_out_sets(config: TrainConfig, task: Task) -> list[HeldOutSet]:
    """Return the sets of a run, without those of a task that holds no question out.

    Raises:
        TaskError: A source of questions cannot be read, or is empty.
    """
    sets = []
    for name, settings in config.evaluation.sets.items():
        if settings.questions is None:
            questions: Sequence[Question] = task.held_out(settings.count)
        else:
            questions = read_own_questions(config, name, settings.questions)[: settings.count]
        if questions:
            sets.append(HeldOutSet(name, settings, questions, _sampling(config, name, settings)))
        else:
            logger.warning(
                "evaluation.sets.%s is left out: %s holds no question out", name, task.name
            )
    return sets


def read_own_questions(config: TrainConfig, name: str, source: str) -> Sequence[Question]:
    """Return the questions of a set that has a source of its own.

    Raises:
        TaskError: The source cannot be read, or is empty.
    """
    own = config.task
    options = QuestionOptions.of(own.options if own.has_questions else None)
    questions = read_questions(source, options, prompt=own.prompt, answer=own.answer)
    if not questions:
        raise NoQuestions(source, "set", f"evaluation.sets.{name}.questions")
    return questions


def _sampling(config: TrainConfig, name: str, settings: EvaluationSet) -> Sampling:
    # Not the run's seed: ordinals begin at 0 in each set, and random numbers would repeat.
    digest = hashlib.sha256(f"{name}:{config.seed}".encode()).digest()
    return Sampling(
        max_new_tokens=settings.max_new_tokens or config.rollouts.max_new_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        repetition_penalty=settings.repetition_penalty,
        stop=config.rollouts.stop,
        # 56 bits: a request's seed is at most 2**62.
        seed=int.from_bytes(digest[:7], "big"),
    )

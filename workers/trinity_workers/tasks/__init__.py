"""Tasks: what the policy is asked, found by name, and how its answers are judged."""

from .base import Answer, Message, Question, RewardFunction, Task, TaskError
from .loading import absolute, is_built_in, load_reward, load_task
from .objects import load_object
from .question_set import QuestionSet
from .spell_backward import SpellBackward
from .splits import Split, split_of

__all__ = [
    "Answer",
    "Message",
    "Question",
    "QuestionSet",
    "RewardFunction",
    "SpellBackward",
    "Split",
    "Task",
    "TaskError",
    "absolute",
    "is_built_in",
    "load_object",
    "load_reward",
    "load_task",
    "split_of",
]

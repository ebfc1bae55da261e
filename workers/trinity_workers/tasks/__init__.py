"""Tasks: what the policy is asked, found by name, and how its answers are judged."""

from .base import Answer, Environment, Message, Question, RewardFunction, Task, TaskError
from .loading import load_reward, load_task
from .objects import load_object
from .question_set import QuestionSet
from .spell_backward import SpellBackward
from .splits import Split, split_of

__all__ = [
    "Answer",
    "Environment",
    "Message",
    "Question",
    "QuestionSet",
    "RewardFunction",
    "SpellBackward",
    "Split",
    "Task",
    "TaskError",
    "load_object",
    "load_reward",
    "load_task",
    "split_of",
]

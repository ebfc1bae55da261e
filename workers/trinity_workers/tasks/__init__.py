"""Tasks: what the policy is asked, found by name, and how its answers are judged."""

from .base import Answer, Message, Question, RewardFunction, Task
from .complex_sums import ComplexSums
from .drawn_task import DrawnTask
from .errors import TaskError
from .loading import absolute, built_in_task, is_built_in, load_reward, load_task
from .mixed_questions import MixedQuestions, WeightedMix
from .objects import load_object
from .question_set import QuestionSet
from .settings import TrainingSet
from .sort_digits import SortDigits
from .spell_backward import SpellBackward
from .splits import Split, split_of

__all__ = [
    "Answer",
    "ComplexSums",
    "DrawnTask",
    "Message",
    "MixedQuestions",
    "Question",
    "QuestionSet",
    "RewardFunction",
    "SortDigits",
    "SpellBackward",
    "Split",
    "Task",
    "TaskError",
    "TrainingSet",
    "WeightedMix",
    "absolute",
    "built_in_task",
    "is_built_in",
    "load_object",
    "load_reward",
    "load_task",
    "split_of",
]

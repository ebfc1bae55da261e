"""Section `model`: the policy that a run starts from."""

from __future__ import annotations

from ...learning.lora_settings import LoraConfig
from ...section import Section
from ..types import DtypeName


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy that the run starts from."""

    path: str | None = None
    """Hugging Face folder of the policy. Null makes a small policy, and warms it up on the
    built-in task that the run has."""
    dtype: DtypeName = "float32"
    """Data type in which the policy computes while it is trained. The optimizer works on float32
    copies of the parameters."""
    lora: LoraConfig = LoraConfig()

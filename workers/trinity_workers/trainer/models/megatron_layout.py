"""Layout of a trainer's models on Megatron, as the configuration names it."""

from __future__ import annotations

from ...config.sections.trainer import TrainerConfig
from ...engines.megatron import ParallelLayout


def parallel_layout(trainer: TrainerConfig) -> ParallelLayout:
    """Return the layout; by default the ranks of a stage share tensors, or else the experts."""
    share = 1 if trainer.expert_parallel > 1 else trainer.ranks // trainer.pipeline_parallel
    return ParallelLayout(
        tensor=trainer.tensor_parallel or max(1, share),
        pipeline=trainer.pipeline_parallel,
        virtual=trainer.virtual_pipeline,
        expert=trainer.expert_parallel,
    )

"""Distribution of a model over ranks, and megatron-core's process groups for it."""

from __future__ import annotations

import importlib.util
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch.distributed as dist
from msgspec import Struct

from trinity_events.errors import TrinityError

from .cpu import adapted, seed_generators

TIMEOUT = timedelta(minutes=30)
"""Maximum time that ranks wait for each other by default, as in megatron-core."""
_rollout_groups: list[weakref.ref[dist.ProcessGroup]] = []
"""Groups of rollout layouts; weak, as the default group's end without :func:`leave` ends them."""


class LayoutRefused(TrinityError):
    """The model cannot be distributed so, or not on this machine.

    Attributes:
        fault: ``sizes`` if one is too small, ``ranks`` and ``experts`` if their number is no
            multiple, ``virtual`` without a pipeline. ``tensor`` and ``mixture`` are layouts that
            need sequence parallelism, ``sequence`` is that without tensor-parallel ranks.
            ``rollout`` if ranks that generate would share the tensors of experts. ``other`` if this
            process has another layout, ``parts`` if the model cannot be divided, ``no experts`` if
            it has none.
        tensor: Tensor-parallel ranks.
        pipeline: Ranks of the pipeline.
        context: Context-parallel ranks.
        expert: Expert-parallel ranks.
        ranks: Number of all ranks, or of those of a pipeline stage.
        what: Parts of the model that cannot be divided.
        count: Their number.
        parts: Number of ranks or stages to divide them into.
        folder: Folder of the model.
    """

    fault: Literal[
        "sizes",
        "ranks",
        "virtual",
        "experts",
        "tensor",
        "mixture",
        "sequence",
        "rollout",
        "other",
        "parts",
        "no experts",
    ]
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    ranks: int = 0
    what: str = ""
    count: int = 0
    parts: int = 0
    folder: Path | None = None
    texts: ClassVar = {
        "sizes": "sizes are 1 or more, and virtual pipeline stages 2 or more or left out",
        "ranks": "{ranks} ranks cannot hold replicas of {_model_ranks} ranks each (tensor {tensor} "
        "x pipeline {pipeline} x context {context}): take a multiple of that, or smaller sizes",
        "virtual": "virtual pipeline stages need a pipeline of two ranks or more",
        "experts": "experts cannot be divided over {expert} ranks: the {ranks} of a pipeline stage "
        "are no multiple of tensor {tensor} x expert {expert}",
        "tensor": "megatron-core spreads experts and tensors together with sequence parallelism "
        "alone: set sequence_parallel, or leave tensor or expert at 1",
        "mixture": "megatron-core spreads the tensors of a mixture of experts with sequence "
        "parallelism alone: set sequence_parallel, or leave tensor at 1",
        "sequence": "sequence parallelism divides sequences over tensor-parallel ranks, and there "
        "is one: set tensor 2 or more, or leave sequence_parallel out",
        "rollout": "ranks that generate cannot share the tensors of a mixture of experts "
        "({tensor} of them): set trainer.rollout_tensor_parallel 1, or leave it out",
        "other": "this process trains a model of another layout: call leave() first, or take its "
        "layout",
        "parts": "the model's {count} {what} cannot be divided into {parts} parts",
        "no experts": "trainer.expert_parallel is {expert}, and the model in {folder} has no "
        "experts: leave it out, or take a mixture of experts",
    }

    @property
    def _model_ranks(self) -> int:
        return self.tensor * self.pipeline * self.context


class ParallelLayout(Struct, frozen=True, kw_only=True):
    """Sizes of the parallel groups; the remaining ranks are data-parallel replicas."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    """Chunks of the model per pipeline rank, if more than one."""
    expert: int = 1
    context: int = 1
    """Ranks that share each sequence."""
    sequence_parallel: bool = False
    """If True, tensor-parallel ranks share each sequence where they do not share tensors."""

    @property
    def model_ranks(self) -> int:
        """Number of ranks of one replica."""
        return self.tensor * self.pipeline * self.context

    def check(self, world_size: int) -> None:
        """Raise LayoutRefused if ``world_size`` ranks do not fit the layout."""
        sizes = (self.tensor, self.pipeline, self.virtual or 2, self.expert, self.context)
        if min(sizes[:2] + sizes[3:]) < 1 or sizes[2] < 2:
            raise LayoutRefused("sizes")
        if world_size % self.model_ranks:
            raise LayoutRefused(
                "ranks",
                tensor=self.tensor,
                pipeline=self.pipeline,
                context=self.context,
                ranks=world_size,
            )
        if self.virtual and self.pipeline < 2:
            raise LayoutRefused("virtual")
        if (world_size // self.pipeline) % (self.tensor * self.expert):
            raise LayoutRefused(
                "experts", tensor=self.tensor, expert=self.expert, ranks=world_size // self.pipeline
            )
        if self.sequence_parallel and self.tensor == 1:
            raise LayoutRefused("sequence")
        if self.expert > 1 and self.tensor > 1 and not self.sequence_parallel:
            raise LayoutRefused("tensor", tensor=self.tensor, expert=self.expert)


def has_transformer_engine() -> bool:
    """Return True if Transformer Engine is installed; it provides fused layers."""
    return importlib.util.find_spec("transformer_engine") is not None


def join(layout: ParallelLayout, seed: int, timeout: timedelta = TIMEOUT) -> None:
    """Make megatron-core's groups from the default process group's ranks. Collective.

    All models that are trained in one process share them: a second model of the same layout changes
    nothing. Models that only generate may have a layout of their own: :func:`rollout_groups`.

    Args:
        layout: Sizes of the groups.
        seed: Seed of all random draws.
        timeout: Maximum time that ranks wait for each other; it is not that of the default group.

    Raises:
        LayoutRefused: if the layout does not fit, or another one is in use.
    """
    from megatron.core import parallel_state

    # Also before the comparison with existing groups, which record no sequence parallelism.
    layout.check(dist.get_world_size())
    if parallel_state.model_parallel_is_initialized():
        if _joined(layout):
            return
        raise LayoutRefused("other")
    with adapted():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            virtual_pipeline_model_parallel_size=layout.virtual,
            context_parallel_size=layout.context,
            expert_model_parallel_size=layout.expert,
            distributed_timeout_minutes=timeout / timedelta(minutes=1),
        )
        seed_generators(seed)


def rollout_groups(tensor: int, timeout: timedelta) -> Any:
    """Return megatron-core's collection of groups for a second layout in this process. Collective.

    Each ``tensor`` consecutive ranks hold one replica. There is no pipeline, and experts are not
    spread. Of the groups, those are there that a model needs to generate.

    Args:
        tensor: Tensor-parallel ranks of a replica.
        timeout: Maximum time that ranks wait for each other.

    Raises:
        LayoutRefused: if the ranks cannot hold such replicas.
    """
    from megatron.core.process_groups_config import ProcessGroupCollection

    ParallelLayout(tensor=tensor).check(dist.get_world_size())
    # megatron-core asks for a group of each kind, also where it has one rank alone.
    shared, alone = (_own_group(size, timeout) for size in (tensor, 1))
    return ProcessGroupCollection(
        **dict.fromkeys(("tp", "mp", "tp_cp"), shared),
        **dict.fromkeys(("pp", "cp", "ep", "expt_tp", "tp_ep", "embd", "pos_embd"), alone),
        **dict.fromkeys(("expt_dp", "tp_dp_cp"), dist.group.WORLD),
    )


def _own_group(size: int, timeout: timedelta) -> dist.ProcessGroup:
    """Return this rank's group of so many consecutive ranks. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    # new_group() is collective over all ranks: each makes every group, in the same order.
    groups = [
        new_rollout_group(timeout, list(range(first, first + size)))
        for first in range(0, world, size)
    ]
    return groups[rank // size]


def new_rollout_group(timeout: timedelta, ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Return a group of ranks, all by default, which :func:`leave` destroys. Collective."""
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=timeout)
    if ranks is None or dist.get_rank() in ranks:  # the others are given a number
        _rollout_groups.append(weakref.ref(group))
    return group


def leave() -> None:
    """Destroy the groups of training and rollout layouts, so that another one can be joined.

    Their connections and threads end with the last reference to the engines that use them.
    """
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    groups = [
        *(parallel_state._global_process_group_list or ()),
        *(reference() for reference in _rollout_groups),
    ]
    _rollout_groups.clear()
    parallel_state.destroy_model_parallel()
    # It leaves these as they are, and of all groups it destroys only those for checkpoints.
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
    for group in groups:
        # None is the default group, or one that is gone. After the default group has been
        # destroyed, torch has none of these.
        if group is not None and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    # Their caches keep the last 32 embeddings, each of which has a group.
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()


def _joined(layout: ParallelLayout) -> bool:
    from megatron.core import parallel_state as state

    return bool(
        layout.tensor == state.get_tensor_model_parallel_world_size()
        and layout.pipeline == state.get_pipeline_model_parallel_world_size()
        and layout.virtual == state.get_virtual_pipeline_model_parallel_world_size()
        and layout.context == state.get_context_parallel_world_size()
        and layout.expert == state.get_expert_model_parallel_world_size()
    )

"""Base of workers whose ranks are in a layout of Megatron."""

from __future__ import annotations

from .dispatch import Dispatch
from .ranks import DistGlobalInfo, DistRankInfo
from .registered import register
from .worker import Worker


class MegatronWorker(Worker):
    """Report of a worker on Megatron about its layout, by which a caller deals data out to it.

    Its methods are called once the rank has joined its layout.
    """

    def rank_info(self) -> DistRankInfo:
        """Return the place of this rank, by veRL's name for the method."""
        return self.get_megatron_rank_info()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_global_info(self) -> DistGlobalInfo:
        """Return the sizes of tensor, data, pipeline and context parallel groups."""
        from megatron.core import parallel_state as state

        return DistGlobalInfo(
            tp_size=state.get_tensor_model_parallel_world_size(),
            dp_size=state.get_data_parallel_world_size(),
            pp_size=state.get_pipeline_model_parallel_world_size(),
            cp_size=state.get_context_parallel_world_size(),
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_megatron_rank_info(self) -> DistRankInfo:
        """Return the place of this rank in each dimension of the layout."""
        from megatron.core import parallel_state as state

        return DistRankInfo(
            tp_rank=state.get_tensor_model_parallel_rank(),
            dp_rank=state.get_data_parallel_rank(),
            pp_rank=state.get_pipeline_model_parallel_rank(),
            cp_rank=state.get_context_parallel_rank(),
        )

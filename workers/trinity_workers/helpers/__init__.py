"""Engine helpers, with the names and signatures that the mission prescribes."""

from .fsdp import ShardsRefused, fsdp_save_state_dict, fsdp_sync_weight_nccl, fsdp_upload_state_dict
from .huggingface import SaveTarget, save_huggingface
from .megatron import (
    megatron_save_state_dict,
    megatron_sync_weight_nccl,
    megatron_upload_state_dict,
)
from .publishing import (
    PublishFull,
    PublishShards,
    PublishSnapshot,
    PublishStrategy,
    strategy_for,
)

__all__ = [
    "PublishFull",
    "PublishShards",
    "PublishSnapshot",
    "PublishStrategy",
    "SaveTarget",
    "ShardsRefused",
    "fsdp_save_state_dict",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
    "megatron_save_state_dict",
    "megatron_sync_weight_nccl",
    "megatron_upload_state_dict",
    "save_huggingface",
    "strategy_for",
]

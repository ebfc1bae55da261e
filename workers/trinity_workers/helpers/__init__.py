"""Engine helpers, with the names and signatures that the mission prescribes."""

from .fsdp import fsdp_save_state_dict, fsdp_sync_weight_nccl, fsdp_upload_state_dict
from .megatron import (
    megatron_save_state_dict,
    megatron_sync_weight_nccl,
    megatron_upload_state_dict,
)

__all__ = [
    "fsdp_save_state_dict",
    "fsdp_sync_weight_nccl",
    "fsdp_upload_state_dict",
    "megatron_save_state_dict",
    "megatron_sync_weight_nccl",
    "megatron_upload_state_dict",
]

"""The seeds' engine helpers, by their names and signatures."""

from .fsdp import fsdp_save_state_dict, fsdp_upload_state_dict

__all__ = ["fsdp_save_state_dict", "fsdp_upload_state_dict"]

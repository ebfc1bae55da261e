"""A torch FSDP2 engine around a Hugging Face causal language model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from ..collectives import together
from .buffers import saved_buffers
from .state_files import copied, make_folder, read_state, sync_tree, write_json, write_state

# Below this size, one all-gather of everything is faster than one for each layer.
_SHARD_LAYERS_FROM = 10_000_000


class FSDPEngine:
    """Holds the sharded model and its optimizer on one rank.

    The default process group must be initialised. Parameters stay in float32.

    Args:
        model_folder: Hugging Face folder to start from.
        device: Where this rank computes.
        learning_rate: Of AdamW, after the ramp.
        ramp_steps: Optimizer steps over which the learning rate rises to it.
        gradient_norm: Gradients are clipped to this global norm.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        device: torch.device,
        learning_rate: float,
        ramp_steps: int = 0,
        gradient_norm: float = 1.0,
    ) -> None:
        from ..learning.policy import load_policy

        model, self.tokenizer = load_policy(model_folder)
        self.module: Any = _shard(model, device)
        self._gradient_norm = gradient_norm
        self.optimizer = torch.optim.AdamW(
            self.module.parameters(), lr=learning_rate, betas=(0.9, 0.99)
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / max(1, ramp_steps))
        )

    def optimizer_step(self, loss: torch.Tensor) -> float:
        """Backward of a 0-dim loss, clip, and step; returns the gradient norm before clipping."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), self._gradient_norm)
        self.optimizer.step()
        self.scheduler.step()
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors by Hugging Face name, one gathered at a time. Collective.

        A tensor that is tied to another appears once, under its first name. Buffers that a state
        dict has come last.
        """
        for name, tensor in chain(self.module.named_parameters(), saved_buffers(self.module)):
            value = tensor.detach()
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def training_state(self) -> dict[str, Any]:
        """This rank's shard of optimizer, scheduler and random generator, copied to the CPU."""
        return {
            "optimizer": copied(self.optimizer.state_dict()),
            "scheduler": copied(self.scheduler.state_dict()),
            "rng": torch.get_rng_state(),
        }

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Write model and training state below ``local_path``; on disk on return. Collective."""
        del hdfs_path, global_step, max_ckpt_to_keep
        folder = Path(local_path)
        with together():
            write_state(folder / shard_name("model"), copied(self.module.state_dict()))
            write_state(folder / shard_name("optim"), self.training_state())
            if dist.get_rank() == 0:
                write_description(folder, self.module, self.tokenizer)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load what :meth:`save_checkpoint` wrote with the same number of ranks. Collective.

        Raises:
            FileNotFoundError: when this rank's shard is not there.
            PeerFailed: when another rank could not read its own; nothing is loaded then.
        """
        del hdfs_path, del_local_after_load
        folder = Path(local_path)
        with together():
            model = read_state(folder / shard_name("model"))
            training = read_state(folder / shard_name("optim"))
        self.module.load_state_dict(model)
        self.optimizer.load_state_dict(training["optimizer"])
        self.scheduler.load_state_dict(training["scheduler"])
        torch.set_rng_state(training["rng"])


def shard_name(what: str) -> str:
    """File name of this rank's shard, as veRL names them."""
    return f"{what}_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"


def write_description(folder: Path, module: Any, tokenizer: Any) -> None:
    """Write what a merger of the shards reads beside them; on disk on return. For one rank.

    ``fsdp_config.json`` says by which FSDP, and over how many ranks, the model is sharded, as
    veRL's merger asks. ``huggingface`` holds configuration, generation defaults and tokenizer.
    """
    is_fsdp1 = bool(FullyShardedDataParallel.fsdp_modules(module))
    write_json(
        folder / "fsdp_config.json",
        {"FSDP_version": 1 if is_fsdp1 else 2, "world_size": dist.get_world_size()},
    )
    huggingface = folder / "huggingface"
    make_folder(huggingface)
    module.config.save_pretrained(huggingface)
    generation = getattr(module, "generation_config", None)
    if generation is not None:
        # Not save_pretrained(), which refuses defaults that released models have.
        generation.to_json_file(huggingface / "generation_config.json")
    if tokenizer is not None:
        tokenizer.save_pretrained(huggingface)
    sync_tree(huggingface)


def _shard(model: Any, device: torch.device) -> Any:
    model.to(device)
    # veRL's merger asks for the name.
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    if sum(parameter.numel() for parameter in model.parameters()) >= _SHARD_LAYERS_FROM:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

"""Torch FSDP2 engine around a Hugging Face causal language model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trinity_events.checkpoints.layout import MODEL_FOLDER

from ..learning.adapters import adapter_config, adapter_tree, without_adapters
from ..learning.finite import backward_gradient
from ..learning.packing import check_isolation
from ..storage.durable_files import make_folder, sync_tree
from ..storage.huggingface_files import read_user_files, write_user_files
from .adamw import AdamWOptions
from .adapter_folder import BaseModel, check_adapters, write_adapter_description
from .base import trained_module
from .buffers import saved_buffers
from .fsdp_context import check_shared
from .fsdp_options import FSDPOptions
from .fsdp_tensor import divide_layers
from .learning_rate import LearningRate, as_learning_rate
from .model_memory import ALL, OffloadedModel, holding, optimizer_tensors
from .offload import FrozenOffload, Offload
from .random_states import random_states, set_random_states
from .reshard import (
    has_optimizer_layout,
    resharded_optimizer,
    saved_world,
    shard_file,
    states_of_shards,
)
from .sharded import ShardedEngine, reshard, shard_name, write_huggingface
from .state_files import copied, read_state


class FSDPEngine(ShardedEngine):
    """Sharded model and its optimizer on one rank.

    The default process group must be initialised.

    Args:
        model_folder: Hugging Face folder to start from.
        device: Device of this rank.
        learning_rate: Learning rate of AdamW; a number is constant. None makes a model without an
            optimizer, which loads the weights of checkpoints and saves none.
        adamw: Options of the optimizer, and the norm to which gradients are clipped.
        dtype: Data type in which the model computes and is published. Parameters and optimizer
            are float32: in bfloat16, an update of less than 0.4% of a parameter would be lost.
        load: Returns model and tokenizer of the folder in that data type; by default the policy's.
            Of a model with adapters these alone are trained, published and saved.
        options: Recomputation, offload to the host's memory, and packing.
        offload: Parts that leave the device while no method needs them. Hold them with
            :meth:`resident` over several calls, and where the module itself computes.

    Raises:
        RecomputeRefused: if the model cannot compute its activations again.
        PackingRefused: if the model does not keep packed samples apart.
        ContextRefused: if ranks cannot share the model's sequences.
        TensorParallelRefused: if they cannot share its layers.
    """

    def __init__(
        self,
        model_folder: Path,
        *,
        device: torch.device,
        learning_rate: float | LearningRate | None,
        adamw: AdamWOptions = AdamWOptions(),  # noqa: B008  # frozen
        dtype: str = "float32",
        load: Callable[[Path, str], tuple[Any, Any]] | None = None,
        options: FSDPOptions = FSDPOptions(),  # noqa: B008  # frozen
        offload: Offload = Offload(),  # noqa: B008  # frozen
    ) -> None:
        from ..learning.policy import load_policy

        loaded: tuple[Any, Any] = (load or load_policy)(model_folder, dtype)
        model, self.tokenizer = loaded
        self.user_files = read_user_files(model_folder) if dist.get_rank() == 0 else {}
        """Tokenizer and generation defaults of the folder, on the rank that writes them."""
        self._device = device
        self._tensor_ranks = 1 if options.tensor is None else options.tensor.mesh.shape[1]
        trained = adapter_tree(model) or model
        # Before the shards become float32, below.
        self.published_dtypes = {
            name: parameter.dtype for name, parameter in trained.named_parameters()
        }
        # Recomputation spares memory of a backward pass, and here is none.
        if learning_rate is None:
            model.requires_grad_(False)
            options = replace(options, recompute=False)
        options.prepare(model)
        module = _shard(model, device, getattr(torch, dtype), options)
        self.adapters = adapter_tree(module)
        self._base: BaseModel | None = None
        if self.adapters is not None and dist.get_rank() == 0:
            # On the rank that writes and checks it alone, as it reads all of the base.
            self._base = BaseModel.of(model_folder)
        # Other models than the policy have its layers.
        if load is None or self.adapters is not None:
            if options.packing:
                check_isolation(module, device)
            if options.context is not None:
                check_shared(module, options.context.group, device)
            reshard(module)  # the optimizer is of the shards
        self._sharded_by_layers = _is_large(model, options)
        rate = optimizer = scheduler = None
        if learning_rate is not None:
            rate = as_learning_rate(learning_rate)
            optimizer = torch.optim.AdamW(
                (module if self.adapters is None else self.adapters).parameters(),
                lr=rate.highest,
                betas=adamw.betas,
                eps=adamw.epsilon,
                weight_decay=adamw.weight_decay,
                # One kernel for all parameters; the plain loop costs a launch for each operation.
                fused=True,
            )
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate.share)
        super().__init__(module, optimizer, scheduler, adamw=adamw, learning_rate=rate)
        self._memory = OffloadedModel(
            offload,
            lambda: _settled_parameters(self.module),
            self._drop_gradients,
            lambda: () if self.optimizer is None else optimizer_tensors(self.optimizer),
        )
        self._memory.guard(self.module)

    def without_adapters(self) -> AbstractContextManager[None]:
        """Return a block without gradients in which the model computes as its base does."""
        return without_adapters(self.module)

    def _drop_gradients(self) -> tuple[torch.Tensor, ...]:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        return ()

    @holding(*ALL)
    def optimizer_step(self, loss: torch.Tensor) -> float:
        """Run backward of a 0-dim loss, clip and step; return the gradient norm before the clip.

        The step is skipped as in :meth:`apply_gradients`.
        """
        self.accumulate(loss, first=True, last=True)
        return self.apply_gradients()

    def accumulate(self, loss: torch.Tensor, *, first: bool, last: bool) -> None:
        """Add the gradients of one micro-batch's loss to those of the ones before. Collective.

        Args:
            loss: Its part of the loss, 0-dimensional.
            first: True for the first micro-batch of an optimizer step.
            last: True for the last one. A model that is sharded as one unit reduces its gradients
                then alone. One that is sharded by layers always does, so that no rank ever holds
                all gradients in full.

        Raises:
            MemoryAway: outside of a block of :meth:`resident`, if the parameters leave the device.
        """
        self._memory.check_resident()
        if first:
            self.optimizer.zero_grad(set_to_none=True)
        self.module.set_requires_gradient_sync(last or self._sharded_by_layers)
        torch.autograd.backward(loss, backward_gradient(loss))

    @holding(*ALL)
    def apply_gradients(self) -> float:
        """Clip the gradients and take the step; return their norm before the clip. Collective.

        If the norm is not finite, on all ranks alike, the step is skipped: parameters, optimizer
        and schedule stay as they are, and the gradients are dropped.
        """
        parameters = list(trained_module(self).parameters())
        norm: Any = get_total_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None]
        )
        norm = norm.full_tensor()  # once: clip_grad_norm_() would reduce it for itself
        # The norm is of all ranks, so that they skip alike (.learning.finite, 1 and 2).
        if not math.isfinite(float(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            return float(norm)
        clip_grads_with_norm_(parameters, self._adamw.max_grad_norm, norm)
        self.optimizer.step()
        self.scheduler.step()
        return float(norm)

    def get_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield full tensors by Hugging Face name, one gathered at a time. Collective.

        Adapters have PEFT's names, and the rest of their model is left out. A tied tensor appears
        once, under its first name. Buffers of the state dict come last.
        """
        return self._full_tensors(self.published_dtypes)

    def master_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors as :meth:`get_per_tensor_param`, in the dtype of the optimizer."""
        return self._full_tensors({})

    def _full_tensors(self, dtypes: dict[str, torch.dtype]) -> Iterator[tuple[str, torch.Tensor]]:
        copy = not self._memory.is_resident()  # else a tensor of one rank alone may be a view
        with self.resident():
            # A forward pass without a backward leaves parameters gathered, in the dtype in which
            # they compute.
            reshard(self.module)
            module = trained_module(self)
            for name, tensor in chain(module.named_parameters(), saved_buffers(module)):
                value = tensor.detach().to(dtypes.get(name, tensor.dtype))
                full = value.full_tensor() if isinstance(value, DTensor) else value
                yield name, full.clone() if copy else full

    def write_description(self, folder: Path) -> None:
        """Write configuration, generation defaults and tokenizer; durable on return. On rank 0.

        Beside adapters there are their own configuration, the identity of their base, and the
        tokenizer: transformers takes a folder with the model's configuration for a whole model.
        """
        if self._base is None:
            write_huggingface(folder, self.module, self.tokenizer, self.user_files)
            return
        make_folder(folder)
        write_user_files(folder, self.user_files)
        sync_tree(folder)
        write_adapter_description(folder, adapter_config(self.module), self._base)

    @holding("optimizer")
    def training_files(self, folder: Path) -> dict[Path, dict[str, Any]]:
        """Return the content of this rank's file of the training state, copied to the CPU."""
        state = {
            "optimizer": copied(self.optimizer.state_dict()),
            "scheduler": copied(self.scheduler.state_dict()),
            "random": random_states(self._device),
        }
        return {folder / shard_name("optim"): state}

    def _read_shards(self, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
        if dist.get_rank() == 0:
            config = None if self.adapters is None else adapter_config(self.module)
            check_adapters(folder / MODEL_FOLDER[-1], config, self._base)
        world = saved_world(folder)
        return self._read_model(folder, world), self._read_training(folder, world)

    def _read_training(self, folder: Path, world: int) -> dict[str, Any]:
        if self.optimizer is None:
            return {"scheduler": _read_schedule(folder, world)}
        training: dict[str, Any]
        if world == dist.get_world_size():
            training = read_state(folder / shard_name("optim"))
            if has_optimizer_layout(training["optimizer"], self.optimizer):
                return training
        states = states_of_shards(folder, "optim", world)
        training = {"scheduler": states[0]["scheduler"]}
        training["optimizer"] = resharded_optimizer(
            [state["optimizer"] for state in states], self.optimizer
        )
        # Ranks that share layers drop the same activations: they continue the first one's states.
        rank = dist.get_rank() // self._tensor_ranks * self._tensor_ranks
        # More ranks than before: the new ones keep what they were seeded with.
        if rank < world:
            training["random"] = states[rank]["random"]
        return training

    def _set_random_states(self, states: dict[str, Any]) -> None:
        set_random_states(states, self._device)


def _read_schedule(folder: Path, world: int) -> dict[str, Any]:
    """Return the schedule of a checkpoint of FSDPEngine, or of veRL, which has a file for it."""
    extra = shard_file(folder, "extra_state", world, 0)
    name, path = "scheduler", shard_file(folder, "optim", world, 0)
    if extra.is_file():
        name, path = "lr_scheduler", extra
    schedule: dict[str, Any] = read_state(path, mapped=True)[name]
    return schedule


def frozen_policy(
    folder: Path,
    *,
    device: torch.device,
    dtype: str = "float32",
    load: Callable[[Path, str], tuple[Any, Any]] | None = None,
    options: FSDPOptions = FSDPOptions(),  # noqa: B008  # frozen
    offload: FrozenOffload = FrozenOffload(),  # noqa: B008  # frozen
) -> Any:
    """Return the folder's policy without gradients, sharded as the engine's. Collective.

    ``load`` returns another model of the folder, and its tokenizer. If ``offload`` moves its
    parameters, its ``resident()`` is a block in which it can compute.
    """
    from ..learning.policy import load_policy

    model, _ = (load or load_policy)(folder, dtype)
    model.requires_grad_(False)
    # A model of another kind may have other layers than the policy, which was checked.
    replace(options, recompute=False, packing=options.packing and load is None).prepare(model)
    module = _shard(model, device, getattr(torch, dtype), options).eval()
    memory = OffloadedModel(offload, lambda: _settled_parameters(module))
    memory.guard(module)
    module.resident = memory.resident
    return module


def _settled_parameters(module: Any) -> Iterator[torch.Tensor]:
    """Yield the sharded parameters, after freeing what was gathered of them."""
    reshard(module)
    yield from module.parameters()


def _is_large(model: Any, options: FSDPOptions) -> bool:
    count: int = sum(parameter.numel() for parameter in model.parameters())
    return count >= options.shard_layers_from


def _shard(model: Any, device: torch.device, dtype: torch.dtype, options: FSDPOptions) -> Any:
    if not options.cpu_offload:  # else one layer at a time goes to the device
        model.to(device)
    adapted = adapter_tree(model) is not None
    for parameter in model.parameters():
        if parameter.requires_grad or not adapted:  # the base of adapters has no optimizer
            parameter.data = parameter.data.float()
    # Gradients are reduced in float32: a sum over many ranks in bfloat16 loses small ones.
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype is torch.float32 else dtype, reduce_dtype=torch.float32
    )
    away = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    offload = away if options.cpu_offload else OffloadPolicy()
    if options.tensor is None:
        # veRL's merger requires this name.
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    else:
        divide_layers(model, options.tensor)
        mesh = options.tensor.mesh["fsdp"]
    # Layers before the whole: FSDP2 leaves to the outer unit what no inner one has taken.
    if _is_large(model, options):
        layers = set(model._no_split_modules or ())
        # A list first, as fully_shard() changes the class of each module that it takes.
        for layer in [module for module in model.modules() if type(module).__name__ in layers]:
            fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)

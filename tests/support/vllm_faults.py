"""Faults that are planted in a worker of vLLM, in the way of the weights."""

import re
import time

import torch

from trinity_workers.rollout_engines.vllm.transfer import WorkerExtension

EXTENSION = "tests.support.vllm_faults.FaultyWorker"
BITS = {"sign": 31, "exponent": 30, "mantissa": 22, "last": 0}
"""Bits of a float32."""


class FaultyWorker(WorkerExtension):
    """A worker whose weight-transfer engine has a fault until the next one is planted."""

    def trinity_plant(self, fault):
        engine = self.weight_transfer_engine
        for name in ("tensors", "receive_weights", "repack_tied_head"):
            vars(engine).pop(name, None)
        kind, _, argument = (fault or "").partition(":")
        if kind == "no-transfer":
            engine.receive_weights = lambda info: engine.drop()
        elif kind == "hang":
            engine.receive_weights = lambda info: time.sleep(3600)
        elif kind == "stale-head":
            engine.repack_tied_head = lambda: None
        elif kind:
            real = engine.tensors
            engine.tensors = lambda version: changed(list(real(version)), kind, argument)


def changed(tensors, kind, argument):
    """The tensors of a version, with a fault."""
    named = dict(tensors)
    if kind == "flip":
        name, bit = argument.split(":")
        flipped = named[name].clone()
        flat = flipped.view(-1).view(torch.int32)
        mask = 1 << BITS[bit] if bit != "sign" else -(1 << BITS[bit])
        flat[len(flat) // 2] ^= mask
        return [(each, flipped if each == name else tensor) for each, tensor in tensors]
    if kind == "omit":
        return [(each, tensor) for each, tensor in tensors if not re.fullmatch(argument, each)]
    if kind == "twice":
        return [*tensors, (argument, named[argument])]
    if kind == "swap":
        first, second = argument.split(",")
        other = {first: named[second], second: named[first]}
        return [(each, other.get(each, tensor)) for each, tensor in tensors]
    if kind == "break":
        return broken(tensors[: int(argument)])
    assert kind == "truncate"
    return tensors[: -int(argument)]


def broken(tensors):
    yield from tensors
    raise OSError("planted: the transport broke")

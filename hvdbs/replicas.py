"""Digests of a replica, and the comparison over ranks at each stage boundary."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType

import torch
from torch import nn

from hvdbs.comm import AgreedError, Communicator
from hvdbs.schedule import Decision


def _bytes(tensor: torch.Tensor) -> bytes:
    # Cloned, because dimensions of size 1 may keep any stride (channels_last 1x1 kernels), which `view` does not take.
    flat = tensor.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()


def parameter_digest(model: nn.Module) -> str:
    """sha256 over the parameters' float32 bytes in name order."""
    total = hashlib.sha256()
    for _, parameter in sorted(model.named_parameters()):
        total.update(_bytes(parameter.float()))
    return total.hexdigest()


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """sha256 over parameters, buffers and optimizer state in their own dtypes: equal means bitwise equal replicas."""
    total = hashlib.sha256()
    for _, tensor in sorted(model.state_dict().items()):
        total.update(_bytes(tensor))
    for _, state in sorted(optimizer.state_dict()["state"].items()):
        for _, value in sorted(state.items()):
            total.update(_bytes(value) if isinstance(value, torch.Tensor) else repr(value).encode())
    return total.hexdigest()


def compare(
    comm: Communicator, decision: Decision, digest: str, factors: Mapping[str, bool] = MappingProxyType({})
) -> None:
    """Collective. Raises AgreedError naming the ranks whose decision or replica is not rank 0's, and both values.

    ``factors``: by layer, whether its gradient goes by factors; ranks that disagree would wait for each other.
    """
    said: dict[str, object] = {"decision": asdict(decision), "replica": digest}
    if factors:
        said["factors"] = dict(factors)
    mine = json.dumps(said).encode()
    reference = comm.broadcast_bytes(mine)
    differ = torch.tensor([float(mine != reference)], dtype=torch.float64)
    comm.start_sum(differ, "compare").wait()
    if differ.item() == 0:
        return
    everyone = comm.gather_bytes(mine)
    ranks: dict[bytes, list[str]] = {}
    for rank, value in enumerate(everyone):
        if value != reference:
            ranks.setdefault(value, []).append(str(rank))
    others = "; ".join(f"ranks {', '.join(who)} have {value.decode()}" for value, who in ranks.items())
    raise AgreedError(f"replicas differ at stage {decision.stage}: {others}; rank 0 has {reference.decode()}")

"""The networks whose communication is measured: those of hvdbs.model by name, and two with wide layers of our own."""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models import vgg11

from hvdbs.config import Config
from hvdbs.costs import CARRY_ITEM_BYTES, CARRY_SLOTS, Linear, ring_bytes
from hvdbs.factors import candidates, choices, eligible, sizes
from hvdbs.model import build_model


def _vgg11(classes: int) -> nn.Module:
    """VGG-11 (Simonyan and Zisserman, arXiv 1409.1556, configuration A) for images of 32 pixels, [B, 3, 32, 32].

    Its five poolings leave one pixel of 512 channels there, so the first of its 4,096-wide layers has 512 inputs and
    not 25,088; the rest is torchvision's: 28.1 million weights, two thirds of them in fully connected layers.
    """
    model = vgg11(weights=None, num_classes=classes)
    model.avgpool = nn.Identity()
    model.classifier[0] = nn.Linear(512, 4096)
    return model


def _fc(classes: int) -> nn.Module:
    """Two convolutions and three fully connected layers, [B, 3, 32, 32]: 6.4 million weights, 99 % in the latter."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, classes),
    )


_OWN = {"vgg11": _vgg11, "fc": _fc}


def build(config: Config, classes: int) -> nn.Module:
    """The network ``config.model.name`` in training mode, its weights drawn from the seed."""
    torch.manual_seed(config.seed)
    return _network(config, classes).train()


def _network(config: Config, classes: int) -> nn.Module:
    own = _OWN.get(config.model.name)
    return build_model(config.model, classes) if own is None else own(classes)


def factor_layers(config: Config, classes: int, global_batches: list[int], world_size: int) -> list[Linear]:
    """The layers that go by factors in some window of ``global_batches``, as a run of hvdbs finds them."""
    if config.communication.scheme == "dense":
        return []
    with torch.device("meta"):
        model = _network(config, classes)
    size = config.data.image_size
    return candidates(config, eligible(model, (3, size, size), torch.float32), global_batches, world_size)


def fc_share(model: nn.Module) -> float:
    """Of the trained weights, that in fully connected layers."""
    within = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    return within / sum(p.numel() for p in model.parameters())


def sent_bytes(model: nn.Module, config: Config, layers: list[Linear], global_batch: int, world_size: int) -> float:
    """What one rank sends in one update, by the formulas of hvdbs.costs: a ring for what is summed, factors beside."""
    chosen = [it for it in choices(config, layers, global_batch, world_size) if it.factors]
    size = sizes(config)
    summed = sum(p.numel() for p in model.parameters() if p.requires_grad) - sum(it.layer.weights for it in chosen)
    statistics = sum(b.numel() for b in model.buffers() if b.is_floating_point())
    carry = CARRY_ITEM_BYTES * (CARRY_SLOTS + statistics)
    return ring_bytes(summed * size.gradient + carry, world_size) + sum(it.factor_bytes for it in chosen)

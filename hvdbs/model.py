"""Models by name, and what the optimizer must know of their parameters."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hvdbs import surfaces
from hvdbs.config import Config, ModelConfig
from hvdbs.errors import HvdbsError, refusal, suggestion

SMALL = {"resnet8": 1, "resnet20": 3}  # blocks in each of three stages


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut (He et al., arXiv 1512.03385, section 4.2); option B where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """The ResNet of 6n + 2 layers for small images (He et al., section 4.2): [B, 3, H, W] to logits [B, K]."""

    def __init__(self, blocks: int, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        layers: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(blocks):
                layers.append(Block(inputs, outputs, stride=2 if stage > 0 and block == 0 else 1))
                inputs = outputs
        self.layers = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(inputs, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(F.relu(self.bn(self.conv(x))))
        logits: torch.Tensor = self.fc(self.dropout(x.mean((2, 3))))
        return logits


class LinearModel(nn.Module):
    """x [B, D] to x.w [B], without a bias; ``weight`` [1, D] is a matrix, so that it decays as those of layers do."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.reshape(1, -1))

    def point(self) -> torch.Tensor:
        """The point [D] of the loss surface where this model stands."""
        return self.weight.flatten()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = x @ self.point()
        return outputs


class NormalisedLinear(LinearModel):
    """x [B, D] to x.w / |w|: the loss depends on the direction of the weights alone, as behind a normalisation."""

    def point(self) -> torch.Tensor:
        point: torch.Tensor = super().point() / torch.linalg.vector_norm(self.weight)
        return point


def network(config: Config, classes: int | None) -> nn.Module:
    """The model of a run, in float32, on analytic data in float64; ``classes`` None is for data that has none."""
    if config.data.kind != "analytic":
        assert classes is not None
        return build_model(config.model, classes)
    normalised = config.model.name == "normalised_linear"
    weight = torch.tensor(surfaces.start(config.data.analytic, normalised).tolist(), dtype=torch.float64)
    return NormalisedLinear(weight) if normalised else LinearModel(weight)


def build_model(config: ModelConfig, classes: int) -> nn.Module:
    """The network ``config.name`` with ``classes`` outputs, initialised from torch's current generator.

    Raises HvdbsError for an unknown name, or an option that the network does not have.
    """
    if config.name in SMALL:
        model: nn.Module = SmallResNet(SMALL[config.name], config.width, classes, config.dropout)
        if config.zero_init_last_gamma:
            for block in model.modules():
                if isinstance(block, Block):
                    nn.init.zeros_(block.bn2.weight)
        return model
    if config.dropout:
        raise refusal("model.dropout", config.dropout, f"is read by {' and '.join(SMALL)} alone, not by {config.name}")
    import torchvision

    options: dict[str, Any] = {}
    if config.zero_init_last_gamma:
        if not config.name.startswith(("resnet", "resnext", "wide_resnet")):
            raise refusal("model.zero_init_last_gamma", True, f"needs residual blocks, which {config.name} has not")
        options["zero_init_residual"] = True
    if config.name in ("googlenet", "inception_v3"):
        options["init_weights"] = True  # their default, of which torchvision warns that it will not stay
    known = torchvision.models.list_models(module=torchvision.models)
    if config.name in known:
        found: nn.Module = torchvision.models.get_model(config.name, weights=None, num_classes=classes, **options)
        return found
    if importlib.util.find_spec("timm") is not None:
        import timm

        if config.name in timm.list_models():
            built: nn.Module = timm.create_model(config.name, pretrained=False, num_classes=classes)
            return built
        known = [*known, *timm.list_models()]
    raise HvdbsError(f"model.name: {config.name} is not known; {suggestion(config.name, [*SMALL, *known])}")


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: to matrices and kernels, not to biases and the scales and shifts of norms."""
    return parameter.ndim > 1 and not name.endswith(".bias")


def group_of(name: str, parameter: torch.Tensor, invariant: Collection[str] = ()) -> str:
    """The parameter's group in layers.csv: ``none`` for norms and biases, ``si`` for weights known to be
    scale-invariant (those named in ``invariant``), ``w`` for other decayed weights."""
    if not is_decayed(name, parameter):
        return "none"
    return "si" if name in invariant else "w"

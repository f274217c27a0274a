"""Scale-invariant weights are found by trying."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdbs.config import ModelConfig
from hvdbs.invariance import scale_invariant
from hvdbs.model import build_model

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Chain(nn.Module):
    """conv-BN, then conv-ReLU-conv-BN, whose first conv is invariant through its homogeneous followers, then fc."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one = nn.Conv2d(3, 6, 3, bias=bias)
        self.norm1 = nn.BatchNorm2d(6)
        self.two = nn.Conv2d(6, 6, 3, bias=bias)
        self.three = nn.Conv2d(6, 6, 3, bias=False)
        self.norm2 = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.one(x)))
        x = torch.relu(self.norm2(self.three(torch.relu(self.two(x)))))
        logits: torch.Tensor = self.fc(x.mean((2, 3)))
        return logits


def test_weights_before_a_normalisation_are_invariant_and_the_classifier_is_not() -> None:
    torch.manual_seed(0)
    assert scale_invariant(Chain(bias=False), IMAGES) == ["one.weight", "two.weight", "three.weight"]


def test_a_bias_between_a_weight_and_its_normalisation_breaks_invariance() -> None:
    """The bias of ``one`` is a shift, which the normalisation right behind takes out; that of ``two`` is not."""
    torch.manual_seed(0)
    assert scale_invariant(Chain(bias=True), IMAGES) == ["one.weight", "three.weight"]


@pytest.mark.parametrize("zero", [False, True])
def test_every_convolution_of_a_residual_network_is_invariant_even_behind_a_scale_of_zero(zero: bool) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig("resnet8", width=4, dropout=0.2, zero_init_last_gamma=zero), 5)
    expected = [name for name, p in model.named_parameters() if p.ndim == 4]
    assert scale_invariant(model, IMAGES) == expected


def test_the_model_is_left_as_it_was() -> None:
    model = build_model(ModelConfig("resnet8", width=4), 5).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scale_invariant(model, IMAGES)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training

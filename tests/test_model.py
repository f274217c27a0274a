"""Models by name, and their parameter groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hvdbs.config import ModelConfig, OptimizerConfig
from hvdbs.errors import HvdbsError
from hvdbs.model import build_model
from hvdbs.optim import apply, build_optimizer
from hvdbs.schedule import Decision


@pytest.mark.parametrize(("name", "layers"), [("resnet8", 8), ("resnet20", 20)])
def test_small_resnets_have_the_layers_of_their_name(name: str, layers: int) -> None:
    model = build_model(ModelConfig(name), 10)
    weights = [m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
    assert len(weights) == layers
    assert model(torch.zeros(2, 3, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet18", "vgg11", "vit_b_16"])
def test_torchvision_models_are_built_by_name(name: str) -> None:
    with torch.device("meta"):
        model = build_model(ModelConfig(name), 7)
    assert [p.shape[0] for n, p in model.named_parameters() if n.endswith("weight")][-1] == 7


def test_timm_models_are_built_by_name() -> None:
    pytest.importorskip("timm")
    with torch.device("meta"):
        assert build_model(ModelConfig("resnet10t"), 7).fc.out_features == 7  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_the_last_gamma_of_a_block_starts_at_zero_if_asked(name: str) -> None:
    def zeros(model: nn.Module) -> int:
        return sum(int((p == 0).all()) for n, p in model.named_parameters() if n.endswith(("bn2.weight", "bn3.weight")))

    assert zeros(build_model(ModelConfig(name), 10)) == 0
    assert zeros(build_model(ModelConfig(name, zero_init_last_gamma=True), 10)) == {"resnet8": 3, "resnet18": 8}[name]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig("resnet51"), "resnet51 is not known; did you mean resnet5"),
        (ModelConfig("vgg11", zero_init_last_gamma=True), "needs residual blocks"),
        (ModelConfig("resnet18", dropout=0.1), "resnet8 and resnet20 alone"),
    ],
)
def test_what_a_model_cannot_do_is_refused(config: ModelConfig, message: str) -> None:
    with pytest.raises(HvdbsError, match=message):
        build_model(config, 10)


@pytest.mark.parametrize("everything", [False, True])
def test_norms_and_biases_are_decayed_only_if_asked(everything: bool) -> None:
    model = build_model(ModelConfig("resnet8"), 10)
    optimizer = build_optimizer(model, OptimizerConfig(decay_norm_and_bias=everything))
    apply(Decision(0, 8, 0.25, 0.5), optimizer)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for parameter in model.parameters():
        assert decay[id(parameter)] == (0.5 if everything or parameter.ndim > 1 else 0.0)
    assert {group["lr"] for group in optimizer.param_groups} == {0.25}

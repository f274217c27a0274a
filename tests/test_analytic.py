"""Known loss surfaces: samples that are functions of (seed, index), losses whose means and gradients are closed forms.

Random checks name their number of standard errors; seeds are fixed, so they do not fail by chance.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hvdbs import surfaces
from hvdbs.batching import MicroBatch
from hvdbs.config import Config, DataConfig, LoggingConfig, ModelConfig, OptimizerConfig
from hvdbs.data.analytic import AnalyticSource, least_squares, logistic, normals, open_analytic
from hvdbs.data.streams import analytic_bits
from hvdbs.loss import summed_loss
from hvdbs.model import LinearModel, network
from hvdbs.schedule import ScheduleConfig
from hvdbs.surfaces import AnalyticConfig

BOWL = AnalyticConfig("bowl", a=0.5, b=2.0, c=0.3, start=(3.0, -2.0))
SQUARES = AnalyticConfig("least_squares", dimension=5, largest=3.0, power=1.5, label_noise=0.7, distance=1.5)
IN_TURN = replace(SQUARES, inputs="in_turn")


def config(surface: AnalyticConfig, seed: int = 0, model: str = "linear", **data: int) -> Config:
    sizes = {"train_samples": 1000, "val_samples": 100} | data
    return Config(
        seed=seed,
        dtype="float64",
        data=DataConfig(kind="analytic", analytic=surface, **sizes),  # type: ignore[arg-type]  # sizes are whole
        model=ModelConfig(model),
        optimizer=OptimizerConfig(momentum=0.0),
        schedule=ScheduleConfig(epochs=1, global_batch=10, lr=0.1),
        logging=LoggingConfig(tensorboard=False),
    )


def model_at(run: Config, point: object) -> LinearModel:
    model = network(run, None)
    assert isinstance(model, LinearModel)
    with torch.no_grad():
        model.weight.copy_(torch.as_tensor(point, dtype=torch.float64).reshape(1, -1))
    return model


def mean_loss(run: Config, model: LinearModel, source: AnalyticSource, begin: int, size: int) -> torch.Tensor:
    """Of the training samples at ``size`` stream positions, as hvdbs takes it."""
    (batch,) = source.train([MicroBatch(0, begin, size)])
    loss: torch.Tensor = summed_loss(run, 0.0)(model(batch.inputs), batch.labels) / size
    return loss


# --- samples


@pytest.mark.parametrize("surface", [BOWL, SQUARES, IN_TURN], ids=["bowl", "least squares", "in turn"])
def test_a_sample_is_a_function_of_seed_and_index_whatever_it_is_made_together_with(surface: AnalyticConfig) -> None:
    """Bit for bit: 300 samples in one batch, in batches of 7, one by one, and after 2^40 others."""
    make = least_squares(7, surface)
    for begin in (0, 2**40):
        inputs, targets = make(0, begin, 300)
        for size in (1, 7):
            parts = [make(0, at, min(size, begin + 300 - at)) for at in range(begin, begin + 300, size)]
            assert np.array_equal(np.concatenate([x for x, _ in parts]), inputs)
            assert np.array_equal(np.concatenate([y for _, y in parts]), targets)


def test_no_sample_returns_with_an_epoch_and_seeds_and_streams_differ() -> None:
    """Samples of an epoch of 20: two epochs, another seed and validation have no target in common."""
    run = config(SQUARES, train_samples=20, val_samples=20)
    (first,) = open_analytic(run).train([MicroBatch(0, 0, 20)])
    (second,) = open_analytic(run).train([MicroBatch(0, 20, 20)])
    (other,) = open_analytic(replace(run, seed=1)).train([MicroBatch(0, 0, 20)])
    (held_out,) = open_analytic(run).validation([MicroBatch(0, 0, 20)])
    everything = torch.cat([batch.labels for batch in (first, second, other, held_out)])
    assert len(everything.unique()) == 80


def test_normal_numbers_are_normal() -> None:
    """A million: mean, variance, third and fourth moment within 4 standard errors (1, sqrt 2, sqrt 15, sqrt 96 over
    1,000); pairs made together are uncorrelated, within 4 as well; none is infinite where the bits are all 0 or 1."""
    drawn = normals(analytic_bits(3, 0, 0, 500_000, 2))
    flat = drawn.ravel()
    for power, (mean, deviation) in enumerate([(0.0, 1.0), (1.0, 2**0.5), (0.0, 15**0.5), (3.0, 96**0.5)], 1):
        assert abs((flat**power).mean() - mean) < 4 * deviation / 1000, power
    assert abs((drawn[:, 0] * drawn[:, 1]).mean()) < 4 / 500_000**0.5
    edges = normals(np.array([[0, 0], [2**64 - 1, 2**64 - 1]], dtype=np.uint64))
    assert np.isfinite(edges).all()
    assert edges[0].tolist() == pytest.approx([8.5717, 0.0], abs=1e-3)  # sqrt(2 * 53 * log 2)


def test_a_finite_set_is_reshuffled_and_its_signs_follow_the_teacher() -> None:
    """logistic: two epochs hold the same samples in another order; of 100,000 samples the share of +1 in each of ten
    ranges of x.t lies within 4.5 standard errors of the mean chance 1 / (1 + exp(-x.t)) there."""
    surface = AnalyticConfig("logistic", dimension=4, teacher_norm=3.0)
    source = open_analytic(config(surface, train_samples=60))
    (first,) = source.train([MicroBatch(0, 0, 60)])
    (second,) = source.train([MicroBatch(0, 60, 60)])
    assert not torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.inputs.sort(dim=0).values, second.inputs.sort(dim=0).values)
    inputs, signs = logistic(0, surface)(0, 0, 100_000)
    along = inputs @ (3.0 * surfaces.even(4))
    chance = 1 / (1 + np.exp(-along))
    for part in np.array_split(np.argsort(along), 10):
        error = np.sqrt((chance[part] * (1 - chance[part])).sum()) / len(part)
        assert abs((signs[part] > 0).mean() - chance[part].mean()) < 4.5 * error


# --- closed forms


@pytest.mark.parametrize("point", [(3.0, -2.0), (0.0, 0.0), (-0.1, 0.7)])
def test_the_mean_loss_of_a_bowl_is_a_w1_squared_plus_b_w2_squared_plus_c(point: tuple[float, float]) -> None:
    """400,000 samples: the mean loss within 4 standard errors, which are F sqrt(2 / n) by the error model, and the
    sample variance within 4 of its own (that of a squared chi-squared: 2 F^2 sqrt(14 / n))."""
    run, n = config(BOWL), 400_000
    source, truth = open_analytic(run), 0.5 * point[0] ** 2 + 2.0 * point[1] ** 2 + 0.3
    (batch,) = source.train([MicroBatch(0, 0, n)])
    losses = 0.5 * (model_at(run, point)(batch.inputs) - batch.labels).square()
    assert abs(losses.mean().item() - truth) < 4 * truth * (2 / n) ** 0.5
    assert abs(losses.var().item() - 2 * truth**2) < 4 * 2 * truth**2 * (14 / n) ** 0.5
    assert source.surface.minimum + source.surface.gap(np.array(point)) == pytest.approx(truth, rel=1e-15)


@pytest.mark.parametrize("surface", [SQUARES, IN_TURN], ids=["normal", "in turn"])
@pytest.mark.parametrize("name", ["linear", "normalised_linear"])
def test_loss_and_gradient_of_least_squares_are_those_of_the_population(surface: AnalyticConfig, name: str) -> None:
    """400,000 samples in 1,000 batches at the first weights: the mean of loss and gradient within 4.5 standard errors
    (from the batches) of F and of J^T H (u - w*), u the model's point and J its derivative; D = 5, so 12 numbers."""
    run = config(surface, model=name)
    source = open_analytic(run)
    assert isinstance(source.surface, surfaces.Quadratic)
    model = network(run, None)
    assert isinstance(model, LinearModel)
    rows = []
    for k in range(1000):
        model.zero_grad()
        loss = mean_loss(run, model, source, 400 * k, 400)
        loss.backward()
        assert model.weight.grad is not None
        rows.append([loss.item(), *model.weight.grad.flatten().tolist()])
    found = np.array(rows)
    errors = found.std(axis=0, ddof=1) / 1000**0.5
    w = model.weight.detach().flatten().numpy()
    point = model.point().detach().numpy()
    gradient = source.surface.eigenvalues * (point - source.surface.minimiser)
    if name == "normalised_linear":  # the part across w, over its norm
        gradient = (gradient - (gradient @ point) * point) / np.linalg.norm(w)
    truth = np.array([source.surface.minimum + source.surface.gap(point), *gradient])
    assert (np.abs(found.mean(axis=0) - truth) < 4.5 * errors).all()


def test_samples_in_turn_have_exactly_the_asked_second_moments() -> None:
    """X^T X / n = diag(h) over any whole rounds, 1e-15 relative, from wherever they begin."""
    inputs, _ = least_squares(0, IN_TURN)(0, 3, 5 * 4)
    assert np.abs(inputs.T @ inputs / 20 - np.diag(surfaces.spectrum(IN_TURN))).max() < 1e-14


def test_first_weights_are_at_the_asked_distance() -> None:
    """1e-14, and on the unit sphere for the normalised model, for dimensions even and odd."""
    for size in (1, 2, 5, 64):
        for distance in (0.0, 0.3, 1.9):
            surface = replace(SQUARES, dimension=size, distance=distance)
            known = surfaces.quadratic(surface)
            assert np.linalg.norm(known.minimiser) == pytest.approx(1.0, abs=1e-14)
            assert surfaces.distance(known, surfaces.start(surface, False)) == pytest.approx(distance, abs=1e-14)
            if size > 1:
                turned = surfaces.start(surface, True)
                assert np.linalg.norm(turned) == pytest.approx(1.0, abs=1e-14)
                assert surfaces.distance(known, turned) == pytest.approx(distance, abs=1e-14)


def test_the_spectrum_is_the_list_or_the_power_law() -> None:
    assert surfaces.spectrum(SQUARES).tolist() == pytest.approx([3 / k**1.5 for k in range(1, 6)], rel=1e-15)
    listed = replace(SQUARES, eigenvalues=(5.0, 4.0, 3.0, 2.0, 1.0))
    assert surfaces.spectrum(listed).tolist() == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert surfaces.spectrum(BOWL).tolist() == [1.0, 4.0]


@pytest.mark.parametrize("factor", [2.0, 0.125, 1024.0])
def test_the_normalised_model_does_not_see_the_scale_of_its_weights(factor: float) -> None:
    """Powers of two change no digit: outputs bit for bit, the gradient divided by the factor bit for bit; and the
    gradient is orthogonal to the weights, 1e-15 of the product of norms."""
    run = config(SQUARES, model="normalised_linear")
    source = open_analytic(run)
    start = surfaces.start(SQUARES, normalised=True)
    found = []
    for scale in (1.0, factor):
        model = model_at(run, scale * start)
        loss = mean_loss(run, model, source, 0, 50)
        loss.backward()
        assert model.weight.grad is not None
        found.append((loss.item(), model.weight.grad * scale))
        weight, gradient = model.weight.detach().flatten(), model.weight.grad.flatten()
        assert abs(weight @ gradient).item() < 1e-15 * weight.norm().item() * gradient.norm().item() * 5
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])

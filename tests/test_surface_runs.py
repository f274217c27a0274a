"""Whole runs on known surfaces against closed forms, and what the report reads off them; in this process, no ranks."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hvdbs import command_line, plan, train
from hvdbs.assembly import initial_model, invariant_layers
from hvdbs.comm.local import Solo
from hvdbs.contour import read_bowl
from hvdbs.data.analytic import Logistic, logistic_minimiser
from hvdbs.errors import HvdbsError
from hvdbs.report import __main__ as report


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch as it was: a run chooses threads and kernels for its process."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def run(recipe: str, out: str, *more: str) -> Path:
    words = ["--config", recipe, "--out", out, "--checkpoint.every_minutes", "0", *more]
    assert train.main(words) == 0
    return Path(out)


def table(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def one_stage(updates: int, global_batch: int, lr: float) -> tuple[str, str]:
    row = {"samples": updates * global_batch, "global_batch": global_batch, "lr": lr}
    return "--schedule.stages", json.dumps([row])


def test_descent_without_label_noise_follows_its_powers() -> None:
    """Inputs in turn, 4 whole rounds in a window: w_t - w* = (1 - lr h)^t (w_0 - w*) for each of 32 eigenvalues 1/k
    over 300 updates, 1e-12 absolute, and the gap of every evaluation 1e-11 relative and 1e-28 absolute."""
    lr = 0.3
    out = run("least-squares", "run", *one_stage(300, 128, lr), "--data.analytic.label_noise", "0")
    h = 1.0 / np.arange(1, 33)
    start = 3.0 * np.array([1, -1] * 16) / 32**0.5
    for row in table(out / "weights.csv"):
        off = np.array([float(row[f"w{k}"]) for k in range(1, 33)]) - 1 / 32**0.5
        assert np.abs(off - (1 - lr * h) ** (int(row["step"]) - 1) * start).max() < 1e-12
    for row in table(out / "evals.csv"):
        off = (1 - lr * h) ** int(row["step"]) * start
        assert float(row["gap"]) == pytest.approx((h * off**2).sum() / 2, rel=1e-11, abs=1e-28)
        assert float(row["distance"]) == pytest.approx(np.linalg.norm(off), rel=1e-11)


def test_the_second_moment_of_sgd_follows_its_recursion() -> None:
    """sebs.md section 7, item 9, with label noise: E d_t^2 = q^t d_0^2 + lr^2 v (1 - q^t) / (1 - q) for each deviation
    from the minimiser, q = (1 - lr h)^2 and v = h s^2 / B the variance of its gradient. Coordinates are independent
    when inputs are taken in turn, so 5 seeds of 400 coordinates are 2,000 runs: the summed gap at every tenth of 60
    updates within 4 standard errors, which are less than sqrt(2 / 2000) of it. Noise is 2 % of it at
    first and 99 % at last."""
    lr, h, noise, size, batch, distance = 0.1, 1.0, 2.0, 400, 400, 10.0
    gaps = np.zeros(6)
    for seed in range(5):
        out = run(
            *("least-squares", f"run-{seed}", *one_stage(60, batch, lr), "--seed", str(seed)),
            *("--data.analytic.dimension", str(size), "--data.analytic.power", "0", "--micro_batch", str(batch)),
            *("--data.analytic.label_noise", str(noise), "--data.analytic.distance", str(distance)),
            *("--data.train_samples", str(10 * batch), "--data.val_samples", "1", "--evaluation.every_epochs", "1"),
        )
        gaps += [float(row["gap"]) for row in table(out / "evals.csv")]
        assert not (out / "weights.csv").exists()  # of so many weights
    q, t = (1 - lr * h) ** 2, np.arange(10, 61, 10)
    expected = q**t * distance**2 / size + lr**2 * h * noise**2 / batch * (1 - q**t) / (1 - q)
    assert np.abs(gaps / 5 / (h * size / 2 * expected) - 1).max() < 4 * (2 / 2000) ** 0.5


def test_the_coefficients_of_a_bowl_are_read_off_its_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The packaged recipe: all three within 3.5 standard errors and 15 %, c within 2 %; the picture is written. A run
    that has hardly begun says why it tells nothing."""
    out = run("bowl", "run")
    bowl = read_bowl(out)
    assert bowl is not None
    found = bowl.estimate()
    for value, error, truth in zip(found.values, found.errors, (0.5, 2.0, 0.3), strict=True):
        assert abs(value - truth) < 3.5 * error
        assert error < 0.07 * truth
    assert abs(found.values[2] / 0.3 - 1) < 0.02
    assert abs(found.dispersion - 1) < 4 * (2 / found.windows) ** 0.5
    capsys.readouterr()
    assert report.main([str(out)]) == 0
    said = capsys.readouterr().out
    assert "a w1^2 + b w2^2 + c" in said
    assert f"{found.values[2]:.6g}" in said
    assert "gap" in said
    assert "top-1" not in said
    assert (out / "surface.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")

    lines = (out / "weights.csv").read_text().splitlines(keepends=True)
    (out / "weights.csv").write_text("".join(lines[:3]) + "3,19")  # and a line that is under way
    assert report.main([str(out)]) == 0
    assert "weights.csv: 2 logged windows at too few different weights" in capsys.readouterr().out
    (out / "weights.csv").write_text(lines[0] + "1,2,3\n")
    assert report.main([str(out)]) == 2
    assert "weights.csv: not a file of hvdbs, or damaged" in capsys.readouterr().err


def test_losses_of_extrapolated_gradients_are_not_taken_for_those_of_the_logged_weights(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run itself is fine, and ends nearer the minimum."""
    away = ("--extrapolation.direction", "global_past", "--extrapolation.ratio", "1")
    out = run("bowl", "run", *one_stage(100, 64, 0.005), *away)
    gaps = [float(row["gap"]) for row in table(out / "evals.csv")]
    assert gaps[-1] < 4.5 + 8.0
    capsys.readouterr()
    assert report.main([str(out)]) == 0
    assert "weights.csv: losses were taken at extrapolated weights" in capsys.readouterr().out


def test_a_run_on_another_surface_is_no_bowl(tmp_path: Path) -> None:
    out = run("least-squares", "run", *one_stage(2, 64, 0.1))
    assert read_bowl(out) is None
    assert report.main([str(out)]) == 0
    assert not (out / "surface.png").exists()


@pytest.mark.parametrize("recipe", ["bowl", "least-squares", "least-squares-normalised", "logistic"])
def test_a_surface_can_be_planned_without_images(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--config", recipe, "--np", "3", "--micro_batch", "1"]) == 0
    assert "total" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "layers"), [("normalised_linear", ["weight"]), ("linear", [])])
def test_the_engine_finds_the_weights_whose_scale_does_not_matter(model: str, layers: list[str]) -> None:
    """By its trial, on inputs of the surface's dimension; and a VBS run with the engine on trains there."""
    schedule = {"method": "vbs", "stage_epochs": [1, 1], "global_batch": 64, "largest_batch": 512, "factor": 0.25}
    config = {"data": {"kind": "analytic", "analytic": {"surface": "least_squares"}, "train_samples": 4096}}
    config["data"]["val_samples"] = 64
    text = {**config, "model": {"name": model}, "dtype": "float64", "logging": {"tensorboard": False}}
    text["schedule"] = schedule | {"lr": 0.02, "weight_decay": 0.01, "autotune": {"mode": "band"}}
    Path("vbs.yaml").write_text(json.dumps(text))
    parsed, _ = command_line.parse(train.parser(), ["--config", "vbs.yaml"])
    assert list(invariant_layers(initial_model(parsed, None, torch.device("cpu")), parsed, Solo())) == layers
    out = run("vbs.yaml", "run")
    assert [int(row["global_batch"]) for row in table(out / "stages.csv")] == [64, 512]


# --- logistic regression


def training_set(seed: int = 0, many: int = 500, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs = generator.standard_normal((many, size))
    signs = np.where(generator.random(many) < 1 / (1 + np.exp(-inputs.sum(axis=1))), 1.0, -1.0)
    return inputs, signs


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_vanishes_where_newton_ends(seed: int) -> None:
    """The whole set's gradient, by torch's autograd in float64: every entry below 1e-14; the Hessian there is positive,
    so it is the minimiser; the loss is larger one part in 1e5 away in each of 12 directions, as the Hessian says."""
    inputs, signs = training_set(seed)
    found = logistic_minimiser(inputs, signs)
    weight = torch.tensor(found, requires_grad=True)
    x, y = torch.from_numpy(inputs), torch.from_numpy(signs)

    def mean_loss(w: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.exp(-y * (x @ w))).mean()

    (gradient,) = torch.autograd.grad(mean_loss(weight), weight)
    assert gradient.abs().max().item() < 1e-14
    hessian = torch.autograd.functional.hessian(mean_loss, weight)
    assert torch.linalg.eigvalsh(hessian).min().item() > 0.01
    surface = Logistic(inputs, signs, found)
    assert surface.minimum == pytest.approx(mean_loss(weight).item(), rel=1e-14)
    assert surface.gap(found) == 0.0
    for k in range(6):
        for sign in (-1e-5, 1e-5):
            moved = found.copy()
            moved[k] += sign
            assert surface.gap(moved) == pytest.approx(hessian[k, k].item() * 1e-10 / 2, rel=1e-3)


def test_gradient_descent_on_the_whole_set_reaches_the_minimum_of_newton() -> None:
    """Momentum 0.9 over whole epochs: gap below 1e-15 and distance below 1e-7 after 1,500 updates."""
    out = run("logistic", "run", *one_stage(1500, 2000, 1.0), "--evaluation.every_epochs", "0", "--micro_batch", "2000")
    (last,) = table(out / "evals.csv")
    assert float(last["gap"]) < 1e-15
    assert float(last["distance"]) < 1e-7


def test_a_training_set_without_a_minimiser_is_refused() -> None:
    inputs, signs = training_set()
    with pytest.raises(HvdbsError, match=r"train_samples: 500 samples of 6 inputs can be told apart without error"):
        logistic_minimiser(inputs, np.sign(inputs[:, 0]))
    inputs[:, 5] = inputs[:, 4]
    with pytest.raises(HvdbsError, match=r"500 samples of 6 inputs are so ill-conditioned"):
        logistic_minimiser(inputs, signs)

"""What a run on a bowl says about it: its coefficients, estimated from weights.csv, and a picture of the way down."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from hvdbs.console import count, table
from hvdbs.errors import HvdbsError
from hvdbs.files import whole_lines
from hvdbs.fit import NAMES, Estimate, fit_bowl
from hvdbs.records import columns, weight_row
from hvdbs.surfaces import AnalyticConfig, quadratic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Bowl:
    """A run on a bowl: the ``truth`` and its logged ``windows``, a row of weights.csv each.

    ``extrapolated``: their losses were taken elsewhere than at the weights of their rows.
    """

    truth: AnalyticConfig
    windows: pd.DataFrame
    extrapolated: bool

    @property
    def weights(self) -> NDArray[np.float64]:
        """[T, 2]: where each loss was taken."""
        return self.windows[["w1", "w2"]].to_numpy(float)

    def estimate(self) -> Estimate:
        """Raises HvdbsError if the weights leave a coefficient open, or are not where the losses were taken."""
        if self.extrapolated:
            raise HvdbsError(
                "weights.csv: losses were taken at extrapolated weights, so they tell nothing of a, b and c"
            )
        return fit_bowl(self.weights, self.windows.loss.to_numpy(float), self.windows.global_batch.to_numpy(float))


def read_bowl(path: Path) -> Bowl | None:
    """The run in ``path`` if it is one on a bowl, else None. Raises HvdbsError for a damaged file."""
    try:
        config: Any = yaml.safe_load((path / "config.yaml").read_bytes())
        data = config["data"]
        if data["kind"] != "analytic" or data["analytic"]["surface"] != "bowl":
            return None
        names = {field.name for field in dataclasses.fields(AnalyticConfig)}
        truth = AnalyticConfig(**{name: value for name, value in data["analytic"].items() if name in names})
        extrapolated = config["extrapolation"]["direction"] != "none"
    except (OSError, KeyError, TypeError):
        return None  # of another kind, or of an older version
    except (ValueError, yaml.YAMLError) as error:
        raise HvdbsError(f"{path / 'config.yaml'}: not a file of hvdbs, or damaged: {error}") from None
    return Bowl(truth, _read(path / "weights.csv"), extrapolated)


def _read(file: Path) -> pd.DataFrame:
    try:
        lines = whole_lines(file.read_bytes()).decode().splitlines()
        rows = [[float(cell) for cell in line.split(",")] for line in lines[1:]]
        return pd.DataFrame(rows, columns=columns(weight_row(2)))
    except (OSError, ValueError) as error:
        raise HvdbsError(f"{file}: not a file of hvdbs, or damaged: {error}") from None


def comparison(truth: AnalyticConfig, estimate: Estimate) -> str:
    """Truth, estimate and interval of each coefficient, and how well the error model held."""
    rows = []
    for k, name in enumerate(NAMES):
        true, (low, high) = getattr(truth, name), estimate.interval(k)
        verdict = "holds it" if low <= true <= high else "misses it"
        rows.append((name, f"{true:.6g}", f"{estimate.values[k]:.6g}", f"{low:.6g} to {high:.6g}", verdict))
    spread = (2 / estimate.windows) ** 0.5
    return "\n".join(
        [
            "a w1^2 + b w2^2 + c",
            table(("", "truth", "estimate", "95% interval", ""), rows),
            f"least loss: {estimate.values[2]:.6g}, at (0, 0); from {count(estimate.windows)} windows, whose squared "
            f"deviations are {estimate.dispersion:.3f}\nof what the error model says (1 +- {spread:.3f} if it holds)",
        ]
    )


def figure(bowl: Bowl, estimate: Estimate) -> Figure:
    """The true bowl's contours with the weights of all logged windows on it, and those of the estimate, dashed."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    weights, windows = bowl.weights, bowl.windows
    reach = 1.15 * np.maximum(np.abs(weights).max(axis=0), 1e-3)
    grid = np.meshgrid(*(np.linspace(-r, r, 201) for r in reach))
    squares = np.stack([grid[0] ** 2, grid[1] ** 2, np.ones_like(grid[0])])
    surface = quadratic(bowl.truth)
    true = np.tensordot([bowl.truth.a, bowl.truth.b, bowl.truth.c], squares, axes=1)
    found = np.tensordot(estimate.values, squares, axes=1)
    levels = surface.minimum + (true.max() - surface.minimum) * np.linspace(0.08, 1, 12) ** 2

    result = Figure(figsize=(9, 6), dpi=150, layout="constrained")
    axes = result.subplots()
    filled = axes.contourf(*grid, true, levels=[surface.minimum, *levels], cmap="Blues_r", norm=LogNorm(), alpha=0.8)
    axes.contour(*grid, true, levels=levels, colors="0.35", linewidths=0.6)
    axes.contour(*grid, found, levels=levels, colors="#D55E00", linewidths=1.1, linestyles="dashed")
    colours = ("#000000", "#CC79A7", "#009E73", "#E69F00", "#56B4E9")
    for at in sorted({int(stage) for stage in windows.stage}):
        part = windows[windows.stage == at]
        batch = int(part.global_batch.iloc[0])
        label = f"stage {at}: global batch {count(batch)}, {count(len(part))} windows"
        axes.plot(part.w1, part.w2, "o-", color=colours[at % 5], markersize=2.2, linewidth=0.7, label=label)
    axes.plot(*weights[0], "s", color="#000000", markersize=8, label="first weights")
    axes.plot(0, 0, "*", color="#D55E00", markersize=13, label="minimum")
    axes.plot([], [], "--", color="#D55E00", label="contours of the estimate (solid: of the truth)")
    axes.set_xlabel("$w_1$")
    axes.set_ylabel("$w_2$")
    values = ", ".join(f"{name} = {value:.4g}" for name, value in zip(NAMES, estimate.values, strict=True))
    axes.set_title(f"estimated: {values}", fontsize=10)
    result.legend(fontsize=8, loc="outside lower center", ncols=3, frameon=False)
    result.colorbar(filled, ax=axes, label="loss", format="%.3g")
    return result

"""Weight norms of layers over epochs, from layers.csv: what the argument for a variable batch size rests on.

The larger the batch, the more violently the norms move in the first epochs; later they are nearly flat (Hu, Xiao et
al., ISPA 2019). Where layers are known to be scale-invariant (group ``si``), these are drawn, else all decayed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def decayed(layers: pd.DataFrame) -> pd.DataFrame:
    """The rows of layers.csv that are of weights, scale-invariant (group ``si``) or not (``w``)."""
    return layers[layers.group != "none"]


def weights(layers: pd.DataFrame) -> pd.DataFrame:
    """The norms to draw, one column for each layer over rows of ``epoch``, relative to the first row of each."""
    chosen = decayed(layers)
    if (invariant := chosen.group == "si").any():
        chosen = chosen[invariant]
    norms = chosen.pivot_table(index="epoch", columns="layer", values="weight_norm", sort=True)
    return norms / norms.iloc[0] if len(norms) else norms


def figure(runs: Sequence[tuple[str, str, pd.DataFrame]]) -> Figure | None:
    """A panel for each run, of label, colour and layers.csv; None if no run has two rows of a layer.

    Thin lines are layers, the thick one is their median; panels share their axes.
    """
    from matplotlib.figure import Figure

    drawn = [(label, colour, norms) for label, colour, table in runs if len(norms := weights(table)) > 1]
    if not drawn:
        return None
    result = Figure(figsize=(1.2 + 3.4 * len(drawn), 3.4), dpi=150, layout="constrained")
    axes = result.subplots(1, len(drawn), sharey=True, sharex=True, squeeze=False)[0]
    for axis, (label, colour, norms) in zip(axes, drawn, strict=True):
        axis.plot(norms.index, norms.to_numpy(), color=colour, alpha=0.3, linewidth=0.8)
        axis.plot(norms.index, norms.median(axis=1).to_numpy(), color=colour, linewidth=2)
        axis.set_title(label, fontsize=9, parse_math=False)
        axis.set_xlabel("epoch")
        axis.grid(alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("weight norm / its first value")
    return result

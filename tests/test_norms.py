"""The picture of weight norms."""

from __future__ import annotations

import pandas as pd
import pytest

from hvdbs.norms import decayed, figure, weights


def rows(group: str, layer: str, norms: list[float]) -> list[dict[str, object]]:
    return [
        {"epoch": float(epoch), "layer": layer, "group": group, "weight_norm": norm}
        for epoch, norm in enumerate(norms, 1)
    ]


def test_norms_are_relative_to_the_first_and_invariant_layers_alone_are_drawn_where_they_are_known() -> None:
    table = pd.DataFrame(
        [*rows("si", "a", [2.0, 4.0, 5.0]), *rows("w", "fc", [1.0, 1.0, 1.0]), *rows("none", "b", [1, 2, 3])]
    )
    assert weights(table).to_dict("list") == {"a": [1.0, 2.0, 2.5]}
    assert list(weights(table[table.group != "si"])) == ["fc"]
    assert list(decayed(table).layer.unique()) == ["a", "fc"]


def test_each_run_has_a_panel_with_a_line_for_each_layer_and_their_median() -> None:
    table = pd.DataFrame([*rows("w", "a", [2.0, 4.0]), *rows("w", "b", [1.0, 3.0])])
    drawn = figure([("one", "red", table), ("two", "blue", table)])
    assert drawn is not None and len(drawn.axes) == 2
    lines = drawn.axes[0].get_lines()
    assert [line.get_ydata()[-1] for line in lines] == pytest.approx([2.0, 3.0, 2.5])
    assert figure([("one", "red", table.iloc[:0])]) is None

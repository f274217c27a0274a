"""The report's page: one file that is valid, holds whatever files say, and tells who communicated least."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from pages import CHROMIUM, checked, in_chromium
from rows import TOTAL_STEPS, create, updates, whole_run
from scipy import stats

import hvdbs.report
from hvdbs.errors import HvdbsError
from hvdbs.report import benchmarks
from hvdbs.report.charts import POINTS, thin
from hvdbs.report.comparison import interval, marked, standing, verdict
from hvdbs.report.page import page
from hvdbs.report.runs import clocks, read_runs
from hvdbs.report.stages import costs, predictions
from hvdbs.report.writing import report

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
NASTY = "<script>alert(1)</script> \"'><img src=x onerror=alert(2)> $x$ & </td></table>"


def changed(path: Path, name: str, **columns: object) -> Path:
    """The run ``path`` with other values in columns of a table; functions get the old ones."""
    table = pd.read_csv(path / name)
    for column, value in columns.items():
        table[column] = value(table[column]) if callable(value) else value
    table.to_csv(path / name, index=False)
    return path


def text_of(runs: Sequence[Path], sheets: Sequence[Path] = ()) -> str:
    return page(read_runs(runs), benchmarks.read_sheets(sheets))


@pytest.mark.parametrize("many", [0, 5, TOTAL_STEPS])
def test_the_page_is_valid_in_any_state_of_a_run(tmp_path: Path, many: int) -> None:
    with create(tmp_path / "run") as run:
        for update in list(updates())[:many]:
            update.write(run)
    found = checked(text_of([tmp_path / "run"]))
    assert "under way or killed: there is no exit.json" in found.text
    assert ("No update is logged yet." in found.text) == (many == 0)
    assert {"comparison", "curves", "stages", "predicted", "layers", "decisions", "environment"} <= set(found.ids)


def test_runs_and_benchmarks_share_a_page(tmp_path: Path) -> None:
    paths = [whole_run(tmp_path / name) for name in ("a", "b")]
    found = checked(text_of(paths, [RESULTS / "throughput.csv", RESULTS / "theory.csv"]))
    assert {"comparison", "sheet-1", "sheet-2"} <= set(found.ids)
    assert "gap against expected_gap" in found.text  # predicted against measured of theory.csv


def test_whatever_files_say_is_text(tmp_path: Path) -> None:
    """Names, reasons, layers, config, environment, plan, and cells of a benchmark."""
    path = whole_run(tmp_path / NASTY.replace("/", "|"))
    changed(path, "decisions.csv", reason=NASTY, inputs=NASTY, quantity=NASTY)
    changed(path, "layers.csv", layer=NASTY)
    changed(path, "stages.csv", method=NASTY)
    (path / "config.yaml").write_text(f"note: |\n  {NASTY}\nother: {{{json.dumps(NASTY)}: 1}}\n")
    for name in ("environment.json", "exit.json"):
        (path / name).write_text(json.dumps({"outcome": NASTY, "reason": NASTY, NASTY: [NASTY]}))
    sheet = tmp_path / "<b>.csv"
    pd.DataFrame({"contender": [NASTY, "b"], "seconds": [1.0, 2.0], "cpu": NASTY}).to_csv(sheet, index=False)
    found = checked(text_of([path, path], [sheet]))
    assert found.text.count(NASTY) > 12
    assert "img" not in found.tags


def test_missing_files_are_each_said_in_a_line(tmp_path: Path) -> None:
    path = whole_run(tmp_path / "run")
    for name in ("steps.csv", "layers.csv", "plan.json", "config.yaml"):
        (path / name).unlink()
    (path / "environment.json").write_text("{")
    (run,) = read_runs([path])
    assert [line.split()[0] for line in run.missing] == [
        *("steps.csv", "layers.csv", "plan.json", "environment.json", "config.yaml")
    ]
    found = checked(page([run], []))
    assert "run, incomplete: steps.csv is missing." in found.text
    assert len([line for line in report([path], tmp_path).splitlines() if line.endswith(" is missing.")]) == 4


def test_the_page_says_who_communicated_least_for_the_accuracy(tmp_path: Path) -> None:
    """Scores are step / 20 at steps 4, 8, 12 and 15; a update reduces 4,096 bytes. ``dear`` reduces thrice as much,
    ``poor`` ends at 0.4, which the others reach at step 8."""
    a, dear, poor = (whole_run(tmp_path / name) for name in ("a", "dear", "poor"))
    changed(dear, "steps.csv", reduced_bytes=lambda old: 3 * old)
    for path, scale in ((dear, 3), (a, 1), (poor, 1)):
        totals = json.loads((path / "summary.json").read_text())
        (path / "summary.json").write_text(json.dumps({**totals, "reduced_bytes": scale * TOTAL_STEPS * 4096}))
    changed(poor, "evals.csv", top1=[0.1, 0.2, 0.3, 0.4])
    standings = [standing(run) for run in read_runs([a, dear, poor])]
    lines = verdict(standings)
    assert lines[0] == (
        "Least communication: a. To reach top-1 40.00%, as all 3 runs did, it reduced 32.8 kB; "
        "poor 61.4 kB (1.88 times as much), dear 98.3 kB (3 times as much)."
    )
    assert lines[1] == "Highest accuracy at any evaluation: a and dear, top-1 75.00%."
    assert standings[0].up_to(0.4) == pytest.approx(
        {"samples_seen": 110, "step": 8, "collectives": 24, "seconds": 8.0, "reduced_bytes": 8 * 4096}
    )
    assert standings[2].up_to(0.5) is None
    found = checked(text_of([a, dear, poor]))
    assert lines[0] in found.text
    assert re.search(r"32\.8 kB least", found.text)


def test_the_best_is_marked_only_where_it_is_better() -> None:
    assert marked([3.0, 1.0, None, 1.0], most=False) == [False, True, False, True]
    assert marked([3.0, 1.0, math.nan], most=True) == [True, False, False]
    assert marked([2.0, 2.0], most=True) == [False, False]
    assert marked([None, 2.0], most=True) == [False, False]


def test_stage_costs_add_up_and_predictions_are_held_against_them(tmp_path: Path) -> None:
    """Seconds of the parts are those of the stage; planned bytes are the counted ones, and a wrong plan shows."""
    path = whole_run(tmp_path / "run")
    (run,) = read_runs([path])
    for cost in costs(run):
        parts = (cost.data_seconds, cost.compute_seconds, cost.exposed_communication_seconds, cost.optimizer_seconds)
        assert sum(parts) == pytest.approx(cost.seconds, rel=1e-12)
        assert cost.compute_seconds / cost.optimizer_seconds == pytest.approx(0.9 / 0.03)
        assert cost.collectives == 3 * cost.steps
    found, notes = predictions(run)
    assert {(one.quantity, one.ratio) for one in found} == {("updates", 1.0), ("reduced bytes", 1.0)}
    assert len(found) == 6 and not notes
    plan = json.loads((path / "plan.json").read_text())
    plan["stages"][1] |= {"reduced_bytes": 2 * plan["stages"][1]["reduced_bytes"], "predicted_seconds": 4.0}
    plan["stages"][2]["samples_end"] += 1
    (path / "plan.json").write_text(json.dumps(plan))
    (run,) = read_runs([path])
    found, notes = predictions(run)
    assert [(one.stage, one.quantity, one.ratio) for one in found if one.ratio != 1] == [
        (1, "reduced bytes", 0.5),
        (1, "seconds", 0.5),
    ]
    assert len(notes) == 1 and notes[0].startswith("stage 2: planned for samples")
    assert "3 of 5 predicted values exact" in checked(page([run], [])).text


def test_updates_after_the_last_logged_one_count_and_a_branch_begins_with_its_parents_spending(tmp_path: Path) -> None:
    sparse, child = whole_run(tmp_path / "sparse"), whole_run(tmp_path / "child")
    table = pd.read_csv(sparse / "steps.csv")
    table[table.step <= 12].to_csv(sparse / "steps.csv", index=False)
    (child / "parent.json").write_text(json.dumps({"step": 9, "samples_seen": 110}))
    table[table.step > 9].to_csv(child / "steps.csv", index=False)
    first, branched = read_runs([sparse, child])
    end = clocks(first).iloc[-1]
    assert (end.step, end.collectives, end.reduced_bytes) == (TOTAL_STEPS, 45, 61440)
    begin = clocks(branched).iloc[0]
    assert (begin.step, begin.samples_seen, begin.collectives, begin.reduced_bytes) == (9, 110, 27, 9 * 4096)


def test_a_long_run_makes_no_large_page(tmp_path: Path) -> None:
    """200,000 logged updates: lines keep their extremes and are thinned, the page stays below 3 MB."""
    path = whole_run(tmp_path / "run")
    one = pd.read_csv(path / "steps.csv").tail(1)
    many = one.loc[one.index.repeat(200_000)].reset_index(drop=True)
    many["step"], many["samples_seen"] = np.arange(1, len(many) + 1), 40 * np.arange(1, len(many) + 1)
    many["loss"] = np.random.default_rng(0).exponential(size=len(many))
    many.to_csv(path / "steps.csv", index=False)
    assert len(text_of([path])) < 3e6
    x, y = thin(many.step, many.loss)
    assert len(x) <= POINTS + 2
    assert (x[0], x[-1], y.min(), y.max()) == (1, len(many), many.loss.min(), many.loss.max())
    assert (np.diff(x) > 0).all()


def test_intervals_are_those_of_the_literature() -> None:
    """Wilson's against scipy; order statistics: n = 20 takes the 6th and the 15th, n = 6 the ends, n = 5 has none
    (Hollander, Wolfe and Chicken, table of the sign test)."""
    known = stats.binomtest(353, 360).proportion_ci(method="wilson")
    assert interval(353 / 360, 360) == pytest.approx((known.low, known.high), rel=1e-6)
    assert (benchmarks.median(range(20)).low, benchmarks.median(range(20)).high) == (5, 14)
    six, five = benchmarks.median([3, 1, 2, 6, 5, 4.0]), benchmarks.median([1, 2, 3, 4, 5])
    assert (six.low, six.value, six.high, six.sure) == (1, 3.5, 6, True)
    assert (five.low, five.high, five.sure) == (1, 5, False)
    for n in range(6, 40):
        middle = benchmarks.median(range(n))
        below = stats.binom.cdf(int(middle.low), n, 0.5)
        assert below <= 0.025 < stats.binom.cdf(int(middle.low) + 1, n, 0.5)


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("throughput.csv", ("accumulation_steps", "contender", ["model", "world_size"], "samples_per_second")),
        (
            "sharing.csv",
            ("cycle_milliseconds", "yields", ["backend", "model", "accumulation_steps"], "samples_per_second"),
        ),
        ("methods.csv", ("accumulation_steps", "contender", ["model", "micro_batch"], "seconds")),
        ("loader.csv", (None, "source", [], "images_per_second")),
        ("theory.csv", ("global_batch", "distance", [], "gap")),
        ("tuning.csv", ("lr", "method", [], "top1")),
        ("overhead.csv", (None, "what", ["model"], "seconds")),
    ],
)
def test_the_columns_of_our_benchmarks_are_understood(name: str, roles: tuple[object, ...]) -> None:
    (sheet,) = benchmarks.read_sheets([RESULTS / name])
    part = sheet.parts[0]
    assert (part.axis, part.line, part.panels, part.measures[0]) == roles
    rows = pd.read_csv(RESULTS / name)
    for setting, group in part.groups():
        same = np.all([rows[column] == value for column, value in setting.items()], axis=0)
        assert len(group) == same.sum() if not part.name else len(group) <= same.sum()
    assert sum(len(one.rows) for one in sheet.parts) == len(rows)
    assert "commit" in sheet.about


def test_a_benchmark_is_a_table_a_picture_and_a_line_of_text(tmp_path: Path) -> None:
    text = report([RESULTS / "methods.csv"], tmp_path)
    assert (tmp_path / "report-methods.png").read_bytes().startswith(b"\x89PNG")
    rows = pd.read_csv(RESULTS / "methods.csv")
    expected = rows.query("model == 'resnet18' and micro_batch == 8 and accumulation_steps == 4")
    middle = expected[expected.contender == "local_past"].seconds.median()
    assert re.search(rf"local_past +30 +{middle:.4g} \[", text)
    found = checked((tmp_path / "report.html").read_text())
    assert f"{middle:.4g}" in found.text
    assert found.text.count("lowest") == 6 + 1  # once for each model, micro-batch and accumulation, and in the note


def test_what_is_no_benchmark_is_refused(tmp_path: Path) -> None:
    run = whole_run(tmp_path / "run")
    (tmp_path / "words.csv").write_text("name,colour\na,red\n")
    (tmp_path / "ragged.csv").write_text("a,b\n1\n2,3,4\n")
    for path, says in (
        (run / "steps.csv", "is a table of a run; name its folder"),
        (tmp_path / "words.csv", "no column that hvdbs knows as measured"),
        (tmp_path / "ragged.csv", "not a CSV file, or damaged"),
        (tmp_path / "none.csv", "cannot be read: No such file"),
    ):
        with pytest.raises(HvdbsError, match=re.escape(says)):
            benchmarks.read_sheets([path])


def test_colours_can_be_seen_in_both_schemes() -> None:
    """WCAG 2.1: 3 to 1 against the page for lines, 4.5 for text."""
    style = (Path(hvdbs.report.__file__).parent / "templates" / "style.css").read_text()
    blocks = [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in style.split("@media")[:2]]
    assert blocks[0].keys() == blocks[1].keys() and blocks[0] != blocks[1]
    for colours in blocks:
        for name, least in {**{f"c{at}": 3 for at in range(6)}, "ink": 4.5, "soft": 4.5, "link": 4.5}.items():
            for ground in ("paper", *(["raised"] if least > 4 else [])):
                light, dark = sorted((luminance(colours[name]), luminance(colours[ground])), reverse=True)
                assert (light + 0.05) / (dark + 0.05) >= least, (name, ground)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the page is not looked at in a browser")
@pytest.mark.parametrize("width", [1280, 500])
def test_a_browser_has_no_complaint_and_nothing_sticks_out(tmp_path: Path, width: int) -> None:
    paths = [whole_run(tmp_path / name) for name in ("constant", "a-run-with-a-very-long-name-" * 6)]
    html = text_of(paths, [RESULTS / "tuning.csv"])
    console, content = in_chromium(html, width, tmp_path)
    assert console == []
    assert content <= width

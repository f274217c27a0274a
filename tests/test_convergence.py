"""The studies of trained runs: the methods head to head, and second stages from one first stage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from benchmarks import branch, convergence, trained
from benchmarks.claims import CLAIMS, NO, OPEN, YES, Claim, Comparison, answered, intervals, judge
from benchmarks.contenders import methods, vbs
from benchmarks.measure import difference_interval
from benchmarks.trained import Study
from hvdbs.command_line import parse, parser
from hvdbs.errors import HvdbsError
from hvdbs.norms import decayed
from hvdbs.schedule import spans
from hvdbs.stage_tables import resolve


def test_the_interval_of_a_difference_holds_the_truth_as_often_as_it_says_for_five_pairs() -> None:
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        seed = generator.normal(0, 5, size=5)  # of the run, the same for both of a pair
        ours, theirs = (seed + generator.normal(mean, 1, size=5) for mean in (0.7, 0.0))
        _, low, high = difference_interval(ours, theirs)
        hits += low <= 0.7 <= high
    assert 0.93 <= hits / 2000 <= 0.97  # 95 % within four standard errors


def test_differences_need_two_pairs() -> None:
    with pytest.raises(ValueError, match="pairs"):
        difference_interval([1.0], [2.0])
    with pytest.raises(ValueError, match="pairs"):
        difference_interval([1.0, 2.0], [2.0])
    assert difference_interval([1.0, 2.0], [0.5, 1.5]) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("kind", "low", "high", "answer"),
    [
        ("within", -0.003, 0.01, YES),
        ("within", -0.02, -0.004, NO),
        ("within", -0.02, 0.02, OPEN),
        ("below", -0.02, -0.001, YES),
        ("below", 0.0, 0.02, NO),
        ("below", -0.02, 0.01, OPEN),
        ("below", -0.002, 0.002, NO),
        ("above", 0.001, 0.02, YES),
        ("above", -0.02, 0.0, NO),
        ("above", -0.02, 0.02, OPEN),
    ],
)
def test_a_question_is_answered_by_the_whole_interval(kind: str, low: float, high: float, answer: str) -> None:
    assert judge(kind, low, high) == answer  # type: ignore[arg-type]


def studied(**gains: float) -> pd.DataFrame:
    """Rows of five seeds, whose runs differ by seed far more than by method; ``gains`` over the reference in points."""
    rows = []
    for name, gain in {"reference": 0.0, **gains}.items():
        for seed, noise in enumerate(np.random.default_rng(len(name)).normal(0, 0.0002, size=5)):
            top1 = 0.85 + 0.01 * seed + gain / 100 + noise
            row = {"method": name.replace("_", "-"), "seed": seed, "top1": top1, "early_top1": top1 - 0.05}
            row |= {"later_gain": 0.05, "updates": 1000 if name == "reference" else 300}
            row |= {"collectives": 2000, "reduced_bytes": 10**6, "samples": 64000, "seconds": 10.0}
            rows.append(row | {"largest_weight_decay": 2e-3 if name == "vbs_band" else 1e-3})
    return pd.DataFrame(rows)


def test_pairs_are_of_one_seed_in_whatever_order_the_rows_stand() -> None:
    rows = studied(large=-1.0).sample(frac=1, random_state=1)
    (line,) = intervals(rows, (Comparison("large", "below", "reference"),)).to_dict("records")
    assert line["pairs"] == 5 and line["answer"] == YES
    assert line["difference"] == pytest.approx(-0.01, abs=0.0005) and line["high"] - line["low"] < 0.002


def test_a_claim_needs_each_of_its_comparisons_and_says_what_is_missing() -> None:
    claim = Claim("x", (Comparison("large", "below", "reference"), Comparison("vbs-rule", "within", "reference")))
    assert answered(claim, studied(large=-1.0, vbs_rule=0.1))[0] == YES
    assert answered(claim, studied(large=-1.0, vbs_rule=-1.0))[0] == NO
    answer, lines = answered(claim, studied(large=-1.0))
    assert answer == OPEN and "1 more not made" in lines[-1]


def test_a_claim_with_too_many_updates_is_not_reproduced() -> None:
    claim = Claim("x", (Comparison("sebs", "within", "reference"),), (("sebs", 0.25),))
    assert answered(claim, studied(sebs=0.5))[0] == NO
    assert answered(Claim("x", claim.comparisons, (("sebs", 0.3),)), studied(sebs=0.5))[0] == YES


def test_every_claim_is_of_methods_that_are_run() -> None:
    known = set(methods(20_000, 4))
    for claim in CLAIMS:
        used = {name for one in claim.comparisons for name in (one.ours, one.theirs)}
        assert used | {name for name, _ in claim.updates} <= known


def study_in(folder: Path, samples: int = 20_000, epochs: int = 4) -> Study:
    return Study(folder / "work", folder / "data", samples, epochs)


@pytest.mark.parametrize("epochs", [1, 4])
@pytest.mark.parametrize("name", methods(1, 1))
def test_a_method_is_a_config_that_can_be_planned_and_sees_as_many_samples(
    name: str, epochs: int, tmp_path: Path
) -> None:
    study = study_in(tmp_path, epochs=epochs)
    method = methods(20_000, epochs)[name]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(study.config(3, schedule=method.schedule, **method.sections)))
    config, _ = parse(parser("x", "x", "x"), ["--config", str(file)])
    schedule = resolve(config.schedule, 20_000)
    assert config.seed == 3 and schedule.end == 60_000 * epochs
    assert schedule.stages[0].lr == 0.05 * schedule.stages[0].global_batch / 64  # linear scaling


def test_the_methods_have_the_updates_that_the_claims_are_about(tmp_path: Path) -> None:
    """In closed form: the first of three equal stages alone takes a third, so a quarter needs stages that grow."""
    updates = {}
    for name, method in methods(20_000, 4).items():
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(study_in(tmp_path).config(1, schedule=method.schedule, **method.sections)))
        config, _ = parse(parser("x", "x", "x"), ["--config", str(file)])
        updates[name] = sum(span.steps for span in spans(resolve(config.schedule, 20_000)))
    assert updates["reference"] == updates["classical"] == 3750
    assert updates["vbs-rule"] == 1250 + 313 <= 3750 / 2
    assert updates["sebs"] > 3750 / 4 >= updates["sebs-growing"]


def test_branches_start_from_a_stage_that_is_theirs_too(tmp_path: Path) -> None:
    """The first stage of each vbs method is the same, so that one checkpoint serves all."""
    stages = []
    for method in methods(20_000, 4).values():
        if method.branches:
            schedule = {key: value for key, value in method.schedule.items() if key != "autotune"}
            stages.append(schedule)
    assert len(stages) == 3 and all(one == stages[0] for one in stages)
    plain = branch.schedule(study_in(tmp_path), 512, "plain")
    assert plain["factor"] == 64 / 512 and plain["autotune"]["mode"] == "rule"  # the rule then changes nothing


def test_the_table_and_the_report_are_of_all_methods() -> None:
    rows = studied(large=-1.0, vbs_rule=0.1, vbs_band=0.2, vbs_off=-0.5)
    assert list(convergence.table(rows).method) == ["reference", "large", "vbs-rule", "vbs-band", "vbs-off"]
    text = convergence.report(rows)
    assert all(claim.text in text for claim in CLAIMS)
    assert "by up to 2.00x: more than 1.2x" in text
    assert convergence.weight_decay_moved(studied(large=-1.0)) is None


def test_a_run_is_skipped_if_finished_and_refused_if_it_was_another(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    out = study.work / "large-1"
    out.mkdir(parents=True)
    config = study.config(1, schedule=vbs(100, 1, 3, 512, "rule"))
    (study.work / "large-1.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    (out / "summary.json").write_text('{"exit_reason": "finished", "top1": 0.5}')
    assert trained.train(study, "large-1", config) == out
    with pytest.raises(HvdbsError, match="was made with other options"):
        trained.train(study, "large-1", config | {"seed": 2})


def test_a_run_that_fails_is_named_with_its_last_line(tmp_path: Path) -> None:
    study = study_in(tmp_path)
    with pytest.raises(HvdbsError, match=r"large-1: ended with exit code 2: .*data.*does not exist"):
        trained.train(study, "large-1", study.config(1))


def test_seeds_come_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What --out has already is not run again, whatever has become of its folder; another study's rows are refused."""
    asked: list[str] = []

    def trained_once(study: Study, name: str, config: dict[str, object], parent: Path | None = None) -> Path:
        asked.append(name)
        out = study.work / name
        out.mkdir(parents=True, exist_ok=True)
        total = {"top1": 0.8, "steps": 3, "collectives": 6, "reduced_bytes": 9, "samples_seen": 12, "seconds": 1.0}
        (out / "summary.json").write_text(json.dumps(total))
        pd.DataFrame({"samples_seen": [10**6], "step": 3, "top1": [0.8]}).to_csv(out / "evals.csv", index=False)
        stage = {"samples_end": [12], "global_batch": 64, "weight_decay": 0.0, "lr": 0.1}
        pd.DataFrame(stage).to_csv(out / "stages.csv", index=False)
        return out

    monkeypatch.setattr(trained, "train", trained_once)
    monkeypatch.setattr(convergence, "prepare", lambda study: None)

    def called(*words: str) -> int:
        place = ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "all.csv"), "--append"]
        monkeypatch.setattr("sys.argv", ["convergence", *place, "--methods", "reference", "large", *words])
        return convergence.main()

    assert called("--seeds", "1", "3") == called("--seeds", "1", "2", "3") == called("--seeds", "2") == 0
    assert asked == ["reference-1", "large-1", "reference-3", "large-3", "reference-2", "large-2"]
    rows, scores = pd.read_csv(tmp_path / "all.csv"), pd.read_csv(tmp_path / "all-evals.csv")
    assert list(rows.seed) == list(scores.seed) == [1, 1, 3, 3, 2, 2] and rows.date.notna().all()
    assert called("--seeds", "4", "--epochs", "2") == 2 and "stage_epochs 4, not 2" in capsys.readouterr().err


def test_a_branch_s_history_begins_with_its_parent_s(tmp_path: Path) -> None:
    parent, out = tmp_path / "parent", tmp_path / "branch"
    for folder, seen in ((parent, [64, 128, 640]), (out, [256, 384])):
        folder.mkdir()
        pd.DataFrame({"samples_seen": seen}).to_csv(folder / "evals.csv", index=False)
    (out / "parent.json").write_text(f'{{"checkpoint": "{parent}/checkpoints/step-2", "samples_seen": 128}}')
    assert list(trained.history(out, "evals.csv").samples_seen) == [64, 128, 256, 384]


def test_a_study_trains_each_run_once_and_branches_count_their_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = Study(tmp_path / "work", tmp_path / "data", samples=640, epochs=1, threads=1)
    monkeypatch.setattr(trained, "VAL", 20)
    generator = np.random.default_rng(0)
    for split, count in (("train", 640), ("val", 20)):
        for number in range(count):
            place = study.data / split / f"class-{number % 10}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(256, size=(28, 28)).astype(np.uint8)
            Image.fromarray(pixels).save(place / f"{number}.png")
    chosen = {name: methods(640, 1)[name] for name in ("classical", "vbs-band")}
    rows, evaluations = convergence.run(study, chosen, [1])
    assert list(rows.method) == ["classical", "vbs-band"]
    assert list(rows.updates) == [30, 10 + 2 + 1] and list(rows.samples) == [1920, 640 + 2 * 512 + 512]
    assert list(rows.collectives) == [2 * n for n in rows.updates]
    counted = evaluations.groupby("method").step.apply(list)
    assert counted["vbs-band"][0] == 10 and counted["vbs-band"][-1] == 13  # the parent's, then its own
    before = {path: path.stat().st_mtime_ns for path in study.work.glob("*/summary.json")}
    assert len(before) == 3
    convergence.run(study, chosen, [1])
    convergence.plot(evaluations, tmp_path / "plots" / "one.png")
    assert {path: path.stat().st_mtime_ns for path in before} == before

    branched, scores, layers = branch.run(study, [64, 128], [1], "rule")
    assert list(branched.updates) == [20, 15] and list(branched.lr) == [0.0125, 0.025]
    seen = decayed(layers).groupby(["batch", "layer"]).epoch.nunique()
    assert len(seen) == 2 * 10 and set(seen) == {2}  # each convolution and the classifier, after either stage
    assert layers.groupby("batch").epoch.min().tolist() == [1.0, 1.0]
    branch.plot(scores, layers, tmp_path / "plots" / "two.png", 1.0)
    assert (tmp_path / "plots" / "one.png").stat().st_size > 10_000 < (tmp_path / "plots" / "two.png").stat().st_size

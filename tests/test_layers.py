"""The layers of the package: imports go to the same level or down, and each heavy package has one home."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hvdbs

ROOT = Path(hvdbs.__file__).parent
LEVELS = [
    {
        "errors",
        "noise",
        "progress",
        "pulse",
        "ancestors",
        "batching",
        "autotune",
        "reach",
        "schedule",
        "stage_tables",
        "surfaces",
        "fit",
        "costs",
        "prediction",
        "calibration",
        "config",
        "rules",
        "command_line",
        "entry",
        "files",
        "records",
        "timeline",
        "overlap",
        "chrome",
        "launch.allocation",
        "launch.commands",
        "launch.sbatch",
        "launch.sweep",
        "launch.arguments",
    },
    {"comm", "comm.cores", "comm.local", "comm.traced", "comm.watched", "comm.horovod"},
    {"data", "model"},
    {
        "loss",
        "gradients",
        "factors",
        "flops",
        "extrapolation",
        "batch_norm",
        "invariance",
        "laps",
        "optim",
        "step",
        "evaluation",
        "replicas",
    },
    {
        "branch",
        "devices",
        "engine",
        "environment",
        "console",
        "metrics",
        "recorder",
        "trail",
        "tracing",
        "core_tuning",
        "watchdog",
        "checkpoint",
        "planning",
        "assumptions",
        "forecast",
        "forecast_table",
        "links",
        "measuring",
        "loop",
        "assembly",
    },
    {"train", "plan", "report", "contour", "norms", "follow", "data.__main__", "launch", "doctor"},
]
HOME = {
    "horovod": {"comm.horovod", "launch.rendezvous", "doctor.probe"},
    "nvidia": {"data.imagenet"},
    "mpi4py": {"comm.horovod"},
}
MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def level_of(name: str) -> int:
    """The level of a module; those of hvdbs.data that are not listed belong to data's own."""
    for candidate in (name, name.split(".")[0]):
        for level, names in enumerate(LEVELS):
            if candidate in names:
                return level
    raise AssertionError(f"hvdbs.{name} stands in no layer: add it to LEVELS")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            for alias in node.names:
                inner = ROOT.joinpath(*node.module.split(".")[1:], alias.name)
                is_module = node.module.startswith("hvdbs") and (inner.with_suffix(".py").exists() or inner.is_dir())
                yield f"{node.module}.{alias.name}" if is_module else node.module


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_below(path: Path) -> None:
    name = name_of(path)
    if not name:
        return  # hvdbs itself: the version alone
    for imported in imports(path):
        if imported.startswith("hvdbs."):
            other = imported.removeprefix("hvdbs.")
            assert level_of(other) <= level_of(name), f"{name} imports {other} from above"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_heavy_packages_are_imported_in_their_one_place(path: Path) -> None:
    for imported in imports(path):
        package = imported.split(".")[0]
        assert package not in HOME or name_of(path) in HOME[package], f"{name_of(path)} imports {imported}"


@pytest.mark.parametrize("name", sorted(LEVELS[0]))
def test_policies_need_no_torch(name: str) -> None:
    assert not {"torch", "torchvision"} & {
        i.split(".")[0] for i in imports(ROOT.joinpath(*name.split(".")).with_suffix(".py"))
    }
